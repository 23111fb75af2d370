"""Routing: every row of every step does what a plain search through the specs says, and no other row does anything."""
from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mia_lab.engine.config import Sizes
from mia_lab.engine.router import Router, Step
from mia_lab.engine.tables import Tables
from mia_lab.engine.wire import KEY, Spec, Term, encode

SITES = [("resid_post", 0), ("mlp_out", 0), ("resid_post", 1)]
WIDTH, TOKENS = 2, 24
VECTORS = {name: torch.tensor([float(i), -float(i)]) for i, name in enumerate("abcdef", 1)}
EVERY = ((0, None),)

Batch = list[tuple[str, int, int]]  # request, rows, first position


@dataclass
class Request:
    """A request under way; without a spec it is nobody's business."""

    spec: Spec | None
    length: int
    done: int = 0


def lab(**sizes: int) -> tuple[Tables, Router]:
    usual = Sizes(TOKENS, programs=24, plans=8, bank_rows=6, captured_tokens=TOKENS, width=WIDTH)
    tables = Tables(len(SITES), replace(usual, **sizes), torch.float32, torch.device("cpu"))
    for name, vector in VECTORS.items():
        tables.register(name, vector)
    return tables, Router(tables, SITES)


def admit(router: Router, new: dict[str, Spec | None] | None = None, finished: Iterable[str] = ()) -> None:
    """Tell the router what the scheduler says of new and finished requests: three fields of its output."""
    asked = [SimpleNamespace(req_id=r, sampling_params=SimpleNamespace(
        extra_args=None if spec is None else {KEY: encode(f"uid-{r}", spec)})) for r, spec in (new or {}).items()]
    router.admit(SimpleNamespace(finished_req_ids=list(finished), scheduled_new_reqs=asked))


def route(router: Router, batch: Batch) -> Step | None:
    """Route a batch; the arrays are longer than it, as a runner's are."""
    counts, starts = (np.array([*column, 7, 7], np.int32) for column in ([b[1] for b in batch], [b[2] for b in batch]))
    return router.route([b[0] for b in batch], counts, starts)


def steer(name: str = "a", site: int = 0, coeff: float = 1.0, spans: tuple = EVERY) -> Term:
    return Term(*SITES[site], name, coeff, spans)


def inside(spans: tuple, position: int) -> bool:
    return any(start <= position and (stop is None or position < stop) for start, stop in spans)


def check(tables: Tables, step: Step | None, batch: Batch, live: dict[str, Request]) -> None:
    """Hold the tables and the step against a loop over rows."""
    row, taken = 0, []
    for req_id, count, start in batch:
        spec = live[req_id].spec or Spec()
        captured = sorted(SITES.index(site) for site in spec.sites)
        for position in range(start, start + count):
            program, plan, base, _ = tables.rows[row].tolist()
            adds = torch.zeros(len(SITES), WIDTH)
            for term in spec.terms:
                if inside(term.spans, position):
                    adds[SITES.index((term.kind, term.layer))] += term.coeff * VECTORS[term.vector]
            torch.testing.assert_close(added(tables, program), adds, msg=f"{req_id} at {position}")
            if captured and inside(spec.rows, position):
                offsets = [captured.index(site) * WIDTH if site in captured else -1 for site in range(len(SITES))]
                assert tables.offsets[:, plan].tolist() == offsets, (req_id, position)
                taken.append((req_id, position, base, tuple(captured)))
            else:
                assert plan == -1, (req_id, position)
            row += 1
    assert (tables.rows[row:] == -1).all()
    check_step(tables, step, taken)


def added(tables: Tables, program: int) -> torch.Tensor:
    out = torch.zeros(len(SITES), WIDTH)
    for site in range(len(SITES)):
        _, vec, coef, bank, _, _ = tables.of_site(site)
        for index, weight in zip(vec[program], coef[program], strict=True) if program >= 0 else ():
            if index >= 0:
                out[site] += weight * bank[index]
    return out


