"""Heat, drawn by plotly and by matplotlib; show/heat.py has its table."""
from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from .colours import BLUE, INK, ORANGE, css, share
from .glyphs import printable
from .marks import marked
from .panel import Panel, axis, plain, thinned, wrapped
from .parts import Heat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_PX, _LEAST_PX, _MOST_PX = 22, 220, 720
_ROOM, _CUT = 12, 12  # columns up to which texts fit into cells, and their characters
_UNIT = 22  # characters of a line beside the scale
_PALE = 0.27  # the alpha of full colour under a text
_TOLD = 60_000  # characters of texts and notes, beyond which only places and values are told


def missing(part: Heat) -> list[tuple[int, int]]:
    """The (row, column) of each cell without a value. It is crossed out: an empty one would look like 0."""
    return [(i, j) for i, row in enumerate(part.values) for j, value in enumerate(row) if not isfinite(value)]


def ends(part: Heat) -> tuple[float, float]:
    """The values at the ends of the colours: as far from 0 on both sides where `low` is negative."""
    end = max(-part.low, part.high)
    return (-end, end) if part.low < 0 else (part.low, part.high)


def scale(part: Heat) -> list[tuple[float, tuple[int, int, int], float]]:
    """The colours as (place from 0 to 1, hue, alpha). Where texts stand in cells they are pale, so that the ink is read on them."""
    full = _PALE if _texts(part) else 1.0
    if part.low < 0:
        return [(0.0, BLUE, full), (0.4999, BLUE, 0.0), (0.5001, ORANGE, 0.0), (1.0, ORANGE, full)]
    return [(0.0, ORANGE, 0.0), (1.0, ORANGE, full)]


def _texts(part: Heat) -> tuple[tuple[str, ...], ...]:
    """What stands in the cells, where there is room for it."""
    return part.texts if part.texts is not None and len(part.columns) <= _ROOM else ()


def height(part: Heat) -> int:
    """Of the drawing, in px."""
    return min(_MOST_PX, max(_LEAST_PX, 110 + _ROW_PX * len(part.rows)))


def draw(part: Heat, axes: Axes) -> None:
    """Draw it by matplotlib, row 0 on top. A cell without a value stays empty."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("mia", [(at, share(hue, alpha)) for at, hue, alpha in scale(part)])
    grid = [[v if isfinite(v) else nan for v in row] for row in part.values]
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=colours, vmin=ends(part)[0], vmax=ends(part)[1])
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.set_facecolor("none")
    bar.ax.tick_params(colors=share(INK), labelsize=9)
    bar.set_label(printable("\n".join(wrapped(part.unit, _UNIT))), color=share(INK))
    for i, j in missing(part):
        axes.text(j, i, "×", ha="center", va="center", color=share(INK), fontsize=9)
    down, across = thinned(len(part.rows)), thinned(len(part.columns))
    slanted = {"rotation": 45, "ha": "right"} if len(part.columns) > 6 else {}
    axes.set_yticks(list(down), [printable(_shown(part.rows[i])) for i in down])
    axes.set_xticks(list(across), [printable(_shown(part.columns[i])) for i in across], **slanted)
    axes.grid(False)
    for i, row in enumerate(_texts(part)):
        for j, text in enumerate(row):
            axes.text(j, i, printable(_cut(text)), ha="center", va="center", color=share(INK), fontsize=8)


def as_plot(part: Heat) -> Panel:
    """Draw it by plotly, row 0 on top. Values go as float32, of which a notebook keeps the bytes rather than a line each."""
    rows, columns = map(_unique, (part.rows, part.columns))
    z = np.array(part.values, dtype=np.float32).reshape(len(rows), len(columns))
    unit, (low, high) = "<br>".join(map(plain, wrapped(part.unit, _UNIT))), ends(part)
    trace = {"type": "heatmap", "z": np.where(np.isfinite(z), z, nan), "x": columns, "y": rows, "zmin": low, "zmax": high,
             "colorscale": [[at, css(hue, alpha)] for at, hue, alpha in scale(part)], "hoverongaps": False,
             "colorbar": {"title": {"text": unit, "side": "right"}, "outlinewidth": 0, "thickness": 12},
             "hovertemplate": "%{y}, %{x}: %{z:.4g}<extra></extra>"}
    told = _told(part)
    if told:
        trace |= {"customdata": told, "hovertemplate": "%{y}, %{x}: %{z:.4g}<br>%{customdata}<extra></extra>"}
    if _texts(part):
        trace |= {"text": [[plain(_cut(text)) for text in row] for row in _texts(part)], "texttemplate": "%{text}",
                  "textfont": {"color": css(INK), "size": 12}}
    gone = missing(part)
    crosses = {"type": "scatter", "mode": "markers", "x": [columns[j] for _, j in gone], "y": [rows[i] for i, _ in gone],
               "marker": {"symbol": "x-thin", "size": 7, "line": {"color": css(INK), "width": 1}}, "showlegend": False, "hoverinfo": "skip",
               "name": "no value"}
    x, y = _axis(part.axes[1], columns), _axis(part.axes[0], rows, autorange="reversed")
    return Panel((trace, crosses) if gone else (trace,), x, y, part.caption, height(part))


def _axis(title: str, names: list[str], **more: Any) -> dict[str, Any]:
    return axis(title, type="category", tickvals=[names[i] for i in thinned(len(names))], showgrid=False, **more)


def _unique(labels: Sequence[str]) -> list[str]:
    """Labels as plotly takes them: it would merge two columns of one name, so equal ones differ by what cannot be seen."""
    seen: dict[str, int] = {}
    found = []
    for label in map(plain, map(_shown, labels)):
        found.append(label + "\u200b" * seen.get(label, 0))
        seen[label] = seen.get(label, 0) + 1
    return found


def _shown(text: str) -> str:
    return marked(text) if text else ""


def _cut(text: str) -> str:
    shown = _shown(text)
    return shown if len(shown) <= _CUT else shown[: _CUT - 1] + "…"


def _told(part: Heat) -> list[list[str]]:
    """What is told of each cell beside its place and value: its text and note. Nothing where that is too much."""
    grids = [grid for grid in (part.texts, part.notes) if grid is not None]
    if not grids or sum(len(text) for grid in grids for row in grid for text in row) > _TOLD:
        return []
    return [["<br>".join(plain(line) for grid in grids for line in grid[i][j].split("\n") if line) for j in range(len(part.columns))]
            for i in range(len(part.rows))]
