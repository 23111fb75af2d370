"""Gates that hold: decided on the device, between forwards, from what taps measured or from the tokens fed back.

`opens[slot, gate]` is the position from which a request's gate is open. A decision, once taken, is never taken back, so
that a request which is preempted and computed again does what it did the first time.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .tables import Tables
from .wire import Gate, Spec

NEVER = (1 << 31) - 1


@dataclass(slots=True)
class _Held:
    """One request's place in `opens`, and its gates by index; `decided` are those that need no more rows."""

    slot: int
    gates: dict[int, Gate]
    decided: set[int] = field(default_factory=set)
    seen: dict[int, int] = field(default_factory=dict)  # gate -> position up to which its rows were pooled


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows `[lo, hi)` of the batch, whose first is at `position`, of a request with gates."""

    held: _Held
    lo: int
    hi: int
    position: int


class Gates:
    """Follows the requests whose edits wait for a decision. Costs nothing while there are none."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._held: dict[str, _Held] = {}
        self._free = list(range(tables.sizes.requests - 1, -1, -1))
        self._pooled = torch.zeros_like(tables.opens, dtype=torch.float32)
        self._step: list[_Rows] = []
        self._opened = torch.zeros((), dtype=torch.int64, device=tables.opens.device)
        self._counted = 0  # gates of requests that ended, but those that were not decided yet

    def take(self, req_id: str, spec: Spec) -> None:
        """Give a request whose gates hold a slot, closed."""
        gates = {i: gate for i, gate in enumerate(spec.gates) if gate.rule != "row"}
        if gates:
            if not self._free:
                raise RuntimeError(f"all {self._tables.sizes.requests} places for gated requests are in use")
            held = self._held[req_id] = _Held(self._free.pop(), gates)
            self._tables.opens[held.slot] = NEVER

    def release(self, req_id: str) -> None:
        """Free a finished request's slot. Which of its gates opened is counted on the device, for which nobody waits."""
        held = self._held.pop(req_id, None)
        if held is not None:
            self._free.append(held.slot)
            self._counted += sum(gate.rule in ("since", "token") or index in held.decided for index, gate in held.gates.items())
            self._opened += (self._tables.opens[held.slot] != NEVER).sum()

    def decisions(self) -> tuple[int, int]:
        """How many gates of requests that ended had opened, and how many had not; waits for the device."""
        opened = int(self._opened)
        return opened, self._counted - opened

    def slots(self, req_ids: Sequence[str]) -> np.ndarray:
        """Return each request's slot `[requests]`, 0 for those without."""
        if not self._held:
            return np.zeros(len(req_ids), np.int64)
        return np.fromiter((self._held[r].slot if r in self._held else 0 for r in req_ids), np.int64, len(req_ids))

    def before_forward(self, req_ids: Sequence[str], counts: np.ndarray, first: np.ndarray, input_ids: torch.Tensor) -> None:
        """Open the gates whose token is fed back in this step. input_ids `[rows]`, on the device."""
        begins = np.cumsum(counts) - counts if self._held else counts
        self._step = [_Rows(self._held[r], int(begins[i]), int(begins[i] + counts[i]), int(first[i]))
                      for i, r in enumerate(req_ids) if r in self._held] if self._held else []
        for rows in self._step:
            for index, gate in rows.held.gates.items():
                skip = max(0, gate.start - rows.position)
                if gate.rule == "token" and rows.lo + skip < rows.hi:
                    found = torch.isin(input_ids[rows.lo + skip : rows.hi], torch.tensor(gate.tokens, device=input_ids.device))
                    self._open(rows, index, found, rows.position + skip)

    def after_forward(self) -> None:
        """Pool what this step measured, and decide what is due."""
        step, self._step = self._step, []
        for rows in step:
            for index, gate in rows.held.gates.items():
                if gate.rule == "since":
                    skip = max(0, gate.start - rows.position)
                    if rows.lo + skip < rows.hi:
                        measured = self._tables.measures[rows.lo + skip : rows.hi, index]
                        self._open(rows, index, measured > gate.threshold, rows.position + skip + 1)
                elif gate.rule != "token" and index not in rows.held.decided:
                    self._pool(rows, index, gate)

    def recover(self) -> None:
        """Forget a step that was broken off."""
        self._step = []

    def _open(self, rows: _Rows, index: int, found: torch.Tensor, position: int) -> None:
        positions = torch.arange(position, position + len(found), dtype=torch.int32, device=found.device)
        cell = self._tables.opens[rows.held.slot, index]
        cell.copy_(torch.minimum(cell, torch.where(found, positions, NEVER).min()))

    def _pool(self, rows: _Rows, index: int, gate: Gate) -> None:
        start = max(gate.start, rows.position)
        stop = min(gate.stop, rows.position + rows.hi - rows.lo)
        if start >= stop:
            return
        measured = self._tables.measures[rows.lo + start - rows.position : rows.lo + stop - rows.position, index]
        if start != gate.start and rows.held.seen.get(index) != start and gate.rule != "last":
            raise RuntimeError(f"a gate over rows {gate.start} to {gate.stop} missed those before {start}")
        cell = self._pooled[rows.held.slot, index]
        new = {"mean": measured.sum, "max": measured.max, "last": lambda: measured[-1]}[gate.rule]()
        if start != gate.start:
            new = {"mean": cell + new, "max": torch.maximum(cell, new), "last": new}[gate.rule]
        cell.copy_(new)
        rows.held.seen[index] = stop
        if stop == gate.stop:
            pooled = cell / (gate.stop - gate.start) if gate.rule == "mean" else cell
            self._tables.opens[rows.held.slot, index] = torch.where(pooled > gate.threshold, gate.stop, NEVER).to(torch.int32)
            rows.held.decided.add(index)
