"""What is read of a request: rows as they are, and, for monitors, the few numbers that they become on the device."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from ..directions import content, digest
from ..edits import Add
from ..engine.wire import Reduce, Span, Take
from ..gates import Gate
from ..points import Point
from ..selectors import Context, merge
from .refusing import Refused

if TYPE_CHECKING:
    from .asking import At, Resolved
    from .catalogue import Served

PROBE, PROJECTION = "probe", "projection"


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One number a position: the value at a point, before its edits or after them, times a direction `[width]`, plus a bias."""

    point: Point
    before: bool
    direction: torch.Tensor
    bias: float
    what: str


@dataclass(frozen=True, slots=True)
class Label:
    """One monitored number a position: "monitor.NAME.INDEX" is column `column` of the rows at (kind, layer, before).

    what: "probe", value . direction + bias as a gate reads it, before the edits at its point; or "projection", onto the unit
    vector of an Add, after them. Rows without a label are captured ones: float32 where there are labels beside them.
    """

    name: str
    index: int
    kind: str
    layer: int
    before: bool
    column: int
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What monitors read: their points, how rows are reduced, the matrices for it by address, and what their columns are."""

    points: frozenset[Point]
    reduce: Reduce
    matrices: Mapping[str, torch.Tensor]
    labels: tuple[Label, ...]


def readings(served: Served, shapes: Mapping[Point, tuple[int, ...]]) -> list[Reading]:
    """What monitoring a bundle reads: its gates' probes, or the projections onto its additions; Refused (400) where it has neither."""
    probes = {content(probe): probe for edit in served.bundle if isinstance(edit.when, Gate) for probe in edit.when.probes}
    if any(probe.cosine for probe in probes.values()):
        raise Refused(400, f"{served.name} is gated by a cosine, which is no dot product; capture its point instead of monitoring it")
    if probes:
        return [Reading(probe.at, True, probe.direction, probe.offset, PROBE) for probe in probes.values()]
    found = [Reading(point, False, _unit(row, edit.head, shapes[point], served.name), 0.0, PROJECTION)
             for edit in served.bundle if isinstance(edit, Add) for point, row in edit.rows.items()]
    if not found:
        raise Refused(400, f"{served.name} has neither an Add nor a gate with probes, so there is no direction to read")
    return found


def plan(monitors: Sequence[Served], shapes: Mapping[Point, tuple[int, ...]]) -> Plan:
    """How bundles are monitored together, whatever the prompt: a matrix `[k width + 1]` a point, the last column being biases."""
    columns: dict[Point, list[torch.Tensor]] = {}
    labels: list[Label] = []
    for served in monitors:
        for index, one in enumerate(readings(served, shapes)):
            held = columns.setdefault(one.point, [])
            labels.append(Label(served.name, index, one.point.kind, one.point.layer, one.before, len(held), one.what))
            held.append(torch.cat([one.direction, torch.tensor([one.bias])]))
    matrices = {point: torch.stack(rows).contiguous() for point, rows in columns.items()}
    shas = {point: digest(matrix) for point, matrix in matrices.items()}
    reduce = Reduce(tuple((point.kind, point.layer, sha) for point, sha in shas.items()))
    return Plan(frozenset(columns), reduce, {shas[point]: matrix for point, matrix in matrices.items()}, tuple(labels))


def takes(resolved: Resolved, prompt: Context) -> tuple[list[Take], Reduce | None, dict[str, torch.Tensor], tuple[Label, ...]]:
    """What is read in a request with this prompt: its takes, how rows are reduced, the matrices for it, and what their columns are.

    Refused (400) for a position that the prompt lacks.
    """
    found = [Take(rows.point.kind, rows.point.layer, _spans(rows.at, prompt.n), rows.before) for rows in resolved.captures]
    monitors = resolved.monitors
    if monitors is None:
        return found, None, {}, ()
    spans = _spans(resolved.monitor_at, prompt.n)
    found += [Take(*site[:2], spans, site[2]) for site in dict.fromkeys((one.kind, one.layer, one.before) for one in monitors.labels)]
    return found, monitors.reduce, dict(monitors.matrices), monitors.labels


def _unit(row: torch.Tensor, head: int | None, shape: Sequence[int], name: str) -> torch.Tensor:
    """A row's direction, `[width]`, at its head's place where it has one."""
    norm = row.double().norm()
    if not norm > 0:
        raise Refused(400, f"a vector of {name} is zero, so there is no direction to read")
    out = torch.zeros(prod(shape))
    start = 0 if head is None or len(row) == len(out) else head * shape[1]
    out[start : start + len(row)] = (row.double() / norm).float()
    return out


def _spans(at: At, n: int) -> tuple[Span, ...]:
    """The positions that `at` names in a prompt of n tokens."""
    words = {"last": (n - 1, n), "prompt": (0, n), "generated": (n, None), "all": (0, None)}
    if isinstance(at, str):
        return (words[at],)
    places = [at] if isinstance(at, int) else at
    wrong = next((place for place in places if not -n <= place < n), None)
    if wrong is not None:
        raise Refused(400, f"position {wrong} was asked for; the prompt has {n} tokens, 0 to {n - 1} (or -1 for the last)")
    return tuple(merge([(place, place + 1) for place in sorted({place % n for place in places})]))
