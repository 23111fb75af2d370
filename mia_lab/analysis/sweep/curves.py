"""Sweeps as curves: the effect and its cost over the coefficient, or over the layers at one coefficient."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

from ...errors import EditError
from ...shown import Shown
from .effects import Result

if TYPE_CHECKING:
    from ...show.parts import Curve, Series

MOST = 6  # curves that can be told apart in one panel


@dataclass(frozen=True, slots=True, repr=False)
class LayerEffects(Shown):
    """What one coefficient of a sweep does at each layer: the effect on `metric` with its interval, placebos, and the cost."""

    coeff: float
    metric: str
    results: tuple[Result, ...]

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a vector, selector and layer."""
        return [{"vector": r.setting.name, "layer": r.setting.layer, "where": r.setting.where.removeprefix(", "), "effect": r.effect.mean,
                 "low": r.effect.low, "high": r.effect.high, "placebo": r.random and r.random.mean,
                 "placebo_limit": r.random and r.random.limit, "kl": r.kl, "perplexity_ratio": r.perplexity_ratio} for r in self.results]

    def _parts(self) -> tuple[Curve, ...]:
        drawn, left = _largest(_gathered(self.results, lambda r: f"{r.setting.name}{r.setting.where}"))
        return _panels(drawn, lambda r: float(r.setting.layer), "layer", self.metric,
                       f"Coefficient {self.coeff:+g} at one layer at a time{left}", placebos=True)


def by_layer(results: Sequence[Result], metric: str, coeff: float) -> LayerEffects:
    """Return what `Sweep.by_layer` promises."""
    measured = sorted({r.setting.coeff for r in results if r.setting.coeff is not None})
    found = tuple(r for r in results if r.setting.coeff == coeff)
    if not found:
        raise EditError(f"the sweep has no coefficient {coeff:g}" + (
            f"; it has {', '.join(f'{c:g}' for c in measured)}" if measured else ": its settings are recipes"))
    return LayerEffects(float(coeff), metric, found)


def over_coefficients(results: Sequence[Result], metric: str) -> tuple[Curve, ...]:
    """The effect over the coefficient, and under it the perplexity ratio, a curve a vector and layer; recipes side by side.

    Of many curves those with the largest effects are drawn, and the caption says so. None for a sweep that was broken off at once.
    """
    from ...show.parts import Curve

    if not results:
        return ()
    swept = [r for r in results if r.setting.coeff is not None]
    if not swept:
        names = tuple(r.setting.label for r in results)
        effects = _series("effect", list(enumerate(results)), lambda r: (r.effect.mean, r.effect.low, r.effect.high))
        return (Curve((effects,), "recipe", f"change of {metric}", "Effect of each recipe", ticks=names),)
    drawn, left = _largest(_gathered(swept, lambda r: f"{r.setting.name} layer {r.setting.layer}{r.setting.where}"))
    return _panels(drawn, lambda r: r.setting.coeff, "coefficient", metric, f"Effect over the coefficient{left}", through=True)


def _gathered(results: Sequence[Result], name: Callable[[Result], str]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for r in results:
        found.setdefault(name(r), []).append(r)
    return found


def _largest(curves: dict[str, list[Result]]) -> tuple[dict[str, list[Result]], str]:
    """Those that are drawn, and what a caption says of it where others are left out."""
    largest = sorted(curves, key=lambda name: -max(abs(r.effect.mean) for r in curves[name]))[:MOST]
    left = f": the {MOST} of {len(curves)} curves with the largest effects" if len(curves) > MOST else ""
    return {name: found for name, found in curves.items() if name in largest}, left


def _panels(curves: dict[str, list[Result]], place: Callable[[Result], float], over: str, metric: str, caption: str,
            placebos: bool = False, through: bool = False) -> tuple[Curve, ...]:
    """The effect, and where it was measured the perplexity ratio, in panels of their own.

    through: lines with places on both sides of 0 run through the unsteered model there, whose effect is 0 and whose ratio is 1.
    """
    from ...show.parts import Curve

    placed = {name: sorted(((place(r), r) for r in found), key=lambda item: item[0]) for name, found in curves.items()}
    effects = [_series(name, found, lambda r: (r.effect.mean, r.effect.low, r.effect.high), 0.0 if through else None)
               for name, found in placed.items()]
    if placebos:
        effects += [_series(f"placebos of {name}, 95 % within", found, _null) for name, found in placed.items()
                    if any(r.random is not None for _, r in found)]
    panels = [Curve(tuple(effects), over, f"change of {metric}", caption)]
    if all(r.perplexity_ratio is not None for found in curves.values() for r in found):
        costs = tuple(_series(name, found, lambda r: (r.perplexity_ratio, None, None), 1.0 if through else None)
                      for name, found in placed.items())
        panels.append(Curve(costs, over, "perplexity ratio", "Its cost on neutral text; 1 is the unsteered model's", level=1.0))
    return tuple(panels)


def _null(r: Result) -> tuple[float, float, float]:
    return (nan, nan, nan) if r.random is None else (r.random.mean, -r.random.limit, r.random.limit)


def _series(name: str, placed: Sequence[tuple[float, Result]], read: Callable[[Result], tuple], level: float | None = None) -> Series:
    """One line. level: the exact value at 0, which it takes on where it has places on both sides of that."""
    from ...show.parts import Series

    points = [(float(x), *read(r)) for x, r in placed]
    if level is not None and points[0][0] < 0 < points[-1][0] and not any(point[0] == 0 for point in points):
        points = sorted([*points, (0.0, level, *((None, None) if points[0][2] is None else (level, level)))], key=lambda point: point[0])
    x, y, low, high = zip(*points)
    return Series(name, x, y, *((None, None) if None in low else (low, high)))
