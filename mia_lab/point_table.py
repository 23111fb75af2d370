"""The table that `Session.points()` returns."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .lazy import human_bytes
from .points import KINDS, Point, ranges

if TYPE_CHECKING:
    from .show.parts import Table


@dataclass(frozen=True, slots=True)
class PointTable:
    """Every kind of point: TransformerLens name, shape, where it is tapped, bytes a captured token costs."""

    data: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, n_layers: int, d_model: int, dtype: torch.dtype, tapped: Iterable[Point],
           absent: Sequence[tuple[str, int, str]]) -> PointTable:
        """Build the table of one session."""
        rows = []
        for kind, meaning in KINDS.items():
            layers = [p.layer for p in tapped if p.kind == kind]
            where = f"layers {ranges(layers)}" if layers else "not tapped"
            reasons: dict[str, list[int]] = {}
            for other, layer, why in absent:
                if other == kind:
                    reasons.setdefault(why, []).append(layer)
            for why, lacking in reasons.items():
                where = f"absent: {why}" if len(lacking) == n_layers else f"{where}; absent at {ranges(lacking)}: {why}"
            rows.append({"point": kind, "name": f"blocks.{{0..{n_layers - 1}}}.hook_{kind}", "shape": f"[batch pos {d_model}]",
                         "tapped": where, "bytes a token": human_bytes(d_model * dtype.itemsize), "meaning": meaning})
        return cls(tuple(rows))

    def _part(self) -> Table:
        from .show.parts import Table

        return Table(tuple(self.data[0]), tuple(tuple(row.values()) for row in self.data))

    def __repr__(self) -> str:
        from .show.text import render

        return render(self._part())

    def _repr_html_(self) -> str:
        from .show.html import render

        return render(self._part())
