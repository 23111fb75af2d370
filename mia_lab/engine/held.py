"""The book of admitted captures: room that is reserved before a request runs, and how long what it captures is kept."""
from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .wire import MAX_NAME

MAX_NOTE = 1 << 16  # bytes
MAX_SECONDS = 7 * 24 * 3600.0
_REMEMBERED = 1 << 16  # names whose room ended before their request came


@dataclass(slots=True)
class _Admitted:
    """What is reserved for one capture, until when; whether its request came, and whether it has ended."""

    note: bytes
    size: int
    until: float
    came: bool = False
    ended: bool = False


class Held:
    """Captures by the client's name (uid). Any number of clients, one book. clock: seconds, ever growing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._book: dict[str, _Admitted] = {}
        self._too_late: OrderedDict[str, None] = OrderedDict()
        self.bytes = self._notes = 0

    def admit(self, uid: str, note: bytes, size: int, seconds: float, limit: int) -> bool:
        """Reserve `size` bytes for `seconds`; False where all that is reserved would exceed `limit`.

        ValueError for a name that is taken, and for anything out of bounds.
        """
        if not isinstance(uid, str) or not 0 < len(uid) <= MAX_NAME or " " in uid:
            raise ValueError(f"a capture's name has 1 to {MAX_NAME} characters and no space")
        if not isinstance(note, bytes) or len(note) > MAX_NOTE:
            raise ValueError(f"a capture's note is bytes, at most {MAX_NOTE}")
        if not isinstance(size, int) or size < 0 or not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
            raise ValueError(f"a capture reserves bytes (not {size!r}) for up to {MAX_SECONDS:.0f} seconds (not {seconds!r})")
        if uid in self._book or uid in self._too_late:
            raise ValueError("this capture's name was used before; make a new one")
        if self.bytes + size > limit or self._notes + len(note) > limit:
            return False
        self._book[uid] = _Admitted(note, size, self._clock() + seconds)
        self.bytes, self._notes = self.bytes + size, self._notes + len(note)
        return True

    def __contains__(self, uid: str) -> bool:
        return uid in self._book

    def __len__(self) -> int:
        return len(self._book)

    def look(self, uid: str) -> tuple[bytes, bool] | None:
        """A capture's note, and whether its request has yet to end; None where there is no such capture."""
        found = self._book.get(uid)
        return None if found is None else (found.note, not found.ended)

    def come(self, uid: str) -> bool:
        """Note that a capture's request came to the engine; False where its room ended before."""
        if uid in self._too_late:
            return False
        if uid in self._book:
            self._book[uid].came = True
        return True

    def end(self, uid: str) -> None:
        """Note that a capture's request has ended."""
        if uid in self._book:
            self._book[uid].ended = True

    def renew(self, uids: Iterable[str], seconds: float) -> list[str]:
        """Keep captures for `seconds` from now, at least; return those that are not there."""
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
            raise ValueError(f"a capture is kept for up to {MAX_SECONDS:.0f} seconds (not {seconds!r})")
        until, gone = self._clock() + seconds, []
        for uid in uids:
            if uid in self._book:
                self._book[uid].until = max(self._book[uid].until, until)
            else:
                gone.append(uid)
        return gone

    def drop(self, uids: Iterable[str]) -> None:
        """End captures; a request of theirs that comes later is turned away."""
        for uid in uids:
            found = self._book.pop(uid, None)
            if found is None:
                continue
            self.bytes, self._notes = self.bytes - found.size, self._notes - len(found.note)
            if not found.came:
                self._too_late[uid] = None
                if len(self._too_late) > _REMEMBERED:
                    self._too_late.popitem(last=False)

    def expire(self) -> list[str]:
        """End the captures whose time is over, and return them."""
        now = self._clock()
        over = [uid for uid, found in self._book.items() if found.until <= now]
        self.drop(over)
        return over
