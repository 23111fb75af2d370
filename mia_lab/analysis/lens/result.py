"""LogitLens: what each layer says next, as tensors, rows for a data frame, text, HTML or a figure."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...shown import Shown

if TYPE_CHECKING:
    from ...show.parts import Part

Tensor = torch.Tensor
EMBED = "embed"


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class LogitLens(Shown):
    """What the stream after each of `layers` ("embed": before the first block) says next, at `positions` of each prompt.

    top `[prompt layer pos k]`: the k likeliest tokens, with top_log_probabilities. entropy, and kl, KL(model || lens), in nats
    `[prompt layer pos]`. followed `[prompt pos m]`: tokens asked for, or else the model's own choice there, with their
    log_probabilities and ranks `[prompt layer pos m]`; rank 1 is the likeliest, and equals share one. Probabilities are over the
    whole vocabulary, after any soft cap. Padded with NaN, or -1. texts: the text of each token; tuned: the tuned lens's model.
    """

    layers: tuple[int | str, ...]
    positions: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    top: Tensor
    top_log_probabilities: Tensor
    entropy: Tensor
    kl: Tensor
    followed: Tensor
    log_probabilities: Tensor
    ranks: Tensor
    texts: Mapping[int, str]
    tuned: str = ""

    @property
    def top_probabilities(self) -> Tensor:
        """The probabilities of the likeliest tokens, `[prompt layer pos k]`."""
        return self.top_log_probabilities.exp()

    @property
    def probabilities(self) -> Tensor:
        """The probabilities of the followed tokens, `[prompt layer pos m]`."""
        return self.log_probabilities.exp()

    @property
    def data(self) -> list[dict[str, Any]]:
        """One row for each prompt, position and layer."""
        likely, chances = self.top_probabilities, self.probabilities
        return [dict(prompt=i, position=self.positions[i][j], token=self._text(self.tokens[i][j]), layer=layer,
                     top=[self._text(t) for t in self.top[i, row, j].tolist()], top_probabilities=likely[i, row, j].tolist(),
                     entropy=float(self.entropy[i, row, j]), kl=float(self.kl[i, row, j]),
                     followed=[self._text(t) for t in self.followed[i, j].tolist()],
                     probabilities=chances[i, row, j].tolist(), ranks=self.ranks[i, row, j].tolist())
                for i in range(len(self.tokens)) for j in range(len(self.tokens[i])) for row, layer in enumerate(self.layers)]

    @property
    def figure(self) -> Any:
        """A plotly heat map of prompt 0: the likeliest token of each layer at each position, coloured by its probability."""
        import plotly.graph_objects as go

        n = len(self.tokens[0])
        names = [[self._text(t) for t in row[:n, 0].tolist()] for row in self.top[0]]
        ticks = [f"{p} {self._text(t)!r}" for p, t in zip(self.positions[0], self.tokens[0])]
        shown = go.Heatmap(z=self.top_probabilities[0, :, :n, 0].tolist(), x=ticks, y=[str(layer) for layer in self.layers], text=names,
                           texttemplate="%{text}", zmin=0, zmax=1, colorscale="Blues", colorbar={"title": "probability"})
        return go.Figure(shown, layout={"xaxis": {"title": "after"}, "yaxis": {"title": "layer", "type": "category"}})

    def _parts(self) -> Iterator[Part]:
        return self._tables(most_layers=len(self.layers), most_positions=48, most_prompts=4)

    def _brief(self) -> Iterator[Part]:
        return self._tables(most_layers=8, most_positions=6, most_prompts=1)

    def _tables(self, most_layers: int, most_positions: int, most_prompts: int) -> Iterator[Part]:
        from ...show.parts import Prose, Table

        first, last, n = self.layers[0], self.layers[-1], len(self.tokens)
        yield Prose(f"{'Tuned' if self.tuned else 'Logit'} lens{f' of {self.tuned}' if self.tuned else ''} on {n} "
                    f"prompt{'s' * (n > 1)}, layers {first} to {last}: the likeliest next token and its probability")
        step = -(-len(self.layers) // most_layers)
        rows = list(range(len(self.layers)))[::-step]  # the last one first
        for i, tokens in enumerate(self.tokens[:most_prompts]):
            places = range(max(0, len(tokens) - most_positions), len(tokens))
            header = ("layer", *(f"{self.positions[i][j]} {self._text(tokens[j])!r}" for j in places), "KL at the last")
            body = [(str(self.layers[row]), *(self._cell(i, row, j) for j in places), f"{float(self.kl[i, row, len(tokens) - 1]):.3g}")
                    for row in rows]
            yield Table(header, tuple(body), f"prompt {i}, {len(tokens)} positions")

    def _cell(self, i: int, row: int, j: int) -> str:
        return f"{self._text(int(self.top[i, row, j, 0]))!r} {float(self.top_log_probabilities[i, row, j, 0].exp()):.2f}"

    def _text(self, token: int) -> str:
        return self.texts[token]
