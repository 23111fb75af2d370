"""Many edited runs that each come down to one number, as one continuous batch."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...edits import Edit
from ...engine.wire import Take
from ...errors import EditError, MissingRowsError
from ...points import Point
from ...prompts import Prompts
from ...running.launch import EngineRows
from .metrics import Judge

if TYPE_CHECKING:
    from vllm import RequestOutput

    from ...session import Session
    from ...show.progress import Bar

Tensor = torch.Tensor
_TOGETHER, _BYTES = 4096, 256 << 20  # requests handed to the engine at a time, and what their vectors may take on the host


@dataclass(frozen=True, slots=True)
class Job:
    """One run: the pair that it belongs to, its prompt, and its edits, which are made when it is submitted."""

    pair: int
    ids: list[int]
    edits: Callable[[], list[Edit]]


@dataclass(frozen=True, slots=True)
class Measured:
    """values `[job]` float64, NaN for jobs that an interrupt kept from running; prompt tokens in all, and those from the cache."""

    values: Tensor
    done: int
    tokens: int
    cached: int
    seconds: float


def top_point(session: Session) -> tuple[Point, bool]:
    """The point that logits are rebuilt from, and whether it is after the final norm: there, where open scopes edit it."""
    top = session._top([[]])
    return top, top.kind == "final_norm"


def measure(session: Session, jobs: Sequence[Job], judge: Judge, batch: int | None, bar: Bar) -> Measured:
    """Run every job and return the metric at its last prompt position. A KeyboardInterrupt keeps what is done.

    batch: jobs handed to the engine at a time at most, by default as many as its tables hold. bar: is told how far it is.
    """
    values = torch.full((len(jobs),), float("nan"), dtype=torch.float64)
    top = top_point(session)[0]

    def keep(source: EngineRows, over: list[int], low: int) -> None:
        part = jobs[low:]
        values[[low + i for i in over]] = judge(_last_rows(source, top, over, part), [part[i].pair for i in over])

    tally = run(session, jobs, lambda job: [Take(top.kind, top.layer, ((len(job.ids) - 1, len(job.ids)),))], keep, batch, bar)
    return Measured(values, tally.done, tally.tokens, tally.cached, time.perf_counter() - tally.start)


def run(session: Session, jobs: Sequence[Job], takes: Callable[[Job], list[Take]],
        keep: Callable[[EngineRows, list[int], int], None], batch: int | None, bar: Bar) -> Tally:
    """Run jobs in as large parts as the engine's tables hold, with what each captures.

    keep(rows, over, low) is told of each part which of its jobs are over, counted from job `low` on, also after an interrupt.
    """
    tally = Tally(bar, time.perf_counter())
    bar.stage(len(jobs), "runs")
    size, low = batch or _together(session, jobs), 0
    try:
        while low < len(jobs):
            part = jobs[low : low + size]
            edits = session._scoped([job.edits() for job in part])
            read = Prompts.of([job.ids for job in part])
            try:
                sampling, uids = session._submit.prepare(read, edits, dict(max_tokens=1, temperature=0.0), list(map(takes, part)))
            except EditError:  # too much for the engine's tables at once
                if len(part) == 1:
                    raise
                size = len(part) // 2
                continue
            source, over = EngineRows(session._engine, uids), []
            try:
                with closing(session._engine.steps(read.ids, sampling)) as steps:
                    for moved in steps:
                        over += [i for i, _ in moved]
                        tally.add([output for _, output in moved])
            finally:
                if over:
                    keep(source, over, low)
            low += len(part)
    except KeyboardInterrupt:
        bar.broken_off("what is done is kept, what needs the others is NaN")
    return tally


def _together(session: Session, jobs: Sequence[Job]) -> int:
    """How many jobs to hand over at a time, so that the vectors which their edits do not share take no more than `_BYTES`."""
    if not jobs:
        return 1
    first, last = jobs[0].edits(), jobs[-1].edits()
    for edit in last:  # before anything runs
        session._submit.check(edit)
    own = [edit for edit in last if not any(edit is other for other in first)]
    size = sum(step.write.nbytes for edit in own for steps in edit.steps.values() for step in steps if step.write is not None)
    return max(1, min(_TOGETHER, _BYTES // max(size, 1)))


@dataclass(slots=True)
class Tally:
    """How far a run of jobs is: how many of them are over, their prompt tokens, and those that came from the prefix cache."""

    bar: Bar
    start: float
    done: int = 0
    tokens: int = 0
    cached: int = 0

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Count finished runs, and say how far it is."""
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        self.done += len(outputs)
        self.tokens += tokens
        self.cached += cached
        self.bar.add(len(outputs), tokens - cached)


def _last_rows(source: EngineRows, top: Point, asked: Sequence[int], jobs: Sequence[Job]) -> Tensor:
    found = []
    for i, (positions, rows) in zip(asked, source.rows(top, asked)):
        if positions.tolist() != [len(jobs[i].ids) - 1]:
            raise MissingRowsError(f"{top} of a patched run has rows {positions.tolist()}; its prompt ends at {len(jobs[i].ids) - 1}")
        found.append(rows[0])
    return torch.stack(found)
