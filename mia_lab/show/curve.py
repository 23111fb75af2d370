"""Curve: values over one axis with their intervals, as numbers, as HTML with a picture, by plotly and by matplotlib.

Points are joined, and their intervals are a band; where x only counts (ticks), points stand side by side with bars. A value that
is not finite leaves a gap.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from .colours import INK, css, line, mark, share, symbol
from .glyphs import printable
from .panel import Panel, axis, gap, interval, named, number, plain, span, stretches, thinned, wrapped
from .parts import Curve, Part, Series, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT_ROWS, _HTML_ROWS = 40, 300
_LEGEND = 26  # characters of a line of the legend
_TICK, _ACROSS = 20, 60  # characters of a name at the axis, and of all of them side by side
_MANY = 60  # points from which on only lone ones are marked


def as_text(part: Curve, lower: Callable[[Part], str]) -> str:
    """The table of numbers."""
    return lower(numbers(part, _TEXT_ROWS))


def as_html(part: Curve, lower: Callable[[Part], str]) -> str:
    """A picture with the table of numbers folded under it; the table alone where matplotlib is missing."""
    from .png import with_picture

    return with_picture(part, described(part), numbers(part, _HTML_ROWS), lower)


def numbers(part: Curve, most: int) -> Table:
    """Every value by its place, a column a series; with more than `most` places, so many of them, evenly spaced."""
    places: dict[tuple[float, int], list[str]] = {}  # a place that a series has twice has two rows
    for column, s in enumerate(part.series):
        seen: dict[float, int] = {}
        for i, x in enumerate(s.x):
            key = (x, seen.get(x, 0))
            seen[x] = key[1] + 1
            places.setdefault(key, [""] * len(part.series))[column] = interval(s.y[i], s.low and s.low[i], s.high and s.high[i])
    step = -(-len(places) // most) or 1
    order = sorted(places)
    kept = order[::-step][::-1]
    left = f" (every {step}th of {len(order)} places)" if step > 1 else ""
    rows = tuple((part.ticks[int(x)] if part.ticks else f"{x:g}", *places[x, again]) for x, again in kept)
    single = len(part.series) == 1
    return Table((part.x_title, *(part.y_title if single else s.name for s in part.series)), rows,
                 part.caption + ("" if single else f"{': ' * bool(part.caption)}{part.y_title}") + left)


def described(part: Curve) -> str:
    """The picture in a sentence a series."""
    told = [_told(part, s) for s in part.series]
    return f"{part.caption or 'Curve'}: {part.y_title} over {part.x_title}. {' '.join(told)}"


def _told(part: Curve, s: Series) -> str:
    known = [(y, x) for x, y in zip(s.x, s.y) if isfinite(y)]
    if not known:
        return f"{s.name} has no value."
    place = (lambda x: part.ticks[int(x)]) if part.ticks else number
    (low, at), (high, top) = min(known), max(known)
    return f"{s.name} runs from {number(low)} at {place(at)} to {number(high)} at {place(top)}."


def reach(part: Curve) -> tuple[float, float]:
    """The ends of the y axis: all values, all intervals, and the line of no effect where it is drawn."""
    shown = [v for s in part.series for values in (s.y, s.low, s.high) if values is not None for v in values]
    return span([*shown, *([part.level] if part.zero else [])])


def _along(part: Curve) -> Curve:
    """The part with each line's points in the order of the axis, as they are joined; beside names they stand as they are."""
    def run(s: Series) -> Series:
        order = sorted(range(len(s.x)), key=s.x.__getitem__)
        x, y, low, high = (values and tuple(values[i] for i in order) for values in (s.x, s.y, s.low, s.high))
        return Series(s.name, x, y, low, high)

    return part if part.ticks is not None else replace(part, series=tuple(map(run, part.series)))


def _beside(part: Curve, i: int) -> float:
    """How far from its place a series stands, so that the bars of several can be told apart."""
    n = len(part.series)
    return 0.0 if part.ticks is None else min(0.12, 0.7 / n) * (i - (n - 1) / 2)


def _bars(part: Curve, s: Series) -> list[int]:
    """Where an interval is a bar: everywhere beside names, else where a band would have no width."""
    if s.low is None:
        return []
    runs = stretches(s.y, s.low, s.high)
    return [i for run in runs for i in run if part.ticks is not None or len(run) == 1]


def _bands(part: Curve, s: Series) -> list[list[int]]:
    """The runs of places over which an interval is a band."""
    return [] if s.low is None or part.ticks is not None else [run for run in stretches(s.y, s.low, s.high) if len(run) > 1]


def _alpha(part: Curve) -> float:
    """Of a band, so that several can lie over each other."""
    return 0.2 if len(part.series) < 4 else 0.1


def _marked(part: Curve, s: Series) -> list[int]:
    """The places whose values carry a mark; without one, a value between two gaps would not be seen."""
    runs = stretches(s.y)
    return [i for run in runs for i in run if part.ticks is not None or len(s.y) <= _MANY or len(run) == 1]


