"""What edits are made of: vectors by layer, bases of subspaces, and the content identity of both."""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from operator import index
from typing import Any, Protocol, runtime_checkable

import torch

from .engine.wire import MAX_NUMBER, address
from .errors import EditError
from .points import Point, kind_of

MAX_CONDITION = 1e3


@runtime_checkable
class Directions(Protocol):
    """What an edit needs of a vector: one row a layer at one kind of point."""

    kind: str
    layers: tuple[int, ...]
    rows: torch.Tensor  # [layer d]


Basis = Directions | torch.Tensor | Sequence[Directions | torch.Tensor]


def rows_of(vector: Directions | torch.Tensor, layers: Sequence[int] | int | None, point: str | None) -> dict[Point, torch.Tensor]:
    """Return a vector's row `[d]`, float32, at each of its points; EditError when layers or shape do not fit."""
    layers = None if layers is None else whole(layers)
    if isinstance(vector, torch.Tensor):
        if layers is None:
            raise EditError("a bare tensor needs its layers: Add(tensor, 4.0, layers=[8])")
        rows = vector.detach().to("cpu", torch.float32)
        rows = rows.expand(len(layers), -1) if rows.ndim == 1 else rows
        if rows.ndim != 2 or len(rows) != len(layers):
            raise EditError(f"the tensor has shape {list(vector.shape)}; {len(layers)} layers need [d_model] or "
                            f"[{len(layers)}, d_model]")
        kind = kind_of(point or "resid_post")
    elif isinstance(vector, Directions):
        if point is not None and kind_of(point) != vector.kind:
            raise EditError(f"the vector was fitted at {vector.kind}, the edit asks for {point}")
        chosen = vector.layers if layers is None else layers
        absent = [layer for layer in chosen if layer not in vector.layers]
        if absent:
            raise EditError(f"the vector has no layer {absent[0]}; it has {list(vector.layers)}")
        rows = torch.stack([vector.rows[vector.layers.index(layer)] for layer in chosen]).float()
        layers, kind = chosen, vector.kind
    else:
        raise EditError(f"an edit takes a Vector or a tensor, not {type(vector).__name__}")
    if not torch.isfinite(rows).all():
        raise EditError("the vector holds NaN or infinite values")
    return {Point(kind, int(layer)): row.clone() for layer, row in zip(layers, rows)}


def basis_of(vectors: Basis, layers: Sequence[int] | int | None,
             point: str | None) -> dict[Point, tuple[torch.Tensor, torch.Tensor]]:
    """Return at each point the unit directions `[k d]` and their dual basis `[k d]`: what to add so that one projection
    changes by one and the others do not. EditError for zero or dependent directions."""
    listed = [vectors] if isinstance(vectors, (torch.Tensor, Directions)) else list(vectors)
    if not listed:
        raise EditError("the edit names no direction")
    each = [rows_of(vector, layers, point) for vector in listed]
    if any(set(rows) != set(each[0]) for rows in each):
        raise EditError("the vectors have different points or layers")
    found = {}
    for at in each[0]:
        rows = torch.stack([rows[at] for rows in each]).double()
        norms = rows.norm(dim=1, keepdim=True)
        if not norms.all():
            raise EditError(f"a direction at {at} is zero")
        unit = rows / norms
        gram = unit @ unit.T
        if torch.linalg.cond(gram) > MAX_CONDITION:
            raise EditError(f"the directions at {at} are nearly dependent; drop or merge some")
        found[at] = unit.float(), torch.linalg.solve(gram, unit).float()
    return found


def whole(layers: Sequence[int] | int, what: str = "layer") -> tuple[int, ...]:
    """Return layers (or heads) as distinct integers; EditError when they are not."""
    try:
        single = not isinstance(layers, Iterable) or getattr(layers, "ndim", 1) == 0
        found = tuple(index(layer) for layer in ([layers] if single else layers))
    except TypeError:
        raise EditError(f"{what}s={layers!r} are not integers") from None
    if len(set(found)) != len(found) or not found:
        raise EditError(f"the {what}s {list(found)} are not distinct" if found else f"the edit names no {what}")
    return found


def number(value: Any, what: str) -> float:
    """Return a float that float32 holds; EditError otherwise."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EditError(f"{what} is {value!r}; it must be a finite number") from None
    if not abs(found) <= MAX_NUMBER:
        raise EditError(f"{what} is {found}; it must be a finite number that float32 holds")
    return found


def digest(vectors: torch.Tensor) -> str:
    """The content address of vectors `[n d]` (or one, `[d]`), float32."""
    rows = vectors.reshape(-1, vectors.shape[-1])
    return address(len(rows), rows.contiguous().numpy().data)


def content(value: Any) -> Any:
    """A hashable that is equal for equal contents: tensors by their address, dataclasses by their fields."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, tuple(content(getattr(value, f.name)) for f in fields(value))
    return tuple(map(content, value)) if isinstance(value, (tuple, list)) else value
