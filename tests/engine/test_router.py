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

from mia_lab.engine.claims import Claims
from mia_lab.engine.config import Sizes
from mia_lab.engine.gates import NEVER
from mia_lab.engine.router import Router, Step
from mia_lab.engine.tables import Tables
from mia_lab.engine.wire import KEY, Gate, Spec, Take, Term, encode
from mia_lab.kernels import program as P
from mia_lab.kernels.tap import asleep, unedited

SITES = [("resid_post", 0), ("mlp_out", 1), ("resid_post", 1)]
WIDTH, TOKENS, ROOM = 2, 24, 8  # a captured row of 2 values takes the room of 8
VECTORS = {name: torch.tensor([[float(i), -float(i)]]) for i, name in enumerate("abcdef", 1)}
EVERY = ((0, None),)

Batch = list[tuple[str, int, int]]  # request, rows, first position
Entries = tuple[tuple[int, bool], ...]  # captured sites, each before or after its edits


@dataclass
class Request:
    """A request under way; without a spec it is nobody's business."""

    spec: Spec | None
    length: int
    done: int = 0


def lab(**sizes: int) -> tuple[Tables, Router]:
    usual = Sizes(TOKENS, requests=12, programs=24, plans=20, terms=256, bank_bytes=6 * 4 * WIDTH, captured_tokens=2 * TOKENS)
    tables = Tables([WIDTH] * 3, [False] * 3, replace(usual, **sizes), torch.float32, torch.device("cpu"))
    for name, vector in VECTORS.items():
        tables.register(name, vector)
    return tables, Router(tables, SITES, Claims())


def admit(router: Router, new: dict[str, Spec | None] | None = None, finished: Iterable[str] = ()) -> None:
    """Tell the router what the scheduler says of new and finished requests: three fields of its output."""
    asked = [SimpleNamespace(req_id=r, sampling_params=SimpleNamespace(
        extra_args=None if spec is None else {KEY: encode(f"uid-{r}", spec)})) for r, spec in (new or {}).items()]
    router.admit(SimpleNamespace(finished_req_ids=list(finished), scheduled_new_reqs=asked))


def route(router: Router, batch: Batch, ids: torch.Tensor | None = None) -> Step | None:
    """Route a batch; the arrays are longer than it, as a runner's are."""
    counts, starts = (np.array([*column, 7, 7], np.int32) for column in ([b[1] for b in batch], [b[2] for b in batch]))
    return router.route([b[0] for b in batch], counts, starts, torch.zeros(TOKENS, dtype=torch.int64) if ids is None else ids)


def steer(name: str = "a", site: int = 0, coeff: float = 1.0, spans: tuple = EVERY, rate: float = 0.0) -> Term:
    return Term("add", *SITES[site], spans, write=name, coeff=coeff, rate=rate)


def take(site: int, spans: tuple = EVERY, before: bool = False) -> Take:
    return Take(*SITES[site], spans, before)


def inside(spans: tuple, position: int) -> bool:
    return any(start <= position and (stop is None or position < stop) for start, stop in spans)


def check(router: Router, step: Step | None, batch: Batch, live: dict[str, Request]) -> None:
    """Hold the tables and the step against a loop over rows."""
    tables, row, taken = router._tables, 0, []
    for req_id, count, start in batch:
        spec = live[req_id].spec or Spec()
        for position in range(start, start + count):
            program, plan, base, at, _, _ = tables.rows[row].tolist()
            expected = [[] for _ in SITES]
            for term in spec.terms:
                if inside(term.spans, position):
                    expected[SITES.index(term.site)].append((VECTORS[term.write][0].tolist(), term.coeff))
            assert listed(tables, program) == expected, (req_id, position)
            assert not noted(tables, unedited) & {site for site in range(len(SITES)) if expected[site]}, (req_id, position)
            if program >= 0 and any(term.rate for term in spec.terms):
                assert at == position, (req_id, position)
            entries = tuple(sorted((SITES.index(t.site), t.before) for t in spec.takes if inside(t.spans, position)))
            assert not noted(tables, asleep) & {site for site in range(len(SITES)) if expected[site] or (site, False) in entries}
            if entries:
                assert tables.offsets[:, plan].tolist() == [
                    [entries.index((site, before)) * ROOM if (site, before) in entries else -1 for before in (True, False)]
                    for site in range(len(SITES))], (req_id, position)
                taken.append((req_id, position, base, entries))
            else:
                assert plan == -1, (req_id, position)
            row += 1
    assert (tables.rows[row:] == -1).all()
    check_step(router, step, taken)


