"""A capture as it is fetched: the rows that the worker holds under a handle, as one safetensors file."""
from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..engine.shared import take
from .container import Values, pack
from .refusing import Refused
from .running import uid_of

if TYPE_CHECKING:
    from .service import Service

_HANDLE = re.compile(r"[A-Za-z0-9_-]{32}")
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


async def fetch(service: Service, tenant: str, handle: str, since: int) -> bytes:
    """Return what is held of a tenant's capture, from position `since` on; Refused 404 where there is none.

    Per captured point "KIND.LAYER" `[n *shape]` in the model's type, and "KIND.LAYER.positions" int64 `[n]`, with ".before" after the
    layer for rows before the edits; per monitored number "monitor.NAME.I" float32 `[n]` and its positions. What the numbers are, how
    long the prompt was and whether its request still runs is said in the file's metadata.
    """
    found = await service.rpc("collect", known(tenant, handle), since)
    if found is None:
        raise Refused(404, "there is no such capture: it expired, was deleted, never was, or is not yours")
    return await asyncio.to_thread(_file, service, found)


def _file(service: Service, found: dict[str, Any]) -> bytes:
    note = json.loads(found["note"])
    metadata = {"config": note["config"], "prompt_tokens": str(note["prompt_tokens"]), "monitors": json.dumps(note["monitors"]),
                "running": str(bool(found["running"])).lower()}
    return pack(_tensors(service, found["rows"], note["monitors"]), metadata)


def known(tenant: str, handle: str) -> str:
    """The engine's name for a capture; Refused 404 for what can be no handle."""
    if not _HANDLE.fullmatch(handle):
        raise Refused(404, "there is no such capture; a handle comes in the header x-mia-lab-capture of the answer")
    return uid_of(tenant, handle)


def _tensors(service: Service, rows: list[Any], labels: list[dict[str, Any]]) -> Iterator[tuple[str, Values]]:
    for kind, layer, before, place, shape, dtype, data in rows:
        positions = Values("int64", [len(place) // 8], place)
        mine = [label for label in labels if (label["kind"], label["layer"], label["before"]) == (kind, layer, before)]
        for label in mine:
            name = f"monitor.{label['name']}.{label['index']}"
            column = take(data, _TYPES[dtype]).view(-1, *shape)[:, label["column"]]
            yield name, Values(dtype, column.shape, _bytes(column))
            yield f"{name}.positions", positions
        if not mine:
            name = f"{kind}.{layer}{'.before' if before else ''}"
            yield name, _as(service.dtype_of(kind), dtype, shape, data)
            yield f"{name}.positions", positions


def _as(wanted: torch.dtype, dtype: str, shape: list[int], data: bytes) -> Values:
    """Rows in a point's own type: beside monitors they come as float32, which holds every number of a shorter type."""
    name = str(wanted).removeprefix("torch.")
    if name != dtype:
        data = _bytes(take(data, _TYPES[dtype]).to(wanted))
    return Values(name, [len(data) // (prod(shape) * wanted.itemsize), *shape], data)


def _bytes(values: torch.Tensor) -> bytes:
    # A column of one row counts as contiguous, with a stride that no view of bytes can have.
    return values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
