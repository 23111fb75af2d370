"""What API server processes tell one another through the engine that they share: which catalogue is wanted, and who adopted which."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .wire import MAX_NAME

_FORGOTTEN = 60.0  # seconds after which a process that is not heard of is left out
_OWNERS = 1024


class Beats:
    """The wanted digest, its version, and when each process was heard of last. clock: seconds, ever growing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[str, float]] = {}
        self.wanted, self.version = "", 0

    def publish(self, digest: str) -> int:
        """Make a digest the wanted one and return its version, which grows by one where it is not wanted already."""
        _check(digest)
        if digest != self.wanted:
            self.wanted, self.version = digest, self.version + 1
        return self.version

    def beat(self, owner: str, adopted: str) -> dict[str, Any]:
        """Note what a process adopted; return what is wanted, and by process what it adopted and how many seconds ago it said so."""
        _check(owner)
        _check(adopted)
        now = self._clock()
        self._heard[owner] = adopted, now
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard[1] < _FORGOTTEN}
        while len(self._heard) > _OWNERS:
            del self._heard[min(self._heard, key=lambda name: self._heard[name][1])]
        return {"wanted": self.wanted, "version": self.version,
                "owners": {name: [digest, now - then] for name, (digest, then) in self._heard.items()}}


def _check(name: object) -> None:
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise ValueError(f"names and digests have at most {MAX_NAME} characters, not {str(name)[:MAX_NAME]!r}")
