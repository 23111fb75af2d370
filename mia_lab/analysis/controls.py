"""Control vectors: what an edit of the same size does when its direction means nothing in particular."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EditError
from ..points import kind_of
from .fitting import METHODS
from .pairs import Pairs
from .units import neutral_rows
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session


def matched_random(session: Session, point: str = "resid_post", *, seed: int = 0) -> Vector:
    """Return a random Vector with the covariance of the stream over the shipped neutral text, at coefficient-1 norm.

    A Gaussian combination of centred activations, u = z (A - mean A): isotropic noise would hit the few dimensions that
    hold most of the norm and damage the model far more than a real direction of the same length does.
    """
    return matched_randoms(session, point, [seed])[0]


def matched_randoms(session: Session, point: str, seeds: Sequence[int]) -> list[Vector]:
    """Return one such Vector a seed, from one pass over the neutral text."""
    layers, rows = neutral_rows(session, point)  # [row layer d_model]
    draws = [torch.randn(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    weights, parts = torch.stack(draws), []  # [seed row]
    for layer in rows.unbind(1):  # one at a time: in float64 they are large
        values = layer.double()
        parts.append((weights @ (values - values.mean(0))).float())
    raw, unit = torch.stack(parts, 1), session.unit(point)  # [seed layer d_model]
    norms = raw.norm(dim=-1)
    return [Vector(kind_of(point), layers, one * (unit / norm)[:, None], norm, unit, f"matched_random({seed})")
            for one, norm, seed in zip(raw, norms, seeds)]


def label_shuffled(session: Session, vector: Vector, pairs: Any, seeds: Sequence[int], at: int = -1) -> list[Vector]:
    """Return what the vector's method gives on its pairs with the sides of each exchanged at random, one Vector a seed.

    Each is as much shorter than the vector as its raw direction is than the vector's. Made as long, it would be a real vector
    again: what varies most among the pairs is what they are about. EditError where the pairs do not give back the vector.
    """
    if vector.method not in METHODS:
        raise EditError(f"a vector made by {vector.method!r} cannot be fitted again; the methods are {', '.join(METHODS)}")
    read, n = Pairs.of(pairs), len(Pairs.of(pairs))
    with session.unsteered():
        rows = session.capture([*read.positive, *read.negative], vector.kind, layers=vector.layers, at=at).float().flatten(2)
    raw = METHODS[vector.method](rows[:n], rows[n:])
    if (torch.cosine_similarity(raw, vector.rows, dim=-1).abs() < 0.98).any():
        raise EditError("the pairs do not give back the vector; give those that it was fitted on, and the same at=")
    length = vector.rows.norm(dim=-1) / raw.norm(dim=-1)
    found = []
    for seed in seeds:
        swap = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5
        one, other = (torch.where(swap[:, None, None], *sides) for sides in ((rows[n:], rows[:n]), (rows[:n], rows[n:])))
        shuffled = METHODS[vector.method](one, other)
        found.append(replace(vector, rows=shuffled * length[:, None], raw_norms=shuffled.norm(dim=-1), method=f"shuffled({seed})"))
    return found
