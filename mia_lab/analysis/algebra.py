"""Several vectors together: weighted sums, what one has apart from others, and directions made orthogonal."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..directions import Directions, basis_of, number
from ..errors import EditError
from ..points import Point
from .vectors import Vector

_LEAST = 1e-4  # of its length: less than this is left by rounding, not by a direction


def combine(vectors: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """Return the sum of vectors times weights (by default 1 each), at each layer, in the vectors' own unit.

    Coefficient 1.0 of the result adds the sum as it stands, which is longer or shorter than one mean centred norm; scale it
    to one with `normalised()`. EditError where kinds, layers, widths or units differ.
    """
    listed = list(vectors)
    factors = [1.0] * len(listed) if weights is None else [number(w, "a weight") for w in weights]
    if not listed or len(factors) != len(listed):
        raise EditError(f"combine takes as many weights as vectors; these are {len(listed)} vectors and {len(factors)} weights")
    if not all(isinstance(v, Vector) for v in listed):
        raise EditError("combine takes Vectors; for tensors, add them yourself and give Add the sum")
    total = listed[0] * factors[0]
    for vector, factor in zip(listed[1:], factors[1:]):
        total = total + vector * factor
    label = " ".join(f"{factor:+g} {vector.method}" for vector, factor in zip(listed, factors))
    return replace(total, raw_norms=total.unit, method=label)


def within(vector: Vector, others: Sequence[Directions | torch.Tensor]) -> Vector:
    """Return the part of a vector in the span of others, at each of its layers."""
    return replace(vector, rows=_span(vector, others).float(), raw_norms=vector.unit, method=f"{vector.method} on {len(others)}")


def orthogonal(vector: Vector, others: Sequence[Directions | torch.Tensor]) -> Vector:
    """Return the part of a vector orthogonal to others, at each of its layers.

    EditError where nothing is left but rounding: a direction made of that would be noise.
    """
    left = vector.rows.double() - _span(vector, others)
    gone = left.norm(dim=-1) < _LEAST * vector.rows.double().norm(dim=-1)
    if gone.any():
        layer = vector.layers[int(gone.long().argmax())]
        raise EditError(f"at layer {layer} nothing of the vector is left: it lies in what is projected out")
    return replace(vector, rows=left.float(), raw_norms=vector.unit, method=f"{vector.method} without {len(others)}")


def orthogonalise(vectors: Sequence[Vector], ordered: bool = False) -> list[Vector]:
    """Return vectors that are orthogonal to each other at each layer, each one unit long.

    By default all give way alike, and their order does not matter (Löwdin: U G^-1/2). ordered: the first stays as it is, and
    each later one loses what it shares with those before it (QR). EditError where they are dependent.
    """
    listed = list(vectors)
    if len(listed) < 2:
        raise EditError("orthogonalise takes two or more vectors")
    first = listed[0]
    for other in listed[1:]:
        _same_place(first, other)
    bases, made = basis_of(listed, first.layers, first.kind), []
    for layer in first.layers:
        rows = bases[Point(first.kind, layer)][0].double()
        if ordered:
            q, r = torch.linalg.qr(rows.T)
            made.append((q * torch.sign(torch.diagonal(r))).T)
        else:
            values, axes = torch.linalg.eigh(rows @ rows.T)
            made.append(axes @ torch.diag(values.rsqrt()) @ axes.T @ rows)
    stack = torch.stack(made)  # [layer vector d]
    return [replace(v, rows=(stack[:, i] * v.unit[:, None].double()).float(), raw_norms=v.unit, method=f"{v.method}, orthogonal")
            for i, v in enumerate(listed)]


def _span(vector: Vector, others: Sequence[Directions | torch.Tensor]) -> torch.Tensor:
    """The projection `[layer d]` float64 on the span of other directions."""
    for other in others:
        if not isinstance(other, torch.Tensor) and isinstance(other, Directions) and other.rows.shape[-1] != vector.rows.shape[-1]:
            raise EditError(f"the vectors have widths {vector.rows.shape[-1]} and {other.rows.shape[-1]}; they are of different models")
    bases = basis_of(list(others), vector.layers, vector.kind)
    found = []
    for layer, row in zip(vector.layers, vector.rows.double()):
        unit, dual = (t.double() for t in bases[Point(vector.kind, layer)])
        found.append((unit @ row) @ dual)
    return torch.stack(found)


def _same_place(one: Vector, other: Vector) -> None:
    if (one.kind, one.layers, one.rows.shape) != (other.kind, other.layers, other.rows.shape):
        raise EditError(f"the vectors are at {one.kind} {list(one.layers)} and at {other.kind} {list(other.layers)}; index them to "
                        f"the same layers")
