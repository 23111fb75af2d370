"""Routing: once per engine step, what each row of the batch does, from the specs of the requests in it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mia_lab.kernels import program as P

from . import streams
from .claims import Claims
from .gates import Gates
from .segments import Segment, segments
from .tables import Line, Plan, PlanLayout, Program, Tables
from .wire import Site, Spec, Term, depth, of_request

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

NEUTRAL = -1
_END = 1 << 31  # past every position
_NOWHERE: frozenset[int] = frozenset()
_STAGES = 4  # pinned staging buffers: more than the steps that can be in flight


@dataclass(frozen=True, slots=True)
class Step:
    """What one step captured: rows that fill the arena's values `[lo, hi)` one after the other.

    By row: whose it is (see Claims), its position, its plan, and where it begins, counted from `lo`. `layouts`: by plan.
    """

    half: int
    lo: int
    hi: int
    claims: np.ndarray
    positions: np.ndarray
    plans: np.ndarray
    starts: np.ndarray
    layouts: dict[int, PlanLayout]


@dataclass(slots=True)
class _Segments:
    """A Spec resolved to table places: ascending starts, where each segment stops, and its program and plan (-1 for none)."""

    starts: np.ndarray
    stops: np.ndarray
    programs: np.ndarray
    plans: np.ndarray
    held: list[Program]
    kept: list[Plan]
    sites: frozenset[int]
    edited: frozenset[int]
    moves: bool  # what it does to a row depends on more than the segment: on the position, or on a gate
    users: int = 0


@dataclass(frozen=True, slots=True)
class _Live:
    """A request under way: its Spec, its number where it captures, and where its keys and values are kept, under a bias."""

    spec: Spec
    claim: int = NEUTRAL
    history: int = NEUTRAL


@dataclass(slots=True)
class _Batch:
    """The requests of a step, in its order: `place[i]` is where request i is in the router's arrays, -1 if it is nobody's.

    owner, within, rows, programs, plans: by row of ours, its request, its place among that one's rows and among all, and what
    it does. taken, starts, ends: which of these are captured, and where in the step's part of the arena. Where each request
    has one row, all that holds while the positions are within `since` and `until`. `resting`: until then the
    table's rows need not even be written again. `written`: by half of the arena, what was last written and captured there.
    """

    req_ids: list[str]
    place: np.ndarray
    mine: np.ndarray
    slots: np.ndarray
    sites: frozenset[int]
    edited: frozenset[int]
    moves: bool
    owner: np.ndarray = field(init=False)
    within: np.ndarray = field(init=False)
    rows: np.ndarray = field(init=False)
    programs: np.ndarray = field(init=False)
    plans: np.ndarray = field(init=False)
    taken: np.ndarray = field(init=False)
    starts: np.ndarray = field(init=False)
    ends: np.ndarray = field(init=False)
    layouts: dict[int, PlanLayout] = field(init=False)
    since: np.ndarray | None = None
    until: np.ndarray | None = None
    resting: bool = False
    written: dict[int, tuple[np.ndarray, Step]] = field(default_factory=dict)


class Router:
    """Turns the requests of a step into table rows. A step that does what the last one did costs two comparisons."""

    def __init__(self, tables: Tables, sites: Sequence[Site], claims: Claims) -> None:
        self._tables, self._claims = tables, claims
        self._site = {site: index for index, site in enumerate(sites)}
        self._live: dict[str, _Live] = {}
        self._segments: dict[Spec, _Segments] = {}
        self._place: dict[str, int] = {}
        self.gates = Gates(tables)
        # The sites at which this step's rows do something, and those of them at which they are edited; one object while it stays the same.
        self.needs = _NOWHERE, _NOWHERE
        self._serving = self._told = False
        self._strides = np.zeros(tables.sizes.plans, np.int64)  # by plan
        self._stale = False
        self._batch: _Batch | None = None
        self._written = 0  # table rows that may hold something other than neutral
        self._half = 0
        cuda = tables.device.type == "cuda"
        self._stages = [torch.full(tables.rows.shape, NEUTRAL, dtype=torch.int32, pin_memory=cuda)
                        for _ in range(_STAGES if cuda else 1)]
        self._events = [torch.cuda.Event() for _ in self._stages] if cuda else []
        self._turn = 0

    def admit(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler: forget finished requests, take in new ones. A resumed request is already known."""
        self._serving = True  # what ran before warmed the kernels up, for which they must be launched
        for req_id in scheduler_output.finished_req_ids:
            self._release(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and params.extra_args and new.req_id not in self._live:
                found = of_request(params.extra_args)
                if found is not None:
                    self._take(new, *found)

    def route(self, req_ids: Sequence[str], counts: Any, starts: Any, input_ids: torch.Tensor) -> Step | None:
        """Write the rows of a step and return what it will capture.

        counts `[requests]`: rows of each request; starts `[requests]`: the absolute position of its first row; input_ids
        `[rows]`: the step's tokens, on the device.
        """
        batch = self._seat(req_ids)
        if batch is None:
            self.neutralise()
            return None
        counts, first = np.asarray(counts)[: len(req_ids)], np.asarray(starts)[: len(req_ids)]
        single = int(counts.max()) == 1
        same = single and batch.until is not None and (first < batch.until).all() and (first >= batch.since).all()
        if same and batch.resting:
            return None
        self._tables.flush()
        self.gates.before_forward(batch.req_ids, counts, first, input_ids)
        if not same:
            self._look_up(batch, counts, first, single)
        again = same and not batch.moves and self._half in batch.written
        step = self._again(batch, first) if again else self._write(batch, counts, first)
        batch.resting = single and step is None and not batch.moves
        return step

    def _seat(self, req_ids: Sequence[str]) -> _Batch | None:
        """Return what is known of these requests together, or None when none of them asks for anything."""
        if not self._live:
            return None
        if self._stale:
            self._index()
        elif self._batch is not None and self._batch.req_ids == req_ids:
            return self._batch if len(self._batch.mine) else None
        place = np.fromiter((self._place.get(r, NEUTRAL) for r in req_ids), np.int64, len(req_ids))
        mine = np.flatnonzero(place >= 0)
        found = [self._segments[spec] for spec in {self._live[req_ids[i]].spec for i in mine.tolist()}]
        sites, edited = (frozenset().union(*some) for some in ((part.sites for part in found), (part.edited for part in found)))
        self._batch = _Batch(list(req_ids), place, mine, self.gates.slots(req_ids), sites, edited, bool(self._moves[place[mine]].any()))
        return self._batch if len(mine) else None

    def _look_up(self, batch: _Batch, counts: np.ndarray, first: np.ndarray, single: bool) -> None:
        """Find what each row does, and, where each request has one row, until which position it goes on doing it."""
        mine = batch.mine
        counted = counts[mine]
        batch.owner = mine if single else np.repeat(mine, counted)  # [rows of our requests] -> request
        batch.within = np.arange(len(batch.owner)) - np.repeat(np.cumsum(counted) - counted, counted)
        batch.rows = (np.cumsum(counts) - counts)[batch.owner] + batch.within
        segment = np.searchsorted(self._keys, (batch.place[batch.owner] << 32) + first[batch.owner] + batch.within, side="right") - 1
        batch.programs, batch.plans = self._flat_programs[segment], self._flat_plans[segment]
        batch.taken = np.flatnonzero(batch.plans >= 0)
        plans = batch.plans[batch.taken]
        batch.ends = np.cumsum(self._strides[plans])
        batch.starts = batch.ends - self._strides[plans]
        batch.layouts = {plan: self._tables.plans[plan] for plan in set(plans.tolist())}
        batch.since = batch.until = None
        batch.written.clear()
        if single:
            batch.since, batch.until = np.full(len(counts), -1, np.int64), np.full(len(counts), _END, np.int64)
            batch.since[mine], batch.until[mine] = self._flat_starts[segment], self._flat_stops[segment]

    def _write(self, batch: _Batch, counts: np.ndarray, first: np.ndarray) -> Step | None:
        owner, used = batch.owner, int(counts.sum())
        place = batch.place[owner]
        histories = self._histories[place]
        if max(batch.programs.max(), batch.plans.max(), histories.max()) < 0:
            self.neutralise()
            self._batch = batch
            return None
        table, position = self._stage(), first[owner] + batch.within
        table[: max(used, self._written)] = NEUTRAL
        no_base = np.full(len(owner), NEUTRAL)
        table[batch.rows] = np.stack([batch.programs, batch.plans, no_base, position, batch.slots[owner], histories], 1)
        step = self._capture(table, batch, self._numbers[place], position)
        self._send(max(used, self._written))
        self._batch, self._written = batch, used
        self._need(batch.sites, batch.edited)
        if step is not None:
            batch.written[step.half] = table[:used].copy(), step
        return step

    def _again(self, batch: _Batch, first: np.ndarray) -> Step:
        """Write what was written for this half two steps ago, at the positions of now."""
        (rows, step), position = batch.written[self._half], first[batch.owner]
        table = self._stage()
        table[: len(rows)] = rows
        table[batch.rows, P.POSITION] = position
        self._send(len(rows))
        self._half ^= 1
        return replace(step, positions=position[batch.taken].astype(np.int64))  # as the other steps have them

    def neutralise(self) -> None:
        """Make every row neutral; costs nothing when they are."""
        self._batch = None
        self._need(_NOWHERE, _NOWHERE)
        if self._written:
            self._stage()[: self._written] = NEUTRAL
            self._send(self._written)
            self._written = 0

    def _need(self, sites: frozenset[int], edited: frozenset[int]) -> None:
        needs = sites, edited
        if needs != self.needs or not self._told:
            self._told = self._serving
            if needs != self.needs:
                self.needs = needs
            if self._serving:
                self._tables.keep_awake(sites, edited)

    def wake(self) -> None:
        """Let every tap be launched, and edit, until requests are served: graphs are captured after all of that was launched once."""
        everywhere = range(len(self._site))
        self._serving = self._told = False
        self._tables.keep_awake(everywhere, everywhere)

    def recover(self) -> None:
        """After a step that was broken off: take no row for granted, so that the next step writes them all."""
        self._batch, self._written = None, len(self._tables.rows)
        self.gates.recover()

    def _capture(self, table: np.ndarray, batch: _Batch, claims: np.ndarray, position: np.ndarray) -> Step | None:
        taken = batch.taken
        if not len(taken):
            return None
        size, lo = int(batch.ends[-1]), self._half * self._tables.half
        if size > self._tables.half:
            raise RuntimeError(f"a step captured {size} values; half the arena holds {self._tables.half}")
        table[batch.rows[taken], P.BASE] = lo + batch.starts
        step = Step(self._half, lo, lo + size, claims[taken], position[taken], batch.plans[taken], batch.starts, batch.layouts)
        self._half ^= 1
        return step

    def _take(self, new: Any, uid: str, spec: Spec) -> None:
        if spec not in self._segments:
            self._segments[spec] = self._resolve(spec)
        self._segments[spec].users += 1
        self._live[new.req_id] = _Live(spec)
        self._stale = True
        try:
            self.gates.take(new.req_id, spec)
            history = NEUTRAL
            if spec.keeps_history:
                length = min(len(new.prompt_token_ids) + new.sampling_params.max_tokens, self._tables.sizes.longest)
                history, _ = self._tables.history.take(new.req_id, length)
        except BaseException:
            self._release(new.req_id)
            raise
        self._live[new.req_id] = _Live(spec, self._claims.open(uid, spec.reduce) if spec.takes else NEUTRAL, history)

    def _release(self, req_id: str) -> None:
        live = self._live.pop(req_id, None)
        if live is None:
            return
        self.gates.release(req_id)
        if live.history >= 0:
            self._tables.history.give(req_id)
            self._tables.history.evict(req_id)
        found = self._segments[live.spec]
        found.users -= 1
        if not found.users:
            self._give_back(found)
            del self._segments[live.spec]
        self._stale = True

    def _resolve(self, spec: Spec) -> _Segments:
        cuts = segments(spec)
        edited = frozenset(self._site[term.site] for term in spec.terms)
        sites = edited | {self._site[take.site] for take in spec.takes}
        moves = bool(spec.gates) or any(term.rate or term.aligned or term.op == "bias" for term in spec.terms)
        starts = [cut.start for cut in cuts]
        found = _Segments(np.array(starts, np.int64), np.array([*starts[1:], _END], np.int64), np.full(len(cuts), NEUTRAL),
                          np.full(len(cuts), NEUTRAL), [], [], sites, edited, moves)
        places: dict[int, int] = {id(()): NEUTRAL}  # segments where the same acts, or the same is captured, share one tuple
        try:
            for i, cut in enumerate(cuts):
                if id(cut.takes) not in places:
                    places[id(cut.takes)] = self._plan(cut, found)
                if id(cut.terms) not in places:
                    places[id(cut.terms)] = self._program(cut, spec, found)
                found.plans[i], found.programs[i] = places[id(cut.takes)], places[id(cut.terms)]
        except BaseException:
            self._give_back(found)
            raise
        return found

    def _plan(self, cut: Segment, found: _Segments) -> int:
        plan = tuple(sorted((self._site[take.site], take.before) for take in cut.takes))
        place = self._tables.take_plan(plan)
        found.kept.append(plan)
        self._strides[place] = self._tables.plans[place].stride
        return place

    def _program(self, cut: Segment, spec: Spec, found: _Segments) -> int:
        first = _first_measures(cut.terms)
        program = tuple(self._line(term, spec, n in first) for n, term in enumerate(cut.terms))
        place = self._tables.take_program(program)
        found.held.append(program)
        return place

    def _line(self, term: Term, spec: Spec, begins: bool) -> Line:
        gate = spec.gates[term.gate] if term.gate >= 0 else None
        level = gate.threshold if gate is not None and gate.rule == "row" and term.op != "measure" else None
        return Line(self._site[term.site], term.bare, level, begins)

    def _give_back(self, found: _Segments) -> None:
        for program in found.held:
            self._tables.give_program(program)
        for plan in found.kept:
            self._tables.give_plan(plan)

    def _index(self) -> None:
        """Lay all segments end to end, keyed by (request, start), so that one search finds every row's segment."""
        self._place = {req_id: i for i, req_id in enumerate(self._live)}
        live = [self._segments[known.spec] for known in self._live.values()]
        join = lambda arrays: np.concatenate(arrays) if arrays else np.empty(0, np.int64)  # noqa: E731
        self._flat_starts = join([found.starts for found in live])
        self._flat_stops = join([found.stops for found in live])
        self._keys = self._flat_starts + np.repeat(np.arange(len(live)) << 32, [len(found.starts) for found in live])
        self._flat_programs = join([found.programs for found in live])
        self._flat_plans = join([found.plans for found in live])
        self._numbers, self._histories = (np.fromiter((getattr(known, name) for known in self._live.values()), np.int64, len(live))
                                          for name in ("claim", "history"))
        self._moves = np.fromiter((found.moves for found in live), bool, len(live))
        self._stale, self._batch = False, None

    def _stage(self) -> np.ndarray:
        if self._events:
            self._turn = (self._turn + 1) % len(self._stages)
            self._events[self._turn].synchronize()
        return self._stages[self._turn].numpy()

    def _send(self, rows: int) -> None:
        self._tables.rows[:rows].copy_(self._stages[self._turn][:rows], non_blocking=True)
        if self._events:
            self._events[self._turn].record(streams.current(self._tables.rows.device.index))


def _first_measures(terms: Sequence[Term]) -> set[int]:
    """Return where in `terms` each gate's measure stands that the forward pass comes to first."""
    measures = sorted((n for n, term in enumerate(terms) if term.op == "measure"), key=lambda n: depth(terms[n]))
    return set({terms[n].gate: n for n in reversed(measures)}.values())
