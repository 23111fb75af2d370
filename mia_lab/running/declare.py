"""From the points and kinds of edit that somebody names to what an engine is asked to tap."""
from __future__ import annotations

from typing import Any

from ..edits import Edit
from ..engine.wire import ATTENTION, Site
from ..gates import Gate
from ..points import DERIVED, KINDS, Point, every, select

EDIT_KINDS = ("add", "ablate", "clamp", "scale", "replace", "affine", "clampfeature", "attentionbias")
BIAS = "attentionbias"


def declare(points: Any, n_layers: int, biased: bool) -> tuple[tuple[Site, ...], frozenset[Site], frozenset[str]]:
    """Return the sites to tap, in the order of the forward pass, those of them that were named one by one, and the kinds
    that were named; without names, whatever the model has is tapped. biased: whether attention is to be biased.

    PointError for a point that no model of `n_layers` blocks has.
    """
    if isinstance(points, (str, Point)) or (isinstance(points, tuple) and len(points) == 2 and isinstance(points[1], int)):
        points = [points]
    known = [p for p in every(n_layers) if p.kind != ATTENTION]
    names = None if points is None or callable(points) else [
        item for p in points for item in (DERIVED[p] if isinstance(p, str) and p in DERIVED else [p])]
    chosen = set(select(points if names is None else names, known, n_layers)) | {Point("resid_post", n_layers - 1)}
    kinds = [item.removeprefix("hook_") for item in names or () if isinstance(item, str) and item.removeprefix("hook_") in KINDS]
    exact = [p for item in names or () if item not in kinds for p in select([item], known, n_layers)]
    chosen |= {Point(ATTENTION, layer) for layer in range(n_layers) if biased}
    return (tuple((p.kind, p.layer) for p in every(n_layers) if p in chosen), frozenset((p.kind, p.layer) for p in exact), frozenset(kinds))


def needed(edit: Edit) -> set[Point]:
    """The points that an edit acts on, and those that its gate reads."""
    return {*edit.steps, *(probe.at for probe in (edit.when.probes if isinstance(edit.when, Gate) else ()))}
