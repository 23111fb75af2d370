"""Parts as a plotly figure that is blank nowhere: beside plotly's own form its output holds the HTML of the parts, pictures included.

Where plotly's renderer runs, the figure moves; where it does not, as in an offline HTML export, the HTML is shown. There is no
image/png beside them: JupyterLab's renderer (jupyterlab-plotly 7.1) would show that, without a word of what it is, until a mouse comes.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

try:
    from plotly.graph_objects import Figure as Graph
except ImportError:
    from ..errors import MiaError

    raise MiaError('a figure is drawn by plotly, which is not installed; type: pip install "mia_lab[lab]". '
                   "The result itself, and its .data, do without") from None

from ..errors import MiaError
from . import bars, curve, heat, heatmap, png, scatter
from .colours import INK, LINES, css
from .panel import Panel, plain, wrapped
from .parts import Bars, Curve, Heat, Part, Prose, Scatter

_AS_PLOT = {Curve: curve.as_plot, Scatter: scatter.as_plot, Bars: bars.as_plot, Heat: heatmap.as_plot}
_GAP, _LINE_PX = 70, 18  # px under a panel for its axis, and for each line of a caption
_GRID = 90_000  # characters of HTML of a grid that plotly draws whole beside it
_CHANGED = "The interactive figure was changed after it was drawn; this is how it was."


class Figure(Graph):
    """A plotly figure with the HTML of its parts. Change it as any other; once its traces differ, the HTML says that it is older."""

    # plotly's own would send plotly's form alone, whatever `display` was asked for, display_id included.
    _ipython_display_ = None

    def __init__(self, data: Any = None, layout: Any = None, frames: Any = None, skip_invalid: bool = False, *,
                 parts: Sequence[Part] = (), drawn: str | None = None, **kwargs: Any) -> None:
        super().__init__(data, layout, frames, skip_invalid, **kwargs)
        self._shown = tuple(parts)
        self._drawn = self._traces() if drawn is None else drawn

    def _traces(self) -> str:
        return json.dumps(json.loads(self.to_json())["data"], sort_keys=True)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **kwargs: Any) -> dict[str, Any]:
        from . import text

        changed = self._traces() != self._drawn
        return {"application/vnd.plotly.v1+json": json.loads(self.to_json()) | {"config": {"responsive": True}},
                "text/html": self._repr_html_(), "text/plain": text.render(*self._told(changed))}

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Show it in the notebook with its HTML; elsewhere, and with arguments, as plotly does."""
        from IPython import get_ipython
        from IPython.display import display

        if args or kwargs or get_ipython() is None:
            super().show(*args, **kwargs)
        else:
            display(self)

    def png(self) -> bytes:
        """Return the parts as a PNG drawn by matplotlib, for a file or a page that shows nothing else; no browser is needed.

        What was changed in the plotly figure is not in it. ImportError without matplotlib.
        """
        return png.png(*self._shown)

    def _repr_html_(self) -> str:
        from . import html

        return html.render(*self._told(self._traces() != self._drawn))

    def _told(self, changed: bool) -> tuple[Part, ...]:
        shown = tuple(heat.fitted(part, _GRID) if isinstance(part, Heat) else part for part in self._shown)
        return ((Prose(_CHANGED),) if changed else ()) + shown

    def __repr__(self) -> str:
        return f"Figure of {', '.join(type(part).__name__ for part in self._shown)}, {len(self.data)} traces"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.to_dict(), self._shown, self._drawn)


def _restored(props: dict[str, Any], parts: tuple[Part, ...], drawn: str) -> Figure:
    return Figure(props, parts=parts, drawn=drawn)


def figure(*parts: Part) -> Figure:
    """Return a plotly figure of parts, one panel under the other. MiaError where none of them can be drawn."""
    drawn = png.drawable(parts)
    if not drawn:
        raise MiaError("this has nothing to draw; its numbers are in .data")
    panels = [_AS_PLOT[type(part)](part) for part in drawn]
    titles = [wrapped(panel.caption, 100) for panel in panels]
    tall = [_LINE_PX * len(title) + 14 + panel.height + _GAP for title, panel in zip(titles, panels)]
    layout = _layout(sum(tall), several=len(panels) > 1)
    traces, top = [], float(sum(tall))
    for i, (panel, title) in enumerate(zip(panels, titles)):
        low = top - tall[i] + _GAP
        place = "" if i == 0 else str(i + 1)
        traces += [_placed(trace, place, low / sum(tall), panel.height / sum(tall), i) for trace in panel.traces]
        layout |= _axes(panel, place, low / sum(tall), (low + panel.height) / sum(tall))
        layout["annotations"].append(_title(title, (low + panel.height + 6) / sum(tall)))
        if len(panels) > 1:
            layout[f"legend{place}"] = {"x": 1.02, "xanchor": "left", "y": (low + panel.height) / sum(tall), "yanchor": "top"}
        top -= tall[i]
    return Figure(traces, layout, parts=drawn)


def _layout(height: int, several: bool) -> dict[str, Any]:
    return {"template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": {"color": css(INK), "size": 13},
            "colorway": [css(c) for c in LINES], "height": height, "margin": {"l": 70, "r": 20, "t": 8, "b": 8}, "annotations": [],
            "hoverlabel": {"namelength": -1}}


def _axes(panel: Panel, place: str, low: float, high: float) -> dict[str, Any]:
    y = panel.y | {"domain": [low, high], "anchor": f"x{place}", "automargin": True}
    if "scaleanchor" in y:
        y["scaleanchor"] = f"x{place}"
    return {f"xaxis{place}": panel.x | {"anchor": f"y{place}", "automargin": True}, f"yaxis{place}": y}


def _placed(trace: dict[str, Any], place: str, low: float, tall: float, i: int) -> dict[str, Any]:
    """A trace on the axes of its panel, with a legend, or a colour bar, of its own."""
    placed = trace | {"xaxis": f"x{place}", "yaxis": f"y{place}"}
    if "legendgroup" in trace:
        placed["legendgroup"] = f"{i} {trace['legendgroup']}"
    if "colorbar" in trace:
        placed["colorbar"] = trace["colorbar"] | {"y": low + tall / 2, "len": tall}
    elif trace["type"] == "scatter" and place:
        placed["legend"] = f"legend{place}"
    return placed


def _title(lines: Sequence[str], y: float) -> dict[str, Any]:
    return {"text": "<br>".join(map(plain, lines)), "x": 0, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left",
            "yanchor": "bottom", "showarrow": False, "align": "left"}
