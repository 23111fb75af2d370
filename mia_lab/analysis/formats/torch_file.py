"""Vectors of the steering-vectors library, which has no file of its own: users write them with `torch.save`.

A file is read without running anything in it. It may hold a SteeringVector, its two fields as a dict, or a dict of tensors by
block. Its `layer_type` says where: a block's output, or the output of its attention or MLP. Multiplier 1 adds the tensor as it is.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ...errors import EditError
from ..vectors import Vector
from .raw import Raw

_KINDS = {"decoder_block": "resid_post", "self_attn": "attn_out", "mlp": "mlp_out"}


class _Fields:
    """Stands in for the library's dataclass while a file is read; it takes fields and has no code."""


def load(path: str | Path) -> Raw:
    """Read the directions of a SteeringVector; EditError when the file holds anything else, or would have to run code."""
    known = (_Fields, "steering_vectors.steering_vector.SteeringVector")
    try:
        with torch.serialization.safe_globals([known]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise EditError(f"{path} cannot be read without running what is in it, which is not done. Where it was made, write "
                        f"torch.save(dataclasses.asdict(vector), path). {str(error).splitlines()[0]}") from None
    fields = vars(found) if isinstance(found, _Fields) else found
    if not isinstance(fields, Mapping) or not fields:
        raise EditError(f"{path} holds a {type(found).__name__}; a SteeringVector, its fields or tensors by block were expected")
    rows, kind = fields.get("layer_activations", fields), fields.get("layer_type", "decoder_block")
    if kind not in _KINDS:
        raise EditError(f"{path} was read at {kind!r}, which is no point here; known are {', '.join(_KINDS)}")
    return Raw(_KINDS[kind], {_block(layer): _row(layer, row) for layer, row in rows.items()}, "steering-vectors", kind != "decoder_block")


def save(vector: Vector, path: str | Path) -> Path:
    """Write a Vector so that `SteeringVector(**torch.load(path))` takes it; a multiplier there is what the coefficient is here.

    EditError for a vector that is neither at a block's output nor at a module's own: whether what a branch adds to the stream is
    its module's output depends on the model.
    """
    kinds = {"resid_post": "decoder_block", "attn_out_raw": "self_attn", "mlp_out_raw": "mlp"}
    if vector.kind not in kinds:
        raise EditError(f"steering-vectors adds at {', '.join(kinds)}; this vector is at {vector.kind}")
    rows = {layer: row.clone() for layer, row in zip(vector.layers, vector.rows)}
    torch.save({"layer_activations": rows, "layer_type": kinds[vector.kind]}, path)
    return Path(path)


def _block(layer: Any) -> int:
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise EditError(f"the file names a block {layer!r}; blocks are counted from 0")
    return layer


def _row(layer: int, row: Any) -> torch.Tensor:
    if not isinstance(row, torch.Tensor) or row.numel() != row.shape[-1]:
        raise EditError(f"the file's entry for block {layer} is no single direction")
    return row
