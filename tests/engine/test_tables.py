"""Tables: equal entries share a place, used ones keep it and their contents, idle ones make room, addresses stay."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.config import Sizes
from mia_lab.engine.tables import Plan, Program, Shelf, Tables
from mia_lab.engine.wire import MAX_TERMS

SITES, WIDTH = 3, 2
VECTORS = {name: torch.tensor([float(i), -float(i)]) for i, name in enumerate("abcdefg", 1)}


def tables(**sizes: int) -> Tables:
    usual = Sizes(tokens=8, programs=4, plans=3, bank_rows=5, captured_tokens=4, width=WIDTH)
    made = Tables(SITES, replace(usual, **sizes), torch.float32, torch.device("cpu"))
    for name, vector in VECTORS.items():
        made.register(name, vector)
    return made


def contents(t: Tables, place: int) -> list[list[tuple[list[float], float]]]:
    """What a program's place says at each site: the bank rows it names, with their coefficients."""
    found = []
    for site in range(SITES):
        _, vec, coef, bank, _, _ = t.of_site(site)
        used = [k for k in range(MAX_TERMS) if vec[place, k] >= 0]
        assert used == list(range(len(used)))  # filled from the front: the kernel stops at an empty first entry
        found.append(sorted((bank[vec[place, k]].tolist(), coef[place, k].item()) for k in used))
    return found


def meant(program: Program) -> list[list[tuple[list[float], float]]]:
    return [sorted((VECTORS[name].tolist(), coeff) for at, name, coeff in program if at == site)
            for site in range(SITES)]


def offsets(plan: Plan) -> list[int]:
    return [plan.index(site) * WIDTH if site in plan else -1 for site in range(SITES)]


# -- Shelf ------------------------------------------------------------------------------------------------------------


def test_equal_entries_share_a_place_which_is_written_once() -> None:
    shelf: Shelf[str] = Shelf(2, "things")
    (a, fresh), again, (b, other) = shelf.take("a"), shelf.take("a"), shelf.take("b")
    assert (fresh, again, other) == (True, (a, False), True)
    assert {a, b} == {0, 1}


def test_a_full_shelf_says_what_is_full() -> None:
    shelf: Shelf[str] = Shelf(2, "edit programs")
    shelf.take("a"), shelf.take("b")
    with pytest.raises(RuntimeError, match="all 2 edit programs are in use"):
        shelf.take("c")
    assert shelf.take("a")[1] is False


def test_an_entry_falls_idle_with_its_last_use_and_is_found_again_unwritten() -> None:
    shelf: Shelf[str] = Shelf(1, "things")
    place, _ = shelf.take("a")
    shelf.take("a")
    assert [shelf.give("a"), shelf.give("a")] == [False, True]
    assert shelf.take("a") == (place, False)
    with pytest.raises(RuntimeError, match="in use"):
        shelf.take("b")


def test_room_is_made_by_the_entry_that_has_been_idle_longest() -> None:
    shelf: Shelf[str] = Shelf(3, "things")
    places = {key: shelf.take(key)[0] for key in "abc"}
    for key in "bac":
        shelf.give(key)
    shelf.take("b"), shelf.give("b")  # now a, c, b
    assert shelf.take("d") == (places["a"], True)
    assert shelf.take("b") == (places["b"], False)
    assert shelf.take("e") == (places["c"], True)
    assert shelf.take("b") == (places["b"], False)


def test_an_evicted_entry_frees_its_place() -> None:
    shelf: Shelf[str] = Shelf(1, "things")
    shelf.take("a"), shelf.give("a")
    shelf.evict("a")
    assert shelf.take("b") == (0, True)
    shelf.give("b")
    assert shelf.take("a") == (0, True)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), max_size=60), st.integers(1, 4))
@settings(deadline=None)
def test_used_entries_keep_their_places_apart_whatever_happens(steps: list[tuple[bool, str]], size: int) -> None:
    shelf: Shelf[str] = Shelf(size, "things")
    uses: Counter[str] = Counter()
    places: dict[str, int] = {}
    owner: dict[int, str] = {}  # what was last written to each place
    for take, key in steps:
        if not take and uses[key]:
            uses[key] -= 1
            assert shelf.give(key) is (uses[key] == 0)
        elif take and (uses[key] or len(+uses) < size):
            place, fresh = shelf.take(key)
            assert fresh is (owner.get(place) != key)
            assert place in range(size)
            assert not uses[key] or places[key] == place
            places[key], owner[place] = place, key
            uses[key] += 1
        elif take:
            with pytest.raises(RuntimeError, match="in use"):
                shelf.take(key)
        assert all(owner[places[used]] == used for used in +uses)


# -- Tables -----------------------------------------------------------------------------------------------------------


def test_fresh_tables_are_neutral() -> None:
    t = tables()
    assert (t.rows == -1).all()
    assert (t.vec == -1).all()
    assert (t.offsets == -1).all()
    assert not t.arena.any()
    assert t.arena.shape == (2 * t.half,)
    assert t.half == 4 * SITES * WIDTH
    assert t.nbytes == sum(x.nbytes for x in (t.rows, t.vec, t.coef, t.bank, t.offsets, t.arena))


def test_a_program_is_written_site_by_site_with_its_vectors() -> None:
    t = tables()
    program: Program = ((0, "a", 2.0), (0, "b", -1.0), (2, "a", 0.5))
    place = t.take_program(program)
    assert contents(t, place) == meant(program)
    assert contents(t, place)[1] == []


