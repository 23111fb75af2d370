"""Parts as PNG, by matplotlib: the twin of a plotly figure, and the picture in the HTML of a curve.

The background is transparent and the ink one grey, so that one picture does for dark and light pages. Figures are made as objects,
never through pyplot, whose list of open figures is the user's own.
"""
from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from . import bars, curve, heatmap, scatter
from .colours import INK, share
from .glyphs import printable
from .palette import packed
from .panel import wrapped
from .parts import Bars, Curve, Heat, Part, Scatter, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 640  # px of the page; the picture has twice as many
_DENSITY, _INCH = 2, 100
_DRAW = {Curve: curve.draw, Scatter: scatter.draw, Bars: bars.draw, Heat: heatmap.draw}
_LABELS = {Curve: lambda p: (p.x_title, p.y_title), Scatter: lambda p: (p.x_title, p.y_title), Bars: lambda p: ("", ""),
           Heat: lambda p: p.axes[::-1]}


def drawable(parts: Iterable[Part]) -> list[Part]:
    """Those of some parts that are drawn; the others are only told."""
    return [part for part in parts if type(part) in _DRAW]


def available() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def png(*parts: Part, captions: bool = True) -> bytes:
    """Return the drawings of parts, one panel under the other, as a PNG of twice WIDTH px. ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tall = [_height(part) for part in parts]
    figure = Figure(figsize=(WIDTH / _INCH, sum(tall) / _INCH), dpi=_DENSITY * _INCH, layout="constrained", facecolor="none")
    canvas = FigureCanvasAgg(figure)
    for part, axes in zip(parts, figure.subplots(len(parts), 1, squeeze=False, height_ratios=tall)[:, 0]):
        _style(axes)
        _DRAW[type(part)](part, axes)
        across, up = _LABELS[type(part)](part)
        axes.set_xlabel(printable(across), color=share(INK), fontsize=10)
        axes.set_ylabel(printable("\n".join(wrapped(up, 40))), color=share(INK), fontsize=10)
        if captions and part.caption:
            axes.set_title(printable("\n".join(wrapped(part.caption, 90))), loc="left", fontsize=9, color=share(INK))
        _legend(axes)
    canvas.draw()
    return packed(np.asarray(canvas.buffer_rgba()))


def with_picture(part: Part, told: str, table: Table, lower: Callable[[Part], str]) -> str:
    """Return the HTML of a caption, a picture that `told` describes, and its numbers folded under it; without matplotlib, the numbers."""
    if not available():
        return lower(table)
    data = b64encode(png(part, captions=False)).decode()
    caption = f"<p>{escape(part.caption)}</p>" if part.caption else ""
    image = f"<img width='{WIDTH}' style='max-width:100%' alt='{escape(told)}' src='data:image/png;base64,{data}'>"
    return f"{caption}{image}<details><summary>numbers</summary>{_bare(table)}</details>"


def _bare(table: Table) -> str:
    """A table without a style in each cell: hundreds of numbers take a quarter of the bytes."""
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table.header)
    body = "".join(f"<tr><th scope='row'>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
                   for first, *rest in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return f"<table cellpadding='4'>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _height(part: Part) -> int:
    """Of a panel, in px of the page."""
    return heatmap.height(part) if isinstance(part, Heat) else 380 if isinstance(part, Scatter) else 280


def _style(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.grid(True, color=share(INK, 0.25), linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=share(INK), labelsize=9)
    for side, spine in axes.spines.items():
        spine.set(color=share(INK), linewidth=0.8, visible=side in ("left", "bottom"))


def _legend(axes: Axes) -> None:
    legend = axes.get_legend()
    if legend is not None:
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set(color=share(INK), fontsize=9)
