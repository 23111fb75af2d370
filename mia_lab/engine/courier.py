"""Delivery: captured rows leave the arena on a side stream and wait on the host, by request and position."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import MissingRowsError
from .reduce import Reducer
from .router import Part, Step
from .tables import Tables
from .wire import Site

Entry = tuple[int, bool]  # site, before its edits


@dataclass(slots=True)
class _Chunk:
    """Rows of one request from one step, host side; readable once `ready` has passed.

    values `[rows stride]`, of which `cuts` gives an entry's (start, width). One row for all positions where `summed`.
    """

    positions: np.ndarray
    cuts: dict[Entry, tuple[int, int]]
    values: torch.Tensor
    ready: torch.cuda.Event | None
    summed: bool = False
    reduced: bool = False


class Courier:
    """Copies each step's part of the arena to the host, and hands out rows by (request, absolute position)."""

    def __init__(self, tables: Tables, sites: Sequence[Site]) -> None:
        self._tables, self._sites, self._reducer = tables, list(sites), Reducer(tables)
        self._held: dict[str, dict[str, list[_Chunk]]] = {}  # by the client's name, then the engine's request
        self._cuda = tables.device.type == "cuda"
        self._stream = torch.cuda.Stream(tables.device) if self._cuda else None
        self._left: list[torch.cuda.Event | None] = [None, None]  # per half: when its last copy is done

    def before_forward(self, step: Step | None) -> None:
        """Hold the device, not the host, until the half that this step writes has been copied out."""
        if step is not None and self._cuda and self._left[step.half] is not None:
            torch.cuda.current_stream().wait_event(self._left[step.half])

    def after_forward(self, step: Step) -> None:
        """Start the one copy that takes this step's rows off the device; reduced rows leave as what they were reduced to."""
        whole = [part for part in step.parts if part.reduce is None]
        if len(whole) == len(step.parts):
            sources = [self._tables.arena[step.lo : step.hi]]
        else:
            sources = [self._rows(part).reshape(-1) for part in whole]
        reduced = [(part, *self._reduce(part)) for part in step.parts if part.reduce is not None]
        hosts, ready = self._send(step.half, [*sources, *(values for _, values, _ in reduced)])
        for i, part in enumerate(whole):
            lo = part.lo - step.lo
            flat = hosts[i] if reduced else hosts[0][lo : lo + len(part.positions) * part.plan.stride]
            self._keep(part, _Chunk(part.positions, part.plan.cuts, flat.view(-1, part.plan.stride), ready))
        for (part, _, cuts), host in zip(reduced, hosts[len(sources):]):
            self._keep(part, _Chunk(part.positions, cuts, host, ready, part.reduce.mean, True))

    def _rows(self, part: Part) -> torch.Tensor:
        return self._tables.arena[part.lo : part.lo + len(part.positions) * part.plan.stride].view(-1, part.plan.stride)

    def _reduce(self, part: Part) -> tuple[torch.Tensor, dict[Entry, tuple[int, int]]]:
        rows, found, cuts = self._rows(part), [], {}
        for entry, (start, width) in part.plan.cuts.items():
            found.append(self._reducer.apply(part.reduce, self._sites[entry[0]], self._typed(rows[:, start : start + width], entry[0])))
            cuts[entry] = sum(values.shape[1] for values in found[:-1]), found[-1].shape[1]
        return torch.cat(found, 1), cuts

    def _send(self, half: int, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        if not self._cuda:
            return [source.clone() for source in sources], None
        done, ready = torch.cuda.Event(), torch.cuda.Event()
        done.record()
        hosts = [torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(done)
            for host, source in zip(hosts, sources):
                host.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            ready.record()
        self._left[half] = ready
        return hosts, ready

    def _keep(self, part: Part, chunk: _Chunk) -> None:
        self._held.setdefault(part.uid, {}).setdefault(part.req_id, []).append(chunk)

    def rows(self, uid: str, site: int, before: bool = False) -> tuple[np.ndarray, torch.Tensor]:
        """Return the positions `[n]`, ascending, and values `[n width]` held for one request at one site.

        A position that was computed twice (after a preemption) appears once, with its latest value. Where rows were
        summed for a mean there is one row of values for all positions.
        """
        held = self._held.get(uid, {})
        if len(held) > 1:
            raise RuntimeError(f"{len(held)} engine requests share the capture {uid!r}; capture with n=1")
        chunks = [chunk for chunk in next(iter(held.values()), []) if (site, before) in chunk.cuts]
        if not chunks:
            empty = torch.empty(0, self._tables.room[site], dtype=self._tables.arena.dtype)
            return np.empty(0, np.int64), self._typed(empty, site)
        for chunk in chunks:
            if chunk.ready is not None:
                chunk.ready.synchronize()
        if chunks[0].summed:
            return _summed(chunks, (site, before))
        positions = np.concatenate([chunk.positions for chunk in chunks])
        values = torch.cat([_cut(chunk, (site, before)) for chunk in chunks])
        order = len(positions) - 1 - np.unique(positions[::-1], return_index=True)[1]
        values = values[torch.from_numpy(order)]
        return positions[order], values if chunks[0].reduced else self._typed(values, site)

    def _typed(self, values: torch.Tensor, site: int) -> torch.Tensor:
        return values.contiguous().view(torch.float32) if self._tables.wide[site] else values

    def drop(self, uid: str) -> None:
        """Let go of one request's rows."""
        self._held.pop(uid, None)


def _cut(chunk: _Chunk, entry: Entry) -> torch.Tensor:
    start, width = chunk.cuts[entry]
    return chunk.values[:, start : start + width]


def _summed(chunks: list[_Chunk], entry: Entry) -> tuple[np.ndarray, torch.Tensor]:
    """Add up the latest sums. A step computed again replaces the earlier one, which it must cover."""
    kept: list[_Chunk] = []
    taken: set[int] = set()
    for chunk in reversed(chunks):
        here = set(chunk.positions.tolist())
        if not here & taken:
            kept.append(chunk)
            taken |= here
        elif not here <= taken:
            raise MissingRowsError("a request was preempted in the middle of a mean, and its rows cannot be told apart; run it again, "
                                   "or capture the rows themselves")
    total = sum(_cut(chunk, entry).double() for chunk in kept)
    return np.array(sorted(taken), np.int64), total.float()
