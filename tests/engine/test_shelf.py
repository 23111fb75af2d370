"""Shelves: equal entries share a place, used ones keep it, idle ones make room."""
from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.tables import FullError, Shelf


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


def test_a_run_takes_places_in_a_row_and_room_is_made_until_it_fits() -> None:
    shelf: Shelf[str] = Shelf(6, "places")
    assert [shelf.take(key, length)[0] for key, length in (("a", 2), ("b", 1), ("c", 2))] == [0, 2, 3]
    with pytest.raises(RuntimeError, match="all 6 places are in use"):
        shelf.take("d", 2)  # one is free
    shelf.give("a"), shelf.give("c")
    assert shelf.take("d", 2) == (0, True)
    assert shelf.take("c", 2) == (3, False)  # a made room enough
    shelf.give("c")
    assert shelf.take("e", 3) == (3, True)  # c and the place after it, which touch


def test_evicted_runs_that_touch_become_one() -> None:
    shelf: Shelf[str] = Shelf(6, "places")
    for key in "abc":
        shelf.take(key, 2), shelf.give(key)
    for key in "acb":
        shelf.evict(key)
    assert shelf.take("whole", 6) == (0, True)


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


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "evict"]), st.sampled_from("abcdef"), st.integers(1, 3)), max_size=80))
@settings(deadline=None)
def test_what_is_free_is_all_that_no_entry_holds_in_as_few_runs_as_can_be(steps: list[tuple[str, str, int]]) -> None:
    shelf: Shelf[str] = Shelf(8, "places")
    uses: Counter[str] = Counter()
    for what, key, length in steps:
        if what == "take":
            with suppress(FullError):
                shelf.take(key, length)
                uses[key] += 1
        elif what == "give" and uses[key]:
            uses[key] -= 1
            shelf.give(key)
        elif what == "evict" and key in shelf.places and not uses[key]:
            shelf.evict(key)
        held = [place for start, n in shelf.places.values() for place in range(start, start + n)]
        free = [place for start, n in shelf._free for place in range(start, start + n)]
        assert sorted(held + free) == list(range(8))
        assert all(start + n < after for (start, n), (after, _) in pairwise(shelf._free))
