"""Edits: frozen descriptions of what is done to a value, each a few affine low-rank steps that one kernel runs.

Every edit takes `layers` and `point` (by default the vector's own, or `resid_post`), `where` (a Selector; by default
every position except BOS), `when` (a Gate) and `schedule` (a Decay). Edits at one point act in the order in which they
are stated.
"""
from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from .directions import Basis, Directions, basis_of, content, digest, number, rows_of, whole
from .engine.wire import MAX_NUMBER
from .errors import EditError
from .gates import After, Decay, Gate
from .points import Point, kind_of
from .selectors import CONTENT, Selector

__all__ = ["Ablate", "Add", "Affine", "AttentionBias", "Clamp", "ClampFeature", "Directions", "Edit", "Replace", "Scale", "Step", "digest"]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One term of an edit at one point: what `engine.wire.Term` says, with the vectors themselves.

    `heads` are the heads whose columns it touches, None for all; a vector as wide as a head is put there.
    """

    op: str
    coeff: float = 1.0
    read: torch.Tensor | None = None
    write: torch.Tensor | None = None  # [n width]; n > 1 only where aligned
    slope: float = 0.0
    offset: float = 0.0
    low: float = 0.0
    high: float = 0.0
    threshold: float = 0.0
    fresh: bool = True
    aligned: bool = False
    head: int | None = None
    keys: Selector | None = None  # of a bias: the span of keys
    heads: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    """What all edits share. Equal contents make equal edits; each subclass also has `layers`, `point` and `where`."""

    when: Gate | After | None = None
    schedule: Decay | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.where, Selector):
            raise EditError(f"where={self.where!r} is no selector; type for example where=mia.prompt()")
        if self.when is not None and not isinstance(self.when, (Gate, After)):
            raise EditError(f"when={self.when!r} is no gate; type for example when=mia.Gate(probe, above=0.5)")
        if self.schedule is not None and not isinstance(self.schedule, Decay):
            raise EditError(f"schedule={self.schedule!r} is no schedule; type for example schedule=mia.Decay(20)")
        object.__setattr__(self, "_steps", self._lower())
        object.__setattr__(self, "_key", None)
        object.__setattr__(self, "_addresses", {})  # of its steps' own tensors, by id

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_addresses": {}}  # the ids of tensors of this process

    @property
    def steps(self) -> dict[Point, tuple[Step, ...]]:
        """The steps at each point."""
        return dict(self._steps)

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """Where it acts, and the span that it names, where it does."""
        return tuple(one for one in (self.where, getattr(self, "span", None)) if one is not None)

    @property
    def first(self) -> int | None:
        """For aligned rows, the position of the first; else None."""
        return None

    @property
    def key(self) -> tuple:
        """Content identity: equal keys mean equal effect."""
        if self._key is None:
            steps = tuple((point, content(self._steps[point])) for point in sorted(self._steps))
            object.__setattr__(self, "_key", (type(self).__name__, steps, self.first, self.where, content(self.when), self.schedule))
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edit) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        places = ", ".join(str(p) for p in sorted(self._steps)[:3]) + (", ..." if len(self._steps) > 3 else "")
        rest = "".join(f", {name}={value}" for name, value in self._notes().items() if value is not None)
        return f"{type(self).__name__}({places}{rest})"

    def _notes(self) -> dict[str, Any]:
        return {"where": None if self.where == CONTENT else self.where, "when": self.when and type(self.when).__name__,
                "schedule": self.schedule}


def _points(edit: Any) -> list[Point]:
    if edit.layers is None:
        raise EditError(f"{type(edit).__name__} needs its layers, for example layers=[8]")
    return [Point(kind_of(edit.point or "resid_post"), layer) for layer in whole(edit.layers)]


@dataclass(frozen=True, eq=False, repr=False)
class Add(Edit):
    """Add `coeff` times a vector.

    vector: a fitted Vector (its own layers and point; unit: one mean centred residual norm), or a bare tensor `[d]` or
    `[layer d]` with `layers` (unit: raw). keep_norm scales the result back to the length it had (arXiv:2310.01405, its
    norm-preserving form). head: put a vector as wide as one head on that head of `z`, `q`-like points.
    """

    vector: Directions | torch.Tensor
    coeff: float = 1.0
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT
    keep_norm: bool = False
    head: int | None = None

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        object.__setattr__(self, "coeff", number(self.coeff, "the coefficient"))
        if isinstance(self.vector, torch.Tensor):  # the edit must not change with the caller's tensor
            object.__setattr__(self, "vector", self.vector.detach().clone())
        tail = (Step("renorm", fresh=False),) if self.keep_norm else ()
        rows = rows_of(self.vector, self.layers, self.point)
        object.__setattr__(self, "_rows", rows)
        return {point: (Step("add", self.coeff, write=row[None], head=self.head), *tail) for point, row in rows.items()}

    @property
    def rows(self) -> dict[Point, torch.Tensor]:
        """The vector per point, each `[d]` float32, before the coefficient."""
        return {point: row.clone() for point, row in self._rows.items()}

    def scaled(self, factor: float) -> Add:
        """The same edit with its coefficient times `factor`; it shares its vectors with this one."""
        other, coeff = copy(self), number(self.coeff * factor, "the coefficient")
        steps = {point: (replace(add, coeff=coeff), *tail) for point, (add, *tail) in self._steps.items()}
        for name, value in (("coeff", coeff), ("_steps", steps), ("_key", None), ("_addresses", self._addresses)):
            object.__setattr__(other, name, value)
        return other

    def _notes(self) -> dict[str, Any]:
        return {"coeff": f"{self.coeff:g}", **super()._notes()}


@dataclass(frozen=True, eq=False, repr=False)
class Ablate(Edit):
    """Take a direction, or the subspace of several, out of the value: h - strength * (projection of h).

    vectors: a Vector, a tensor `[d]` or `[layer d]`, or a list of these, removed together. The whole stream is
    projected, also where a block hands on two halves of it. Source: arXiv:2406.11717, which edits every layer.
    """

    vectors: Basis
    strength: float = 1.0
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        strength = number(self.strength, "the strength")
        found = {}
        for point, (unit, dual) in basis_of(self.vectors, self.layers, self.point).items():
            found[point] = tuple(Step("affine", strength, u, w[None], slope=-1.0, fresh=not i) for i, (u, w) in enumerate(zip(unit, dual)))
        return found


@dataclass(frozen=True, eq=False, repr=False)
class Clamp(Edit):
    """Set the projection on a unit direction to `value`, or keep it within `[low, high]`.

    vectors: as in Ablate; several are clamped together, so that each ends where it was told to although they are
    correlated. value, low, high: raw projections, a number or one for each vector. Source: arXiv:2410.12877.
    """

    vectors: Basis
    value: float | Sequence[float] | None = None
    low: float | Sequence[float] | None = None
    high: float | Sequence[float] | None = None
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        if (self.value is None) == (self.low is None and self.high is None):
            raise EditError("Clamp takes value=..., or low=... and/or high=...")
        found = {}
        for point, (unit, dual) in basis_of(self.vectors, self.layers, self.point).items():
            lows = self._levels(self.low if self.value is None else self.value, -MAX_NUMBER, len(unit))
            highs = self._levels(self.high if self.value is None else self.value, MAX_NUMBER, len(unit))
            if any(a > b for a, b in zip(lows, highs)):
                raise EditError(f"Clamp: low {lows} is above high {highs}")
            found[point] = tuple(Step("clip", 1.0, u, w[None], low=a, high=b, fresh=not i)
                                 for i, (u, w, a, b) in enumerate(zip(unit, dual, lows, highs)))
        return found

    @staticmethod
    def _levels(given: float | Sequence[float] | None, default: float, n: int) -> list[float]:
        values = [default] * n if given is None else list(given) if isinstance(given, Sequence) else [given] * n
        if len(values) != n:
            raise EditError(f"Clamp has {n} directions and {len(values)} values")
        return [number(v, "a projection") for v in values]


@dataclass(frozen=True, eq=False, repr=False)
class Scale(Edit):
    """Multiply the value by `factor`; with `heads`, only those heads' part of `z` (0 switches a head off)."""

    factor: float
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT
    heads: Sequence[int] | int | None = None

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        coeff = number(self.factor, "the factor") - 1.0
        heads = (None,) if self.heads is None else whole(self.heads, "head")
        steps = tuple(Step("scale", coeff, head=head, fresh=not i) for i, head in enumerate(heads))
        return dict.fromkeys(_points(self), steps)


