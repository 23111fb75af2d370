"""The vectors that one server process has the worker hold, by content address: sent once, kept while used, let go by age."""
from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import torch

BYTES = 256 << 20  # of vectors that no request uses and that are still kept


class Vectors:
    """What one owner has registered. rpc calls the worker; requests `hold` what they name before they run, and `release` it after."""

    def __init__(self, rpc: Callable[..., Awaitable[Any]], owner: str, room: int = BYTES) -> None:
        self._rpc, self._owner, self._room = rpc, owner, room
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()  # how many, and bytes, by address; least recently used first
        self._uses: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    def missing(self, shas: Iterable[str]) -> list[str]:
        """Those that are not registered; what is can be held as None until the next await."""
        return [sha for sha in shas if sha not in self._known]

    def sizes(self, shas: Iterable[str]) -> dict[str, range]:
        """How many vectors lie under addresses that are held, as something so long."""
        return {sha: range(self._known[sha][0]) for sha in shas}

    async def hold(self, vectors: Mapping[str, torch.Tensor | None]) -> None:
        """Have the worker know vectors `[n d]` float32, until as many calls of `release` as there were of this.

        None stands for one that is registered already.
        """
        self._uses.update(vectors.keys())
        try:
            if not vectors.keys() <= self._known.keys():
                async with self._lock:
                    await self._register({sha: rows for sha, rows in vectors.items() if sha not in self._known})
        except BaseException:
            self._drop(vectors)
            raise
        for sha in vectors:
            self._known.move_to_end(sha)

    async def _register(self, new: Mapping[str, torch.Tensor]) -> None:
        if new:
            sent = {sha: (len(rows), rows.contiguous().numpy().tobytes()) for sha, rows in new.items()}
            await asyncio.shield(self._send(sent))  # what was sent is there, also where whoever asked goes away before the answer

    async def _send(self, sent: Mapping[str, tuple[int, bytes]]) -> None:
        await self._rpc("register", sent, self._owner)
        self._known.update({sha: (n, len(data)) for sha, (n, data) in sent.items()})

    async def release(self, shas: Iterable[str]) -> None:
        """End a request's use of vectors; those that nobody used for longest go, once they take more than the room."""
        self._drop(shas)
        if self._size > self._room and self._idle():
            async with self._lock:
                gone = self._idle()
                for sha in gone:  # before the worker is told: who asks for one meanwhile waits, and registers it again
                    del self._known[sha]
                if gone:
                    await self._rpc("forget", gone, self._owner)

    @property
    def _size(self) -> int:
        return sum(size for _, size in self._known.values())

    def _drop(self, shas: Iterable[str]) -> None:
        self._uses.subtract(list(shas))
        self._uses = +self._uses

    def _idle(self) -> list[str]:
        """Those to let go of so that the rest fits."""
        over, gone = self._size - self._room, []
        for sha, (_, size) in self._known.items():
            if over <= 0:
                break
            if not self._uses[sha]:
                gone.append(sha)
                over -= size
        return gone
