"""Bars, drawn by plotly and by matplotlib; as text and HTML they are tables."""
from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from .colours import BLUE, INK, ORANGE, css, share
from .glyphs import printable
from .panel import Panel, axis, gap, named, plain, span, thinned
from .parts import Bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(part: Bars, axes: Axes) -> None:
    """Draw it by matplotlib. A value that is not finite has no bar."""
    places = [i for i, v in enumerate(part.values) if isfinite(v)]
    values = [part.values[i] for i in places]
    axes.bar(places, values, color=[share(ORANGE if v >= 0 else BLUE, 0.9) for v in values])
    axes.axhline(0.0, color=share(INK), linewidth=0.9)
    at = thinned(len(part.labels))
    slanted = {"rotation": 45, "ha": "right"} if len(at) > 8 else {}
    axes.set_xticks(list(at), [printable(part.labels[i]) for i in at], **slanted)
    axes.set(xlim=(-0.6, len(part.labels) - 0.4), ylim=span([0.0, *part.values]))


def as_plot(part: Bars) -> Panel:
    """Draw it by plotly."""
    colours = [css(ORANGE if v >= 0 else BLUE, 0.9) for v in part.values]
    trace = {"type": "bar", "x": list(range(len(part.labels))), "y": [gap(v) for v in part.values], "marker": {"color": colours},
             "customdata": [plain(label) for label in part.labels], "showlegend": False,
             "hovertemplate": "%{customdata}: %{y:.4g}<extra></extra>"}
    return Panel((trace,), named("", part.labels), axis("", zeroline=True, zerolinecolor=css(INK)), part.caption)
