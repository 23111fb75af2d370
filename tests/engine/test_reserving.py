"""Room for captures, which comes with their requests: given, held and given back, and nothing of it left where a request is turned away."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from desks import VECTORS, Worker, add, at, facts, is_empty, request, room

from mia_lab.engine.desk import Desk
from mia_lab.engine.wire import Spec
from mia_lab.errors import EditError, MissingRowsError, RoomError


@pytest.mark.parametrize("wrong", [7, "", "{}", "[" * 100_000, room().replace(":1,", ":-1,"), {"note": ""}])
def test_room_that_cannot_be_read_is_not_given(desk: Desk, wrong: Any) -> None:
    with pytest.raises(EditError, match="what this request asks of mia_lab cannot be read"):
        desk.enter(request(Spec(takes=(at(),)), room=wrong))
    with pytest.raises(EditError, match="a spec is a string"):
        desk.enter(request(None, room=room()))
    assert is_empty(desk) and len(desk.held) == 0


def test_without_room_a_request_is_turned_away_and_leaves_nothing(desk: Desk) -> None:
    spec = Spec((add(),), (at(),))
    desk.enter(request(spec, "r0", "t.0", room=room(10)))
    for known in (spec, Spec((add(coeff=2.0),), (at(),))):  # whether one like it is in flight or not
        with pytest.raises(RoomError, match="your captures may take 15 bytes"):
            desk.enter(request(known, "r1", "t.1", room=room(6)))
    desk.leave("r0")
    with pytest.raises(RoomError):  # what ended is still held
        desk.enter(request(spec, "r1", "t.1", room=room(6)))
    assert is_empty(desk) and desk.held.bytes == 10
    desk.drop(["t.0"])
    desk.register(VECTORS, "client")
    desk.enter(request(spec, "r1", "t.1", room=room(6)))


def test_where_the_tables_are_full_no_room_is_taken(desk: Desk) -> None:
    desk.enter(request(Spec(tuple(add(coeff=float(n), layer=n % 2) for n in range(8))), "r0"))
    with pytest.raises(RoomError, match="terms of edits"):
        desk.enter(request(Spec((add(coeff=9.0),), (at(),)), "r1", room=room()))
    assert desk.held.bytes == 0


def test_what_the_engine_then_does_not_take_leaves_nothing(desk: Desk) -> None:
    desk.enter(request(Spec((add(),), (at(),)), room=room()))
    desk.undo("r")
    assert is_empty(desk) and desk.held.bytes == 0 and desk.collect("t.uid") is None
    desk.undo("another")


def test_a_capture_is_collected_by_name_while_it_is_held(desk: Desk, worker: Worker) -> None:
    call = lambda name, *args: desk.answer(f"mia_{name}", args)[0]  # noqa: E731
    assert call("collect", "t.uid") is None
    desk.enter(request(Spec(takes=(at(),)), room=room(6, "note")))
    assert call("collect", "t.uid", 3) == {"note": "note", "running": True, "rows": [["resid_post", 0]]}
    assert worker.heard() == [("rows", "t.uid", 3)]
    desk.leave("r")
    assert not call("collect", "t.uid")["running"]
    assert call("beat", "p", "")["held"] == [1, 10]
    worker.heard()
    call("drop", ["t.uid", "other"])
    assert worker.heard() == [("drop", ["t.uid", "other"])]
    assert call("collect", "t.uid") is None
    assert call("beat", "p", "") == {"wanted": "", "version": 0, "owners": {"p": ["", 0.0]}, "rows": 5, "dropped": 0, "gates": [1, 2],
                                     "held": [0, 0]} | {"owners": desk.beats.beat("p", "")["owners"]}


def test_rows_captured_after_their_capture_was_let_go_are_dropped_when_the_request_ends(desk: Desk, worker: Worker) -> None:
    desk.enter(request(Spec(takes=(at(),)), room=room()))
    desk.drop(["t.uid"])
    worker.heard()
    desk.leave("r")
    desk.answer("mia_publish", ("digest",))
    assert worker.heard() == [("drop", ["t.uid"])]


def test_a_capture_that_was_let_go_turns_its_request_away(desk: Desk) -> None:
    desk.drop(["t.uid"])
    with pytest.raises(MissingRowsError, match="let go of before its request came"):
        desk.enter(request(Spec(takes=(at(),)), room=room()))
    assert is_empty(desk) and desk.held.bytes == 0


def test_what_is_over_goes_with_the_next_call(desk: Desk, worker: Worker) -> None:
    now = [0.0]
    desk.held._clock = lambda: now[0]
    desk.enter(request(Spec(takes=(at(),)), room=room(seconds=5)))
    now[0] = 5.0
    assert desk.answer("mia_collect", ("t.uid",)) == [None]
    assert worker.heard() == [("drop", ["t.uid"])]


def test_rows_that_nobody_admitted_are_their_clients(desk: Desk, worker: Worker) -> None:
    desk.enter(request(Spec(takes=(at(),)), uid="session"))
    desk.leave("r")
    desk.answer("mia_beat", ("p", ""))
    assert worker.heard() == [("counts",)]


def test_requests_come_while_captures_are_let_go_of(worker: Worker) -> None:
    """On two threads, as in an engine: whatever comes first, no room is lost and none is given twice."""
    desk, errors, uids = Desk(facts(), worker), [], []

    def guarded(work: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                for i in range(2000):
                    work(i)
            except Exception as error:
                errors.append(error)
        return run

    def come(i: int) -> None:
        try:
            desk.enter(request(Spec(takes=(at(),)), f"r{i}", f"t.{i}", room=room(5, seconds=1e-4 if i % 3 else 60)))
        except RoomError:
            return
        uids.append(f"t.{i}")
        desk.leave(f"r{i}")

    def call(i: int) -> None:
        desk.answer("mia_drop", (uids[-3:],))
        if desk.held.bytes > 15 or desk.answer("mia_beat", ("p", ""))[0]["held"][0] > 3:
            raise AssertionError("more is held than there is room for")

    threads = [threading.Thread(target=guarded(work)) for work in (come, call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(uids) > 3
    desk.drop(uids)
    assert (len(desk.held), desk.held.bytes) == (0, 0)
    assert is_empty(desk)
