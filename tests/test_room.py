"""Room: requests are let in exactly where their distinct specs fit together, and what is let in always finds places in the tables."""
from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.claims import Claims
from mia_lab.engine.config import Sizes
from mia_lab.engine.room import InFlight, Room
from mia_lab.engine.router import Router
from mia_lab.engine.tables import Shelf, Tables
from mia_lab.engine.wire import KEY, Gate, Spec, Take, Term, addresses, encode, segments
from mia_lab.errors import EditError, RoomError

SITES = [("resid_post", 0), ("mlp_out", 1), ("resid_post", 1)]
WIDTH, TOGETHER = 8, 4
VECTORS = {f"v{i}": torch.full((1, WIDTH), float(i)) for i in range(12)}
VECTORS |= {f"block{i}": torch.full((3, WIDTH), float(-i)) for i in range(4)}
ROOM = Room(bank_rows=9, programs=7, terms=14, plans=3, biased_tokens=40, together=TOGETHER)


def add(name: str, site: int = 0, spans: tuple = ((0, None),), coeff: float = 1.0) -> Term:
    return Term("add", *SITES[site], spans, write=name, coeff=coeff)


def made(rng: random.Random) -> Spec:
    """Some spec: a few edits that begin and end anywhere, rows by position, captures."""
    terms = []
    for _ in range(rng.randint(0, 5)):
        start = rng.randint(0, 3)
        if rng.random() < 0.3:
            terms.append(Term("add", *SITES[rng.randrange(3)], ((start, start + 3),), write=f"block{rng.randrange(4)}", origin=start,
                              aligned=3))
        else:
            terms.append(add(f"v{rng.randrange(12)}", rng.randrange(3), ((start, rng.choice([None, start + 2])),), rng.choice([1.0, 2.0])))
    takes = tuple(Take(*site, ((rng.randint(0, 2), None),)) for site in SITES if rng.random() < 0.3)
    return Spec(tuple(terms), takes)


def fits(specs: list[Spec], room: Room = ROOM) -> bool:
    try:
        room.check(specs, VECTORS)
    except EditError:
        return False
    return True


def worst(specs: list[Spec]) -> tuple[int, int, int, int]:
    """The most vectors, programs, terms and plans that some four of these requests use, counted one by one."""
    def use(some: tuple[Spec, ...]) -> tuple[int, int, int, int]:
        cuts = [cut for spec in some for cut in segments(spec)]
        programs = {tuple(replace(term, spans=()) for term in cut.terms) for cut in cuts if cut.terms}
        plans = {tuple(take.site for take in cut.takes) for cut in cuts if cut.takes}
        return sum(len(VECTORS[sha]) for sha in set().union(*map(addresses, some))), len(programs), sum(map(len, programs)), len(plans)

    distinct = set(specs)
    return tuple(map(max, zip(*map(use, combinations(distinct, min(TOGETHER, len(distinct)))))))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_request_is_let_in_exactly_where_the_distinct_specs_then_fit(seed: int) -> None:
    rng, book, inside = random.Random(seed), InFlight(ROOM), []
    known = [made(rng) for _ in range(8)]
    for _ in range(40):
        if inside and rng.random() < 0.4:
            book.leave(inside.pop(rng.randrange(len(inside))))
            continue
        spec = rng.choice(known)
        try:
            book.enter(spec, VECTORS)
        except RoomError:
            assert not fits([*inside, spec])
        else:
            inside.append(spec)
            assert fits(inside)
            assert all(used <= room for used, room in zip(worst(inside), (ROOM.bank_rows, ROOM.programs, ROOM.terms, ROOM.plans)))
    assert len(book) == len(set(inside))
    for spec in inside:
        book.leave(spec)
    assert len(book) == 0
    book.enter(Spec((add("v1"),)), VECTORS)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_is_let_in_always_finds_places_in_the_tables(seed: int) -> None:
    """Whatever the order in which requests come, run and end, and in how many pieces the tables lie by then."""
    rng, book = random.Random(seed), InFlight(ROOM)
    sizes = Sizes(tokens=8, requests=2 * TOGETHER, programs=ROOM.programs, plans=ROOM.plans, terms=ROOM.terms,
                  bank_bytes=4 * WIDTH * ROOM.bank_rows, captured_tokens=8)
    tables = Tables([WIDTH] * 3, [False] * 3, sizes, torch.float32, torch.device("cpu"))
    assert tables.bank_rows == ROOM.bank_rows
    for name, vector in VECTORS.items():
        tables.register(name, vector)
    router, waiting, running = Router(tables, SITES, Claims()), [], []
    for i in range(60):
        spec = made(rng)
        try:
            book.enter(spec, VECTORS)
            waiting.append((f"r{i}", spec))
        except RoomError:
            pass
        ended = [running.pop(rng.randrange(len(running))) for _ in range(rng.randint(0, len(running)))]
        for _, old in ended:
            book.leave(old)
        begun = [waiting.pop(rng.randrange(len(waiting))) for _ in range(min(len(waiting), TOGETHER - len(running)))]
        running += begun
        router.admit(SimpleNamespace(finished_req_ids=[name for name, _ in ended], scheduled_new_reqs=[
            SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args={KEY: encode(name, spec)})) for name, spec in begun]))
        for _, spec in running:
            check_bank(tables, spec)


