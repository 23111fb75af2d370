"""The book of captures that are kept: the room that each has, whose it is, and how long it is kept."""
from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import EditError, MissingRowsError, RoomError
from .reservation import MAX_SECONDS, Reservation

_REMEMBERED = 1 << 16  # names that were let go of before their request came


@dataclass(slots=True)
class _Admitted:
    """One capture: its note, the bytes that it takes together with its rows, until when, and whether its request has ended."""

    note: str
    size: int
    until: float
    ended: bool = False


class Held:
    """Captures by the client's name (uid), whose part before the first dot is the tenant's. Safe to use from several threads.

    bytes: what all of them may take. clock: seconds, ever growing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._book: dict[str, _Admitted] = {}
        self._taken: Counter[str] = Counter()  # bytes, by tenant
        self._over: list[str] = []  # those whose time was over when room was needed
        self._early: OrderedDict[str, None] = OrderedDict()  # names that were let go of, and were not here
        self._next = math.inf  # no capture's time is over before
        self.bytes = 0

    def admit(self, uid: str, asked: Reservation) -> None:
        """Give a capture its room, as its request comes.

        RoomError where its tenant's share or all the room is taken, EditError for a name that is taken, MissingRowsError for a capture
        that was let go of before.
        """
        size, tenant = asked.size + len(asked.note), _tenant(uid)
        with self._lock:
            if uid in self._early:
                raise MissingRowsError("this capture was let go of before its request came; send the request again for another one")
            if uid in self._book:
                raise EditError("a capture of this name is held already; send the request under another")
            if self._shortage(tenant, size, asked):
                self._over += self._expire()
            short = self._shortage(tenant, size, asked)
            if short:
                raise RoomError(short)
            until = self._clock() + asked.seconds
            self._book[uid] = _Admitted(asked.note, size, until)
            self._next = min(self._next, until)
            self._taken[tenant] += size
            self.bytes += size

    def _shortage(self, tenant: str, size: int, asked: Reservation) -> str:
        """Whose room is full, in words; "" where there is room."""
        taken = self._taken[tenant]
        if taken + size > asked.share:
            return (f"your captures may take {asked.share} bytes together here; {taken} are taken, and this one could come to {size}. "
                    f"Delete some of yours, or wait")
        if self.bytes + size > asked.limit:
            return (f"the captures of all tenants may take {asked.limit} bytes together here, and too few are left for {size} more, of "
                    f"which yours take {taken}. Try again later")
        return ""

    def __contains__(self, uid: str) -> bool:
        return uid in self._book

    def __len__(self) -> int:
        return len(self._book)

    def look(self, uid: str) -> tuple[str, bool] | None:
        """A capture's note, and whether its request has yet to end; None where there is no such capture."""
        with self._lock:
            found = self._book.get(uid)
            return None if found is None else (found.note, not found.ended)

    def end(self, uid: str) -> None:
        """Note that a capture's request has ended."""
        with self._lock:
            if uid in self._book:
                self._book[uid].ended = True

    def renew(self, uids: Iterable[str], seconds: float) -> list[str]:
        """Keep captures for `seconds` from now, at least; return those that are not there."""
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
            raise ValueError(f"a capture is kept for up to {MAX_SECONDS:.0f} seconds (not {seconds!r})")
        until, gone = self._clock() + seconds, []
        with self._lock:
            for uid in uids:
                if uid in self._book:
                    self._book[uid].until = max(self._book[uid].until, until)
                else:
                    gone.append(uid)
        return gone

    def drop(self, uids: Iterable[str]) -> None:
        """End captures. A request that comes for one only then, since whoever sent it is gone, is turned away."""
        with self._lock:
            for uid in uids:
                if not self._strike(uid):
                    self._early[uid] = None
            while len(self._early) > _REMEMBERED:
                self._early.popitem(last=False)

    def expire(self) -> list[str]:
        """End the captures whose time is over; return those that ended so since the last call."""
        with self._lock:
            over, self._over = self._over + self._expire(), []
            return over

    def _expire(self) -> list[str]:
        now = self._clock()
        if now < self._next:
            return []
        over = [uid for uid, found in self._book.items() if found.until <= now]
        for uid in over:
            self._strike(uid)
        self._next = min((found.until for found in self._book.values()), default=math.inf)
        return over

    def _strike(self, uid: str) -> bool:
        found = self._book.pop(uid, None)
        if found is None:
            return False
        tenant = _tenant(uid)
        self.bytes -= found.size
        self._taken[tenant] -= found.size
        if not self._taken[tenant]:
            del self._taken[tenant]
        return True


def _tenant(uid: str) -> str:
    return uid.partition(".")[0]
