"""Who captures: a number for each engine request that does, so that a step names the owners of its rows in one array."""
from __future__ import annotations

from collections import defaultdict
from itertools import count

from .wire import Reduce


class Claims:
    """The book of captures, from a request's admission until its client lets go of its rows."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)
        self._next = count()
        self._open: set[int] = set()
        self.reducing: dict[int, Reduce] = {}

    def open(self, uid: str, reduce: Reduce | None) -> int:
        """Enter an engine request and return its number."""
        number = next(self._next)
        self._numbers[uid].append(number)
        self._open.add(number)
        if reduce is not None:
            self.reducing[number] = reduce
        return number

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def numbers(self, uid: str) -> list[int]:
        """The numbers of the engine requests under one name, the oldest first."""
        return list(self._numbers.get(uid, ()))

    def close(self, uid: str) -> list[int]:
        """Strike out all requests under a name, and return their numbers."""
        gone = self._numbers.pop(uid, [])
        self._open.difference_update(gone)
        for number in gone:
            self.reducing.pop(number, None)
        return gone