def noted(tables: Tables, some: set[int]) -> set[int]:
    """The sites whose index tables are in a set of addresses."""
    return {site for site in range(len(SITES)) if tables.index[site].data_ptr() in some}


def listed(tables: Tables, program: int) -> list[list[tuple]]:
    """What a program adds at each site, in order: vectors and coefficients."""
    out = [[] for _ in SITES]
    for site in range(len(SITES)) if program >= 0 else ():
        _, index, words, numbers, bank, *_ = tables.of_site(site)
        first, count, *_ = index[program].tolist()
        out[site] = [(bank[words[i, P.WRITE]].tolist(), numbers[i, P.COEFF].item()) for i in range(first, first + count)]
    return out


def check_step(router: Router, step: Step | None, taken: list[tuple[str, int, int, Entries]]) -> None:
    """Each captured row has a piece of the step's half for itself, and the step names them all."""
    if not taken:
        assert step is None
        return
    tables = router._tables
    lo, hi = step.half * tables.half, (step.half + 1) * tables.half
    pieces = sorted((base, base + len(entries) * ROOM) for _, _, base, entries in taken)
    assert lo <= step.lo == pieces[0][0]
    assert pieces[-1][1] == step.hi <= hi
    assert all(end == begin for (_, end), (begin, _) in pairwise(pieces))
    owners = {number: req_id for req_id, _, _, _ in taken for number in router._claims.numbers(f"uid-{req_id}")[-1:]}
    layouts = [step.layouts[plan] for plan in step.plans.tolist()]
    named = [(owners[claim], position, step.lo + start, tuple(layout.cuts)) for claim, position, start, layout in
             zip(step.claims.tolist(), step.positions.tolist(), step.starts.tolist(), layouts, strict=True)]
    assert named == taken
    assert all(layout.stride == len(layout.cuts) * ROOM for layout in layouts)


# -- one thing at a time ----------------------------------------------------------------------------------------------


def test_while_nobody_asks_for_anything_nothing_is_written() -> None:
    tables, router = lab()
    before = tables.rows._version
    admit(router, {"plain": None})
    assert route(router, [("plain", 5, 0), ("unknown", 2, 3)]) is None
    router.neutralise()
    assert tables.rows._version == before


def test_taps_are_told_where_rows_are_edited_and_where_nothing_is_done() -> None:
    tables, router = lab()
    assert noted(tables, asleep) == noted(tables, unedited) == set()  # what runs before the first request warms kernels up
    admit(router, {"taken": Spec(takes=(take(0), take(1))), "edited": Spec(terms=(steer(site=1),)), "plain": None})
    for batch, sleeping, never in [([("taken", 2, 0)], {2}, {0, 1, 2}), ([("taken", 1, 2), ("edited", 3, 0)], {2}, {0, 2}),
                                   ([("edited", 1, 3)], {0, 2}, {0, 2}), ([("taken", 1, 3)], {2}, {0, 1, 2}),
                                   ([("plain", 4, 0)], {0, 1, 2}, {0, 1, 2}), ([("edited", 1, 4)], {0, 2}, {0, 2})]:
        route(router, batch)
        assert (noted(tables, asleep), noted(tables, unedited)) == (sleeping, never), batch


def test_all_taps_are_launched_again_while_graphs_are_captured() -> None:
    tables, router = lab()
    admit(router, {"r": None})  # vLLM may warm itself up by requests
    route(router, [("r", 4, 0)])
    assert noted(tables, asleep) == {0, 1, 2}
    router.wake()
    for _ in range(2):
        router.neutralise()  # as before a dummy run
        assert noted(tables, asleep) == noted(tables, unedited) == set()
    admit(router, {"s": Spec(takes=(take(1),))})
    route(router, [("s", 4, 0)])
    assert noted(tables, asleep) == {0, 2} and noted(tables, unedited) == {0, 1, 2}


def test_rows_left_by_a_larger_batch_are_made_neutral() -> None:
    _, router = lab()
    live = {"r": Request(Spec((steer(),)), 99), "plain": Request(None, 99)}
    admit(router, {r: request.spec for r, request in live.items()})
    for batch in [[("r", 20, 0)], [("r", 3, 20)], [("plain", 4, 0), ("r", 1, 23)], [("r", 12, 0)], [("plain", 2, 4)],
                  [("r", 2, 24)]]:
        check(router, route(router, batch), batch, live)


def test_neutralise_clears_what_the_last_step_wrote() -> None:
    tables, router = lab()
    admit(router, {"r": Spec((steer(),))})
    route(router, [("r", 9, 0)])
    assert (tables.rows[:9, 0] >= 0).all()
    router.neutralise()
    assert (tables.rows == -1).all()


