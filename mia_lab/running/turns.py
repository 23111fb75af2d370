"""Turns: one thread at a time uses an engine; the others wait, and are told so."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 2.0  # seconds of waiting before a word about it


class Stopped(KeyboardInterrupt):
    """A run was asked to end, and ended between two engine steps. As after Ctrl-C, what was done by then is kept."""


class Turns:
    """Who uses an engine. A turn may be taken again within itself, and be given back by another thread than took it, as happens to
    an abandoned generator. Taking a free turn costs about a microsecond."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._owner: int | None = None
        self._over: Callable[[], bool] | None = None
        self._ended = False
        self.at_end: list[Callable[[], object]] = []  # called when the engine is about to be shut down

    @contextmanager
    def taken(self, over: Callable[[], bool] | None = None, tell: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the turn within the block. over: says when what runs in it is to end. tell: gets the line for one who has to wait, by
        default written to stderr."""
        me = threading.get_ident()
        if self._owner == me:
            yield
            return
        if not self._free.acquire(blocking=False):
            self._wait(tell)
        self._owner, self._over = me, over
        try:
            yield
        finally:
            self._owner = self._over = None
            self._free.release()

    def go_on(self) -> None:
        """Keep the turn for the thread that calls, which goes on with what another may have begun; Stopped where it is to end."""
        self._owner = threading.get_ident()
        if self._over is not None and (self._ended or self._over()):
            raise Stopped("this run was stopped")

    def end(self) -> None:
        """From now on, ask every run to end that can be asked."""
        self._ended = True
        for told in self.at_end:
            told()

    def _wait(self, tell: Callable[[str], None] | None) -> None:
        if self._free.acquire(timeout=_PATIENCE):
            return
        line = "mia_lab: waiting for another thread's run on this session, as a panel's, to end; interrupt to give up waiting"
        (tell or (lambda said: print(said, file=sys.stderr)))(line)
        self._free.acquire()
