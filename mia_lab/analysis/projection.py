"""Pairs in the plane of their first two principal components, with the direction between the sides.

Source: Pearson, On lines and planes of closest fit to systems of points in space, 1901. The components are those of both sides
together about their common mean: what varies most, be it the label or not.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EditError
from ..points import DERIVED, kind_of
from ..running.reading import asked_points
from ..shown import Shown
from .fitting import mean_difference
from .pairs import Pairs
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session
    from ..show.parts import Part, Scatter

Tensor = torch.Tensor
_SHOWN = 3  # layers of one view
_NOTE = 80  # characters of a prompt


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Projection(Shown):
    """Rows of both sides of pairs along the first two principal components of each layer.

    positive, negative `[pair layer 2]`: coordinates about the common mean. explained `[layer 2]`: each component's share of the
    variance. components `[layer 2 d]`: unit rows, turned so that the positive side's mean is on the positive side.
    direction `[layer 2]`: where the vector points, one unit long before it was projected, and within `[layer]`: the share of its
    squared length in the plane; below one half, the plane shows little of it. vector: its name. prompts: (positive, negative) texts.
    """

    kind: str
    layers: tuple[int, ...]
    positive: Tensor
    negative: Tensor
    explained: Tensor
    components: Tensor
    direction: Tensor
    vector: str
    prompts: tuple[tuple[str, str], ...]

    @property
    def within(self) -> Tensor:
        """The share of the direction's squared length that lies in the plane, `[layer]`."""
        return self.direction.square().sum(-1)

    def __getitem__(self, layers: int | Sequence[int]) -> Projection:
        """The same at one layer, or some."""
        wanted = [layers] if isinstance(layers, int) else list(layers)
        absent = [layer for layer in wanted if layer not in self.layers]
        if absent or not wanted:
            raise EditError(f"the projection has no layer {absent[0] if absent else wanted}; it has layers {list(self.layers)}")
        at = [self.layers.index(layer) for layer in wanted]
        return replace(self, layers=tuple(wanted), positive=self.positive[:, at], negative=self.negative[:, at],
                       explained=self.explained[at], components=self.components[at], direction=self.direction[at])

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a prompt and layer."""
        sides = (("positive", self.positive.tolist()), ("negative", self.negative.tolist()))
        return [dict(layer=layer, pair=i, side=side, x=rows[i][at][0], y=rows[i][at][1], prompt=texts[n])
                for at, layer in enumerate(self.layers) for n, (side, rows) in enumerate(sides) for i, texts in enumerate(self.prompts)]

    def _parts(self) -> list[Part]:
        from ..show.parts import Prose

        shown = self._drawn()
        left = f" Drawn are layers {', '.join(map(str, shown))}; others: projection[layer]." if len(shown) < len(self.layers) else ""
        return [*self._brief(), *([Prose(left.strip())] if left else []), *self._plots()]

    def _brief(self) -> list[Part]:
        from ..show.parts import Prose, Table

        rows = tuple((str(layer), f"{a:.1%}", f"{b:.1%}", f"{share:.1%}") for layer, (a, b), share in
                     zip(self.layers, self.explained.tolist(), self.within.tolist()))
        return [Prose(f"Principal components of {len(self.prompts)} pairs at {self.kind}, both sides about their common mean"),
                Table(("layer", "component 1", "component 2", f"{self.vector} in their plane"), rows)]

    def _drawn(self) -> tuple[int, ...]:
        """The layers of the view: all, or the first, the middle one and the last."""
        n = len(self.layers)
        return self.layers if n <= _SHOWN else (self.layers[0], self.layers[n // 2], self.layers[-1])

    def _plots(self) -> list[Scatter]:
        return [self._scatter(self.layers.index(layer)) for layer in self._drawn()]

    def _scatter(self, at: int) -> Scatter:
        """One layer. A direction within the plane has an arrow as long as the farthest prompt; another one's is shorter."""
        from ..show.parts import Scatter

        sides = [rows[:, at].tolist() for rows in (self.positive, self.negative)]
        groups = tuple((name, tuple((x, y, texts[n][:_NOTE]) for (x, y), texts in zip(rows, self.prompts)))
                       for n, (name, rows) in enumerate(zip(("positive", "negative"), sides)))
        reach = max(float(self.positive[:, at].norm(dim=-1).max()), float(self.negative[:, at].norm(dim=-1).max()))
        x, y = (self.direction[at] * reach).tolist()
        titles = [f"component {i + 1} ({share:.0%} of the variance)" for i, share in enumerate(self.explained[at].tolist())]
        return Scatter(groups, *titles, f"{self.kind} {self.layers[at]}: pairs, and where {self.vector} points "
                                        f"({float(self.within[at]):.0%} of it is in this plane)", arrows=((x, y, self.vector),))


