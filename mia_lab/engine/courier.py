"""Delivery: captured rows leave the arena with one copy a step and wait on the host, by request and position."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from ..errors import MissingRowsError
from . import streams
from .claims import Claims
from .reduce import Reducer
from .ring import Done, Ring
from .router import Step
from .store import Store, copy
from .tables import Tables
from .wire import Reduce, Site

_RING_BYTES = 1 << 30
_NOTHING = torch.empty(0)

Entry = tuple[int, bool]  # site, before its edits
Tensor = torch.Tensor
_Order = tuple[np.ndarray, Tensor | None]  # positions, ascending, and which of the rows they are, where not all as they come


@dataclass(slots=True)
class _Rows:
    """Rows of one claim on the host: positions, and values `[rows stride]` of which `cuts` gives an entry's (start, width).

    One row of values for all positions where `summed`; `reduced` where the values are no longer the point's own.
    """

    positions: np.ndarray
    cuts: dict[Entry, tuple[int, int]]
    values: Tensor
    summed: bool = False
    reduced: bool = False

    def cut(self, entry: Entry) -> Tensor:
        """The values of one entry, `[rows width]`."""
        start, width = self.cuts[entry]
        return self.values[:, start : start + width]


@dataclass(slots=True)
class _Delivery:
    """What was sent in one piece: the step whose rows it holds, or `n` reduced rows of a claim; and its values, once they arrived."""

    step: Step | None = None
    claim: int = -1
    rows: _Rows | None = None
    n: int = 0
    values: Tensor | None = None

    def arrive(self, store: Store, values: Tensor) -> None:
        """Take the values over into memory that stays."""
        place = store.take(len(values), values.dtype)
        copy(place, values)
        self.values = place


@dataclass(slots=True)
class _Kept:
    """All that arrived for one claim: its rows by plan, and what they were reduced to, in order."""

    whole: dict[int, list[_Rows]] = field(default_factory=dict)
    reduced: list[_Rows] = field(default_factory=list)

    def entries(self) -> dict[Entry, int]:
        """Of which (site, before its edits) rows are held, and to how many values they were reduced, or 0."""
        every = (*(found[0] for found in self.whole.values()), *self.reduced)
        return {entry: width * rows.reduced for rows in every for entry, (_, width) in rows.cuts.items()}

    def parts(self, since: int) -> list[_Rows]:
        """What holds the positions from `since` on; if that is all, the rows of each plan in one piece of memory."""
        if since:
            every = [rows for found in (*self.whole.values(), self.reduced) for rows in found]
            return [rows for rows in every if rows.summed or rows.positions.max() >= since]
        for plan, found in self.whole.items():
            if len(found) > 1:
                self.whole[plan] = [replace(found[0], positions=np.concatenate([rows.positions for rows in found]),
                                            values=torch.cat([rows.values for rows in found]))]
        return [*(rows for found in self.whole.values() for rows in found), *self.reduced]


class Courier:
    """Copies each step's part of the arena to the host, and hands out rows by (request, absolute position).

    A step's rows leave while the next one runs: sent at once, they would hold up the sampled tokens, which go the same way.
    complete: whether a step waits where the ring has no room; otherwise its rows are dropped, and counted in `dropped`.
    """

    def __init__(self, tables: Tables, sites: Sequence[Site], claims: Claims, complete: bool = True) -> None:
        self._tables, self._sites, self._claims, self._reducer = tables, list(sites), claims, Reducer(tables)
        self._store = Store(tables.device)
        self._next: deque[tuple[int, Tensor, _Delivery]] = deque()  # what leaves next: its half, its memory on the device
        self._sent: list[_Delivery] = []  # in order; not yet sorted by claim
        self._kept: dict[int, _Kept] = {}
        self._complete, self.dropped, self.captured = complete, 0, 0  # the last two in rows, since the start
        self._ring = Ring(min(len(tables.arena), _RING_BYTES // tables.arena.itemsize), tables.arena.dtype, tables.device)
        self._left: list[torch.cuda.Event | Done | None] = [None, None]  # per half: when its last copy is done

    def before_forward(self, step: Step | None) -> None:
        """Let the last step's rows leave, and hold the device, not the host, until the half that this step writes is copied out."""
        self._send()
        if step is not None and isinstance(self._left[step.half], torch.cuda.Event):
            self._left[step.half].wait(streams.current(self._tables.arena.device.index))

    def after_forward(self, step: Step) -> None:
        """Make ready the one copy that takes this step's rows off the device; reduced rows leave as what they were reduced to."""
        self.captured += len(step.claims)
        reducing = self._claims.reducing
        reduced = np.isin(step.claims, list(reducing)) if reducing else None
        if reduced is None or not reduced.any():
            self._next.append((step.half, self._tables.arena[step.lo : step.hi], _Delivery(step)))
            return
        for some in _runs(step, np.flatnonzero(reduced)):
            self._reduce(step, some, reducing[int(step.claims[some[0]])])
        if not reduced.all():
            some = np.flatnonzero(~reduced)
            pieces = [self._rows_at(step, run).reshape(-1) for run in _runs(step, some)]
            strides = np.array([step.layouts[plan].stride for plan in step.plans[some].tolist()])
            rest = replace(step, claims=step.claims[some], positions=step.positions[some], plans=step.plans[some],
                           starts=np.cumsum(strides) - strides)
            self._next.append((step.half, torch.cat(pieces), _Delivery(rest)))

    def _rows_at(self, step: Step, run: np.ndarray) -> Tensor:
        """The values `[rows stride]`, on the device, of rows of one claim and plan that follow one another."""
        stride, first = step.layouts[int(step.plans[run[0]])].stride, step.lo + int(step.starts[run[0]])
        return self._tables.arena[first : first + len(run) * stride].view(-1, stride)

    def _reduce(self, step: Step, run: np.ndarray, how: Reduce) -> None:
        rows, found, cuts = self._rows_at(step, run), [], {}
        for entry, (start, width) in step.layouts[int(step.plans[run[0]])].cuts.items():
            found.append(self._reducer.apply(how, self._sites[entry[0]], self._typed(rows[:, start : start + width], entry[0])))
            cuts[entry] = sum(values.shape[1] for values in found[:-1]), found[-1].shape[1]
        values = torch.cat(found, 1)
        named = _Rows(step.positions[run], cuts, _NOTHING, how.mean, True)
        sent = _Delivery(claim=int(step.claims[run[0]]), rows=named, n=len(values))
        self._next.append((step.half, values.view(-1).view(self._tables.arena.dtype), sent))

    def _send(self) -> None:
        while self._next:
            half, source, delivery = self._next.popleft()
            delivery.values = self._store.take_again(len(source), source.dtype)
            if delivery.values is None:
                left = self._ring.send(source, partial(delivery.arrive, self._store), self._complete)
            else:
                left = self._ring.land(source, delivery.values)
            if left is None:
                self.dropped += len(delivery.rows.positions if delivery.step is None else delivery.step.positions)
            else:
                self._left[half] = left
                self._sent.append(delivery)

    @property
    def congested(self) -> bool:
        """Whether requests that capture should wait outside until the host has taken over what is on its way."""
        return self._complete and self._ring.congested

    def wait(self) -> None:
        """Return once all that was captured is on the host."""
        self._send()
        self._ring.wait()

    def _sort(self) -> None:
        """Give what was sent to its claims, once it has arrived."""
        self.wait()
        for delivery in self._sent:
            if delivery.step is None:
                if delivery.claim not in self._claims:
                    continue  # its client has let go of it meanwhile
                values = delivery.values.view(torch.float32).view(delivery.n, -1)
                self._kept.setdefault(delivery.claim, _Kept()).reduced.append(replace(delivery.rows, values=values))
            else:
                for claim, plan, rows in _by_claim(delivery.step, delivery.values):
                    if claim in self._claims:
                        self._kept.setdefault(claim, _Kept()).whole.setdefault(plan, []).append(rows)
        self._sent.clear()

    def rows(self, uid: str, site: int, before: bool = False, since: int = 0) -> tuple[np.ndarray, Tensor]:
        """Return the positions `[n]`, ascending, and values `[n width]` held for one request at one site, from `since` on.

        A position that was computed twice (after a preemption) appears once, with its latest value. Where rows were
        summed for a mean there is one row of values for all positions.
        """
        self._sort()
        return self._read([rows for kept in self._held_of(uid) for rows in kept.parts(since)], (site, before), since, {})

    def held(self, uid: str, since: int = 0) -> Iterator[tuple[Entry, bool, np.ndarray, Tensor]]:
        """Yield, for each (site, before its edits) of which rows are held for one request, in the order of the sites: it, whether the
        rows were reduced, and what `rows` gives."""
        self._sort()
        held = self._held_of(uid)
        parts, orders = [rows for kept in held for rows in kept.parts(since)], {}
        for entry, reduced in sorted(one for kept in held for one in kept.entries().items()):
            positions, values = self._read(parts, entry, since, orders)
            yield entry, bool(reduced), positions, values if len(positions) or not reduced else torch.empty(0, reduced)

    def _held_of(self, uid: str) -> list[_Kept]:
        held = [self._kept[claim] for claim in self._claims.numbers(uid) if claim in self._kept]
        if len(held) > 1:
            raise RuntimeError(f"{len(held)} engine requests share the capture {uid!r}; capture with n=1")
        return held

    def _read(self, parts: list[_Rows], entry: Entry, since: int, orders: dict[tuple[int, ...], _Order]) -> tuple[np.ndarray, Tensor]:
        """What `rows` gives of one entry. orders: those of the parts that were read already, by their ids."""
        found = [rows for rows in parts if entry in rows.cuts]
        if not found:
            empty = torch.empty(0, self._tables.room[entry[0]], dtype=self._tables.arena.dtype)
            return np.empty(0, np.int64), self._typed(empty, entry[0])
        if found[0].summed:
            return _summed(found, entry)
        names = tuple(map(id, found))
        if names not in orders:
            orders[names] = _in_order(found, since)
        positions, picked = orders[names]
        values = torch.cat([rows.cut(entry) for rows in found]) if len(found) > 1 else found[0].cut(entry)
        if picked is not None:
            values = values[picked]
        return positions, values if found[0].reduced else self._typed(values, entry[0])

    def _typed(self, values: Tensor, site: int) -> Tensor:
        return values.contiguous().view(torch.float32) if self._tables.wide[site] else values

    def drop(self, uid: str) -> None:
        """Let go of one request's rows."""
        self._sort()
        for claim in self._claims.close(uid):
            self._kept.pop(claim, None)


