"""LogitLens: what each layer says next, as tensors, rows for a data frame, text, HTML or a figure."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...counted import counted
from ...shown import Shown

if TYPE_CHECKING:
    from ...show.parts import Heat, Part

Tensor = torch.Tensor
EMBED = "embed"
_PROMPTS = 4  # in one view
_CELLS = 1500  # up to which a note tells five tokens, and beyond which three


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

    def _plots(self) -> tuple[Heat, ...]:
        """Prompt 0."""
        return (self._heat(),)

    def _heat(self, i: int = 0, rows: Sequence[int] | None = None, places: Sequence[int] | None = None) -> Heat:
        """The likeliest token of prompt i at some of its layers and positions, by default all, the last layer on top."""
        from ...show.marks import marked
        from ...show.parts import Heat

        rows = range(len(self.layers))[::-1] if rows is None else rows
        places = range(len(self.tokens[i])) if places is None else places
        told = 5 if len(rows) * len(places) <= _CELLS else 3
        top, likely = self.top[i].tolist(), self.top_probabilities[i].tolist()  # [layer pos k]
        kl, entropy = self.kl[i].tolist(), self.entropy[i].tolist()  # [layer pos]

        def note(row: int, j: int) -> str:
            names = (f"{marked(self._text(token))} {p:.2f}" for token, p in zip(top[row][j][:told], likely[row][j]))
            return "\n".join([*names, f"KL {kl[row][j]:.2f}, entropy {entropy[row][j]:.2f}"])

        return Heat(tuple(str(self.layers[row]) for row in rows),
                    tuple(f"{self.positions[i][j]} {marked(self._text(self.tokens[i][j]))}" for j in places),
                    tuple(tuple(likely[row][j][0] for j in places) for row in rows), f"prompt {i}, {len(self.tokens[i])} positions",
                    tuple(tuple(self._text(top[row][j][0]) for j in places) for row in rows),
                    tuple(tuple(note(row, j) for j in places) for row in rows),
                    low=0.0, high=1.0, axes=("layer", "after"), unit="probability of the likeliest next token")

    def _parts(self) -> Iterator[Part]:
        from ...show.heat import BUDGET, fitted
        from ...show.parts import Prose, Slides

        n = min(len(self.tokens), _PROMPTS)
        yield Prose(self._title())
        pages = tuple((fitted(self._heat(i), BUDGET // n), self._last(i, range(len(self.layers))[::-1])) for i in range(n))
        if n > 1:
            yield Slides("prompt", tuple(map(str, range(n))), pages)
        else:
            yield from pages[0]
        if n < len(self.tokens):
            yield Prose(f"Prompts {n} to {len(self.tokens) - 1} are left out of this view, not of .data")

    def _brief(self) -> Iterator[Part]:
        from ...show.parts import Prose

        n, step = len(self.tokens[0]), -(-len(self.layers) // 8)
        rows = range(len(self.layers))[::-step]  # the last one first
        yield Prose(self._title())
        yield self._heat(0, rows, range(max(0, n - 6), n))
        yield self._last(0, rows)

    def _title(self) -> str:
        return (f"{'Tuned' if self.tuned else 'Logit'} lens{f' of {self.tuned}' if self.tuned else ''} on "
                f"{counted(len(self.tokens), 'prompt')}, layers {self.layers[0]} to {self.layers[-1]}: the likeliest next token and its "
                f"probability")

    def _last(self, i: int, rows: Sequence[int]) -> Part:
        """How far each layer is from the model's own choice at the last position."""
        from ...show.parts import Prose

        found = (f"{float(self.kl[i, row, len(self.tokens[i]) - 1]):.3g} at {self.layers[row]}" for row in rows)
        return Prose(f"KL at the last position, by layer, in nats: {', '.join(found)}")

    def _text(self, token: int) -> str:
        return self.texts[token]
