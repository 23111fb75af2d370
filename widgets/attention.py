"""The attention explorer: a layer and a head, and what each token of a prompt attends to there."""
from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as w

from mia_lab.errors import PointError

from .naming import call, name_of
from .panel import STYLE, WIDE, Panel, marked

if TYPE_CHECKING:
    from mia_lab.session import Session

_ALL = "all"


class AttentionExplorer(Panel):
    """Controls over a layer, a head and a prompt, above the view of `Session.attention`."""

    title = "Attention"

    def __init__(self, session: Session, prompt: str, layer: int) -> None:
        both = [{p.layer for p in session.tapped if p.kind == kind} for kind in ("q", "k")]
        there = sorted(both[0] & both[1])
        if layer not in there:
            raise PointError(f"attention is rebuilt from queries and keys, and layer {layer} has not both tapped here "
                             f"({', '.join(map(str, there)) or 'no layer has'}); load with points=[\"resid_post\", \"q\", \"k\"]")
        self._called = name_of(session, "s")
        super().__init__(session, "attention", call(session.attention_explorer, prompt=prompt, layer=layer))
        heads = next(shape[0] for p, shape in session._engine.shapes.items() if p.kind == "q")
        self.layer = w.SelectionSlider(options=there, value=layer, description="layer", continuous_update=False, style=STYLE,
                                       layout=w.Layout(width="32em"))
        self.head = w.Dropdown(options=[_ALL, *range(heads)], value=_ALL, description="head", style=STYLE)
        self.prompt = w.Textarea(prompt, rows=2, continuous_update=False, description="prompt", style=STYLE, layout=WIDE)
        self.run_button = marked(w.Button(description="Run", icon="play"), "mia-run")
        self.box.children = (w.HBox([marked(self.layer, "mia-layer"), marked(self.head, "mia-head")]), marked(self.prompt, "mia-prompt"),
                             w.HBox([self.run_button, self.stop_button, self.status]))
        self.on_change(self.layer, self.head, self.prompt, self.run_button, do=self.run)
        self.run()

    @property
    def code(self) -> str:
        """The line that gives the view."""
        heads = "" if self.head.value == _ALL else f", heads={self.head.value}"
        return f"{self._called}.attention({self.prompt.value!r}, layers={self.layer.value}{heads})"

    def run(self) -> None:
        """Run the prompt and show the layer and head that the controls are at."""
        prompt, layer, code = self.prompt.value, self.layer.value, self.code
        heads = None if self.head.value == _ALL else self.head.value
        self.submit(lambda: self.twin.update(list(self._session.attention(prompt, layers=layer, heads=heads)._parts()), code))
