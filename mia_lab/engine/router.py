"""Routing: once per engine step, what each row of the batch does, from the specs of the requests in it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mia_lab.kernels import program as P

from .gates import Gates
from .tables import Line, Plan, PlanLayout, Program, Tables
from .wire import Reduce, Site, Spec, Term, depth, of_request, segments

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

NEUTRAL = -1
_STAGES = 4  # pinned staging buffers: more than the steps that can be in flight


@dataclass(frozen=True, slots=True)
class Part:
    """The captured rows of one request in one step: arena values `[lo, lo + len(positions) * plan.stride)`."""

    uid: str
    req_id: str
    positions: np.ndarray
    plan: PlanLayout
    lo: int
    reduce: Reduce | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one step captured: the arena's values `[lo, hi)` and whose they are."""

    half: int
    lo: int
    hi: int
    parts: list[Part]


@dataclass(slots=True)
class _Segments:
    """A Spec resolved to table places: ascending starts, and each segment's program and plan (-1 for none)."""

    starts: np.ndarray
    programs: np.ndarray
    plans: np.ndarray
    held: list[Program]
    kept: list[Plan]
    users: int = 0


class Router:
    """Turns the requests of a step into table rows. `route` does no work while no request asks for anything."""

    def __init__(self, tables: Tables, sites: Sequence[Site]) -> None:
        self._tables = tables
        self._site = {site: index for index, site in enumerate(sites)}
        self._live: dict[str, tuple[str, Spec]] = {}  # engine request -> its name and Spec
        self._segments: dict[Spec, _Segments] = {}
        self._place: dict[str, int] = {}
        self._history: dict[str, int] = {}  # engine request -> where its keys and values begin, under a bias
        self.gates = Gates(tables)
        self._strides = np.zeros(tables.sizes.plans, np.int64)  # by plan
        self._stale = False
        self._written = 0  # table rows that may hold something other than neutral
        self._half = 0
        cuda = tables.device.type == "cuda"
        self._stages = [torch.full(tables.rows.shape, NEUTRAL, dtype=torch.int32, pin_memory=cuda)
                        for _ in range(_STAGES if cuda else 1)]
        self._events = [torch.cuda.Event() for _ in self._stages] if cuda else []
        self._turn = 0

    def admit(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler: forget finished requests, take in new ones. A resumed request is already known."""
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
        if self._stale:
            self._index()
        place = np.fromiter((self._place.get(r, NEUTRAL) for r in req_ids), np.int64, len(req_ids)) if self._place else None
        if place is None or place.max(initial=NEUTRAL) < 0:
            self.neutralise()
            return None
        counts, first = np.asarray(counts)[: len(req_ids)], np.asarray(starts)[: len(req_ids)]
        begins = np.cumsum(counts) - counts
        self.gates.before_forward(req_ids, begins, counts, first, input_ids)
        mine = np.flatnonzero(place >= 0)
        owner = np.repeat(mine, counts[mine])  # [rows of our requests] -> request
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts[mine]) - counts[mine], counts[mine])
        position = first[owner] + within
        segment = np.searchsorted(self._keys, (place[owner] << 32) + position, side="right") - 1
        plans = self._flat_plans[segment]
        table = self._stage()
        used = int(counts.sum())
        table[: max(used, self._written)] = NEUTRAL
        rows = begins[owner] + within
        table[rows, P.PROGRAM], table[rows, P.PLAN], table[rows, P.POSITION] = self._flat_programs[segment], plans, position
        table[rows, P.SLOT] = self.gates.slots(req_ids)[owner]
        if self._history:
            table[rows, P.HISTORY] = np.fromiter((self._history.get(r, NEUTRAL) for r in req_ids), np.int64, len(req_ids))[owner]
        step = self._capture(table, req_ids, owner, position, rows, plans)
        self._send(max(used, self._written))
        self._written = used
        return step

    def neutralise(self) -> None:
        """Make every row neutral; costs nothing when they are."""
        if self._written:
            self._stage()[: self._written] = NEUTRAL
            self._send(self._written)
            self._written = 0

    def recover(self) -> None:
        """After a step that was broken off: take no row for granted, so that the next step writes them all."""
        self._written = len(self._tables.rows)
        self.gates.recover()

    def _capture(self, table: np.ndarray, req_ids: Sequence[str], owner: np.ndarray, position: np.ndarray,
                 rows: np.ndarray, plans: np.ndarray) -> Step | None:
        taken = np.flatnonzero(plans >= 0)
        if not len(taken):
            return None
        sizes = self._strides[plans[taken]]
        ends = np.cumsum(sizes)
        if ends[-1] > self._tables.half:
            raise RuntimeError(f"a step captured {ends[-1]} values; half the arena holds {self._tables.half}")
        lo = self._half * self._tables.half
        bases = lo + ends - sizes
        table[rows[taken], P.BASE] = bases
        cuts = np.flatnonzero(np.diff(owner[taken]) | np.diff(plans[taken])) + 1
        parts = []
        for start, stop in pairwise([0, *cuts.tolist(), len(taken)]):
            req_id = req_ids[owner[taken[start]]]
            plan = self._tables.plans[int(plans[taken[start]])]
            uid, spec = self._live[req_id]
            parts.append(Part(uid, req_id, position[taken[start:stop]], plan, int(bases[start]), spec.reduce))
        step = Step(self._half, lo, lo + int(ends[-1]), parts)
        self._half ^= 1
        return step

    def _take(self, new: Any, uid: str, spec: Spec) -> None:
        if spec not in self._segments:
            self._segments[spec] = self._resolve(spec)
        self._segments[spec].users += 1
        self._live[new.req_id] = uid, spec
        self._stale = True
        try:
            self.gates.take(new.req_id, spec)
            if spec.keeps_history:
                length = len(new.prompt_token_ids) + new.sampling_params.max_tokens
                self._history[new.req_id], _ = self._tables.history.take(new.req_id, length)
        except BaseException:
            self._release(new.req_id)
            raise

    def _release(self, req_id: str) -> None:
        if req_id not in self._live:
            return
        _, spec = self._live.pop(req_id)
        self.gates.release(req_id)
        if self._history.pop(req_id, None) is not None:
            self._tables.history.give(req_id)
            self._tables.history.evict(req_id)
        found = self._segments[spec]
        found.users -= 1
        if not found.users:
            self._give_back(found)
            del self._segments[spec]
        self._stale = True

    def _resolve(self, spec: Spec) -> _Segments:
        cuts = segments(spec)
        found = _Segments(np.array([cut.start for cut in cuts], np.int64), np.full(len(cuts), NEUTRAL),
                          np.full(len(cuts), NEUTRAL), [], [])
        try:
            for i, cut in enumerate(cuts):
                if cut.takes:
                    plan = tuple(sorted((self._site[take.site], take.before) for take in cut.takes))
                    found.plans[i] = place = self._tables.take_plan(plan)
                    found.kept.append(plan)
                    self._strides[place] = self._tables.plans[place].stride
                if cut.terms:
                    first = _first_measures(cut.terms)
                    program = tuple(self._line(term, spec, n in first) for n, term in enumerate(cut.terms))
                    found.programs[i] = self._tables.take_program(program)
                    found.held.append(program)
        except BaseException:
            self._give_back(found)
            raise
        return found

    def _line(self, term: Term, spec: Spec, begins: bool) -> Line:
        gate = spec.gates[term.gate] if term.gate >= 0 else None
        level = gate.threshold if gate is not None and gate.rule == "row" and term.op != "measure" else None
        return Line(self._site[term.site], replace(term, spans=()), level, begins)

    def _give_back(self, found: _Segments) -> None:
        for program in found.held:
            self._tables.give_program(program)
        for plan in found.kept:
            self._tables.give_plan(plan)

    def _index(self) -> None:
        """Lay all segments end to end, keyed by (request, start), so that one search finds every row's segment."""
        self._place = {req_id: i for i, req_id in enumerate(self._live)}
        live = [self._segments[spec] for _, spec in self._live.values()]
        join = lambda arrays: np.concatenate(arrays) if arrays else np.empty(0, np.int64)  # noqa: E731
        self._keys = join([(i << 32) + found.starts for i, found in enumerate(live)])
        self._flat_programs = join([found.programs for found in live])
        self._flat_plans = join([found.plans for found in live])
        self._stale = False

    def _stage(self) -> np.ndarray:
        if self._events:
            self._turn = (self._turn + 1) % len(self._stages)
            self._events[self._turn].synchronize()
        return self._stages[self._turn].numpy()

    def _send(self, rows: int) -> None:
        self._tables.rows[:rows].copy_(self._stages[self._turn][:rows], non_blocking=True)
        if self._events:
            self._events[self._turn].record()


def _first_measures(terms: Sequence[Term]) -> set[int]:
    """Return where in `terms` each gate's measure stands that the forward pass comes to first."""
    measures = sorted((n for n, term in enumerate(terms) if term.op == "measure"), key=lambda n: depth(terms[n]))
    return set({terms[n].gate: n for n in reversed(measures)}.values())