def check_step(tables: Tables, step: Step | None, taken: list[tuple[str, int, int, tuple[int, ...]]]) -> None:
    """Each captured row has a piece of the step's half for itself, and the parts name them all."""
    if not taken:
        assert step is None
        return
    lo, hi = step.half * tables.half, (step.half + 1) * tables.half
    pieces = sorted((base, base + len(plan) * WIDTH) for _, _, base, plan in taken)
    assert lo <= step.lo == pieces[0][0]
    assert pieces[-1][1] == step.hi <= hi
    assert all(end == begin for (_, end), (begin, _) in pairwise(pieces))
    listed = [(part.req_id, int(position), part.lo + i * len(part.plan) * WIDTH, part.plan)
              for part in step.parts for i, position in enumerate(part.positions)]
    assert listed == taken
    assert all(part.uid == f"uid-{part.req_id}" for part in step.parts)
    assert len({part.req_id for part in step.parts}) == len(step.parts)


# -- one thing at a time ----------------------------------------------------------------------------------------------


def test_while_nobody_asks_for_anything_nothing_is_written() -> None:
    tables, router = lab()
    before = tables.rows._version
    admit(router, {"plain": None})
    assert route(router, [("plain", 5, 0), ("unknown", 2, 3)]) is None
    router.neutralise()
    assert tables.rows._version == before


def test_rows_left_by_a_larger_batch_are_made_neutral() -> None:
    tables, router = lab()
    live = {"r": Request(Spec((steer(),)), 99), "plain": Request(None, 99)}
    admit(router, {r: request.spec for r, request in live.items()})
    for batch in [[("r", 20, 0)], [("r", 3, 20)], [("plain", 4, 0), ("r", 1, 23)], [("r", 12, 0)], [("plain", 2, 4)],
                  [("r", 2, 24)]]:
        check(tables, route(router, batch), batch, live)


def test_neutralise_clears_what_the_last_step_wrote() -> None:
    tables, router = lab()
    admit(router, {"r": Spec((steer(),))})
    route(router, [("r", 9, 0)])
    assert (tables.rows[:9, 0] >= 0).all()
    router.neutralise()
    assert (tables.rows == -1).all()


def test_captures_alternate_between_the_halves_and_other_steps_do_not_count() -> None:
    tables, router = lab()
    live = {"r": Request(Spec((), (SITES[2], SITES[0]), ((2, 4), (6, None))), 99)}
    admit(router, {"r": live["r"].spec})
    halves = []
    for batch in [[("r", 3, 0)], [("r", 1, 3)], [("r", 2, 4)], [("r", 1, 6)], [("r", 1, 7)]]:
        step = route(router, batch)
        check(tables, step, batch, live)
        halves.append(None if step is None else step.half)
    assert halves == [0, 1, None, 0, 1]


def test_a_step_that_the_arena_cannot_hold_is_an_error_and_one_that_just_fits_is_not() -> None:
    tables, router = lab(captured_tokens=4)
    live = {"r": Request(Spec((), tuple(SITES), EVERY), 99)}
    admit(router, {"r": live["r"].spec})
    check(tables, route(router, [("r", 4, 0)]), [("r", 4, 0)], live)
    with pytest.raises(RuntimeError, match="a step captured 30 values; half the arena holds 24"):
        route(router, [("r", 5, 4)])


def test_requests_that_ask_the_same_share_places_until_the_last_has_finished() -> None:
    tables, router = lab(programs=1, plans=1)
    spec, other = Spec((steer("a"),), (SITES[0],), EVERY), Spec((steer("b"),), (SITES[1],), EVERY)
    live = {r: Request(spec, 99) for r in ("one", "two")} | {"three": Request(other, 99)}
    admit(router, {"one": spec, "two": spec})
    admit(router, {"two": spec})  # resumed after a preemption
    admit(router, finished=["one", "never seen"])
    check(tables, route(router, [("two", 3, 0)]), [("two", 3, 0)], live)
    admit(router, {"three": other}, finished=["two"])
    check(tables, route(router, [("three", 3, 0)]), [("three", 3, 0)], live)


