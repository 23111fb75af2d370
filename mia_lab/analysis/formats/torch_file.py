"""Vectors of the steering-vectors library, which has no file of its own: users write them with `torch.save`.

A file is read without running anything in it. It may hold a SteeringVector, its two fields as a dict, or a dict of tensors by
block. Its `layer_type` says where: a block's output, or the output of its attention or MLP. Multiplier 1 adds the tensor as it is.
"""
from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import EditError
from ..vectors import Vector
from .raw import Raw

MAX_BYTES = 2 << 30
MAX_PICKLE = 4 << 20  # of a file's structure, which holds no values
_KINDS = {"decoder_block": "resid_post", "self_attn": "attn_out", "mlp": "mlp_out"}


class _Fields:
    """Stands in for the library's dataclass while a file is read; it takes fields and has no code."""


def load(path: str | Path) -> Raw:
    """Read the directions of a SteeringVector; EditError when the file holds anything else, or would have to run code."""
    known = (_Fields, "steering_vectors.steering_vector.SteeringVector")
    found = read(path, [known])
    fields = vars(found) if isinstance(found, _Fields) else found
    if not isinstance(fields, Mapping) or not fields:
        raise EditError(f"{path} holds a {type(found).__name__}; a SteeringVector, its fields or tensors by block were expected")
    rows, kind = fields.get("layer_activations", fields), fields.get("layer_type", "decoder_block")
    if kind not in list(_KINDS) or not isinstance(rows, Mapping):
        raise EditError(f"{path} was read at {str(kind)[:60]!r}, which is no point here, or has no tensors by block; known points are "
                        f"{', '.join(_KINDS)}")
    return Raw(_KINDS[kind], {_block(layer): _row(layer, row) for layer, row in rows.items()}, "steering-vectors", kind != "decoder_block")


def read(path: str | Path, known: Sequence[Any] = ()) -> Any:
    """What `torch.save` wrote, without running anything in it; `known` are classes that may be in it beside tensors and containers.

    EditError, before anything large is read, for files that are no zip of `torch.save`, are compressed or too large, and for tensors
    that would hold more than the file does.
    """
    path = Path(path)
    _refuse_large(path)
    try:
        with torch.serialization.safe_globals(list(known)):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes its reader raise whatever the damage leads to
        raise EditError(f"{path} cannot be read without running what is in it, which is not done. Where it was made, write "
                        f"torch.save(dataclasses.asdict(vector), path). {(str(error) or repr(error)).splitlines()[0][:200]}") from None
    for tensor in _tensors(found, set()):
        if tensor.is_sparse or tensor.is_meta or tensor.numel() * tensor.element_size() > path.stat().st_size:
            raise EditError(f"{path} names a tensor of shape {list(tensor.shape)}, more than the file holds")
    return found


def save(vector: Vector, path: str | Path) -> Path:
    """Write a Vector so that `SteeringVector(**torch.load(path))` takes it; a multiplier there is what the coefficient is here.

    EditError for a vector that is neither at a block's output nor at a module's own: whether what a branch adds to the stream is
    its module's output depends on the model.
    """
    kinds = {"resid_post": "decoder_block", "attn_out_raw": "self_attn", "mlp_out_raw": "mlp"}
    if vector.kind not in kinds:
        raise EditError(f"steering-vectors adds at {', '.join(kinds)}; this vector is at {vector.kind}")
    rows = {layer: row.clone() for layer, row in zip(vector.layers, vector.rows)}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save({"layer_activations": rows, "layer_type": kinds[vector.kind]}, scratch)
    scratch.replace(path)
    return path


def _refuse_large(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
        raise EditError(f"{path} cannot be read without running what is in it, which is not done: it is no zip of torch.save "
                        f"({error})") from None
    code = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or code > MAX_PICKLE or path.stat().st_size > MAX_BYTES:
        raise EditError(f"{path} is compressed or too large: {path.stat().st_size} bytes, {code} of them structure; {MAX_BYTES} and "
                        f"{MAX_PICKLE} are the most")


def _tensors(value: Any, seen: set[int], depth: int = 0) -> Iterator[torch.Tensor]:
    """Each tensor; a container that is held many times is looked into once."""
    if depth > 8:
        raise EditError("the file nests deeper than 8")
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    inner = vars(value) if isinstance(value, _Fields) else value
    for item in inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, (list, tuple, set)) else ():
        yield from _tensors(item, seen, depth + 1)


def _block(layer: Any) -> int:
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise EditError(f"the file names a block {layer!r}; blocks are counted from 0")
    return layer


def _row(layer: int, row: Any) -> torch.Tensor:
    if not isinstance(row, torch.Tensor) or not row.ndim or row.numel() != row.shape[-1] or row.is_complex() or row.is_quantized:
        raise EditError(f"the file's entry for block {layer} is no single direction")
    return row
