"""Path patching: what one part of the model does through its direct path to another, everything between them held still.

Sources: arXiv:2304.05969, arXiv:2211.00593. The sender takes its value from the other run; every attention and MLP output after it
is held at the base run's value, so that only the residual stream carries the change; what the receiver makes of that is recorded,
and then put into an otherwise untouched base run.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...edits import Edit, Replace
from ...engine.wire import Take
from ...errors import EditError, MissingRowsError, PointError
from ...points import Point, parse, select
from ...running.launch import EngineRows
from ...selectors import everywhere
from ...shown import progress_bar
from .activation import Group, Sources, asked_points, groups_of, heads_of, read_pairs, replaced, sources
from .cells import Job, measure, run, top_point
from .grids import PatchGrid
from .metrics import Judge, Metric

if TYPE_CHECKING:
    from ...session import Session
    from ...show.progress import Bar

Tensor = torch.Tensor
BRANCHES = ("z", "attn_out", "mlp_out")


@dataclass(frozen=True, slots=True)
class Receiver:
    """A branch's output, or one head of `z`."""

    point: Point
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.point}" if self.head is None else f"{self.point} head {self.head}"


@dataclass(frozen=True, slots=True)
class _Sender:
    """One cell: the pair, where it stands in the grid, and what is sent from where."""

    pair: int
    place: tuple[int, int, int, int]
    point: Point
    head: int | None
    group: Group


def path_patch(session: Session, clean: Any, corrupt: Any, receivers: Any, sender: str, metric: Metric,
               layers: int | Iterable[int] | None, positions: Any, heads: Any, through_mlps: bool, direction: str, batch: int | None,
               progress: bool) -> PatchGrid:
    """Return what `Session.path_patch` promises."""
    pairs = read_pairs(session, clean, corrupt)
    base = pairs.ends(direction)[0]
    ends = _receivers(session, receivers)
    points = asked_points(session, sender, layers, BRANCHES)
    chosen = heads_of(session, points, heads)
    groups, names = groups_of(session, pairs, "all" if positions is None else positions, heads)
    judge = Judge(session, metric, len(base), top_point(session)[1])
    still = _held(session, through_mlps)
    found = sources(session, pairs, points, judge, direction, of_base=still)
    frozen = [{p: Replace(found.base[p][i], [p.layer], p.kind, everywhere(), start=0) for p in still} for i in range(len(base))]
    shape = (len(base), len(points), len(chosen), len(groups[0]))
    senders = [_Sender(i, (i, j, k, m), points[j], chosen[k], groups[i][m]) for i in range(shape[0]) for j in range(shape[1])
               for k in range(shape[2]) for m in range(shape[3]) if not ends or any(_after(end.point, points[j]) for end in ends)]
    jobs = [Job(s.pair, base[s.pair], partial(_sent, s, found, frozen[s.pair])) for s in senders]
    with progress_bar(progress and bool(jobs)) as bar:
        if ends:
            jobs = _received(session, senders, jobs, ends, batch, bar)
        there = [i for i, job in enumerate(jobs) if job is not None]
        done = measure(session, [jobs[i] for i in there], judge, batch, bar)
    raw = (found.corrupt if direction == "denoise" else found.clean).view(-1, 1, 1, 1).repeat(1, *shape[1:])
    for s in senders:
        raw[s.place] = float("nan")
    for i, value in zip(there, done.values):
        raw[senders[i].place] = value
    raw = raw.squeeze([axis for axis, labels in ((2, heads), (3, names)) if labels is None])
    label = f"{points[0].kind} to {', '.join(map(str, ends)) or 'logits'}"
    return PatchGrid(label, tuple(p.layer for p in points), None if heads is None else tuple(chosen), names, raw, found.clean,
                     found.corrupt, judge.name, direction, "direct path" + " and through MLPs" * through_mlps,
                     len(senders) * (1 + bool(ends)), done.cached / max(done.tokens, 1), done.seconds)


