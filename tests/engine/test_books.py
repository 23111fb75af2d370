"""The desk's books: who holds which vectors, what is reserved for captures and until when, and which process serves what."""
from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine import reservation
from mia_lab.engine.beats import Beats
from mia_lab.engine.held import Held
from mia_lab.engine.reservation import MAX_NOTE, Reservation
from mia_lab.engine.vectors import Vectors, owner_of
from mia_lab.errors import EditError, MissingRowsError, RoomError

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


def room(size: int = 1, note: str = "", seconds: float = 10, limit: int = 100, share: int = 100) -> Reservation:
    return Reservation(note, size, seconds, limit, share)


def test_captures_take_room_and_give_it_back(clock: Clock) -> None:
    held = Held(clock)
    held.admit("t.a", room(56, "note"))
    with pytest.raises(RoomError, match="your captures may take 100 bytes together here; 60 are taken, and this one could come to 41"):
        held.admit("t.b", room(41))
    assert "t.b" not in held
    held.admit("t.b", room(40))
    assert (len(held), held.bytes) == (2, 100)
    held.drop(["t.a", "never"])
    assert (len(held), held.bytes) == (1, 40)
    held.admit("t.c", room(0, "n" * 60))
    with pytest.raises(RoomError):
        held.admit("t.d", room(0, "n"))


def test_each_tenant_has_a_share_of_the_room(clock: Clock) -> None:
    held = Held(clock)
    half = lambda size: room(size, share=50)  # noqa: E731
    held.admit("one.a", half(50))
    with pytest.raises(RoomError, match="your captures may take 50 bytes together here; 50 are taken"):
        held.admit("one.b", half(1))
    held.admit("two.a", half(40))
    with pytest.raises(RoomError, match="all tenants may take 100 bytes together here, and too few are left for 11 more, of which yours"):
        held.admit("three.a", half(11))
    held.admit("three.a", half(10))
    held.drop(["one.a"])
    held.admit("one.c", half(50))
    assert held.bytes == 100


def test_a_capture_runs_until_its_request_has_ended(clock: Clock) -> None:
    held = Held(clock)
    held.admit("t.a", room(note="note"))
    assert held.look("t.a") == ("note", True)
    held.end("t.a")
    assert held.look("t.a") == ("note", False)
    assert held.look("t.b") is None


def test_a_capture_whose_time_is_over_goes(clock: Clock) -> None:
    held = Held(clock)
    for uid, seconds in (("t.a", 10), ("t.b", 20)):
        held.admit(uid, room(50, seconds=seconds))
    clock.now += 9.9
    assert held.expire() == []
    clock.now += 0.1
    assert held.expire() == ["t.a"]
    assert "t.a" not in held and held.bytes == 50
    held.admit("t.c", room(50, seconds=1))
    assert held.renew(["t.b", "t.a"], 100) == ["t.a"]
    clock.now += 50
    assert held.expire() == ["t.c"]
    assert held.renew(["t.b"], 1) == []  # which does not shorten it
    clock.now += 49
    assert held.expire() == []
    clock.now += 1
    assert held.expire() == ["t.b"]


def test_a_capture_whose_time_is_over_makes_room_for_the_next(clock: Clock) -> None:
    held = Held(clock)
    held.admit("t.a", room(100))
    clock.now += 10
    held.admit("t.b", room(100))
    assert "t.a" not in held and held.bytes == 100
    assert held.expire() == ["t.a"]  # whose rows are still to be let go of
    assert held.expire() == []


def test_a_request_whose_capture_was_let_go_of_before_is_too_late(clock: Clock) -> None:
    held = Held(clock)
    held.drop(["t.early"])
    with pytest.raises(MissingRowsError, match="let go of before its request came"):
        held.admit("t.early", room())
    held.admit("t.held", room())
    with pytest.raises(EditError, match="a capture of this name is held already"):
        held.admit("t.held", room())
    assert (len(held), held.bytes) == (1, 1)
    held.drop(f"t.{i}" for i in range(1 << 16))
    held.admit("t.early", room())  # so many names are remembered, and no more


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_book_adds_up_whatever_comes(seed: int) -> None:
    rng, clock, known = random.Random(seed), Clock(), {}
    held = Held(clock)
    for i in range(60):
        uid, asked = f"{rng.choice('ab')}.{i}", room(rng.randint(0, 40), "n" * rng.randint(0, 3), rng.randint(1, 20), 100, 60)
        size, tenant = asked.size + len(asked.note), uid[0]
        action = rng.randrange(4)
        if action == 0:
            clock.now += rng.randint(0, 5)
            assert sorted(held.expire()) == sorted(name for name, (_, until) in known.items() if until <= clock.now)
        elif action == 1:
            held.drop(rng.sample(sorted(known), min(len(known), 2)))
        else:
            known = {name: one for name, one in known.items() if name in held}
            mine = sum(taken for name, (taken, _) in known.items() if name[0] == tenant)
            fits = mine + size <= 60 and sum(taken for taken, _ in known.values()) + size <= 100
            try:
                held.admit(uid, asked)
                came = True
                known[uid] = size, clock.now + asked.seconds
            except RoomError:
                came = False
            assert came == fits
        known = {name: one for name, one in known.items() if name in held}
        assert held.bytes == sum(taken for taken, _ in known.values()) and len(held) == len(known)


def test_a_reservation_crosses_as_it_was() -> None:
    asked = Reservation('{"said": "a \\ \u00e9"}', 7, 1.5, 1 << 50, 0)
    assert reservation.decode(reservation.encode(asked)) == asked
    reservation.encode(room(note='"' * MAX_NOTE))


@pytest.mark.parametrize("wrong", [
    dict(note=None), dict(note=b"text"), dict(note="n" * (MAX_NOTE + 1)), dict(size=-1), dict(size=1.5), dict(size=True),
    dict(size=1 << 63), dict(seconds=0), dict(seconds=-1.0), dict(seconds=float("nan")), dict(seconds=float("inf")), dict(seconds="10"),
    dict(seconds=True), dict(limit=-1), dict(limit=None), dict(share="9"), dict(more=1)])
def test_what_is_out_of_bounds_is_refused(wrong: dict[str, Any]) -> None:
    said = dict(note="", size=1, seconds=10.0, limit=100, share=100) | wrong
    with pytest.raises(ValueError, match=r"capture|reservation"):
        reservation.decode(json.dumps(said, default=str) if b"text" not in said.values() else said)


@pytest.mark.parametrize("text", [None, 7, b"{}", "", "{", "[]", "{}", "7", '"text"', "[" * 100_000, "n" * (1 << 18), '{"note": ""}',
                                  '{"size": ' + "9" * 5000 + "}"])
def test_what_is_no_reservation_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        reservation.decode(text)


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
