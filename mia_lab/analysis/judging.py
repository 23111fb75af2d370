"""How far a direction can be trusted: whether it tells held-out pairs apart, and whether another sample would have given it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..counted import counted
from ..errors import EditError
from ..shown import Shown
from .fitting import METHODS
from .pairs import Pairs
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session
    from ..show.parts import Part

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Separability(Shown):
    """How well a vector's projections tell the sides of pairs apart, per layer.

    auroc, low, high `[layer]`: the share of (positive, negative) prompts in the right order, ties counting half, and its 95 %
    interval from a bootstrap over whole groups, NaN for one group. d_prime `[layer]`: the distance of the sides' means in
    standard deviations. accuracy, accuracy_low, accuracy_high `[layer]`: the share of prompts on the right side of a threshold
    midway between the sides' means of all other groups, with its interval; NaN for one group.
    """

    layers: tuple[int, ...]
    auroc: Tensor
    low: Tensor
    high: Tensor
    d_prime: Tensor
    accuracy: Tensor
    accuracy_low: Tensor
    accuracy_high: Tensor
    n_pairs: int
    n_groups: int

    @property
    def best(self) -> int:
        """The layer with the highest lower end; choose it on one split and report it on another. EditError for one group."""
        if self.n_groups < 2:
            raise EditError("pairs of one group give no interval to choose a layer by; give pairs of several groups")
        return self.layers[int(self.low.argmax())]

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a layer, ready for pandas."""
        names = ("auroc", "low", "high", "d_prime", "accuracy", "accuracy_low", "accuracy_high")
        columns = [getattr(self, name).tolist() for name in names]
        return [dict(layer=layer, **dict(zip(names, values))) for layer, *values in zip(self.layers, *columns)]

    def _parts(self) -> list[Part]:
        from ..show.parts import Prose

        return [Prose(self._title()), *self._plots(), Prose("The line is chance. Accuracy is that of a threshold midway between the sides' "
                                                            "means of the other groups.")]

    def _brief(self) -> list[Part]:
        from ..show.parts import Prose, Table

        rows = tuple((str(r["layer"]), f"{r['auroc']:.3f} [{r['low']:.3f}, {r['high']:.3f}]", f"{r['d_prime']:+.2f}",
                      f"{r['accuracy']:.3f} [{r['accuracy_low']:.3f}, {r['accuracy_high']:.3f}]") for r in self.data)
        return [Prose(self._title()), Table(("layer", "AUROC [95 %]", "d'", "held-out accuracy [95 %]"), rows)]

    def _title(self) -> str:
        return f"Separability on {counted(self.n_pairs, 'pair')} in {counted(self.n_groups, 'group')}"

    def _plots(self) -> list[Part]:
        from ..show.parts import Curve, Series

        at = tuple(map(float, self.layers))
        found = (("AUROC", self.auroc, self.low, self.high), ("held-out accuracy", self.accuracy, self.accuracy_low, self.accuracy_high))
        series = tuple(Series(name, at, *(tuple(values.tolist()) for values in numbers)) for name, *numbers in found)
        return [Curve(series, "layer", "AUROC, accuracy",
                      f"How well the vector tells {self.n_pairs} pairs apart, with 95 % intervals over {self.n_groups} groups", level=0.5)]


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
    right = _held_out([side.double() for side in sides], groups)
    found, kept = _resampled(sides, right, groups, draws, seed)
    several = len(set(groups)) > 1
    (low, high), (worst, best) = (torch.from_numpy(np.percentile(each.numpy(), [2.5, 97.5], axis=0) if several else
                                                   np.full((2, len(layers)), np.nan)) for each in (found, kept))
    spread = ((sides[0].var(0) + sides[1].var(0)) / 2).sqrt().clamp(min=1e-30)
    return Separability(tuple(layers), auroc(*sides), low, high, (sides[0].mean(0) - sides[1].mean(0)) / spread, right.mean(0), worst, best,
                        len(positive), len(set(groups)))


def _members(groups: Sequence[str]) -> list[np.ndarray]:
    """The places of each group's pairs."""
    return [np.flatnonzero(np.array(groups) == name) for name in sorted(set(groups))]


def _held_out(sides: list[Tensor], groups: Sequence[str]) -> Tensor:
    """The share of a pair's two prompts on the right side of a threshold from the other groups, `[pair layer]`; NaN for one group."""
    right = torch.full_like(sides[0], float("nan"))
    for places in _members(groups):
        others = len(groups) - len(places)
        if others:
            threshold = sum(side.sum(0) - side[places].sum(0) for side in sides) / (2 * others)
            right[places] = ((sides[0][places] > threshold).double() + (sides[1][places] < threshold).double()) / 2
    return right


def _resampled(sides: list[Tensor], right: Tensor, groups: Sequence[str], draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """AUROC and accuracy, each `[draw layer]`, of samples of whole groups, drawn with replacement."""
    members, draw = _members(groups), np.random.default_rng(seed)
    found, kept = [], []
    for _ in range(draws):
        chosen = torch.from_numpy(np.concatenate([members[i] for i in draw.integers(len(members), size=len(members))]))
        found.append(auroc(*(side[chosen] for side in sides)))
        kept.append(right[chosen].mean(0))
    return torch.stack(found), torch.stack(kept)


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