def check_bank(tables: Tables, spec: Spec) -> None:
    """Every vector of a running request lies, whole, where the bank's book says."""
    tables.flush()
    for term in spec.terms:
        start, n = tables._bank.places[term.write]
        assert torch.equal(tables.bank[start : start + n], VECTORS[term.write])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_keys_and_values_under_a_bias_always_find_places(seed: int) -> None:
    rng, book = random.Random(seed), InFlight(ROOM)
    shelf: Shelf[str] = Shelf(ROOM.biased_tokens, "places")
    bias = Spec((Term("bias", "attention", 0, ((0, None),), coeff=1.0, columns=(0, 2)),))
    waiting, running = [], []
    for i in range(80):
        length = rng.randint(1, 12)
        try:
            book.enter(bias, {}, length)
            waiting.append((str(i), length))
        except RoomError:
            pass
        for _ in range(rng.randint(0, len(running))):
            name, length = running.pop(rng.randrange(len(running)))
            shelf.give(name), shelf.evict(name)
            book.leave(bias, length)
        while waiting and len(running) < TOGETHER:
            running.append(waiting.pop(0))
            shelf.take(*running[-1])


@pytest.mark.parametrize(("specs", "says"), [
    ([Spec(tuple(add(f"v{i}") for i in range(10)))], "10 different vectors; the engine holds 9"),
    ([Spec(tuple(add("v1", spans=((i, None),)) for i in range(8)))], "8 different programs of edits; the engine holds 7"),
    ([Spec((add("v1"),) * 15)], "15 terms of edits; the engine holds 14"),
    ([Spec(takes=tuple(Take(*SITES[n], ((i, None),)) for n, i in enumerate((0, 1, 2)))), Spec(takes=(Take(*SITES[2], ((0, None),)),))],
     "4 different sets of points to capture; the engine holds 3"),
])
def test_what_is_too_much_is_named(specs: list[Spec], says: str) -> None:
    with pytest.raises(EditError, match=says):
        ROOM.check(specs, VECTORS)
    book = InFlight(ROOM)
    for spec in specs[:-1]:
        book.enter(spec, VECTORS)
    with pytest.raises(RoomError, match=says):
        book.enter(specs[-1], VECTORS)


def test_equal_specs_and_equal_edits_of_other_positions_count_once() -> None:
    book, spec = InFlight(ROOM), Spec(tuple(add(f"v{i}") for i in range(9)))
    for _ in range(100):
        book.enter(spec, VECTORS)
    book.enter(Spec(tuple(add(f"v{i}", spans=((5, None),)) for i in range(9))), VECTORS)
    with pytest.raises(RoomError, match="different vectors"):
        book.enter(Spec((add("v10"),)), VECTORS)


def test_only_so_many_run_together() -> None:
    specs = [Spec((add(f"v{i}"), add(f"v{i + 1}", 1))) for i in range(0, 10, 2)]  # ten vectors, of which four requests use eight
    ROOM.check(specs, VECTORS)
    with pytest.raises(EditError, match="10 different vectors"):
        Room(9, 7, 14, 3, 40, together=5).check(specs, VECTORS)


