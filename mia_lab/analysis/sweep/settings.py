"""Settings of a sweep: the edits of each, and the placebos that belong to it."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...edits import Add, Edit
from ...errors import EditError
from ...selectors import CONTENT, Selector
from ..controls import label_shuffled, matched_randoms
from ..vectors import Vector

if TYPE_CHECKING:
    from ...session import Session

BASE, STEERED, RANDOM, SHUFFLED = "base", "steered", "random", "shuffled"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a request of a sweep runs under. role: "base" (nothing), "steered", or a placebo of it, "random" or "shuffled".

    name: of the vector or recipe; layer and coeff are None for a recipe. of: what a placebo is a placebo of, and what it shares
    with the settings that it serves; draw: which placebo.
    """

    name: str
    role: str
    edits: tuple[Edit, ...] = ()
    layer: int | None = None
    coeff: float | None = None
    where: str = ""
    system: str | None = None
    asked: bool = True
    of: tuple = ()
    draw: int = 0

    @property
    def label(self) -> str:
        """A short text that tells it from the others."""
        place = "" if self.layer is None else f" layer {self.layer}, {self.coeff:+g}"
        return f"{self.name}{place}{self.where}"


@dataclass(frozen=True, slots=True)
class Placebos:
    """How many placebos a setting has, and on how many prompts each is tried; shuffled: vectors by the name of the real one."""

    random: tuple[Vector, ...]
    shuffled: Mapping[str, tuple[Vector, ...]]
    prompts: int

    def of(self, settings: Sequence[Setting]) -> list[Setting]:
        """The placebos of steered settings. Settings that differ in sign, or in a vector of the same length, share random ones."""
        found: dict[tuple, Setting] = {}
        for setting in settings:
            if setting.role != STEERED:
                continue
            for draw, vector in enumerate(self.random):
                edits = tuple(_in_place(edit, vector) for edit in setting.edits)
                if edits and all(edits):
                    placebo = replace(setting, name="random", role=RANDOM, edits=edits, coeff=_size(setting), of=setting.of[:1], draw=draw)
                    found.setdefault((RANDOM, setting.of[0], draw), placebo)
            for draw, vector in enumerate(self.shuffled.get(setting.name, ())):
                edits = (Add(vector[setting.layer], _size(setting), where=setting.edits[0].where),)
                placebo = replace(setting, name=f"{setting.name} shuffled", role=SHUFFLED, edits=edits, coeff=_size(setting),
                                  of=setting.of[1:], draw=draw)
                found.setdefault((SHUFFLED, setting.of[1], draw), placebo)
        return list(found.values())


def _size(setting: Setting) -> float | None:
    return None if setting.coeff is None else abs(setting.coeff)


def _in_place(edit: Edit, random: Vector) -> Add | None:
    """An Add with random directions as long as the edit's own; None for another kind of edit, or another kind of point."""
    if not isinstance(edit, Add) or edit.head is not None or any(p.kind != random.kind or p.layer not in random.layers for p in edit.rows):
        return None
    rows = torch.stack([_as_long(random[p.layer].rows[0], row) for p, row in edit.rows.items()])
    return Add(rows, abs(edit.coeff), [p.layer for p in edit.rows], random.kind, edit.where, edit.keep_norm, when=edit.when,
               schedule=edit.schedule)


