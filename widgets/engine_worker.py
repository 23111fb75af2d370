"""The one thread through which panels use a session: the latest request of a kind wins, and Stop ends it at the next engine step."""
from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mia_lab.running.turns import Stopped

if TYPE_CHECKING:
    from mia_lab.session import Session

_IDLE = 10.0  # seconds after which a thread without work ends; the next request starts another


class Client(Protocol):
    """A panel, as its session's worker sees it."""

    def session_closed(self) -> None:
        """The session is being closed."""


@dataclass(slots=True)
class Job:
    """One request. do: runs with the engine's turn held. failed, stopped: how it ended, where it did not end well. tell: gets the
    line where it has to wait for a cell."""

    kind: str
    do: Callable[[], None]
    failed: Callable[[BaseException], None]
    stopped: Callable[[], None] = lambda: None
    tell: Callable[[str], None] = lambda line: None
    over: threading.Event = field(default_factory=threading.Event)


class EngineWorker:
    """Runs jobs one after the other. A job that waits is replaced by a newer one of its kind; one that runs is stopped by it."""

    def __init__(self, session: Session) -> None:
        self._turns, self._open = session._engine.turns, session._open
        self._waiting: dict[str, Job] = {}
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.clients: weakref.WeakSet[Any] = weakref.WeakSet()
        me = weakref.ref(self)
        self._turns.at_end.append(lambda: me() and me().close())

    def submit(self, job: Job) -> None:
        """Run a job as soon as the engine is free, in the place of older ones of its kind."""
        with self._changed:
            self._waiting[job.kind] = job
            if self._running is not None and self._running.kind == job.kind:
                self._running.over.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mia-panels", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self, kind: str) -> bool:
        """End what runs or waits of a kind; return whether there was anything."""
        with self._changed:
            found = self._waiting.pop(kind, None) is not None
            if self._running is not None and self._running.kind == kind:
                self._running.over.set()
                found = True
            self._changed.notify_all()
        return found

    def wait(self, timeout: float = 60.0) -> bool:
        """Return once nothing runs or waits, True; or False after `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._running is None, max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Drop what waits and tell the panels that their session is closed."""
        with self._changed:
            self._waiting.clear()
        for client in list(self.clients):
            client.session_closed()

    def _work(self) -> None:
        self._open.apart = True  # panels name their edits; a scope of a cell is not theirs
        while (job := self._next()) is not None:
            try:
                with self._turns.taken(job.over.is_set, job.tell):
                    self._turns.go_on()
                    job.do()
            except Stopped:
                job.stopped()
            except BaseException as error:  # goes to the panel: nobody waits for this thread
                job.failed(error)
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, _IDLE):
                self._thread = None
                return None
            self._running = self._waiting.pop(next(iter(self._waiting)))
            return self._running


_workers: weakref.WeakKeyDictionary[Session, EngineWorker] = weakref.WeakKeyDictionary()


def worker_of(session: Session) -> EngineWorker:
    """Return the session's worker, which all its panels share."""
    if session not in _workers:
        _workers[session] = EngineWorker(session)
    return _workers[session]
