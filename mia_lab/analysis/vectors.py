"""Steering vectors: one direction a layer, in units of the model's mean centred residual norm."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..directions import Directions
from ..errors import EditError
from ..points import select
from ..prompts import resolve_at
from ..shown import Shown
from .fitting import METHODS
from .pairs import Pairs

if TYPE_CHECKING:
    from ..session import Session
    from ..show.parts import Part
    from .cosines import CosineMap


@dataclass(frozen=True, eq=False)
class Vector(Shown):
    """Directions for edits. Coefficient 1.0 adds, at each layer, one mean centred norm of the stream there.

    rows `[layer d_model]` float32, already scaled to that norm; raw_norms and unit `[layer]`: the norm before scaling
    and the norm that 1.0 stands for. What is computed from vectors (a sum, a projection) is not scaled again: its raw norm is
    the unit, and `normalised()` makes it one unit long.
    """

    kind: str
    layers: tuple[int, ...]
    rows: torch.Tensor
    raw_norms: torch.Tensor
    unit: torch.Tensor
    method: str = "mean_diff"

    def __getitem__(self, key: int | slice | Sequence[int]) -> Vector:
        """The vector at one layer, a slice of layer numbers, or a list of them."""
        if isinstance(key, slice):
            if key.step not in (None, 1) or min(key.start or 0, key.stop or 0) < 0:
                raise EditError(f"the vector has no {key}; a slice of layers has no step and counts from 0")
            wanted = [n for n in self.layers if (key.start or 0) <= n and (key.stop is None or n < key.stop)]
        else:
            wanted = list(key) if isinstance(key, Iterable) else [key]
        absent = [layer for layer in wanted if layer not in self.layers]
        if absent or not wanted:
            span = f"layers {key.start} to {key.stop}" if isinstance(key, slice) else f"layer {absent[0] if absent else key}"
            raise EditError(f"the vector has no {span}; it has layers {list(self.layers)}")
        index = [self.layers.index(layer) for layer in wanted]
        return replace(self, layers=tuple(wanted), rows=self.rows[index], raw_norms=self.raw_norms[index], unit=self.unit[index])

    def __mul__(self, factor: float) -> Vector:
        return replace(self, rows=self.rows * float(factor))

    __rmul__ = __mul__

    def __neg__(self) -> Vector:
        return self * -1.0

    def __add__(self, other: Vector) -> Vector:
        if not isinstance(other, Vector):
            return NotImplemented
        if (other.kind, other.layers) != (self.kind, self.layers):
            raise EditError(f"cannot add a vector at {other.kind} {list(other.layers)} to one at {self.kind} {list(self.layers)}")
        if self.rows.shape != other.rows.shape or not torch.allclose(self.unit, other.unit, rtol=0.05):
            raise EditError("cannot add vectors whose coefficient 1.0 stands for different norms; are they of one model?")
        return replace(self, rows=self.rows + other.rows, raw_norms=self.unit, method=f"{self.method}+{other.method}")

    def __sub__(self, other: Vector) -> Vector:
        return self + (-other)

    @property
    def natural(self) -> Vector:
        """The directions as long as they were when fitted or imported: there, coefficient 1.0 adds just that raw difference."""
        return replace(self, rows=self.rows * (self.raw_norms / self.unit)[:, None], raw_norms=self.unit)

    def normalised(self) -> Vector:
        """The same directions, each one unit long, so that coefficient 1.0 is one mean centred norm. EditError where one is zero."""
        norms = self.rows.norm(dim=-1)
        if not (norms > 0).all():
            raise EditError(f"the vector is zero at layer {self.layers[int((norms > 0).long().argmin())]}; there is no direction to scale")
        return replace(self, rows=self.rows * (self.unit / norms)[:, None], raw_norms=norms)

    def project_out(self, *others: Directions | torch.Tensor) -> Vector:
        """Return what is orthogonal, at each layer, to other vectors or tensors `[d]`, taken out together. It is not scaled again,
        so coefficient 1.0 adds less than before."""
        from .algebra import orthogonal

        return orthogonal(self, others)

    def projected_on(self, *others: Directions | torch.Tensor) -> Vector:
        """Return the part within the span of other vectors: what `project_out` takes away, and the two sum to this vector."""
        from .algebra import within

        return within(self, others)

    def cosine(self, other: Vector | None = None) -> CosineMap:
        """Return the cosines between the directions at any of its layers and any of another's, or its own."""
        from .cosines import CosineMap

        return CosineMap.between(self, self if other is None else other)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file with everything that `Vector.load` needs; returns its path."""
        from .formats.own import save

        return save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Vector:
        """Read what `save` wrote. Files of other tools: `mia.import_vector`."""
        from .formats.own import load

        return load(path)

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a layer: the norm that coefficient 1.0 adds, that of the raw difference, and the stream's mean centred norm."""
        norms = self.rows.norm(dim=-1)
        return [dict(layer=layer, norm=norm, raw_norm=raw, unit=unit, raw_share=raw / unit) for layer, norm, raw, unit in
                zip(self.layers, norms.tolist(), self.raw_norms.tolist(), self.unit.tolist())]

    def _parts(self) -> list[Part]:
        from ..show.parts import Prose, Table

        lines = [Prose(line.strip()) for line in repr(self).splitlines()]
        if len(self.layers) > 1:
            return [*lines, *self._plots()]
        record = self.data[0]
        return [*lines, Table(("coefficient 1.0 adds a norm of", "raw norm", "mean centred norm of the stream"),
                              (tuple(f"{record[name]:.4g}" for name in ("norm", "raw_norm", "unit")),))]

    def _plots(self) -> list[Part]:
        """Norms by layer. What coefficient 1.0 adds is drawn where it is not the stream's norm, as it is for a fitted vector."""
        from ..show.parts import Curve, Series

        at, told = tuple(map(float, self.layers)), self.data
        names = {"unit": "mean centred norm of the stream", "raw_norm": "raw difference"}
        if not torch.allclose(self.rows.norm(dim=-1), self.unit, rtol=1e-3):
            names["norm"] = "what coefficient 1.0 adds"
        series = tuple(Series(name, at, tuple(record[key] for record in told)) for key, name in names.items())
        return [Curve(series, "layer", "norm", f"{self.method} at {self.kind}: norms by layer")]

    def __repr__(self) -> str:
        span = f"layer {self.layers[0]}" if len(self.layers) == 1 else f"{len(self.layers)} layers ({self.layers[0]} to {self.layers[-1]})"
        share = (self.raw_norms / self.unit).tolist()
        length = (f"raw norm is {min(share):.2g} to {max(share):.2g} of the mean centred norm" if any(x != 1.0 for x in share) else
                  "coefficient 1.0 adds it as it stands")
        return f"Vector: {self.method} at {self.kind}, {span}, d_model {self.rows.shape[-1]}\n  {length}"