def _held(session: Session, through_mlps: bool) -> list[Point]:
    """The branches that are held still, at every layer; PointError unless all of them are tapped."""
    kinds = ("attn_out",) if through_mlps else ("attn_out", "mlp_out")
    return [p for kind in kinds for p in select([(kind, layer) for layer in range(session.n_layers)], session.tapped, session.n_layers)]


def _receivers(session: Session, asked: Any) -> list[Receiver]:
    """Read receivers: "logits" is [], else points, each with a head or without."""
    if isinstance(asked, str) and asked == "logits":
        return []
    items = [asked] if isinstance(asked, (str, Point)) or (isinstance(asked, tuple) and isinstance(asked[0], str)) else list(asked)
    found = []
    for item in items:
        head = item[2] if isinstance(item, tuple) and len(item) == 3 else None
        named = parse(item[:2] if head is not None else item, session.n_layers, **session._dialect)
        point = select([named], session.tapped, session.n_layers)[0]
        if point.kind not in BRANCHES:
            raise PointError(f'a receiver is "logits" or a branch ({", ".join(BRANCHES)}), as ("z", 9, 3) or ("mlp_out", 4); not {item!r}')
        found.append(Receiver(point, None if head is None else heads_of(session, [point], [head])[0]))
    if not found:
        raise PointError('no receiver was named; type for example receiver="logits" or receiver=[("z", 9, 3)]')
    scoped = {p for edit in session._scoped([[]])[0] for p in edit.steps}
    edited = [end.point for end in found if end.point in scoped]
    if edited:  # what is recorded there is without that edit, and what is put there comes after it
        raise EditError(f"an open scope or a default edits {edited[0]}, which is a receiver; type with session.unsteered(): ...")
    return found


def _after(one: Point, other: Point) -> bool:
    """Whether a branch comes after another in the forward pass."""
    return (one.layer, one.kind == "mlp_out") > (other.layer, other.kind == "mlp_out")


def _sent(sender: _Sender, found: Sources, frozen: dict[Point, Edit]) -> list[Edit]:
    """The edits of a run in which only the direct paths from a sender are open."""
    sent = replaced(found.rows[sender.point][sender.pair], sender.point, sender.group, sender.head)
    return [*sent, *(edit for p, edit in frozen.items() if _after(p, sender.point))]


def _received(session: Session, senders: Sequence[_Sender], jobs: Sequence[Job], ends: Sequence[Receiver], batch: int | None,
              bar: Bar) -> list[Job | None]:
    """Run the jobs and return those that put what the receivers made of it into the base run; None where an interrupt came first."""
    wanted = sorted({end.point for end in ends})
    found: list[Job | None] = [None] * len(jobs)

    def keep(source: EngineRows, over: list[int], low: int) -> None:
        values = {p: source.rows(p, over, before=True) for p in wanted}
        for k, i in enumerate(over):
            job = jobs[low + i]
            rows = {}
            for p in wanted:
                positions, value = values[p][k]
                if positions.tolist() != list(range(len(job.ids))):
                    raise MissingRowsError(f"{p} of a run has rows {positions.tolist()} of {len(job.ids)}")
                rows[p] = value.float()  # [pos *shape]
            found[low + i] = Job(job.pair, job.ids, partial(_put, rows, [e for e in ends if _after(e.point, senders[low + i].point)]))

    run(session, jobs, lambda job: [Take(p.kind, p.layer, ((0, len(job.ids)),), True) for p in wanted], keep, batch, bar)
    return found


def _put(rows: dict[Point, Tensor], ends: Sequence[Receiver]) -> list[Edit]:
    """The edits that give receivers the values that were recorded."""
    return [Replace(rows[e.point].flatten(1) if e.head is None else rows[e.point][:, e.head], [e.point.layer], e.point.kind, everywhere(),
                    start=0, head=e.head) for e in ends]