def test_a_site_holds_as_many_vectors_as_may_meet() -> None:
    t = tables()
    program = tuple((1, name, 1.0) for name in "abcd")
    assert len(program) == MAX_TERMS
    assert contents(t, t.take_program(program)) == meant(program)


def test_equal_programs_share_a_place_and_equal_vectors_a_bank_row() -> None:
    t = tables(bank_rows=1, programs=3)
    one, again = t.take_program(((0, "a", 1.0),)), t.take_program(((0, "a", 1.0),))
    other = t.take_program(((0, "a", 2.0), (1, "a", 1.0)))
    assert one == again != other
    with pytest.raises(RuntimeError, match="all 1 vector places are in use"):
        t.take_program(((0, "b", 1.0),))


def test_a_place_is_used_again_by_another_program_without_remains() -> None:
    t = tables(programs=1, bank_rows=3)
    for program in [((0, "a", 2.0), (0, "b", 3.0), (2, "c", 1.0)), ((1, "c", 1.0),), ((0, "d", 1.0), (1, "a", 1.0))]:
        place = t.take_program(program)
        assert contents(t, place) == meant(program)
        t.give_program(program)


@pytest.mark.parametrize("plan", [(0,), (2,), (0, 2), (0, 1, 2)])
def test_a_plan_gives_each_of_its_sites_the_next_row(plan: Plan) -> None:
    t = tables()
    place = t.take_plan(plan)
    assert t.offsets[:, place].tolist() == offsets(plan)
    assert t.plans[place] == plan
    assert t.take_plan(plan) == place


def test_plans_in_use_are_not_dropped_for_another() -> None:
    t = tables(plans=1)
    t.take_plan((0, 1))
    with pytest.raises(RuntimeError, match="all 1 capture plans are in use"):
        t.take_plan((0,))
    t.give_plan((0, 1))
    assert t.offsets[:, t.take_plan((0,))].tolist() == offsets((0,))


PROGRAMS: list[Program] = [
    ((0, "a", 1.0),), ((0, "a", 2.0),), ((0, "b", 1.0), (1, "c", 1.0)), ((1, "c", -1.0), (2, "c", 1.0)),
    ((2, "d", 1.0),), ((0, "e", 1.0), (0, "f", 1.0), (0, "g", 1.0)),
    ((0, "a", 1.0), (1, "b", 1.0), (2, "c", 1.0)), ((2, "g", 1.0),)]
PLANS: list[Plan] = [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)]


def fits(t: Tables, used: Counter[Any], item: Any) -> bool:
    """Whether one more entry has room beside those in use, by plain counting."""
    programs = {p for p in {*(+used), item} if p in PROGRAMS}
    vectors = {name for program in programs for _, name, _ in program}
    plans = {*(+used), item} - programs
    return len(programs) <= t.sizes.programs and len(vectors) <= t.sizes.bank_rows and len(plans) <= t.sizes.plans


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(PROGRAMS + PLANS)), max_size=50))
@settings(max_examples=60, deadline=None)
def test_what_is_in_use_is_never_overwritten_and_what_fits_is_never_refused(steps: list[tuple[bool, Any]]) -> None:
    t = tables()
    addresses = [x.data_ptr() for site in range(SITES) for x in t.of_site(site)]
    used: Counter[Any] = Counter()
    places: dict[Any, int] = {}
    for take, item in steps:
        kind = "program" if item in PROGRAMS else "plan"
        if take and fits(t, used, item):
            place = getattr(t, f"take_{kind}")(item)
            assert not used[item] or places[item] == place
            places[item] = place
            used[item] += 1
        elif not take and used[item]:
            getattr(t, f"give_{kind}")(item)
            used[item] -= 1
        for held in +used:
            if held in PROGRAMS:
                assert contents(t, places[held]) == meant(held)
            else:
                assert t.offsets[:, places[held]].tolist() == offsets(held)
                assert t.plans[places[held]] == held
    assert [x.data_ptr() for site in range(SITES) for x in t.of_site(site)] == addresses


def test_a_program_that_did_not_fit_is_written_when_it_does() -> None:
    t = tables(bank_rows=3)
    first, large = ((0, "a", 1.0),), ((0, "b", 1.0), (1, "c", 1.0), (2, "d", 1.0))
    t.take_program(first)
    with pytest.raises(RuntimeError, match="all 3 vector places are in use"):
        t.take_program(large)
    t.give_program(first)
    assert contents(t, t.take_program(large)) == meant(large)
    t.give_program(large)
    assert contents(t, t.take_program(((0, "e", 1.0), (1, "f", 1.0), (2, "g", 1.0)))) != []


def test_a_program_whose_vector_was_unknown_is_written_once_it_is_registered() -> None:
    t = tables()
    program: Program = ((0, "a", 1.0), (1, "late", 1.0))
    with pytest.raises(KeyError):
        t.take_program(program)
    t.register("late", torch.tensor([8.0, 9.0]))
    assert contents(t, t.take_program(program))[1] == [([8.0, 9.0], 1.0)]


def test_a_forgotten_vector_stays_in_the_bank_while_a_program_uses_it() -> None:
    t = tables()
    program: Program = ((0, "a", 1.0),)
    place = t.take_program(program)
    t.forget("a")
    t.forget("never known")
    assert t.take_program(program) == place
    assert contents(t, place) == meant(program)
