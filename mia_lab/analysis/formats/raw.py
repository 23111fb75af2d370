"""What every file of vectors holds, before it has a session's unit."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...errors import EditError
from ...points import Point, undeclared
from ..vectors import Vector

if TYPE_CHECKING:
    from ...session import Session


@dataclass(frozen=True, slots=True, eq=False)
class Raw:
    """Directions `[d]` by 0-based block, as a file holds them. own: whether a module's own output is meant, before a norm that may
    follow it; method: what wrote the file."""

    kind: str
    rows: Mapping[int, torch.Tensor]
    method: str
    own: bool = False

    def vector(self, session: Session | None) -> Vector:
        """Return a Vector in a session's unit, or, without one, in the file's own, where coefficient 1.0 adds what the file holds.

        Layers whose row is zero are left out: adding them does nothing. EditError for values that are not finite, rows of another
        width than the model's, or nothing but zeros; PointError for a layer that the session does not tap.
        """
        found = {layer: torch.as_tensor(row).detach().float().flatten() for layer, row in sorted(self.rows.items())}
        if not all(torch.isfinite(row).all() for row in found.values()):
            raise EditError("the file holds NaN or infinite values")
        found = {layer: row for layer, row in found.items() if row.any()}
        if not found or len({len(row) for row in found.values()}) != 1:
            raise EditError("the file holds no direction" if not found else "the file's directions have different widths")
        layers, rows = tuple(found), torch.stack(list(found.values()))
        norms = rows.norm(dim=-1)
        if session is None and self.own:
            raise EditError(f"the file's vector is added to a module's own output, which is {self.kind} in some models and {self.kind}_raw "
                            f"in others; give the session")
        if session is None:
            return Vector(self.kind, layers, rows, norms, norms, self.method)
        kind = f"{self.kind}_raw" if self.own and session.sandwich else self.kind
        unit = _units(session, kind, layers, rows.shape[1])
        return Vector(kind, layers, rows * (unit / norms)[:, None], norms, unit, self.method)


def _units(session: Session, kind: str, layers: tuple[int, ...], width: int) -> torch.Tensor:
    """A session's unit at some layers of a kind, `[layer]`, once it is certain that rows of this width belong there."""
    tapped = [p.layer for p in session.tapped if p.kind == kind]
    absent = [layer for layer in layers if layer not in tapped]
    if absent:
        if absent[0] >= session.n_layers:
            raise EditError(f"the file has a direction for block {absent[0]}; the model has blocks 0 to {session.n_layers - 1}")
        raise undeclared(str(Point(kind, absent[0])), session.tapped)
    sizes = {session._engine.shapes[Point(kind, layer)] for layer in layers}
    if {int(torch.Size(size).numel()) for size in sizes} != {width}:
        raise EditError(f"the file's directions hold {width} values; {kind} of this model holds {sorted(sizes)}")
    return session.unit(kind)[[tapped.index(layer) for layer in layers]]
