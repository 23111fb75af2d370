"""AttentionView: what each head attends to, on one prompt."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..counted import counted
from ..directions import whole
from ..errors import MissingRowsError, PointError, PromptError
from ..points import Point
from ..running.reading import asked_points, positions_at
from ..shown import Shown

if TYPE_CHECKING:
    from ..session import Session
    from ..show.parts import Heads, Part

Tensor = torch.Tensor
_BRIEF = 12  # heads in the text
_MOST_TOKENS = 4096
_DRAWN = 2_000_000  # characters that the cells of a figure would take as a table: some 180 tokens a side


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttentionView(Shown):
    """The attention of `heads` at `layers`: `weights[layer head query key]` float32, whose rows sum to 1 over the keys, unless the
    model's attention has a sink of its own.

    positions: of the queries; tokens: the text of every key, from position 0 on. group: heads that share one key/value head, as head
    h does with all of h // group. windows: how many keys a layer's queries see, themselves included, None for all before them.
    bos: whether the first token is BOS, where heads rest that have nothing to attend to.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    weights: Tensor
    group: int
    windows: tuple[int | None, ...]
    bos: bool

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record for each layer, head, query and key up to it; `weights` holds the same in less room."""
        return [dict(layer=layer, head=head, query=query, key=key, query_token=self.tokens[query], key_token=self.tokens[key],
                     weight=weight)
                for layer, per_layer in zip(self.layers, self.weights) for head, per_head in zip(self.heads, per_layer)
                for query, row in zip(self.positions, per_head.tolist()) for key, weight in enumerate(row[: query + 1])]

    @property
    def names(self) -> tuple[str, ...]:
        """What each head is called, layer by layer: with the key/value head that it shares, and its layer's window."""
        shared = (lambda head: f", kv {head // self.group}") if self.group > 1 else lambda head: ""
        return tuple(f"layer {layer} head {head}{shared(head)}{'' if window is None else f', window {window}'}"
                     for layer, window in zip(self.layers, self.windows) for head in self.heads)

    def _parts(self) -> Iterator[Part]:
        yield self._drawn(len(self.names))

    def _brief(self) -> Iterator[Part]:
        from ..show.parts import Prose

        yield self._drawn(_BRIEF)
        if len(self.names) > _BRIEF:
            yield Prose(f"and {counted(len(self.names) - _BRIEF, 'head')} more, in .weights [layer head query key] and in the notebook's "
                        f"view")

    def _plots(self) -> Iterator[Part]:
        """The first head alone; ask for another one by layers= and heads=."""
        from ..show.heat import fitted
        from ..show.parts import Heat

        keys = self._labels()
        values = tuple(tuple(row) for row in self.weights[0, 0].tolist())
        yield fitted(Heat(tuple(keys[p] for p in self.positions), keys, values, f"Attention of {self.names[0]}", low=0.0,
                          axes=("token", "attends to"), unit="attention"), _DRAWN)

    def _labels(self) -> tuple[str, ...]:
        from ..show.marks import marked

        return tuple(f"{i} {marked(token)}" for i, token in enumerate(self.tokens))

    def _drawn(self, most: int) -> Heads:
        from ..show.parts import Heads

        keys = self._labels()
        rounded = (self.weights.flatten(0, 1)[:most] * 255).round().to(torch.uint8)
        rows = tuple(tuple(row.numpy().tobytes() for row in head) for head in rounded)
        return Heads(self.names[:most], rows, tuple(keys[p] for p in self.positions), keys, self._caption())

    def _caption(self) -> str:
        from ..show.marks import marked

        first = float(self.weights[..., 0].mean())
        sink = (f" On average {first:.0%} of it goes to {marked(self.tokens[0])}, the first token: heads rest there that find nothing."
                if self.bos else "")
        kv = f" kv: the key/value head, which {self.group} heads share." if self.group > 1 else ""
        local = " window: how many tokens a row sees, itself included." if any(self.windows) else ""
        return (f"Attention of {counted(len(self.names), 'head')} over {counted(len(self.tokens), 'token')}: each row is one token's, the "
                f"stronger the colour of a cell, the more of its attention goes to that column's token.{sink}{kv}{local}")


def attention(session: Session, prompt: Any, layers: int | Iterable[int] | None, heads: int | Iterable[int] | None, at: Any,
              edits: Any) -> AttentionView:
    """Return what `Session.attention` promises."""
    read = session._read(prompt)
    if len(read.ids) != 1:
        raise PromptError(f"attention is shown of one prompt, not of {len(read.ids)}")
    if len(read.ids[0]) > _MOST_TOKENS:
        raise PromptError(f"a view of attention holds {_MOST_TOKENS} tokens, the prompt has {len(read.ids[0])}; type "
                          f"s.capture(prompt, 'pattern', layers=..., at=...) for the weights alone")
    asked = asked_points(session, "pattern", None if layers is None else whole(layers))
    positions = positions_at(session, read, 0, at)
    shapes = session._engine.shapes
    found = session.capture(read.ids, "pattern", layers=[p.layer for p in asked], at=positions, edits=edits)[0]  # [layer query head key]
    n, kv = (shapes[Point(kind, asked[0].layer)][0] for kind in ("q", "k"))
    chosen = range(n) if heads is None else whole(heads, "head")
    if not all(0 <= head < n for head in chosen):
        raise PointError(f"heads {list(chosen)} were asked for; each layer here has heads 0 to {n - 1}")
    weights = found.transpose(1, 2)[:, list(chosen)].float()
    if not torch.isfinite(weights).all():
        raise MissingRowsError("some attention weights are not finite; nothing of this prompt is shown")
    windows = dict(map(tuple, session._engine.facts["windows"]))
    return AttentionView(tuple(p.layer for p in asked), tuple(chosen), tuple(positions),
                         tuple(session.tokenizer.decode([i]) for i in read.ids[0][: weights.shape[-1]]), weights, n // kv,
                         tuple(windows.get(p.layer) for p in asked), session._has_bos(read.ids[0]))
