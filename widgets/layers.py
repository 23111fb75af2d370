"""The layer explorer: a prompt's tokens at one layer, by the length of the value there and, of the stream, what it would say next."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ipywidgets as w
import torch

import mia_lab as mia
from mia_lab.errors import PointError
from mia_lab.show.marks import marked as visible
from mia_lab.show.parts import Part, Prose, Table, Tokens

from .naming import call, name_of
from .panel import STYLE, WIDE, Panel, marked

if TYPE_CHECKING:
    from mia_lab.analysis.lens.result import LogitLens
    from mia_lab.session import Session


@dataclass(frozen=True, slots=True)
class Reading:
    """One run: its tokens, the lengths of the values at every layer of a kind, `[layer pos]`, and the lens of the stream.

    bos: how many tokens at the start are BOS.
    """

    kind: str
    prompt: str
    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    norms: torch.Tensor
    bos: int
    lens: LogitLens | None


class LayerExplorer(Panel):
    """Controls over a kind of point, a layer and a prompt. All layers come from one run, so the layer moves without the engine."""

    title = "Layers"

    def __init__(self, session: Session, prompt: str, point: str) -> None:
        self._called = name_of(session, "s")
        self._layers = {}
        for p in session.tapped:
            if len(session._engine.shapes[p]) == 1:
                self._layers.setdefault(p.kind, []).append(p.layer)
        if point not in self._layers:
            raise PointError(f"{point!r} is not tapped as one row a token in this session; there are {', '.join(self._layers)}. "
                             f"Load with points=[{point!r}]")
        super().__init__(session, "layers", call(session.layer_explorer, prompt=prompt, point=point))
        self.reading: Reading | None = None
        there = self._layers[point]
        self.kind = marked(w.Dropdown(options=list(self._layers), value=point, description="point", style=STYLE), "mia-point")
        self.layer = w.SelectionSlider(options=there, value=there[len(there) // 2], description="layer", style=STYLE,
                                       layout=w.Layout(width="32em"))
        self.prompt = w.Textarea(prompt, rows=2, continuous_update=False, description="prompt", style=STYLE, layout=WIDE)
        self.run_button = marked(w.Button(description="Run", icon="play"), "mia-run")
        self.box.children = (w.HBox([self.kind, marked(self.layer, "mia-layer")]), marked(self.prompt, "mia-prompt"),
                             w.HBox([self.run_button, self.stop_button, self.status]))
        self.on_change(self.kind, do=self._other_kind)
        self.on_change(self.prompt, self.run_button, do=self.run)
        self.on_change(self.layer, do=self.draw)
        self.run()

    @property
    def code(self) -> str:
        """The lines that give the numbers shown."""
        lens = f"\n{self._called}.logit_lens({self.prompt.value!r}, layers={self.layer.value})" if self.kind.value == "resid_post" else ""
        return (f"{self._called}.capture({self.prompt.value!r}, {self.kind.value!r}, layers={self.layer.value}, at=None, "
                f"reduce=mia.Norm()){lens}")

    def run(self) -> None:
        """Run the prompt once, for all layers of the kind."""
        kind, prompt = self.kind.value, self.prompt.value
        self.submit(lambda: self._read(kind, prompt))

    def _read(self, kind: str, prompt: str) -> None:
        session = self._session
        norms = session.capture(prompt, kind, at=None, reduce=mia.Norm()).get().float()
        lens = session.logit_lens(prompt, top_k=5) if kind == "resid_post" else None
        tokens = tuple(session.to_str_tokens(prompt))
        bos = int(session._has_bos(session._read(prompt).ids[0]))
        self.reading = Reading(kind, prompt, tuple(self._layers[kind]), tokens, norms, bos, lens)
        self.draw()

    def draw(self) -> None:
        """Show the layer that the slider is at, of what was read."""
        if self.reading is not None and self.layer.value in self.reading.layers:
            self.twin.update(parts_of(self.reading, self.layer.value), self.code)

    def _other_kind(self) -> None:
        there, now = self._layers[self.kind.value], self.layer.value
        with self.quietly():
            self.layer.options = there
            self.layer.value = now if now in there else there[len(there) // 2]
        self.run()


def parts_of(reading: Reading, layer: int) -> list[Part]:
    """Tokens coloured by length at a layer, and the tokens that the lens finds likeliest after each."""
    norms = reading.norms[reading.layers.index(layer)]
    rest = norms[reading.bos:] if len(norms) > reading.bos else norms
    low, top = float(norms.min()), float(rest.max())  # lengths are alike: shades from 0 on would be one shade
    beyond = "; BOS, which is longer, is cut off" if reading.bos and float(norms[0]) > top else ""
    shown = Tokens(tuple(reading.tokens), tuple(norms.tolist()), f"Length of {reading.kind} at layer {layer}{beyond}", low, top, "length")
    if reading.lens is None:
        return [shown, Prose("A lens reads the stream; choose resid_post to see what it would say next.")]
    row = reading.lens.layers.index(layer)
    rows = []
    for j, token in enumerate(reading.lens.tokens[0]):
        likely = zip(reading.lens.top[0, row, j].tolist(), reading.lens.top_probabilities[0, row, j].tolist())
        rows.append((f"{j} {visible(reading.lens.texts[token])}", *(f"{visible(reading.lens.texts[t])} {p:.2f}" for t, p in likely),
                     f"{float(reading.lens.kl[0, row, j]):.2f}"))
    header = ("after", *(f"{i + 1}." for i in range(reading.lens.top.shape[-1])), "KL to the model's end")
    return [shown, Table(header, tuple(rows), f"What the stream after layer {layer} would say next, with its probability")]