def _runs(step: Step, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Cut rows of a step into runs of one claim and one plan that follow one another."""
    cuts = np.flatnonzero(np.diff(rows) != 1) if len(rows) > 1 else rows[:0]
    turns = np.flatnonzero((np.diff(step.claims[rows]) != 0) | (np.diff(step.plans[rows]) != 0))
    yield from np.split(rows, np.union1d(cuts, turns) + 1)


def _by_claim(step: Step, values: Tensor) -> Iterator[tuple[int, int, _Rows]]:
    """The rows of each claim and plan in a step, as views of its values."""
    for run in _runs(step, np.arange(len(step.claims))):
        plan = int(step.plans[run[0]])
        layout, first = step.layouts[plan], int(step.starts[run[0]])
        yield int(step.claims[run[0]]), plan, _Rows(step.positions[run], layout.cuts,
                                                    values[first : first + len(run) * layout.stride].view(-1, layout.stride))


def _in_order(found: list[_Rows], since: int) -> _Order:
    """The positions of parts together, from `since` on, each once: where it was computed twice, its latest row."""
    positions, picked = np.concatenate([rows.positions for rows in found]), None
    if since and not (positions >= since).all():
        picked = np.flatnonzero(positions >= since)
        positions = positions[picked]
    if (np.diff(positions) <= 0).any():
        order = len(positions) - 1 - np.unique(positions[::-1], return_index=True)[1]
        picked = order if picked is None else picked[order]
        positions = positions[order]
    return positions, None if picked is None else torch.from_numpy(picked)


def _summed(found: list[_Rows], entry: Entry) -> tuple[np.ndarray, Tensor]:
    """Add up the latest sums. A step computed again replaces the earlier one, which it must cover."""
    kept: list[_Rows] = []
    taken: set[int] = set()
    for rows in reversed(found):
        here = set(rows.positions.tolist())
        if not here & taken:
            kept.append(rows)
            taken |= here
        elif not here <= taken:
            raise MissingRowsError("a request was preempted in the middle of a mean, and its rows cannot be told apart; run it again, "
                                   "or capture the rows themselves")
    total = sum(rows.cut(entry).double() for rows in kept)
    return np.array(sorted(taken), np.int64), total.float()
