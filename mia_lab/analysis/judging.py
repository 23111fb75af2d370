"""How far a direction can be trusted: whether it tells held-out pairs apart, and whether another sample would have given it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import EditError
from .fitting import METHODS
from .pairs import Pairs
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Separability:
    """How well a vector's projections tell the sides of pairs apart, per layer.

    auroc, low, high `[layer]`: the share of (positive, negative) prompts in the right order, ties counting half, and its 95 %
    interval from a bootstrap over whole groups, NaN for one group. d_prime `[layer]`: the distance of the sides' means in
    standard deviations.
    """

    layers: tuple[int, ...]
    auroc: Tensor
    low: Tensor
    high: Tensor
    d_prime: Tensor
    n_pairs: int
    n_groups: int

    @property
    def best(self) -> int:
        """The layer with the highest lower end; choose it on one split and report it on another. EditError for one group."""
        if self.n_groups < 2:
            raise EditError("pairs of one group give no interval to choose a layer by; give pairs of several groups")
        return self.layers[int(self.low.argmax())]

    def __repr__(self) -> str:
        lines = [f"Separability on {self.n_pairs} pairs in {self.n_groups} groups, AUROC with its 95 % interval:"]
        lines += [f"  layer {layer:2}: {a:.3f} [{low:.3f}, {high:.3f}], d' {d:+.2f}" for layer, a, low, high, d in
                  zip(self.layers, self.auroc.tolist(), self.low.tolist(), self.high.tolist(), self.d_prime.tolist())]
        return "\n".join(lines)


def auroc(positive: Tensor, negative: Tensor) -> Tensor:
    """The probability that a positive value exceeds a negative one, ties counting half: `[...]` from `[n ...]` and `[m ...]`.

    NaN where a value is.
    """
    n, m = len(positive), len(negative)
    values = torch.cat([positive, negative]).double().movedim(0, -1).contiguous()  # [... n + m]
    ordered = values.sort(-1).values
    below, upto = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    ranks = (below + upto + 1).double() / 2  # the mean rank of equal values, from 1 on
    found = (ranks[..., :n].sum(-1) - n * (n + 1) / 2) / (n * m)
    return found.masked_fill(values.isnan().any(-1), float("nan"))


def separability(positive: Tensor, negative: Tensor, rows: Tensor, layers: Sequence[int], groups: Sequence[str], draws: int = 1000,
                 seed: int = 0) -> Separability:
    """Judge directions `[layer d]` on rows `[pair layer d]` of both sides, whose pairs belong to `groups`. EditError for a zero one."""
    lengths = rows.double().norm(dim=-1, keepdim=True)
    if not (lengths > 0).all():
        raise EditError(f"the vector is zero at layer {layers[int((lengths > 0).long().argmin())]}; it has no direction to judge")
    unit = rows.double() / lengths
    sides = [(side.double() * unit).sum(-1) for side in (positive, negative)]  # [pair layer]
    found = _resampled(sides, groups, draws, seed)
    low, high = np.percentile(found.numpy(), [2.5, 97.5], axis=0) if len(set(groups)) > 1 else np.full((2, len(layers)), np.nan)
    spread = ((sides[0].var(0) + sides[1].var(0)) / 2).sqrt().clamp(min=1e-30)
    return Separability(tuple(layers), auroc(*sides), torch.from_numpy(low), torch.from_numpy(high),
                        (sides[0].mean(0) - sides[1].mean(0)) / spread, len(positive), len(set(groups)))


def _resampled(sides: list[Tensor], groups: Sequence[str], draws: int, seed: int) -> Tensor:
    """AUROC `[draw layer]` of samples of whole groups, drawn with replacement."""
    names = sorted(set(groups))
    members = [np.flatnonzero(np.array(groups) == name) for name in names]
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        chosen = torch.from_numpy(np.concatenate([members[i] for i in draw.integers(len(names), size=len(names))]))
        found.append(auroc(*(side[chosen] for side in sides)))
    return torch.stack(found)


def stability(positive: Tensor, negative: Tensor, method: str = "mean_diff", draws: int = 20, seed: int = 0) -> Tensor:
    """The cosine between directions fitted on two disjoint halves of the pairs, `[draw layer]`, over random halves.

    Source: split-half reliability; agreement between the pairs' differences predicts it, arXiv 2505.22637.
    """
    if len(positive) < 4:
        raise EditError(f"halves of {len(positive)} pairs are too small to fit on; give at least 4")
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        order = torch.randperm(len(positive), generator=draw)
        one, other = (METHODS[method](positive[half], negative[half]) for half in order.chunk(2))
        found.append(torch.nn.functional.cosine_similarity(one, other, dim=-1))
    return torch.stack(found)


def cosines(vector: Vector) -> Tensor:
    """The cosine between a vector's directions at any two of its layers, `[layer layer]`."""
    unit = vector.rows.double() / vector.rows.double().norm(dim=-1, keepdim=True)
    return (unit @ unit.T).float()


def judge(session: Session, vector: Vector, pairs: Any, at: Any, draws: int) -> Separability:
    """Return what `Session.separability` promises."""
    read = Pairs.of(pairs)
    if not isinstance(at, int) or isinstance(at, bool):
        raise EditError("separability is read at one position; give at an int")
    rows = session.capture([*read.positive, *read.negative], vector.kind, layers=vector.layers, at=at).float().flatten(2)
    return separability(rows[: len(read)], rows[len(read):], vector.rows, vector.layers, read.group, draws)
