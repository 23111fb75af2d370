"""The table that `Session.points()` returns."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lazy import human_bytes
from ..points import KINDS, Point, ranges
from ..shown import Shown

if TYPE_CHECKING:
    from ..show.parts import Table


@dataclass(frozen=True, slots=True, repr=False)
class PointTable(Shown):
    """Every kind of point: TransformerLens name, shape, where it is tapped, bytes a captured token costs."""

    data: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, n_layers: int, shapes: Mapping[Point, tuple[int, ...]], row_bytes: Callable[[Point], int], tapped: Iterable[Point],
           absent: Mapping[Point, str]) -> PointTable:
        """Build the table of one session."""
        rows = []
        for kind, meaning in KINDS.items():
            layers = [p.layer for p in tapped if p.kind == kind]
            here = [p for p in shapes if p.kind == kind]
            reasons: dict[str, list[int]] = {}
            for p, why in absent.items():
                if p.kind == kind:
                    reasons.setdefault(why, []).append(p.layer)
            where = f"layers {ranges(layers)}" if layers else "not tapped"
            if not here:
                where = f"absent: {'; '.join(reasons)}"
            elif reasons:
                where += "".join(f"; absent at {ranges(lacking)}: {why}" for why, lacking in reasons.items())
            name = Point(kind, 0).name.replace("blocks.0.", f"blocks.{{0..{n_layers - 1}}}.")
            rows.append({"point": kind, "name": name, "shape": f"[batch pos {' '.join(map(str, shapes[here[0]]))}]" if here else "",
                         "tapped": where, "bytes a token": human_bytes(row_bytes(here[0])) if here else "", "meaning": meaning})
        return cls(tuple(rows))

    def _parts(self) -> list[Table]:
        from ..show.parts import Table

        return [Table(tuple(self.data[0]), tuple(tuple(row.values()) for row in self.data),
                      'Points of this session; others are tapped by mia.Session(..., points=["attn_out", ("mlp_out", 3)])')]

