"""Delivery: captured rows leave the arena on a side stream and wait on the host, by request and position."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .router import Step
from .tables import Plan, Tables


@dataclass(slots=True)
class _Chunk:
    """Rows of one request from one step, host side, `[positions sites d]`; readable once `ready` has passed."""

    positions: np.ndarray
    plan: Plan
    values: torch.Tensor
    ready: torch.cuda.Event | None


class Courier:
    """Copies each step's part of the arena to the host, and hands out rows by (request, absolute position)."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._held: dict[str, dict[str, list[_Chunk]]] = {}  # by the client's name, then the engine's request
        self._cuda = tables.device.type == "cuda"
        self._stream = torch.cuda.Stream(tables.device) if self._cuda else None
        self._left: list[torch.cuda.Event | None] = [None, None]  # per half: when its last copy is done

    def before_forward(self, step: Step | None) -> None:
        """Hold the device, not the host, until the half that this step writes has been copied out."""
        if step is not None and self._cuda and self._left[step.half] is not None:
            torch.cuda.current_stream().wait_event(self._left[step.half])

    def after_forward(self, step: Step) -> None:
        """Start the one copy that takes this step's rows off the device."""
        source = self._tables.arena[step.lo : step.hi]
        ready = None
        if self._cuda:
            done = torch.cuda.Event()
            done.record()
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(done)
                host.copy_(source, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record()
            self._left[step.half] = ready
        else:
            host = source.clone()
        width = self._tables.sizes.width
        for part in step.parts:
            lo = part.lo - step.lo
            shape = (len(part.positions), len(part.plan), width)
            values = host[lo : lo + shape[0] * shape[1] * width].view(shape)
            self._held.setdefault(part.uid, {}).setdefault(part.req_id, []).append(_Chunk(part.positions, part.plan, values, ready))

    def rows(self, uid: str, site: int) -> tuple[np.ndarray, torch.Tensor]:
        """Return the positions `[n]`, ascending, and values `[n d_model]` held for one request at one site.

        A position that was computed twice (after a preemption) appears once, with its latest value.
        """
        held = self._held.get(uid)
        if held is None:
            return np.empty(0, np.int64), torch.empty(0, self._tables.sizes.width, dtype=self._tables.arena.dtype)
        if len(held) > 1:
            raise RuntimeError(f"{len(held)} engine requests share the capture {uid!r}; capture with n=1")
        (chunks,) = held.values()
        for chunk in chunks:
            if chunk.ready is not None:
                chunk.ready.synchronize()
        positions = np.concatenate([chunk.positions for chunk in chunks])
        values = torch.cat([chunk.values[:, chunk.plan.index(site)] for chunk in chunks])
        order = len(positions) - 1 - np.unique(positions[::-1], return_index=True)[1]
        return positions[order], values[torch.from_numpy(order)]

    def drop(self, uid: str) -> None:
        """Let go of one request's rows."""
        self._held.pop(uid, None)
