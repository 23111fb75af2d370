"""Cosines between vectors across layers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EditError
from ..shown import Shown
from .vectors import Vector

if TYPE_CHECKING:
    from ..show.parts import Heat, Part

_LOUD = 0.5


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CosineMap(Shown):
    """The cosine of each row's direction to each column's, `values [row column]` float32.

    rows, columns: (name, layer). loud: the largest share of a direction's squared norm that one dimension holds; above one half,
    cosines say little more than that dimension's sign.
    """

    rows: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, int], ...]
    values: torch.Tensor
    loud: float

    @classmethod
    def of(cls, **vectors: Vector) -> CosineMap:
        """All directions of named vectors against each other: `mia.CosineMap.of(mood=v, style=w)`."""
        if not vectors:
            raise EditError("name one or more vectors: mia.CosineMap.of(mood=v, style=w)")
        labels = tuple((name, layer) for name, vector in vectors.items() for layer in vector.layers)
        unit, loud = _unit(list(vectors.values()))
        return cls(labels, labels, (unit @ unit.T).float(), loud)

    @classmethod
    def between(cls, one: Vector, other: Vector) -> CosineMap:
        """The layers of one vector against those of another."""
        (a, loud), (b, louder) = _unit([one]), _unit([other])
        if a.shape[1] != b.shape[1]:
            raise EditError(f"the vectors have widths {a.shape[1]} and {b.shape[1]}; they are of different models or points")
        rows, columns = (tuple((v.method, layer) for layer in v.layers) for v in (one, other))
        return cls(rows, columns, (a @ b.T).float(), max(loud, louder))

    @property
    def diagonal(self) -> torch.Tensor:
        """The cosine at each layer that rows and columns share, `[layer]`, in the rows' order."""
        places = {layer: i for i, (_, layer) in enumerate(self.columns)}
        if len(places) != len(self.columns) or len({layer for _, layer in self.rows}) != len(self.rows):
            raise EditError("a map of several vectors has no diagonal; use v.cosine(w)")
        shared = [(i, places[layer]) for i, (_, layer) in enumerate(self.rows) if layer in places]
        if not shared:
            raise EditError("the two vectors share no layer")
        return torch.stack([self.values[i, j] for i, j in shared])

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a cell, ready for pandas."""
        return [{"row": a, "row_layer": i, "column": b, "column_layer": j, "cosine": float(self.values[r, c])}
                for r, (a, i) in enumerate(self.rows) for c, (b, j) in enumerate(self.columns)]

    def _heat(self) -> Heat:
        from ..show.parts import Heat

        rows, columns = (tuple(f"{name} {layer}" for name, layer in labels) for labels in (self.rows, self.columns))
        return Heat(rows, columns, tuple(map(tuple, self.values.tolist())), "cosine of each row's direction to each column's",
                    axes=("direction", "direction"), unit="cosine")

    def _parts(self) -> list[Part]:
        return [self._heat(), *self._warning()]

    def _brief(self) -> list[Part]:
        from ..show.heat import BRIEF, fitted

        return [fitted(self._heat(), BRIEF), *self._warning()]

    def _warning(self) -> list[Part]:
        from ..show.parts import Prose

        said = f"One dimension holds {self.loud:.0%} of a direction's squared norm: cosines here say little else."
        return [Prose(said)] if self.loud > _LOUD else []


def _unit(vectors: list[Vector]) -> tuple[torch.Tensor, float]:
    """Unit directions `[direction d]` float64, and the largest share of a squared norm in one dimension."""
    if len({v.rows.shape[1] for v in vectors}) != 1:
        raise EditError(f"the vectors have widths {sorted({v.rows.shape[1] for v in vectors})}; they are of different models or points")
    rows = torch.cat([v.rows for v in vectors]).double()
    norms = rows.norm(dim=-1, keepdim=True)
    if not (norms > 0).all():
        raise EditError("a direction is zero, so it has no cosine")
    unit = rows / norms
    return unit, float(unit.square().max())