def test_where_priorities_differ_all_that_is_in_flight_must_fit() -> None:
    """Who was preempted keeps its places, while any number of others run in its stead."""
    book, specs = InFlight(ROOM), [Spec((add(f"v{i}"), add(f"v{i + 1}", 1))) for i in range(0, 10, 2)]
    for spec in specs:
        book.enter(spec, VECTORS, rank=1)
    for spec in (specs[0], Spec((add("v1"),))):
        with pytest.raises(RoomError, match="10 different vectors; the engine holds 9"):
            book.enter(spec, VECTORS, rank=0)
    book.enter(specs[0], VECTORS, rank=1)
    book.leave(specs[4], rank=1)
    book.enter(specs[0], VECTORS, rank=0)
    with pytest.raises(RoomError, match="10 different vectors"):
        book.enter(specs[4], VECTORS, rank=1)
    book.leave(specs[0], rank=0)
    book.enter(specs[4], VECTORS, rank=1)


def test_where_priorities_differ_gates_that_hold_have_places_of_their_own() -> None:
    held = Spec((Term("measure", *SITES[0], ((0, None),), read="v0", gate=0), Term("scale", *SITES[2], ((1, None),), gate=0)),
                gates=(Gate("since"),))
    book, other = InFlight(ROOM), Spec((add("v1"),))
    for _ in range(2 * TOGETHER + 1):
        book.enter(held, VECTORS)
    with pytest.raises(RoomError, match="9 times gates that hold; the engine follows 8"):
        book.enter(other, VECTORS, rank=1)
    book.leave(held)
    book.enter(other, VECTORS, rank=1)
    with pytest.raises(RoomError, match="9 times gates that hold"):
        book.enter(held, VECTORS)
    book.leave(other, rank=1)
    book.enter(held, VECTORS)


def test_where_priorities_differ_all_keys_and_values_must_fit() -> None:
    book, bias = InFlight(ROOM), Spec((Term("bias", "attention", 0, ((0, None),), coeff=1.0, columns=(0, 2)),))
    for _ in range(9):
        book.enter(bias, {}, 5)
    with pytest.raises(RoomError, match="attention biases over 45 tokens; the engine keeps 40"):
        book.enter(Spec((add("v1"),)), VECTORS, rank=1)
    book.enter(bias, {}, 5)


def test_a_process_has_its_share() -> None:
    book, other = InFlight(ROOM.share(2)), Spec((add("v9"),))
    with book.held(Spec(tuple(add(f"v{i}") for i in range(4))), VECTORS), pytest.raises(RoomError, match="holds 4 at once"):
        book.enter(other, VECTORS)
    book.enter(other, VECTORS)


def test_a_request_that_was_turned_away_leaves_nothing_behind() -> None:
    book, bias = InFlight(ROOM), Spec((Term("bias", "attention", 0, ((0, None),), coeff=1.0, columns=(0, 2)),))
    book.enter(bias, {}, 20)
    for _ in range(5):
        with pytest.raises(RoomError, match="an attention bias over 30 more tokens; the engine keeps 40"):
            book.enter(bias, {}, 30)
    book.enter(bias, {}, 20)
    with pytest.raises(EditError, match=r"hold up to 41 tokens together; the engine keeps 40\. Load with max_biased_tokens=41"):
        ROOM.check_lengths([20, 21])


def test_both_sides_of_a_point_need_chunks() -> None:
    twice = Spec(takes=(Take(*SITES[0], ((0, None),), True), Take(*SITES[0], ((0, None),))))
    ROOM.check([twice], {})
    with pytest.raises(EditError, match="enable_chunked_prefill=True"):
        Room(9, 7, 14, 3, 40, 4, chunked=False).check([twice], {})


def test_entering_costs_little_while_thousands_are_in_flight() -> None:
    room, rng = Room(1 << 20, 1 << 20, 1 << 20, 1 << 20, 0, 256), random.Random(0)
    book = InFlight(room)
    specs = [Spec(tuple(add(f"v{rng.randrange(12)}", n, coeff=rng.random()) for n in range(3))) for _ in range(4000)]
    for spec in specs:
        book.enter(spec, VECTORS)
    start = time.perf_counter()
    for spec in specs:
        book.enter(spec, VECTORS)
    assert (time.perf_counter() - start) / len(specs) < 50e-6
