"""PatchGrid: what patching one place at a time does to a metric, by layer, head and position."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from ...counted import counted
from ...errors import EditError
from ...shown import Shown

if TYPE_CHECKING:
    from ...show.parts import Heat, Part

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PatchGrid(Shown):
    """A metric with one place patched at a time.

    raw `[pair layer head position]`, without the axes of `heads` or `positions` where these are None: the metric of each run, NaN
    where an interrupt came first. clean, corrupt `[pair]`: of the runs without a patch. method: how it was found; a "gradient" is an
    estimate. cached: the share of prompt tokens that runs took from the prefix cache; ran: how many runs there were: places before
    the first token that differs need none.
    """

    point: str
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    positions: tuple[str, ...] | None
    raw: Tensor
    clean: Tensor
    corrupt: Tensor
    metric: str
    direction: str = "denoise"
    method: str = "patched"
    ran: int = 0
    cached: float = 0.0
    seconds: float = 0.0

    @property
    def scores(self) -> Tensor:
        """How far each patch carries the metric from the run it is put in, 0, to the run it comes from, 1: `[layer (head) (position)]`.

        Denoising puts clean values in the corrupt run, (patched - corrupt) / (clean - corrupt); noising the reverse. Over pairs it is
        the quotient of the means, so that a pair whose runs hardly differ cannot rule it.
        """
        base, source = self._ends
        moved = (self.raw - self._wide(base)).mean(0)
        return (moved / (source - base).mean()).float()

    @property
    def per_pair(self) -> Tensor:
        """The scores of each pair alone, `[pair layer (head) (position)]`."""
        base, source = self._ends
        return ((self.raw - self._wide(base)) / self._wide(source - base)).float()

    @property
    def complete(self) -> bool:
        """Whether every cell is there."""
        return not bool(self.raw.isnan().any())

    @property
    def data(self) -> list[dict[str, Any]]:
        """One row a pair and cell: pair, layer, head, position, metric, score."""
        axes = {"pair": range(len(self.raw)), **self._axes}
        values = zip(product(*axes.values()), self.raw.flatten().tolist(), self.per_pair.flatten().tolist())
        return [dict(zip(axes, place)) | {"metric": raw, "score": score} for place, raw, score in values]

    def top(self, n: int = 5) -> list[dict[str, Any]]:
        """The cells with the largest scores by size, averaged over pairs."""
        places, scores = list(product(*self._axes.values())), self.scores.flatten()
        order = scores.nan_to_num().abs().argsort(descending=True)[:n].tolist()
        return [dict(zip(self._axes, places[i])) | {"score": float(scores[i])} for i in order]

    def agreement(self, other: PatchGrid) -> dict[str, float]:
        """How an estimate agrees with a patched grid of the same cells: their correlation, and the largest difference of scores."""
        names = ("point", "layers", "heads", "positions", "metric", "direction")
        differ = [name for name in names if getattr(self, name) != getattr(other, name)]
        if differ:
            raise EditError(f"the grids differ in {differ[0]}: {getattr(self, differ[0])!r} and {getattr(other, differ[0])!r}")
        both = torch.stack([self.scores.flatten(), other.scores.flatten()]).double()
        both = both[:, ~both.isnan().any(0)]
        return {"correlation": float(torch.corrcoef(both)[0, 1]), "largest_difference": float((both[0] - both[1]).abs().max())}

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        return (self.corrupt, self.clean) if self.direction == "denoise" else (self.clean, self.corrupt)

    @property
    def _axes(self) -> dict[str, tuple]:
        axes = {"layer": self.layers, "head": self.heads, "position": self.positions}
        return {name: labels for name, labels in axes.items() if labels is not None}

    def _wide(self, per_pair: Tensor) -> Tensor:
        return per_pair.view(-1, *[1] * (self.raw.ndim - 1))

    def _caption(self) -> str:
        into = "clean into corrupt" if self.direction == "denoise" else "corrupt into clean"
        gap = "" if self.complete else f"; interrupted, {int(self.raw.isnan().sum())} of {self.raw.numel()} cells are NaN"
        runs = f"; {counted(self.ran, 'run')}, {self.cached:.0%} of their tokens from the prefix cache" if self.ran else ""
        pairs = f", means of {len(self.raw)} pairs" if len(self.raw) > 1 else ""
        return (f"PatchGrid: {self.point}, {into}, {self.method}; {self.metric}: clean {float(self.clean.mean()):.3f}, corrupt "
                f"{float(self.corrupt.mean()):.3f}{pairs}{runs}{gap}")

    def _rows(self) -> tuple[list[str], list[str], Tensor]:
        """Row labels, column labels, and the scores as `[row column]`."""
        *first, (_, columns) = self._axes.items() if len(self._axes) > 1 else [*self._axes.items(), ("score", ("score",))]
        labels = [" ".join(f"{name[0].upper()}{label}" for (name, _), label in zip(first, place))
                  for place in product(*(labels for _, labels in first))]
        names = [f"H{label}" if self.positions is None and self.heads is not None else str(label) for label in columns]
        return labels, names, self.scores.reshape(len(labels), len(columns))

    def _heat(self) -> Heat:
        from ...show.parts import Heat

        labels, columns, scores = self._rows()
        metric = self.raw.mean(0).reshape(scores.shape).tolist()
        ends = f"clean {float(self.clean.mean()):.3g}, corrupt {float(self.corrupt.mean()):.3g}"
        notes = tuple(tuple("not run" if value != value else f"{score:.3f}: metric {value:.3g} ({ends})" for score, value in zip(*row))
                      for row in zip(scores.tolist(), metric))
        *down, across = self._axes if len(self._axes) > 1 else [*self._axes, ""]
        return Heat(tuple(labels), tuple(columns), tuple(map(tuple, scores.tolist())), self._caption(), notes=notes,
                    axes=(" ".join(down), across), unit="score")

    def _parts(self) -> list[Heat]:
        return [self._heat()]

    def _brief(self) -> list[Heat]:
        from ...show.heat import BRIEF, fitted

        return [fitted(self._heat(), BRIEF)]

    def _plots(self) -> list[Part]:
        """A grid, or a curve where only layers were patched."""
        from ...show.parts import Curve, Series

        if list(self._axes) != ["layer"]:
            return [self._heat()]
        scores = Series("score", tuple(map(float, self.layers)), tuple(self.scores.tolist()))
        return [Curve((scores,), "layer", "score", self._caption())]