def _as_long(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return row * (other.norm() / row.norm())


def grid(low: float, high: float, n: int) -> tuple[float, ...]:
    """`n` evenly spaced coefficients from `low` to `high`, both included; one that should be zero is."""
    if n < 1 or (n == 1 and low != high):
        raise EditError(f"grid({low}, {high}, {n}) has no {n} values from {low} to {high}")
    step = (high - low) / max(1, n - 1)
    return tuple(round(low + i * step, 12) + 0.0 for i in range(n))


def named(vectors: Any) -> dict[str, Vector]:
    """Vectors by name, from one or a mapping."""
    found = dict(vectors) if isinstance(vectors, Mapping) else {getattr(vectors, "method", "vector"): vectors}
    wrong = [name for name, vector in found.items() if not isinstance(vector, Vector)]
    if wrong or not found:
        raise EditError("a sweep takes a Vector, as s.vector(pairs) gives it, or a mapping of names to Vectors")
    return found


def of_vectors(vectors: Mapping[str, Vector], coeffs: Iterable[float], where: Any) -> list[Setting]:
    """One setting for each vector, layer, selector and coefficient, and for each coefficient its opposite; the base is first."""
    wheres = _wheres(where)
    asked = sorted({float(c) for c in coeffs} - {0.0})
    if not asked:
        raise EditError("a sweep needs coefficients other than 0, for example mia.grid(-0.4, 0.4, 9)")
    found = [Setting("unsteered", BASE)]
    for name, vector in vectors.items():
        for layer, row in zip(vector.layers, vector.rows):
            for shown, selector in wheres.items():
                for c in sorted({*asked, *(-c for c in asked)}):
                    size = (layer, vector.kind, shown, abs(c), round(float(row.norm()), 6))
                    found.append(Setting(name, STEERED, (Add(vector[layer], c, where=selector),), layer, c, shown, asked=c in asked,
                                         of=(size, (name, *size))))
    return found


def of_recipes(recipes: Mapping[str, Any]) -> list[Setting]:
    """One setting a recipe: a list of edits that act together, a system prompt, or (system prompt, edits); the base is first."""
    found = [Setting("unsteered", BASE)]
    for name, recipe in recipes.items():
        system, edits = recipe if isinstance(recipe, tuple) else (recipe, []) if isinstance(recipe, str) else (None, recipe)
        edits = (edits,) if isinstance(edits, Edit) else tuple(edits or ())
        if not (system is None or isinstance(system, str)) or not all(isinstance(edit, Edit) for edit in edits) or not (edits or system):
            raise EditError(f"the recipe {name!r} is a list of edits, a system prompt, or (system prompt, list of edits)")
        found.append(Setting(name, STEERED, edits, system=system, of=((name,), (name,))))
    return found


def placebos(session: Session, settings: Iterable[Setting], vectors: Mapping[str, Vector], n: int, prompts: int, pairs: Any, at: int,
             seed: int) -> Placebos:
    """Draw `n` placebos of each sort; label-shuffled ones where there are pairs for a vector."""
    kinds, seeds = {p.kind for s in settings for edit in s.edits if isinstance(edit, Add) for p in edit.steps}, range(seed, seed + n)
    if n and len(kinds) > 1:
        raise EditError(f"placebos are drawn at one kind of point, these edits act at {', '.join(sorted(kinds))}; sweep each kind "
                        f"apart, or without: placebos=0")
    random = matched_randoms(session, kinds.pop(), seeds) if n and kinds else []
    given = pairs if isinstance(pairs, Mapping) else dict.fromkeys(vectors, pairs)
    if set(given) - set(vectors):
        raise EditError(f"pairs names {sorted(set(given) - set(vectors))}; the vectors are {sorted(vectors)}")
    shuffled = {name: tuple(label_shuffled(session, vector, given[name], seeds, at)) for name, vector in vectors.items()
                if n and given.get(name) is not None}
    return Placebos(tuple(random), shuffled, prompts)


def _wheres(where: Any) -> dict[str, Selector]:
    """Selectors by how they are shown; the default one is not."""
    listed = [CONTENT] if where is None else [where] if isinstance(where, Selector) else list(where)
    if not listed or not all(isinstance(selector, Selector) for selector in listed):
        raise EditError("where is a selector, such as mia.generated(), or a list of them")
    shown = {"" if selector == CONTENT else f", {selector}": selector for selector in listed}
    if len(shown) < len(set(listed)):
        raise EditError(f"two of the selectors are shown alike, as {', '.join(map(str, listed))}; sweep them apart")
    return shown
