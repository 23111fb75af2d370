"""The way off the device: one copy a step into a ring, pinned on the host, from where a thread of its own moves it on.

The engine's thread only enqueues: while the ring has room a step costs it one asynchronous copy. It waits only when the
host's memory cannot take rows over as fast as the device gives them.
"""
from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import streams
from .driver import copy_to_host

Tensor = torch.Tensor


class Ring:
    """A buffer on the host, used round and round, and the thread that empties it in order.

    size: values of `dtype`. What is sent is handed to `deliver` on that thread once it is on the host, and must not be kept;
    an error there is raised by the next call.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffer = torch.empty(size, dtype=dtype, pin_memory=self._cuda)
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._line = _Line()
        self._next = 0
        self._landed: torch.cuda.Event | Done = Done()
        threading.Thread(target=_empty, args=(self._line,), name="mia-courier", daemon=True).start()
        weakref.finalize(self, self._line.jobs.put, True).atexit = False

    def send(self, source: Tensor, deliver: Callable[[Tensor], None], wait: bool = True) -> torch.cuda.Event | Done | None:
        """Start copying a flat tensor to the host, and return the event after which its memory may be used again.

        Where the ring has no room, wait until it has, or else return None.
        """
        size = len(source)
        held = size if size <= len(self._buffer) else 0  # what is larger than the ring gets memory of its own
        if not wait and (self._gap(held) is None or (self.congested and not held)):
            return None
        start = self._room(held)
        place = self._buffer[start : start + size] if held else torch.empty(size, dtype=source.dtype, pin_memory=self._cuda)
        done = self._copy(source, place)
        with self._line.moved:
            self._next = start + held
            self._line.held.append(_Piece(start, size, done, place, deliver))
        self._line.jobs.put(None)
        return done

    def land(self, source: Tensor, place: Tensor) -> torch.cuda.Event | Done:
        """Start copying past the ring, to where it stays; it is there when `wait` has returned, or the event returned has come."""
        self._landed = self._copy(source, place)
        return self._landed

    def _copy(self, source: Tensor, place: Tensor) -> torch.cuda.Event | Done:
        if not self._cuda:
            place.copy_(source)
            return Done()
        ready, done = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        ready.record(streams.current(source.device.index))
        ready.wait(self._stream)
        copy_to_host(place, source, self._stream.cuda_stream)
        done.record(self._stream)
        source.record_stream(self._stream)
        return done

    @property
    def congested(self) -> bool:
        """Whether more than half of the ring waits to be emptied."""
        if not self._line.held:
            return False
        with self._line.moved:
            return 2 * sum(piece.size for piece in self._line.held) > len(self._buffer)

    def wait(self) -> None:
        """Return once all that was sent is delivered."""
        self._line.jobs.put(None)
        self._wait_for(lambda: not self._line.held)
        self._landed.synchronize()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        line = self._line
        with line.moved:
            line.moved.wait_for(lambda: condition() or line.error is not None)
        if line.error is not None:
            raise RuntimeError("captured rows could not be delivered") from line.error

    def _room(self, size: int) -> int:
        """Where `size` values are free: behind the newest, else before the oldest; waits until they are."""
        self._wait_for(lambda: self._gap(size) is not None)
        return self._gap(size)

    def _gap(self, size: int) -> int | None:
        with self._line.moved:
            oldest = self._line.held[0].start if self._line.held else None
        if oldest is None:
            return 0
        if self._next <= oldest:
            return self._next if self._next + size <= oldest else None
        if self._next + size <= len(self._buffer):
            return self._next
        return 0 if size <= oldest else None


class Done:
    """The event of a copy that is finished when it returns."""

    def synchronize(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Something on its way: where it begins in the ring, its size, when it is there, and what becomes of it."""

    start: int
    size: int
    done: torch.cuda.Event | Done
    place: Tensor
    deliver: Callable[[Tensor], None]


class _Line:
    """What is on its way, the oldest first, shared with the thread, which must not keep the ring itself alive."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()  # None says that there is something new; True, that the ring is gone
        self.held: deque[_Piece] = deque()
        self.moved = threading.Condition(threading.RLock())
        self.error: BaseException | None = None


def _empty(line: _Line) -> None:
    """Deliver what arrives, in order, until there is no ring."""
    while not line.jobs.get():
        while line.held:  # all that is there, so that a sender who was interrupted before it said so is made up for
            piece = line.held[0]
            try:
                piece.done.synchronize()
                piece.deliver(piece.place)
            except BaseException as error:
                line.error = error
            del piece
            with line.moved:
                line.held.popleft()
                line.moved.notify_all()