def fit(session: Session, pairs: Iterable, method: str, point: str, at: Any) -> Vector:
    """Return what `Session.vector` promises."""
    if method not in METHODS:
        raise EditError(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")
    read = Pairs.of(pairs)
    positive, negative = read.positive, read.negative
    chosen = select(point, session.tapped, session.n_layers)
    rows = session.capture([*positive, *negative], point, at=at).float()
    one = isinstance(at, int) and not isinstance(at, bool)
    rows = rows.flatten(2 if one else 3)  # heads side by side
    if not one:  # [prompt layer pos d]: one row a prompt, the mean over its positions
        lengths = [len(resolve_at(at, len(ids))) for ids in session._read([*positive, *negative]).ids]
        rows = torch.stack([row[:, :n].mean(1) for row, n in zip(rows, lengths)])
    raw = METHODS[method](rows[: len(positive)], rows[len(positive):])
    unit, norms = session.unit(point), raw.norm(dim=-1)
    if not (norms > 0).all():
        raise EditError("positive and negative prompts give equal means; there is no direction between them")
    return Vector(chosen[0].kind, tuple(p.layer for p in chosen), raw * (unit / norms)[:, None], norms, unit, method)


def centred_norm(rows: torch.Tensor) -> torch.Tensor:
    """Return E|h - mean h| per layer, `[layer]`, from rows `[row layer d_model]`."""
    rows = rows.double()
    return (rows - rows.mean(0)).norm(dim=-1).mean(0).float()
