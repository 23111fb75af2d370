"""Host memory for delivered rows, kept for the next ones.

A page costs far more when it is touched for the first time than a copy into it does: 0.4 to 3 GB/s against 15 were seen
in virtual machines, huge pages being slower still. So memory that is let go stays, up to a share of the machine's.
"""
from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import psutil
import torch

_SLAB_BYTES = 64 << 20
_KEPT_BYTES = psutil.virtual_memory().total // 4  # of memory that nobody uses, at most
_ALIGNED = 64


class Store:
    """Hands out memory cut from large slabs. A slab is used again once all that was cut from it is let go."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run in the midst of `take`
        self._free: list[np.ndarray] = []
        self._users: dict[int, int] = {}  # by slab: the pieces of it that live, and one while it is being cut
        self._slab: np.ndarray | None = None
        self._next = 0

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `size` values, flat, holding anything; safe to call from any thread."""
        wanted = -(-size * dtype.itemsize // _ALIGNED) * _ALIGNED
        with self._lock:
            if self._slab is None or self._next + wanted > len(self._slab):
                self._begin(wanted)
            slab = self._slab
            piece = slab[self._next : self._next + size * dtype.itemsize]
            self._next += wanted
            self._users[id(slab)] += 1
        weakref.finalize(piece, self._leave, slab).atexit = False
        return torch.from_numpy(piece).view(dtype)

    def _begin(self, wanted: int) -> None:
        """Go on to another slab, of the usual size or as large as is wanted."""
        if self._slab is not None:
            self._leave(self._slab)
        fitting = [i for i, slab in enumerate(self._free) if len(slab) >= wanted]
        smallest = min(fitting, key=lambda i: len(self._free[i]), default=None)
        self._slab = np.frombuffer(mmap.mmap(-1, max(wanted, _SLAB_BYTES)), np.uint8) if smallest is None else self._free.pop(smallest)
        self._users[id(self._slab)] = 1
        self._next = 0

    def _leave(self, slab: np.ndarray) -> None:
        with self._lock:
            self._users[id(slab)] -= 1
            if not self._users[id(slab)]:
                del self._users[id(slab)]
                if sum(map(len, self._free)) + len(slab) <= _KEPT_BYTES:
                    self._free.append(slab)
