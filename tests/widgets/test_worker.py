"""Turns and the worker, without an engine."""
from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from mia_lab.running.turns import Stopped, Turns
from mia_lab.widgets.engine_worker import EngineWorker, Job


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def worker(turns: Turns) -> EngineWorker:
    return EngineWorker(SimpleNamespace(_engine=SimpleNamespace(turns=turns), _open=SimpleNamespace()))


def steps(turns: Turns, n: int, seen: list[str], name: str) -> None:
    for _ in range(n):
        turns.go_on()
        time.sleep(0.002)
    seen.append(name)


def job(turns: Turns, seen: list[str], name: str, kind: str = "a", n: int = 1) -> Job:
    return Job(kind, lambda: steps(turns, n, seen, name), lambda error: seen.append(f"{name}: {error}"),
               lambda: seen.append(f"{name} stopped"))


def test_the_latest_of_a_kind_wins_and_other_kinds_run(worker: EngineWorker, turns: Turns) -> None:
    seen: list[str] = []
    worker.submit(job(turns, seen, "first", n=1000))
    while worker._running is None:
        time.sleep(0.001)
    for name in ("second", "third"):
        worker.submit(job(turns, seen, name))
    worker.submit(job(turns, seen, "other", kind="b"))
    assert worker.wait(5)
    assert seen == ["first stopped", "third", "other"]


def test_stop_drops_what_waits_and_ends_what_runs(worker: EngineWorker, turns: Turns) -> None:
    seen: list[str] = []
    worker.submit(job(turns, seen, "one", n=1000))
    worker.submit(job(turns, seen, "two", kind="b"))
    assert worker.stop("b") and worker.stop("a") and not worker.stop("c")
    assert worker.wait(5)
    assert seen in (["one stopped"], [])  # it may have been dropped before it began
    worker.submit(job(turns, seen, "three"))
    assert worker.wait(5) and seen[-1] == "three"


def test_errors_go_to_the_job_and_the_thread_lives(worker: EngineWorker, turns: Turns) -> None:
    seen: list[str] = []
    worker.submit(Job("a", lambda: 1 / 0, lambda error: seen.append(type(error).__name__)))
    assert worker.wait(5)
    worker.submit(job(turns, seen, "next"))
    assert worker.wait(5)
    assert seen == ["ZeroDivisionError", "next"]


def test_a_turn_is_taken_again_within_itself_and_keeps_others_out(turns: Turns) -> None:
    order: list[str] = []

    def other() -> None:
        with turns.taken():
            order.append("other")

    with turns.taken():
        with turns.taken():
            order.append("inner")
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        order.append("outer")
    thread.join(5)
    assert order == ["inner", "outer", "other"]


def test_one_who_waits_is_told(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mia_lab.running.turns._PATIENCE", 0.01)
    said: list[str] = []

    def other() -> None:
        with turns.taken(tell=said.append):
            said.append("in")

    with turns.taken():
        thread = threading.Thread(target=other)
        thread.start()
        while not said:
            time.sleep(0.001)
    thread.join(5)
    assert "waiting for another thread" in said[0] and said[1:] == ["in"]


def test_only_a_turn_that_can_end_is_stopped(turns: Turns) -> None:
    told: list[str] = []
    turns.at_end.append(lambda: told.append("end"))
    with turns.taken(lambda: False):
        turns.go_on()
        turns.end()
        with pytest.raises(Stopped):
            turns.go_on()
    with turns.taken():
        turns.go_on()
    assert told == ["end"] and issubclass(Stopped, KeyboardInterrupt)


def test_a_turn_goes_on_in_another_thread(turns: Turns) -> None:
    def generation() -> object:
        with turns.taken():
            while True:
                turns.go_on()
                yield threading.get_ident()

    run = generation()
    here, there = next(run), []

    def go_on() -> None:
        there.append(next(run))
        with turns.taken():  # its own, so it does not wait for itself
            there.append("within")
        run.close()

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join(5)
    assert there[0] != here and there[1] == "within"
    with turns.taken():
        pass
