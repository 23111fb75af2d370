"""Control vectors: what an edit of the same size does when its direction means nothing in particular."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..points import kind_of
from .units import neutral_rows
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session


def matched_random(session: Session, point: str = "resid_post", *, seed: int = 0) -> Vector:
    """Return a random Vector with the covariance of the stream over the shipped neutral text, at coefficient-1 norm.

    A Gaussian combination of centred activations, u = z (A - mean A): isotropic noise would hit the few dimensions that
    hold most of the norm and damage the model far more than a real direction of the same length does.
    """
    layers, rows = neutral_rows(session, point)  # [row layer d_model]
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    raw = torch.einsum("r,rld->ld", weights, rows.double() - rows.double().mean(0)).float()
    unit, norms = session.unit(point), raw.norm(dim=-1)
    return Vector(kind_of(point), layers, raw * (unit / norms)[:, None], norms, unit, f"matched_random({seed})")