@dataclass(frozen=True, eq=False, repr=False)
class Replace(Edit):
    """Put another value in the place of this one, or blend it in: (1 - blend) * h + blend * source.

    source: `[d]` for all selected positions, or `[layer d]`; with `start`, rows of another request by position, `[pos d]`
    or `[layer pos d]`, the first of which belongs at position `start`: only these positions are edited. A captured
    lazy tensor will do. head: replace one head's part only, with a source as wide as a head.
    """

    source: torch.Tensor
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT
    blend: float = 1.0
    start: int | None = None
    head: int | None = None

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        blend = number(self.blend, "blend")
        points = _points(self)
        rows = torch.as_tensor(self.source).detach().to("cpu", torch.float32)
        want = 1 if self.start is None else 2
        rows = rows.expand(len(points), *rows.shape) if rows.ndim == want else rows
        if rows.ndim != want + 1 or len(rows) != len(points) or not rows.numel():
            form = "[d]" if self.start is None else "[pos d]"
            raise EditError(f"the source has shape {list(torch.as_tensor(self.source).shape)}; {len(points)} layers need {form} "
                            f"or [{len(points)}, ...]")
        if not torch.isfinite(rows).all():
            raise EditError("the source holds NaN or infinite values")
        if self.start is not None and (isinstance(self.start, bool) or not isinstance(self.start, int) or self.start < 0):
            raise EditError(f"start={self.start!r} is no position")
        return {point: (Step("scale", -blend, head=self.head),
                        Step("add", blend, write=row.reshape(-1, row.shape[-1]).clone(), fresh=False, aligned=self.start is not None,
                             head=self.head)) for point, row in zip(points, rows)}

    @property
    def first(self) -> int | None:
        """The position of the first row, for rows by position."""
        return self.start


