"""Reductions: what captured rows become on the device, so that only a few numbers leave it."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .directions import Directions, digest, rows_of
from .engine.wire import Reduce
from .errors import EditError
from .points import Point
from .selectors import Selector


@dataclass(frozen=True, eq=False)
class Project:
    """Each row's readings on directions: `rows . directions + bias`.

    directions: a Vector, one direction a layer, or a tensor `[k d]` used at every layer; bias `[k]` or None.
    """

    directions: Directions | torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Norm:
    """Each row's length."""


@dataclass(frozen=True, eq=False)
class TopK:
    """Each row's `k` largest values, and where they are."""

    k: int


@dataclass(frozen=True, eq=False)
class SAE:
    """The `k` strongest features of a sparse autoencoder at each row, and which they are.

    encoder `[d features]`, bias `[features]` (with the input bias folded in, b_enc - b_dec . encoder, where the SAE
    subtracts one); threshold: JumpReLU's, one number, 0 for ReLU.
    """

    encoder: torch.Tensor
    bias: torch.Tensor
    k: int = 32
    threshold: float = 0.0


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean over the asked positions, of rows or of what `of` makes of each."""

    of: Project | Norm | None = None


@dataclass(frozen=True, eq=False)
class Mass:
    """For patterns: how much attention each asked position pays to the prompt's positions that a selector picks."""

    where: Selector


Reduction = Project | Norm | TopK | SAE | Mean


def lower(how: Reduction, points: Iterable[Point], width: int) -> tuple[Reduce, dict[str, torch.Tensor], int, bool]:
    """Return the wire form, the matrices it names, how many numbers a row becomes, and whether these are (values, places)."""
    points = list(points)
    if isinstance(how, Mean):
        if how.of is not None and not isinstance(how.of, (Project, Norm)):
            raise EditError("a mean is of rows, projections or norms")
        wire, matrices, size, _ = (Reduce(), {}, width, False) if how.of is None else lower(how.of, points, width)
        return Reduce(wire.matrices, wire.threshold, wire.norm, wire.k, mean=True), matrices, size, False
    if isinstance(how, Norm):
        return Reduce(norm=True), {}, 1, False
    if isinstance(how, TopK):
        if not 0 < how.k <= width:
            raise EditError(f"TopK({how.k}) of rows that hold {width} values")
        return Reduce(k=how.k), {}, 2 * how.k, True
    if isinstance(how, SAE):
        matrix = torch.cat([how.encoder.detach().float().T, how.bias.detach().float()[:, None]], 1).contiguous()
        if matrix.shape[1] != width + 1 or not 0 < how.k <= len(matrix):
            raise EditError(f"the encoder has shape {list(how.encoder.shape)}; rows here hold {width} values, and k is {how.k}")
        sha = digest(matrix)
        return Reduce(tuple((p.kind, p.layer, sha) for p in points), max(how.threshold, 0.0), k=how.k), {sha: matrix}, 2 * how.k, True
    if isinstance(how, Project):
        found = {p: _directions(how, p, width) for p in points}
        shas = {p: digest(matrix) for p, matrix in found.items()}
        return (Reduce(tuple((p.kind, p.layer, shas[p]) for p in points)), {shas[p]: found[p] for p in points},
                len(next(iter(found.values()))), False)
    raise EditError(f"{how!r} is no reduction; there are Project, Norm, TopK, SAE, Mean and, for patterns, Mass")


def _directions(how: Project, point: Point, width: int) -> torch.Tensor:
    if isinstance(how.directions, torch.Tensor):
        rows = how.directions.detach().to("cpu", torch.float32)
        rows = rows[None] if rows.ndim == 1 else rows
    else:
        rows = rows_of(how.directions, [point.layer], point.kind)[point][None]
    bias = torch.zeros(len(rows)) if how.bias is None else how.bias.detach().float().reshape(-1)
    if rows.ndim != 2 or rows.shape[1] != width or len(bias) != len(rows):
        raise EditError(f"directions of shape {list(rows.shape)} with {len(bias)} biases do not fit rows of {width} values")
    return torch.cat([rows, bias[:, None]], 1).contiguous()
