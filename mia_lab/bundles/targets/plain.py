"""Edits as most tools know them: directions by layer, a factor and a scope; and a reason for what a format cannot say."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...analysis.vectors import Vector
from ...directions import rows_of
from ...edits import Ablate, Add, Affine, Clamp, Edit, Replace
from ...errors import BundleError
from .scopes import WORDS, Scope, scope_of

Tensor = torch.Tensor
_FACTOR = {"Add": "coeff", "Ablate": "strength", "Replace": "blend", "Affine": "coeff"}


@dataclass(frozen=True, slots=True)
class Says:
    """What a format has words for: kinds of edit and of point, scopes, several edits, and scaling back to the norm before."""

    edits: tuple[str, ...] = ("Add",)
    kinds: tuple[str, ...] = ("resid_post",)
    scopes: tuple[str, ...] = ("all",)
    several: bool = True
    keep_norm: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """One edit. rows: its direction `[d]` by layer, float32, without `factor`; low and high bound a Clamp; read and bias
    are the other parts of an Affine, whose `rows` are then `[r d]`."""

    word: str
    kind: str
    rows: dict[int, Tensor]
    factor: float
    scope: Scope
    keep_norm: bool = False
    low: float | None = None
    high: float | None = None
    read: Tensor | None = None
    bias: Tensor | None = None

    @property
    def scaled(self) -> dict[int, Tensor]:
        """The directions times the factor, for formats that have no place for one."""
        return {at: row * self.factor for at, row in self.rows.items()}


def plain(edits: Sequence[Edit], format: str, says: Says, bos: str | None) -> list[Plain]:
    """Each edit in plain form; BundleError with the reason for the first that the format cannot say."""
    if not edits or (len(edits) > 1 and not says.several):
        raise BundleError(f"{format} holds one edit; these are {len(edits)}" if edits else "there is no edit to write")
    return [_plain(edit, format, says, bos) for edit in edits]


def summed(edits: Sequence[Plain]) -> dict[int, Tensor]:
    """Additions as one direction a layer, for formats that hold one and have no place for a factor."""
    found: dict[int, Tensor] = {}
    for edit in edits:
        for at, row in edit.scaled.items():
            if at in found and found[at].shape != row.shape:
                raise BundleError(f"the additions at layer {at} have different widths")
            found[at] = found[at] + row if at in found else row
    return dict(sorted(found.items()))


def as_vector(rows: dict[int, Tensor], kind: str = "resid_post") -> Vector:
    """Directions as a Vector whose coefficient 1.0 adds them as they stand."""
    stacked = torch.stack(list(rows.values()))
    norms = stacked.norm(dim=-1)
    return Vector(kind, tuple(rows), stacked, norms, norms)


def addition(rows: dict[int, Tensor], coeff: float = 1.0, **rest: object) -> Add:
    """An Add of bare directions, in the raw unit of the file that they come from; a single one is kept as `[d]`."""
    first, *others = rows.values()
    alike = all(torch.equal(first, row) for row in others)
    return Add(first if alike else torch.stack([first, *others]), coeff, list(rows), **rest)


def _plain(edit: Edit, format: str, says: Says, bos: str | None) -> Plain:
    word = type(edit).__name__
    for wrong, what in ((word not in says.edits, f"{word}; it has a word for {', '.join(says.edits)}"),
                        (edit.when is not None, "a gate (when=)"), (edit.schedule is not None, "a schedule (schedule=)"),
                        (getattr(edit, "head", None) is not None, "an edit of one head (head=)"),
                        (getattr(edit, "keep_norm", False) and not says.keep_norm, "keep_norm"),
                        (getattr(edit, "start", None) is not None, "rows of another request by position (start=)")):
        if wrong:
            raise BundleError(f"{format} cannot say {what}")
    rows = _rows(edit, format)
    kinds = {point.kind for point in edit.steps}
    if not kinds <= set(says.kinds):
        raise BundleError(f"{format} acts at {', '.join(says.kinds)}; this edit is at {', '.join(sorted(kinds))}")
    scope = scope_of(edit.where, bos, format)
    if scope.word not in says.scopes:
        can = "; ".join(WORDS[one] for one in says.scopes)
        hint = ". Say bos='edit' to let BOS be edited with the rest" if bos == "skip" and scope.word in ("from", "prompt_from") else ""
        raise BundleError(f"{format} cannot act at {WORDS[scope.word]} ({edit.where}); it can at: {can}{hint}")
    low, high = (edit.value,) * 2 if isinstance(edit, Clamp) and edit.value is not None else (getattr(edit, "low", None),
                                                                                              getattr(edit, "high", None))
    read = edit.read.detach().cpu().float() if isinstance(edit, Affine) else None
    return Plain(word, kinds.pop(), rows, float(getattr(edit, _FACTOR.get(word, ""), 1.0)), scope, getattr(edit, "keep_norm", False),
                 _one(low, format), _one(high, format), read, getattr(edit, "bias", None))


def _rows(edit: Edit, format: str) -> dict[int, Tensor]:
    match edit:
        case Add():
            return {point.layer: row for point, row in edit.rows.items()}
        case Ablate() | Clamp():
            listed = list(edit.vectors) if isinstance(edit.vectors, (list, tuple)) else [edit.vectors]
            if len(listed) != 1:
                raise BundleError(f"{format} cannot say {type(edit).__name__} of {len(listed)} directions together")
            return {point.layer: row for point, row in rows_of(listed[0], edit.layers, edit.point).items()}
        case Replace():
            return {point.layer: steps[1].write[0] for point, steps in edit.steps.items()}
        case Affine():
            return {point.layer: torch.stack([step.write[0] for step in steps]) for point, steps in edit.steps.items()}
    return {}


def _one(level: float | Sequence[float] | None, format: str) -> float | None:
    """A bound of one direction, which may be given as a list of one."""
    return float(level[0]) if isinstance(level, Sequence) else None if level is None else float(level)