@dataclass(frozen=True, eq=False, repr=False)
class Affine(Edit):
    """Low-rank affine map: h + write^T (read h + bias), all directions reading the same h.

    read, write `[r d]`, bias `[r]` or None. DiReFT is this map; `Affine.loreft(R, W, b)` builds LoReFT,
    h + R^T (W h + b - R h), with orthonormal rows R. Source: arXiv:2404.03592.
    """

    read: torch.Tensor
    write: torch.Tensor
    bias: torch.Tensor | None = None
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT
    coeff: float = 1.0

    @classmethod
    def loreft(cls, rotation: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **rest: Any) -> Affine:
        """LoReFT from R `[r d]` (orthonormal rows, checked), W `[r d]`, b `[r]`."""
        r = rotation.detach().float()
        if r.ndim != 2 or not torch.allclose(r @ r.T, torch.eye(len(r)), atol=1e-3):
            raise EditError(f"R has shape {list(r.shape)}; LoReFT needs [r, d] with orthonormal rows (checkpoints store [d, r])")
        return cls(weight.detach().float() - r, r, bias, **rest)

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        coeff = number(self.coeff, "the coefficient")
        read, write = (t.detach().to("cpu", torch.float32).clone() for t in (self.read, self.write))
        bias = torch.zeros(len(read)) if self.bias is None else self.bias.detach().to("cpu", torch.float32)
        if read.ndim != 2 or read.shape != write.shape or bias.shape != (len(read),) or not len(read):
            raise EditError(f"Affine needs read and write [r, d] and bias [r]; got {list(read.shape)}, {list(write.shape)}, "
                            f"{list(bias.shape)}")
        if not all(torch.isfinite(t).all() for t in (read, write, bias)):
            raise EditError("the map holds NaN or infinite values")
        steps = tuple(Step("affine", coeff, u, w[None], slope=1.0, offset=float(b), fresh=not i)
                      for i, (u, w, b) in enumerate(zip(read, write, bias)))
        return dict.fromkeys(_points(self), steps)


@dataclass(frozen=True, eq=False, repr=False)
class ClampFeature(Edit):
    """Set one SAE feature to `value`, keeping everything the SAE does not explain: h + (value - f) * decoder.

    encoder, decoder `[d]`: the feature's column and row; bias: its encoder bias (with the SAE's input bias folded in,
    b_enc - b_dec . encoder, where it subtracts one); threshold: JumpReLU's, 0 for ReLU. Adding a feature is
    `Add(decoder, a, layers=...)`. Source: arXiv:2501.17148.
    """

    encoder: torch.Tensor
    decoder: torch.Tensor
    value: float
    bias: float = 0.0
    threshold: float = 0.0
    layers: Sequence[int] | int | None = None
    point: str | None = None
    where: Selector = CONTENT

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        encoder, decoder = (rows_of(t, [0], None)[Point("resid_post", 0)] for t in (self.encoder, self.decoder))
        value, bias, threshold = (number(x, "a feature's number") for x in (self.value, self.bias, self.threshold))
        step = Step("feature", 1.0, encoder, decoder[None], offset=bias, low=value, threshold=max(threshold, 0.0))
        return dict.fromkeys(_points(self), (step,))


@dataclass(frozen=True, eq=False, repr=False)
class AttentionBias(Edit):
    """Raise (or lower) the attention that rows pay to a span of the prompt, at all heads or some.

    span: a Selector of the keys, which must resolve to one run of positions. share: the share of attention that the span
    is to have in each row and head; a row that pays more, or sees nothing of it, stays as it is. bias: nats added to the
    span's scores instead. Source: Spotlight, arXiv:2505.12025, whose one bias a layer misses its target; here each row's
    own is exact. Needs Session(..., max_biased_tokens=...): the keys and values of such requests are kept beside the cache.
    """

    span: Selector
    share: float | None = None
    bias: float | None = None
    layers: Sequence[int] | int | None = None
    where: Selector = CONTENT
    heads: Sequence[int] | int | None = None
    point: str | None = None

    def _lower(self) -> dict[Point, tuple[Step, ...]]:
        if (self.share is None) == (self.bias is None) or not isinstance(self.span, Selector):
            raise EditError("AttentionBias takes a span (a Selector) and either share=... or bias=...")
        if self.point is not None or self.schedule is not None:
            raise EditError("AttentionBias acts on attention, without a schedule")
        heads = () if self.heads is None else whole(self.heads, "head")
        if any(not 0 <= head < 64 for head in heads):
            raise EditError(f"heads {list(heads)}: only heads 0 to 63 can be named")
        coeff = number(self.share if self.bias is None else self.bias, "share or bias")
        if self.bias is None and not 0 < coeff < 1:
            raise EditError(f"share={coeff} is no share of attention; it lies between 0 and 1")
        step = Step("bias", coeff, slope=float(self.bias is None), keys=self.span, heads=heads)
        return {Point("attention", layer): (step,) for layer in whole(self.layers)} if self.layers is not None else dict.fromkeys(
            _points(self), (step,))