def draw(part: Curve, axes: Axes) -> None:
    """Draw it by matplotlib."""
    part = _along(part)
    if part.zero:
        axes.axhline(part.level, color=share(INK), linewidth=0.9, zorder=1)
    lines = []
    for i, s in enumerate(part.series):
        colour, x = line(i), [v + _beside(part, i) for v in s.x]
        for run in _bands(part, s):
            across, low, high = ([values[j] for j in run] for values in (x, s.low, s.high))
            axes.fill_between(across, low, high, color=share(colour, _alpha(part)), linewidth=0)
        for j in _bars(part, s):
            axes.plot([x[j]] * 2, [s.low[j], s.high[j]], color=share(colour), linewidth=1.4)
        lines += axes.plot(x, [v if isfinite(v) else nan for v in s.y], color=share(colour), linewidth=0 if part.ticks else 1.6,
                           marker=mark(i), markersize=4, markevery=_marked(part, s) or [])
    axes.set_ylim(*reach(part))
    if part.ticks is not None:
        axes.set_xlim(-0.5, len(part.ticks) - 0.5)
        at = thinned(len(part.ticks))
        names = [printable(tick if len(tick) <= _TICK else f"{tick[:_TICK - 1]}…") for tick in (part.ticks[i] for i in at)]
        slanted = {"rotation": 45, "ha": "right"} if sum(map(len, names)) > _ACROSS else {}
        axes.set_xticks(list(at), names, **slanted)
    elif all(x == int(x) for s in part.series for x in s.x):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if len(lines) > 1:
        order = _order(part)
        names = [printable("\n".join(wrapped(part.series[i].name, _LEGEND))) for i in order]
        axes.legend([lines[i] for i in order], names, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _order(part: Curve) -> list[int]:
    """The series in the order of the legend: that in which lines end, from top to bottom, and else that in which they stand."""
    ends = [next((y for y in reversed(s.y) if isfinite(y)), float("-inf")) for s in part.series]
    return sorted(range(len(ends)), key=lambda i: -ends[i]) if part.ticks is None else list(range(len(ends)))


def as_plot(part: Curve) -> Panel:
    """Draw it by plotly."""
    part = _along(part)
    traces: list[dict[str, Any]] = []
    order = _order(part)
    for i, s in enumerate(part.series):
        traces += [_band(s, run, i, _alpha(part)) for run in _bands(part, s)]
        traces.append(_trace(part, s, i) | {"legendrank": order.index(i), "showlegend": len(part.series) > 1})
    y = axis(part.y_title, range=list(reach(part)))
    x = axis(part.x_title) if part.ticks is None else named(part.x_title, part.ticks, range=[-0.5, len(part.ticks) - 0.5])
    if part.zero:
        low, high = span([v for s in part.series for v in s.x]) if part.ticks is None else (-0.5, len(part.ticks) - 0.5)
        x["range"] = [low, high]
        traces.insert(0, {"type": "scatter", "x": [low, high], "y": [part.level] * 2, "mode": "lines", "hoverinfo": "skip",
                          "line": {"color": css(INK), "width": 1}, "showlegend": False, "name": "no effect"})
    return Panel(tuple(traces), x, y, part.caption)


def _trace(part: Curve, s: Series, i: int) -> dict[str, Any]:
    colour, bars, marked = css(line(i)), set(_bars(part, s)), set(_marked(part, s))
    told = [interval(y, s.low and s.low[j], s.high and s.high[j]) for j, y in enumerate(s.y)]
    if part.ticks is not None:  # beside its name's place plotly would tell a number
        told = [f"{plain(part.ticks[int(x)])}: {said}" for x, said in zip(s.x, told)]
    sizes = [7 if j in marked else 0 for j in range(len(s.y))]
    marks = {"color": colour, "symbol": symbol(i), "opacity": 1.0, "line": {"width": 0}, "size": sizes}
    name = "<br>".join(map(plain, wrapped(s.name, _LEGEND)))
    trace = {"type": "scatter", "name": name, "x": [x + _beside(part, i) for x in s.x], "y": [gap(y) for y in s.y],
             "mode": "markers" if part.ticks is not None else "lines+markers", "connectgaps": False, "customdata": told,
             "legendgroup": str(i), "line": {"color": colour, "width": 2}, "marker": marks,
             "hovertemplate": f"{'' if part.ticks is not None else '%{x}: '}%{{customdata}}<extra>%{{fullData.name}}</extra>"}
    if bars:
        up, down = ([abs(end[j] - s.y[j]) if j in bars else None for j in range(len(s.y))] for end in (s.high, s.low))
        trace["error_y"] = {"type": "data", "array": up, "arrayminus": down, "color": colour, "thickness": 1.4, "width": 3}
    return trace


def _band(s: Series, run: list[int], i: int, alpha: float) -> dict[str, Any]:
    there, back = [s.x[j] for j in run], [s.x[j] for j in reversed(run)]
    return {"type": "scatter", "x": there + back, "y": [s.high[j] for j in run] + [s.low[j] for j in reversed(run)], "fill": "toself",
            "fillcolor": css(line(i), alpha), "line": {"width": 0}, "mode": "lines", "hoverinfo": "skip", "showlegend": False,
            "legendgroup": str(i), "name": plain(f"{s.name}, interval")}
