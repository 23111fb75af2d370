"""The desk's books: who holds which vectors, what is reserved for captures and until when, and which process serves what."""
from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.beats import Beats
from mia_lab.engine.held import MAX_NOTE, Held
from mia_lab.engine.vectors import Vectors, owner_of

A, B, REQUEST = owner_of("a"), owner_of("b"), ("request", "a")


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# -- vectors ----------------------------------------------------------------------------------------------------------


def test_a_vector_stays_until_its_last_holder_lets_go() -> None:
    book = Vectors()
    book.add({"x": (1, 8), "y": (3, 8)}, A)
    book.add({"x": (1, 8)}, B)
    assert book.hold(["x", "y"], REQUEST) == []
    assert book.release(A) == []
    assert book.release(B, ["x", "y", "unknown"]) == []
    assert (book.shape("x"), book.shape("y")) == ((1, 8), (3, 8))
    assert sorted(book.release(REQUEST)) == ["x", "y"]
    assert "x" not in book and book.shape("y") is None
    assert book.release(REQUEST) == book.release(A, ["x"]) == []


def test_where_one_vector_is_missing_none_is_held() -> None:
    book = Vectors()
    book.add({"x": (1, 8)}, A)
    assert book.hold(["x", "z"], REQUEST) == ["z"]
    assert book.release(A) == ["x"]


def test_to_register_twice_is_to_hold_once() -> None:
    book = Vectors()
    for _ in range(2):
        book.add({"x": (1, 8)}, A)
    assert book.release(A, ["x"]) == ["x"]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30))
def test_vectors_are_there_exactly_while_somebody_holds_them(seed: int) -> None:
    rng, book, held = random.Random(seed), Vectors(), defaultdict(set)
    owners, shas = [A, B, REQUEST, ("request", "r")], list("uvwxyz")
    for _ in range(60):
        owner, some = rng.choice(owners), rng.sample(shas, rng.randint(0, 3))
        known = set().union(*held.values())
        action = rng.randrange(4)
        if action == 0:
            book.add(dict.fromkeys(some, (1, 1)), owner)
            held[owner] |= set(some)
        elif action == 1:
            missing = book.hold(some, owner)
            assert missing == [sha for sha in some if sha not in known]
            held[owner] |= set() if missing else set(some)
        else:
            gone = book.release(owner, some if action == 2 else None)
            held[owner] -= set(some) if action == 2 else held[owner]
            assert set(gone) == known - set().union(*held.values())
        assert {sha for sha in shas if sha in book} == set().union(*held.values())


@pytest.mark.parametrize("name", ["x" * 65, 7, None, b"a"])
def test_an_owner_has_a_short_name(name: Any) -> None:
    with pytest.raises(ValueError, match="an owner is a name"):
        owner_of(name)


# -- captures ---------------------------------------------------------------------------------------------------------


def test_captures_reserve_room_and_give_it_back(clock: Clock) -> None:
    held = Held(clock)
    assert held.admit("t.a", b"note", 60, 10, 100)
    assert not held.admit("t.b", b"", 41, 10, 100)
    assert held.admit("t.b", b"", 40, 10, 100)
    assert (len(held), held.bytes) == (2, 100)
    held.drop(["t.a", "never"])
    assert (len(held), held.bytes) == (1, 40)
    assert held.admit("t.c", b"", 60, 10, 100)


def test_notes_count_as_well(clock: Clock) -> None:
    held = Held(clock)
    assert held.admit("t.a", bytes(60), 0, 10, 100)
    assert not held.admit("t.b", bytes(60), 0, 10, 100)
    held.drop(["t.a"])
    assert held.admit("t.b", bytes(60), 0, 10, 100)


def test_a_capture_runs_until_its_request_has_ended(clock: Clock) -> None:
    held = Held(clock)
    held.admit("t.a", b"note", 1, 10, 100)
    assert held.look("t.a") == (b"note", True)
    assert held.come("t.a")
    assert held.look("t.a") == (b"note", True)
    held.end("t.a")
    assert held.look("t.a") == (b"note", False)
    assert held.look("t.b") is None


def test_a_capture_whose_time_is_over_goes(clock: Clock) -> None:
    held = Held(clock)
    for uid, seconds in (("t.a", 10), ("t.b", 20)):
        held.admit(uid, b"", 50, seconds, 100)
    clock.now += 9.9
    assert held.expire() == []
    clock.now += 0.1
    assert held.expire() == ["t.a"]
    assert "t.a" not in held and held.bytes == 50
    assert held.admit("t.c", b"", 50, 1, 100)
    assert held.renew(["t.b", "t.a"], 100) == ["t.a"]
    clock.now += 50
    assert held.expire() == ["t.c"]
    assert held.renew(["t.b"], 1) == []  # which does not shorten it
    clock.now += 49
    assert held.expire() == []


def test_a_request_whose_capture_ended_before_it_came_is_too_late(clock: Clock) -> None:
    held = Held(clock)
    for uid in ("t.dropped", "t.over", "t.came"):
        held.admit(uid, b"", 1, 10, 100)
    assert held.come("t.came")
    held.drop(["t.dropped"])
    clock.now += 10
    held.expire()
    assert [held.come(uid) for uid in ("t.dropped", "t.over", "t.came", "never")] == [False, False, True, True]
    with pytest.raises(ValueError, match="used before"):
        held.admit("t.over", b"", 1, 10, 100)


@pytest.mark.parametrize("wrong", [
    dict(uid=""), dict(uid="x" * 65), dict(uid="a b"), dict(uid=7), dict(note="text"), dict(note=bytes(MAX_NOTE + 1)), dict(size=-1),
    dict(size=1.5), dict(seconds=0), dict(seconds=-1.0), dict(seconds=float("nan")), dict(seconds=float("inf")), dict(seconds="10"),
    dict(uid="t.taken")])
def test_what_is_out_of_bounds_is_refused(wrong: dict[str, Any]) -> None:
    held = Held()
    held.admit("t.taken", b"", 1, 10, 100)
    with pytest.raises(ValueError, match=r"capture"):
        held.admit(**dict(uid="t.a", note=b"", size=1, seconds=10.0, limit=100) | wrong)
    assert (len(held), held.bytes) == (1, 1)


# -- beats ------------------------------------------------------------------------------------------------------------


def test_processes_hear_what_is_wanted_and_what_others_serve(clock: Clock) -> None:
    beats = Beats(clock)
    assert beats.beat("one", "") == {"wanted": "", "version": 0, "owners": {"one": ["", 0.0]}}
    assert [beats.publish(digest) for digest in ("d1", "d1", "d2", "d1")] == [1, 1, 2, 3]
    clock.now += 2
    assert beats.beat("two", "d1") == {"wanted": "d1", "version": 3, "owners": {"one": ["", 2.0], "two": ["d1", 0.0]}}


def test_a_process_that_is_silent_is_forgotten(clock: Clock) -> None:
    beats = Beats(clock)
    beats.beat("one", "")
    clock.now += 60
    assert list(beats.beat("two", "")["owners"]) == ["two"]
    for i in range(2000):
        found = beats.beat(f"p{i}", "")
    assert len(found["owners"]) == 1024 and "p1999" in found["owners"]


@pytest.mark.parametrize("name", ["x" * 65, 7, None])
def test_names_and_digests_are_short(name: Any) -> None:
    for call in (lambda: Beats().publish(name), lambda: Beats().beat(name, ""), lambda: Beats().beat("one", name)):
        with pytest.raises(ValueError, match="at most 64"):
            call()