def components(rows: Tensor, n: int = 2) -> tuple[Tensor, Tensor]:
    """The first principal components `[layer n d]` of rows `[row layer d]` about their mean, and their shares of the variance `[layer n]`.

    Float64. EditError where rows do not differ, and so have none.
    """
    centred = (rows.double() - rows.double().mean(0)).transpose(0, 1)  # [layer row d]
    _, values, axes = torch.linalg.svd(centred, full_matrices=False)
    power = values.square()
    total = power.sum(-1, keepdim=True)
    if min(centred.shape[1:]) < n or not (total > 0).all():
        raise EditError(f"{centred.shape[1]} prompts that hardly differ have no {n} principal components")
    return axes[:, :n], power[:, :n] / total


def project(positive: Tensor, negative: Tensor, directions: Tensor, kind: str, layers: Sequence[int], vector: str,
            prompts: Sequence[tuple[str, str]]) -> Projection:
    """Project rows `[pair layer d]` of both sides, and directions `[layer d]`. EditError for rows that do not differ."""
    both = torch.cat([positive, negative]).double()
    if not both.isfinite().all():
        raise EditError("rows that were not computed have no principal components")
    axes, explained = components(both)
    middle = both.mean(0)
    sides = [torch.einsum("pld,lnd->pln", side.double() - middle, axes) for side in (positive, negative)]
    turn = torch.where(sides[0].mean(0) < 0, -1.0, 1.0).double()  # [layer n]
    unit = directions.double() / directions.double().norm(dim=-1, keepdim=True)
    along = torch.einsum("ld,lnd->ln", unit, axes) * turn
    return Projection(kind, tuple(layers), sides[0] * turn, sides[1] * turn, explained, axes * turn[..., None], along, vector,
                      tuple(prompts))


def pca(session: Session, pairs: Any, layers: int | Iterable[int] | None, point: str, at: Any, vector: Vector | None) -> Projection:
    """Return what `Session.pca` promises."""
    read = Pairs.of(pairs)
    if not isinstance(at, int) or isinstance(at, bool):
        raise EditError("principal components are of one position; give at an int")
    kind = kind_of(point)
    if kind in DERIVED:
        raise EditError(f"rows of {kind} are as long as their prompts, so they have no common components; give another point")
    chosen = [p.layer for p in asked_points(session, kind, layers)]
    rows = session.capture([*read.positive, *read.negative], kind, layers=chosen, at=at).float().flatten(2)
    positive, negative = rows[: len(read)], rows[len(read):]
    if vector is not None and vector.kind != kind:
        raise EditError(f"the vector is at {vector.kind}, the components are at {kind}; give point={vector.kind!r}")
    directions = mean_difference(positive, negative) if vector is None else vector[chosen].rows
    if directions.shape[-1] != rows.shape[-1] or not (directions.norm(dim=-1) > 0).all():
        raise EditError("there is no direction to draw: the sides have equal means, or the vector is zero or of another width")
    texts = [tuple(map(_text, pair)) for pair in zip(read.positive, read.negative)]
    return project(positive, negative, directions, kind, chosen, vector.method if vector else "mean difference", texts)


def _text(prompt: Any) -> str:
    """A prompt as a note tells it: of chat messages the last, of token ids the ids."""
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1]["content"]) if isinstance(prompt[0], dict) else " ".join(map(str, prompt))