def test_captures_alternate_between_the_halves_and_other_steps_do_not_count() -> None:
    _, router = lab()
    spans = (2, 4), (6, None)
    live = {"r": Request(Spec((), (take(2, spans), take(0, spans))), 99)}
    admit(router, {"r": live["r"].spec})
    halves = []
    for batch in [[("r", 3, 0)], [("r", 1, 3)], [("r", 2, 4)], [("r", 1, 6)], [("r", 1, 7)]]:
        step = route(router, batch)
        check(router, step, batch, live)
        halves.append(None if step is None else step.half)
    assert halves == [0, 1, None, 0, 1]


def test_requests_that_go_on_capturing_are_worked_out_once_for_each_half(monkeypatch: pytest.MonkeyPatch) -> None:
    _, router = lab()
    live = {"plain": Request(None, 99), "r": Request(Spec((steer(),), (take(1, ((2, 40),)),)), 99), "s": Request(Spec((), (take(0),)), 99)}
    admit(router, {req_id: request.spec for req_id, request in live.items()})
    written, write = [], router._write
    monkeypatch.setattr(router, "_write", lambda *args: written.append(1) or write(*args))
    for step in range(8):
        batch = [("r", 1, 5 + step), ("plain", 1, step), ("s", 1, 20 + step)]
        check(router, route(router, batch), batch, live)
        assert router._tables.rows[:3, P.POSITION].tolist() == [5 + step, -1, 20 + step]
    assert len(written) == 2
    for batch in [[("r", 1, 13)], [("r", 1, 14), ("s", 1, 28)], [("r", 1, 40), ("s", 1, 29)]]:  # another batch, then a span's end
        check(router, route(router, batch), batch, live)
    assert len(written) == 5


def test_a_step_that_the_arena_cannot_hold_is_an_error_and_one_that_just_fits_is_not() -> None:
    _, router = lab(captured_tokens=4)
    live = {"r": Request(Spec((), (take(0), take(1), take(2))), 99)}
    admit(router, {"r": live["r"].spec})
    check(router, route(router, [("r", 4, 0)]), [("r", 4, 0)], live)
    with pytest.raises(RuntimeError, match="a step captured 120 values; half the arena holds 96"):
        route(router, [("r", 5, 4)])


def test_requests_that_ask_the_same_share_places_until_the_last_has_finished() -> None:
    _, router = lab(programs=1, plans=1)
    spec, other = Spec((steer("a"),), (take(0),)), Spec((steer("b"),), (take(1, before=True),))
    live = {r: Request(spec, 99) for r in ("one", "two")} | {"three": Request(other, 99)}
    admit(router, {"one": spec, "two": spec})
    admit(router, {"two": spec})  # resumed after a preemption
    admit(router, finished=["one", "never seen"])
    check(router, route(router, [("two", 3, 0)]), [("two", 3, 0)], live)
    admit(router, {"three": other}, finished=["two"])
    check(router, route(router, [("three", 3, 0)]), [("three", 3, 0)], live)


def test_edges_of_adjacent_spans_meet_without_gap_or_overlap() -> None:
    _, router = lab()
    terms = (steer("a", spans=((0, 4),)), steer("b", spans=((4, 8),)), steer("c", spans=((3, 5), (7, None))))
    live = {"r": Request(Spec(terms, (take(1, ((4, 5), (5, 6), (9, 10))), take(1, ((5, 9),), before=True))), 99)}
    admit(router, {"r": live["r"].spec})
    for batch in [[("r", 12, 0)], [("r", 1, 3)], [("r", 1, 4)], [("r", 4, 6)], [("r", 1, 1_000_000)]]:
        check(router, route(router, batch), batch, live)


def test_after_a_request_that_did_not_fit_another_is_served() -> None:
    _, router = lab(programs=4)
    with pytest.raises(RuntimeError, match="all 4 edit programs are in use"):
        admit(router, {"large": Spec(tuple(steer("a", 0, float(i), ((i, i + 1),)) for i in range(1, 9)))})
    admit(router, {"small": Spec((steer("b"),))}, finished=["large"])
    check(router, route(router, [("small", 2, 0)]), [("small", 2, 0)], {"small": Request(Spec((steer("b"),)), 99)})


