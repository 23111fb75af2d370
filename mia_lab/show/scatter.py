"""Scatter: points in the plane by group, as numbers, as HTML with a picture, by plotly and by matplotlib."""
from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

from .colours import INK, css, line, mark, share, symbol
from .glyphs import printable
from .panel import Panel, axis, number, plain, span
from .parts import Part, Scatter, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT_ROWS, _HTML_ROWS = 24, 300
_ARROW = {"arrowstyle": "-|>", "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}


def as_text(part: Scatter, lower: Callable[[Part], str]) -> str:
    """The table of numbers."""
    return lower(numbers(part, _TEXT_ROWS))


def as_html(part: Scatter, lower: Callable[[Part], str]) -> str:
    """A picture with the table of numbers folded under it; the table alone where matplotlib is missing."""
    from .png import with_picture

    return with_picture(part, described(part), numbers(part, _HTML_ROWS), lower)


def numbers(part: Scatter, most: int) -> Table:
    """Arrows, then points by group; of more than `most` points the first of each group."""
    total = sum(len(points) for _, points in part.groups)
    each = most if total <= most else max(1, most // len(part.groups))
    rows = [(f"direction {name}", number(x), number(y), "") for x, y, name in part.arrows]
    rows += [(name, number(x), number(y), note) for name, points in part.groups for x, y, note in points[:each]]
    left = total + len(part.arrows) - len(rows)
    return Table(("group", part.x_title, part.y_title, "note"), tuple(rows), part.caption + (f" ({left} more points)" if left else ""))


def described(part: Scatter) -> str:
    """The picture in a sentence a group."""
    told = []
    for name, points in part.groups:
        known = [(x, y) for x, y, _ in points if isfinite(x) and isfinite(y)]
        x, y = (sum(values) / len(known) for values in zip(*known)) if known else (float("nan"), float("nan"))
        told.append(f"{name}: {len(known)} points around ({number(x)}, {number(y)}).")
    told += [f"The direction {name} points to ({number(x)}, {number(y)})." for x, y, name in part.arrows]
    return f"{part.caption or 'Scatter'}: {part.y_title} over {part.x_title}. {' '.join(told)}"


def _reach(part: Scatter) -> list[tuple[float, float]]:
    """The ends of both axes."""
    points = [point for _, group in part.groups for point in group]
    return [span([p[i] for p in points] + [a[i] for a in part.arrows] + [0.0] * bool(part.arrows)) for i in (0, 1)]


def draw(part: Scatter, axes: Axes) -> None:
    """Draw it by matplotlib. A point that is not finite is not drawn."""
    for i, (name, points) in enumerate(part.groups):
        shown = [(x, y) for x, y, _ in points if isfinite(x) and isfinite(y)]
        axes.plot([x for x, _ in shown], [y for _, y in shown], color=share(line(i), 0.8), linewidth=0, marker=mark(i), markersize=5,
                  label=printable(name))
    for x, y, name in part.arrows:
        axes.annotate("", (x, y), (0, 0), arrowprops=_ARROW | {"color": share(INK)})
        axes.annotate(printable(name), (x, y), (4, 4), textcoords="offset points", color=share(INK), fontsize=9, fontweight="bold")
    if part.arrows:  # the limits follow from the one scale, and must hold the arrows
        axes.update_datalim([(0.0, 0.0), *((x, y) for x, y, _ in part.arrows)])
        axes.set_aspect("equal", adjustable="datalim")
    else:
        axes.set(xlim=_reach(part)[0], ylim=_reach(part)[1])
    if len(part.groups) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def as_plot(part: Scatter) -> Panel:
    """Draw it by plotly."""
    traces: list[dict[str, Any]] = []
    for i, (name, points) in enumerate(part.groups):
        shown = [point for point in points if isfinite(point[0]) and isfinite(point[1])]
        traces.append({"type": "scatter", "mode": "markers", "name": plain(name), "x": [p[0] for p in shown], "y": [p[1] for p in shown],
                       "customdata": [plain(p[2]) for p in shown], "marker": {"color": css(line(i), 0.8), "symbol": symbol(i), "size": 8},
                       "showlegend": len(part.groups) > 1,
                       "hovertemplate": "%{customdata}<br>%{x:.4g}, %{y:.4g}<extra>%{fullData.name}</extra>"})
    for x, y, name in part.arrows:
        traces.append({"type": "scatter", "mode": "lines+markers+text", "name": plain(name), "x": [0.0, x], "y": [0.0, y],
                       "text": ["", plain(name)], "textposition": "top center", "textfont": {"color": css(INK)}, "showlegend": False,
                       "line": {"color": css(INK), "width": 2.5}, "hoverinfo": "name+x+y",
                       "marker": {"color": css(INK), "symbol": "arrow", "size": [0, 13], "angleref": "previous"}})
    across, up = _reach(part)
    y = axis(part.y_title, range=list(up)) | ({"scaleanchor": "x"} if part.arrows else {})
    return Panel(tuple(traces), axis(part.x_title, range=list(across)), y, part.caption, 380)
