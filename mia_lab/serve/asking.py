"""What one request asks, held against the catalogue and the key."""
from __future__ import annotations

from dataclasses import dataclass

from ..edits import Edit
from ..errors import PointError
from ..points import DERIVED, Point, kind_of, ranges
from ..points import parse as parse_point
from .catalogue import Catalogue, Served
from .policy import Key
from .readings import Label, Plan, plan, takes
from .refusing import Refused, shown
from .request import Asked, At, Captured, parse

__all__ = ["Asked", "Captured", "Label", "Resolved", "Rows", "needs", "parse", "resolve", "takes"]

_PLANS = 32  # kept
_SLACK = 1e-6  # of a dose, since vectors are float32


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one point, and at which positions."""

    point: Point
    at: At
    before: bool


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """What acts and what is read, defaults first. acted: names and coefficients; doses: by point, in the vectors' own units, None where
    one is not known."""

    edits: tuple[Edit, ...]
    acted: tuple[tuple[str, float], ...]
    doses: dict[Point, float] | None
    captures: tuple[Rows, ...]
    monitors: Plan | None
    monitor_at: At

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what acts, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.acted))

    @property
    def dose(self) -> float | None:
        """The largest dose at one point; None where it is not known."""
        return None if self.doses is None else max(self.doses.values(), default=0.0)

    @property
    def idle(self) -> bool:
        """Whether it asks for nothing."""
        return not (self.edits or self.captures or self.monitors)

    @property
    def captures_anything(self) -> bool:
        """Whether rows come back."""
        return bool(self.captures or self.monitors)


def needs(asked: Asked | None, catalogue: Catalogue) -> bool:
    """Whether a request has to be resolved at all: it says something, or default edits act."""
    return asked is not None or bool(catalogue.policy.defaults)


def resolve(asked: Asked | None, catalogue: Catalogue, key: Key) -> Resolved:
    """Hold a request against what there is and what its key may do; Refused with 400, 403 or 404.

    The cap on a key's dose is held against everything that would act on its request, default edits too.
    """
    asked = asked or Asked()
    if asked.edits or not asked.defaults:
        key.must("steer")
    if asked.captures or asked.monitors:
        key.must("capture")
    named = [*(catalogue.policy.defaults if asked.defaults else ()), *asked.edits]
    mine = {one.name: _served(one.name, catalogue, key) for one in asked.edits}
    acting = [(mine.get(one.name) or catalogue.bundles[one.name], one.coeff) for one in named]
    edits = tuple(edit for served, coeff in acting for edit in served.edits(coeff))
    captures = _points(asked.captures, catalogue)
    monitors = _plan(asked.monitors, catalogue, key) if asked.monitors else None
    both = next((rows.point for rows in captures if monitors is not None and rows.point in monitors.points), None)
    if both is not None:
        raise Refused(400, f"{both} is captured already: the reading is a dot product; leave one of the two out")
    return Resolved(edits, tuple((one.name, one.coeff) for one in named), _doses(acting, key), captures, monitors, asked.monitor_at)


def _served(name: str, catalogue: Catalogue, key: Key) -> Served:
    if not key.allows(name):
        raise Refused(403, f"your key may not use {name!r}; it may use {', '.join(key.edits) or 'no edit'}")
    if name not in catalogue.bundles:
        there = [other for other in sorted(catalogue.bundles) if key.allows(other)]
        raise Refused(404, f"there is no edit {name!r} here; there are {', '.join(there) or 'none'}")
    return catalogue.bundles[name]


def _plan(names: tuple[str, ...], catalogue: Catalogue, key: Key) -> Plan:
    """How bundles are monitored together; what was asked before is kept, as it is megabytes for a large model."""
    monitors = [_served(name, catalogue, key) for name in names]
    found = catalogue.plans.get(names)
    if found is None:
        found = catalogue.plans[names] = plan(monitors, catalogue.model.check.shapes)
        if len(catalogue.plans) > _PLANS:
            catalogue.plans.popitem(last=False)
    return found


def _doses(acting: list[tuple[Served, float]], key: Key) -> dict[Point, float] | None:
    """What is added at each point, in the vectors' units, None where nobody knows; Refused (403) over the key's cap, or where it has one
    and nobody knows."""
    found: dict[Point, float] = {}
    for served, coeff in acting:
        if served.doses is None and key.max_dose is not None:
            raise Refused(403, f"your key may use doses up to {key.max_dose:g}; that of {served.name} is unknown: its vector has no unit")
        for point, dose in (served.doses or {}).items():
            found[point] = found.get(point, 0.0) + abs(coeff) * dose
    worst = max(found, key=found.__getitem__, default=None)
    if key.max_dose is not None and worst is not None and not found[worst] <= key.max_dose * (1 + _SLACK):
        raise Refused(403, f"this request adds a dose of {found[worst]:.4g} at {worst}, the server's default edits included; your key may "
                           f"use {key.max_dose:g}. Ask for smaller coefficients")
    return None if any(served.doses is None for served, _ in acting) else found


def _points(asked: tuple[Captured, ...], catalogue: Catalogue) -> tuple[Rows, ...]:
    """The points that captures name, each once."""
    found: dict[tuple[Point, bool], Rows] = {}
    for one in asked:
        try:
            points = _named_points(one, catalogue)
        except PointError as error:
            raise Refused(400, f"capture: {error}") from None
        for point in points:
            if (point, one.before) in found:
                raise Refused(400, f"capture names {point} twice; name it once, with all its positions in `at`")
            found[point, one.before] = Rows(point, one.at, one.before)
    return tuple(found.values())


def _kind(name: str) -> str | None:
    """The kind of point that a name stands for, None where it names more than a kind, or nothing."""
    try:
        return kind_of(name)
    except PointError:
        return None


def _named_points(one: Captured, catalogue: Catalogue) -> list[Point]:
    model, kind = catalogue.model, _kind(one.point)
    if kind in DERIVED:
        raise PointError(f"{kind} is computed from {' and '.join(DERIVED[kind])}, which can be captured; for logits ask for logprobs")
    if kind is None and one.layers is not None:
        raise PointError(f"{shown(one.point)} names a layer itself; leave layers out, or give a kind of point such as 'resid_post'")
    if kind is None:
        points = [parse_point(one.point, model.n_layers, **model.dialect)]
    elif one.layers is None:
        points = [point for point in model.points if point.kind == kind]
    else:
        points = [parse_point((kind, layer), model.n_layers) for layer in one.layers]
    absent = next((str(point) for point in points if point not in model.points), None if points else kind)
    if absent is not None:
        held = {point.kind: [p.layer for p in model.points if p.kind == point.kind] for point in model.points}
        there = "; ".join(f"{name} at layers {ranges(layers)}" for name, layers in held.items())
        raise PointError(f"{absent} is not tapped by this server. Tapped: {there}")
    return points