def test_each_row_of_a_gated_request_names_its_slot_which_is_free_again_when_it_ends() -> None:
    tables, router = lab(requests=2)
    gate = Gate("token", start=1, tokens=(7,))
    spec = Spec((Term("scale", *SITES[0], ((1, None),), gate=0),), (), (gate,))
    admit(router, {"one": spec, "two": spec, "plain": Spec((steer(),))})
    route(router, [("two", 2, 0), ("plain", 2, 0), ("one", 1, 0)])
    two, one = (tables.rows[row, P.SLOT].item() for row in (1, 4))
    assert {one, two} == {0, 1}
    assert tables.rows[:2, P.SLOT].tolist() == [two, two]
    with pytest.raises(RuntimeError, match="all 2 places for gated requests are in use"):
        admit(router, {"three": spec})
    admit(router, {"four": spec}, finished=["two"])
    route(router, [("four", 2, 0)])
    assert tables.rows[1, P.SLOT].item() == two
    assert (tables.opens[tables.rows[0, P.SLOT], 0]).item() == NEVER


def test_a_token_that_is_fed_back_opens_its_gate_in_the_step_that_computes_it() -> None:
    tables, router = lab()
    spec = Spec((Term("scale", *SITES[0], ((2, None),), gate=0),), (), (Gate("token", start=2, tokens=(7, 8)),))
    admit(router, {"r": spec})
    for batch, tokens, opens in [([("r", 2, 0)], [7, 7], NEVER), ([("x", 1, 5), ("r", 1, 2)], [7, 3], NEVER),
                                 ([("x", 1, 6), ("r", 1, 3)], [3, 8], 3), ([("r", 1, 4)], [7], 3)]:
        route(router, batch, torch.tensor(tokens + [7] * (TOKENS - len(tokens))))
        assert tables.opens[router.gates.slots(["r"])[0], 0].item() == opens


def test_a_gate_per_row_puts_its_level_on_the_edits_and_marks_its_first_reading() -> None:
    tables, router = lab()
    late, early = (Term("measure", *SITES[site], EVERY, name, gate=0) for site, name in ((1, "a"), (0, "b")))
    again = replace(late, read="c")
    edit = Term("add", *SITES[2], EVERY, write="d", gate=0)
    admit(router, {"r": Spec((late, again, early, edit, steer("e", 2)), (), (Gate("row", 0.5),))})
    route(router, [("r", 1, 0)])
    program = tables.rows[0, P.PROGRAM]
    flags, levels = [], []
    for site in range(3):
        first, count, *_ = tables.index[site, program].tolist()
        flags.append(tables.words[first : first + count, P.FLAGS].tolist())
        levels.append(tables.numbers[first : first + count, P.LEVEL].tolist())
    assert flags == [[P.FRESH | P.BEGINS], [P.FRESH, P.FRESH], [P.FRESH | P.PER_ROW, P.FRESH]]
    assert levels == [[0.0], [0.0, 0.0], [0.5, 0.0]]


def test_of_two_equal_readings_only_the_first_begins() -> None:
    tables, router = lab()
    reading = Term("measure", *SITES[0], EVERY, "a", gate=0)
    admit(router, {"r": Spec((reading, reading, Term("add", *SITES[2], EVERY, write="d", gate=0)), (), (Gate("row", 0.5),))})
    route(router, [("r", 1, 0)])
    first, *_ = tables.index[0, tables.rows[0, P.PROGRAM]].tolist()
    assert tables.words[first : first + 2, P.FLAGS].tolist() == [P.FRESH | P.BEGINS, P.FRESH]


def test_after_a_step_that_was_broken_off_every_row_is_written_again() -> None:
    tables, router = lab()
    admit(router, {"r": Spec((steer(),))})
    tables.rows.fill_(3)
    router.recover()
    route(router, [("r", 2, 0)])
    assert (tables.rows[2:] == -1).all()


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
    terms = tuple(steer(rng.choice("abcdef"), rng.randrange(3), rng.choice([0.5, -1.0, 2.0]), random_spans(rng, length),
                        rng.choice([0.0, 0.0, 0.0, -0.5])) for _ in range(rng.randint(0, 3)))
    entries = rng.sample([(site, before) for site in range(3) for before in (False, True)], rng.randint(0, 3))
    one = random_spans(rng, length)
    takes = tuple(take(site, rng.choice([one, one, random_spans(rng, length), ()]), before) for site, before in entries)
    return Request(Spec(terms, takes), length)


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
        check(router, route(router, batch), batch, live)
        while rng.random() < 0.6 and all(live[req_id].done < live[req_id].length for req_id, _, _ in batch):
            batch = [(req_id, 1, live[req_id].done) for req_id, _, _ in batch]  # the same requests decode on
            for req_id, _, _ in batch:
                live[req_id].done += 1
            check(router, route(router, batch), batch, live)
        if rng.random() < 0.1:
            router.neutralise()
            assert (tables.rows == -1).all()
