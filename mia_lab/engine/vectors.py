"""The book of registered vectors: which ones the worker holds, how large they are, and for whom."""
from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from .wire import MAX_NAME

Owner = tuple[str, str]  # "client" and its name, or "request" and its id


class Vectors:
    """Shapes `(n, width)` by content address. A vector stays while anyone holds it. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shapes: dict[str, tuple[int, int]] = {}
        self._holders: dict[str, set[Owner]] = {}
        self._held: dict[Owner, set[str]] = {}

    def shape(self, sha: str) -> tuple[int, int] | None:
        """How many vectors lie under an address and how wide they are; None where nobody registered it."""
        return self._shapes.get(sha)

    def __contains__(self, sha: str) -> bool:
        return sha in self._shapes

    def add(self, shapes: Mapping[str, tuple[int, int]], owner: Owner) -> None:
        """Enter vectors that an owner holds from now on."""
        with self._lock:
            for sha, shape in shapes.items():
                self._shapes[sha] = shape
                self._hold(sha, owner)

    def hold(self, shas: Collection[str], owner: Owner) -> list[str]:
        """Hold vectors for one more owner; where some are not known, hold none and return them."""
        with self._lock:
            missing = [sha for sha in shas if sha not in self._shapes]
            for sha in () if missing else shas:
                self._hold(sha, owner)
            return missing

    def _hold(self, sha: str, owner: Owner) -> None:
        self._holders.setdefault(sha, set()).add(owner)
        self._held.setdefault(owner, set()).add(sha)

    def release(self, owner: Owner, shas: Iterable[str] | None = None) -> list[str]:
        """Let go of an owner's vectors, by default of all; return those that nobody holds any more, which are struck out."""
        with self._lock:
            held = self._held.get(owner, set())
            gone = []
            for sha in list(held) if shas is None else [sha for sha in shas if sha in held]:
                held.discard(sha)
                holders = self._holders[sha]
                holders.discard(owner)
                if not holders:
                    del self._holders[sha], self._shapes[sha]
                    gone.append(sha)
            if not held:
                self._held.pop(owner, None)
            return gone


def owner_of(name: object) -> Owner:
    """The owner that a client calls itself; ValueError for what is no short name."""
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise ValueError(f"an owner is a name of at most {MAX_NAME} characters, not {str(name)[:MAX_NAME]!r}")
    return "client", name
