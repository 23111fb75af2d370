"""Edits: frozen descriptions of what is added to the stream, compiled to the engine's wire form."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Protocol, runtime_checkable

import torch

from .engine.wire import MAX_NUMBER, MAX_TERMS, Span, Spec, Term, busiest, segments
from .errors import EditError
from .points import Point, kind_of
from .selectors import CONTENT, Selector


@runtime_checkable
class Directions(Protocol):
    """What an edit needs of a vector: one row a layer at one kind of point."""

    kind: str
    layers: tuple[int, ...]
    rows: torch.Tensor  # [layer d_model]


@dataclass(frozen=True, eq=False)
class Add:
    """Add `coeff` times a vector to the stream at one point of one or several layers.

    vector: a fitted Vector (its own layers and point; unit: one mean centred residual norm), or a bare tensor
    `[d_model]` or `[layer d_model]` with `layers` (unit: raw). `where` is a Selector; the default is every position
    except BOS. Raises EditError for a missing layer, a NaN or an infinity.
    """

    vector: Directions | torch.Tensor
    coeff: float = 1.0
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT
    _rows: dict[Point, torch.Tensor] = field(init=False, repr=False)
    _shas: dict[Point, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.vector, torch.Tensor):  # the edit must not change with the caller's tensor
            object.__setattr__(self, "vector", self.vector.detach().clone())
        object.__setattr__(self, "_rows", _resolve(self.vector, self.layers, self.point))
        object.__setattr__(self, "_shas", {point: digest(row) for point, row in self._rows.items()})
        try:
            coeff = float(self.coeff)
        except (TypeError, ValueError, OverflowError):
            raise EditError(f"the coefficient is {self.coeff!r}; it must be a finite number") from None
        if not abs(coeff) <= MAX_NUMBER:
            raise EditError(f"the coefficient is {coeff}; it must be a finite number that float32 holds")
        object.__setattr__(self, "coeff", coeff)
        if not isinstance(self.where, Selector):
            raise EditError(f"where={self.where!r} is no selector; type for example where=mia.prompt()")

    @property
    def rows(self) -> dict[Point, torch.Tensor]:
        """The vector per point, each `[d_model]` float32, before the coefficient."""
        return dict(self._rows)

    def scaled(self, factor: float) -> Add:
        """The same edit with its coefficient times `factor`."""
        return Add(self.vector, self.coeff * factor, self.layers, self.point, self.where)

    @property
    def key(self) -> tuple:
        """Content identity: equal keys mean equal effect."""
        return tuple(sorted(self._shas.items())), self.coeff, self.where

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Add) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        places = ", ".join(str(p) for p in sorted(self._rows)[:3]) + (", ..." if len(self._rows) > 3 else "")
        where = "" if self.where == CONTENT else f", where={self.where.rule}{self.where.args or ''}"
        return f"Add({places}, coeff={self.coeff:g}{where})"


def _resolve(vector: Directions | torch.Tensor, layers: Sequence[int] | int | None,
             point: str | None) -> dict[Point, torch.Tensor]:
    layers = None if layers is None else _whole(layers)
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


def _whole(layers: Sequence[int] | int) -> tuple[int, ...]:
    try:
        found = tuple(index(layer) for layer in (layers if isinstance(layers, Iterable) else [layers]))
    except TypeError:
        raise EditError(f"layers={layers!r} are not integers") from None
    if len(set(found)) != len(found) or not found:
        raise EditError(f"the layers {list(found)} are not distinct" if found else "the edit names no layer")
    return found


def digest(vector: torch.Tensor) -> str:
    """The content address of one vector: SHA-256 of its float32 bytes, 32 hex digits."""
    return hashlib.sha256(vector.contiguous().numpy().tobytes()).hexdigest()[:32]


def compile_edits(edits: Iterable[Add], n_prompt: int, has_bos: bool, d_model: int, n_layers: int,
                  editable: Iterable[Point]) -> tuple[list[Term], dict[str, torch.Tensor]]:
    """Return the wire terms of `edits` for one prompt and the vectors they name, by content address.

    What meets at one point under one selector is summed into one term; a zero coefficient leaves none.
    Raises EditError for a width or point that does not fit the model.
    """
    editable = set(editable)
    parts: dict[tuple[Point, tuple[Span, ...]], list[tuple[str, torch.Tensor, float]]] = {}
    for edit in edits:
        if not isinstance(edit, Add):
            raise EditError(f"{type(edit).__name__} is not an edit; type for example mia.Add(vector, 0.2)")
        spans = tuple(edit.where.spans(n_prompt, has_bos))
        for point, vector in edit.rows.items():
            _check(point, vector, d_model, n_layers, editable)
            if spans:
                parts.setdefault((point, spans), []).append((edit._shas[point], vector, edit.coeff))
    terms: list[Term] = []
    vectors: dict[str, torch.Tensor] = {}
    for (point, spans), summands in sorted(parts.items(), key=lambda item: str(item[0])):
        sha, vector, coeff = _sum(summands)
        if coeff:
            vectors[sha] = vector
            terms.append(Term(point.kind, point.layer, sha, coeff, spans))
    for segment in segments(Spec(tuple(terms))):
        point, meeting = busiest(segment)
        if meeting > MAX_TERMS:
            raise EditError(f"{meeting} edits with different selectors meet at {Point(*point)} from position {segment.start} on; "
                            f"at most {MAX_TERMS} can")
    return terms, vectors


def _sum(summands: list[tuple[str, torch.Tensor, float]]) -> tuple[str, torch.Tensor, float]:
    """One vector and coefficient with the effect of all summands; equal vectors only add their coefficients."""
    sha, vector, _ = summands[0]
    if all(other == sha for other, _, _ in summands):
        coeff = math.fsum(coeff for _, _, coeff in summands)
    else:
        vector = sum(vector.double() * coeff for _, vector, coeff in summands).float()
        sha, coeff = digest(vector), float(vector.any())
    if not torch.isfinite(vector * coeff).all():
        raise EditError("these edits add up to more than float32 holds")
    return sha, vector, coeff


def _check(point: Point, vector: torch.Tensor, d_model: int, n_layers: int, editable: set[Point]) -> None:
    if vector.shape != (d_model,):
        raise EditError(f"the vector for {point} has width {vector.shape[-1]}; the model's is {d_model}")
    if not 0 <= point.layer < n_layers:
        raise EditError(f"the edit names layer {point.layer}; the model has layers 0 to {n_layers - 1}")
    if point not in editable:
        kinds = sorted({p.kind for p in editable})
        raise EditError(f"edits at {point} were not declared; declared: {', '.join(kinds) or 'none'}. "
                        f"Load with Session(..., points=[{point.kind!r}, ...], edits=['add'])")
