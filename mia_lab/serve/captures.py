"""A capture as it is fetched: the rows that the worker holds under a handle, as one safetensors file."""
from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from ..engine.shared import take
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
    tensors = dict(_tensors(service, found["rows"], note["monitors"]))
    metadata = {"config": note["config"], "prompt_tokens": str(note["prompt_tokens"]), "monitors": json.dumps(note["monitors"]),
                "running": str(bool(found["running"])).lower()}
    return save(tensors, metadata)


def known(tenant: str, handle: str) -> str:
    """The engine's name for a capture; Refused 404 for what can be no handle."""
    if not _HANDLE.fullmatch(handle):
        raise Refused(404, "there is no such capture; a handle comes in the header x-mia-lab-capture of the answer")
    return uid_of(tenant, handle)


def _tensors(service: Service, rows: list[Any], labels: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, layer, before, place, shape, dtype, data in rows:
        positions, values = take(place, torch.int64), take(data, _TYPES[dtype]).view(-1, *shape)
        mine = [label for label in labels if (label["kind"], label["layer"], label["before"]) == (kind, layer, before)]
        for label in mine:
            name = f"monitor.{label['name']}.{label['index']}"
            yield name, values[:, label["column"]].contiguous()
            yield f"{name}.positions", positions.clone()
        if not mine:  # beside monitors it comes as float32, which holds every number of a shorter type
            name = f"{kind}.{layer}{'.before' if before else ''}"
            yield name, values.to(service.dtype_of(kind))
            yield f"{name}.positions", positions