def test_edges_of_adjacent_spans_meet_without_gap_or_overlap() -> None:
    tables, router = lab()
    terms = (steer("a", spans=((0, 4),)), steer("b", spans=((4, 8),)), steer("c", spans=((3, 5), (7, None))))
    live = {"r": Request(Spec(terms, (SITES[1],), ((4, 5), (5, 6), (9, 10))), 99)}
    admit(router, {"r": live["r"].spec})
    for batch in [[("r", 12, 0)], [("r", 1, 3)], [("r", 1, 4)], [("r", 4, 6)], [("r", 1, 1_000_000)]]:
        check(tables, route(router, batch), batch, live)


def test_after_a_request_that_did_not_fit_another_is_served() -> None:
    tables, router = lab(programs=4)
    with pytest.raises(RuntimeError, match="all 4 edit programs are in use"):
        admit(router, {"large": Spec(tuple(steer("a", 0, float(i), ((i, i + 1),)) for i in range(1, 9)))})
    admit(router, {"small": Spec((steer("b"),))}, finished=["large"])
    check(tables, route(router, [("small", 2, 0)]), [("small", 2, 0)], {"small": Request(Spec((steer("b"),)), 99)})


# -- random steps -----------------------------------------------------------------------------------------------------


def random_spans(rng: random.Random, limit: int) -> tuple:
    edges = sorted(rng.sample(range(limit), 2 * rng.randint(1, 2)))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if rng.random() < 0.4:
        spans[-1] = (spans[-1][0], None)
    return EVERY if rng.random() < 0.2 else tuple(spans)


def random_request(rng: random.Random) -> Request:
    length = rng.randint(8, 30)
    if rng.random() < 0.3:
        return Request(None, length)
    terms = tuple(steer(rng.choice("abcdef"), rng.randrange(3), rng.choice([0.5, -1.0, 2.0]), random_spans(rng, length))
                  for _ in range(rng.randint(0, 3)))
    sites = tuple(rng.sample(SITES, rng.randint(0, 3)))
    return Request(Spec(terms, sites, random_spans(rng, length) if rng.random() < 0.8 else ()), length)


def random_batch(rng: random.Random, live: dict[str, Request]) -> Batch:
    """Prefill chunks and decode rows of some of the requests, in any order, within the step's rows."""
    batch, room = [], rng.choice([TOKENS, TOKENS, 6])
    for req_id in rng.sample(list(live), rng.randint(0, len(live))):
        request = live[req_id]
        count = min(room, request.length - request.done, rng.choice([1, 1, 4, 9, 30]))
        if count:
            batch.append((req_id, count, request.done))
            request.done += count
            room -= count
    return batch


@pytest.mark.parametrize("seed", range(10))
def test_random_steps_do_what_a_loop_over_rows_says(seed: int) -> None:
    rng = random.Random(seed)
    tables, router = lab(programs=64)
    live: dict[str, Request] = {}
    for turn in range(40):
        finished = [r for r, request in live.items() if request.done == request.length or rng.random() < 0.03]
        for req_id in finished:
            del live[req_id]
        new = {f"r{turn}.{i}": random_request(rng) for i in range(rng.choice([0, 0, 1, 3])) if len(live) < 6}
        live |= new
        admit(router, {r: request.spec for r, request in new.items()}, finished)
        for request in live.values():
            if rng.random() < 0.05:
                request.done = 0  # preempted: it starts again
        batch = random_batch(rng, live)
        check(tables, route(router, batch), batch, live)
        if rng.random() < 0.1:
            router.neutralise()
            assert (tables.rows == -1).all()
