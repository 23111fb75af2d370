"""Random arguments for the kernels of the taps: rows of every kind, with edit programs that use all that terms know."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from mia_lab.kernels import program as P

ROWS, SPARE, PLANS, GATES, SLOTS, READS, WRITES = 24, 4, 4, 4, 3, 5, 9
OPS = P.OPS[: P.BIAS]  # a bias is another kernel's
PROGRAMS = len(OPS) + 2  # one that begins with each op, one that is empty here, one addition
EMPTY, ADDITION = PROGRAMS - 2, PROGRAMS - 1
ALL = (0, (1 << 31) - 1)
ORIGIN = 3  # of every position, schedule and block of vectors: positions lie in [ORIGIN, ORIGIN + WRITES)
NOTHING = 7.0  # in the arena before anything is captured
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [64, 640, 1536, 4096, 8192]
on_gpu = lambda values: [pytest.param(value, marks=pytest.mark.gpu) for value in values]  # noqa: E731


@dataclass
class Case:
    """The operator's arguments, in its order."""

    x: torch.Tensor
    residual: torch.Tensor | None
    rows: torch.Tensor
    index: torch.Tensor
    words: torch.Tensor
    numbers: torch.Tensor
    bank: torch.Tensor
    offsets: torch.Tensor
    arena: torch.Tensor
    measures: torch.Tensor
    opens: torch.Tensor

    @property
    def args(self) -> list[torch.Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def copy(self, device: str = "cpu") -> Case:
        return Case(*(None if a is None else a.clone().to(device) for a in self.args))

    def program(self, row: int, *lines: tuple[list[int], list[float]], slot: int = 0) -> None:
        """Give a row, at position ORIGIN, a program of these terms, and no capture."""
        self.words[: len(lines)] = torch.tensor([words for words, _ in lines])
        self.numbers[: len(lines)] = torch.tensor([numbers for _, numbers in lines])
        self.index[0] = torch.tensor([0, len(lines), -1, 0])
        self.rows[row] = torch.tensor([0, -1, -1, ORIGIN, slot, -1])


def term(op: str, read: int = -1, write: int = -1, gate: int = -1, columns: tuple[int, int] = ALL, flags: int = P.FRESH, coeff: float = 1.0,
         slope: float = 0.0, offset: float = 0.0, low: float = 0.0, high: float = 0.0, rate: float = 0.0, threshold: float = 0.0,
         level: float = 0.0) -> tuple[list[int], list[float]]:
    """One line of words and numbers."""
    return [P.OPS.index(op), read, write, gate, *columns, ORIGIN, flags], [coeff, slope, offset, low, high, rate, threshold, level]


def random_term(rng: random.Random, op: str, d: int) -> tuple[list[int], list[float]]:
    """A term that uses any of what its op knows."""
    maybe = lambda bit, chance=0.5: bit * (rng.random() < chance)  # noqa: E731
    number = lambda size: rng.choice([-1, 1]) * rng.uniform(0.2, size)  # noqa: E731
    flags, write, gate = maybe(P.FRESH), -1, rng.randrange(GATES) if rng.random() < 0.4 else -1
    if op in ("add", "affine", "clip", "feature"):
        aligned = maybe(P.ALIGNED, 0.4)
        flags, write = flags | aligned, READS + (0 if aligned else rng.randrange(WRITES))
    if op == "measure":
        gate, write = rng.randrange(GATES), READS + rng.randrange(WRITES) if rng.random() < 0.5 else -1
        flags |= maybe(P.COSINE) | maybe(P.VOTE) | maybe(P.BEGINS)
    else:
        flags |= maybe(P.PER_ROW) * (gate >= 0)
    columns = tuple(sorted(rng.sample(range(d + 1), 2))) if op in ("add", "scale") and rng.random() < 0.5 else ALL
    rate = 0.0 if op == "measure" else rng.choice([0.0, -0.5, -0.1])
    low, coeff = rng.uniform(-1.5, 1.0), number(0.5 if op == "scale" else 1.0)
    read = rng.randrange(READS) if op in ("affine", "clip", "feature", "measure") else -1
    return term(op, read, write, gate, columns, flags, coeff, number(1.0), number(0.5), low, low + rng.uniform(0, 1), rate,
                number(1.0), number(0.6))


def plain(listed: list[tuple[list[int], list[float]]], d: int) -> tuple[int, int]:
    """The place and the coefficient's bits of a program that is one addition and nothing else."""
    if len(listed) == 1 and listed[0][0][P.OP] == P.ADD:
        words, numbers = listed[0]
        if words[P.GATE] < 0 and not numbers[P.RATE] and not words[P.FLAGS] & P.ALIGNED and words[P.LAST_COLUMN] >= d:
            return words[P.WRITE], int(torch.tensor(numbers[P.COEFF]).view(torch.int32))
    return -1, 0


def make(d: int = 8, dtype: torch.dtype = torch.float32, residual: bool = True, seed: int = 0) -> Case:
    """Rows edited or not, captured or not, some by programs and plans that say nothing here; the last ones neutral."""
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    programs = [[random_term(rng, op, d) for op in [first, *rng.choices(OPS, k=rng.randint(0, 5))]] for first in OPS]
    programs += [[], [term("add", write=READS, coeff=0.75)]]
    lines, index = [], []
    for listed in programs:
        index.append((len(lines), len(listed), *plain(listed, d)))
        lines += listed
    rows = torch.full((ROWS + SPARE, P.ROW_COLUMNS), -1, dtype=torch.int32)  # the table is longer than a batch
    busy = ROWS - 3
    rows[:busy, P.PROGRAM] = torch.arange(busy) % (PROGRAMS + 1) - 1
    rows[:busy, P.PLAN] = torch.randint(-1, PLANS, (busy,), generator=g)
    rows[:ROWS, P.BASE] = torch.randperm(ROWS, generator=g) * 4 * d
    rows[:ROWS, P.POSITION] = torch.randint(ORIGIN, ORIGIN + WRITES, (ROWS,), generator=g)
    rows[:ROWS, P.SLOT] = torch.randint(SLOTS, (ROWS,), generator=g)
    rows[ROWS:] = torch.tensor([ADDITION, 2, 0, ORIGIN, 0, -1])
    bank = torch.full((READS + WRITES, d + 8), float("nan"))  # as wide as the widest point; what is past this one is not read
    bank[:READS, :d] = torch.nn.functional.normalize(draw(READS, d), dim=1)
    bank[READS:, :d] = draw(WRITES, d) / 2
    offsets = torch.tensor([[0, -1], [-1, 2 * d], [2 * d, 0], [-1, -1]], dtype=torch.int32)
    opens = torch.randint(ORIGIN, ORIGIN + 2 * WRITES, (SLOTS, GATES), generator=g).to(torch.int32)
    return Case(draw(ROWS, d).to(dtype), draw(ROWS, d).to(dtype) if residual else None, rows, torch.tensor(index, dtype=torch.int32),
                torch.tensor([words for words, _ in lines], dtype=torch.int32), torch.tensor([numbers for _, numbers in lines]),
                bank, offsets, torch.full((ROWS * 4 * d,), NOTHING, dtype=dtype), draw(ROWS + SPARE, GATES), opens)


def crowd(case: Case, times: int) -> Case:
    """The same rows many times over, each with its own part of the arena."""
    many, room = case.copy(), len(case.arena)
    many.x, many.arena = case.x.repeat(times, 1), case.arena.repeat(times)
    many.residual = None if case.residual is None else case.residual.repeat(times, 1)
    many.rows = case.rows[:ROWS].repeat(times, 1)
    many.rows[:, P.BASE] += torch.arange(times, dtype=torch.int32).repeat_interleave(ROWS) * room
    many.measures = case.measures[:ROWS].repeat(times, 1)
    return many


def captured(before: Case, after: Case) -> torch.Tensor:
    """The arena that the rows' values before and after the edits make, to the bit."""
    arena, d = before.arena.clone(), before.x.shape[-1]
    for row in range(len(before.x)):
        plan, base = before.rows[row, P.PLAN], before.rows[row, P.BASE]
        for side, x in enumerate((before.x, after.x)):
            if plan >= 0 and before.offsets[plan, side] >= 0:
                value = x[row].float() if before.residual is None else x[row].float() + before.residual[row].float()
                start = int(base + before.offsets[plan, side])
                arena[start : start + d] = value.to(arena.dtype)
    return arena


def wider(rows: torch.Tensor) -> torch.Tensor:
    """The same values as a view of rows that go on."""
    return torch.cat([rows, torch.full_like(rows, float("nan"))], 1)[:, : rows.shape[1]]


def chain(case: Case, taps: int) -> tuple[Case, list[torch.Tensor], list[torch.Tensor]]:
    """A case with room for several sites' captures, and each site's index and offsets: no row does the same at two of them."""
    room, wide = len(case.arena), case.copy()
    wide.arena = case.arena.repeat(taps)
    index = [case.index.roll(site, 0).contiguous() for site in range(taps)]
    offsets = [torch.where(case.offsets < 0, -1, case.offsets + site * room).roll(site, 0).contiguous() for site in range(taps)]
    return wide, index, offsets


def one_by_one(tap: Callable[..., None], case: Case, index: list[torch.Tensor], offsets: list[torch.Tensor], alone: bool) -> Case:
    """The case after a tap for each site in turn; the first has no residual where `alone`."""
    found = case.copy(str(case.x.device))
    for site in range(len(index)):
        residual = None if alone and site == 0 else found.residual
        tap(found.x, residual, found.rows, index[site], found.words, found.numbers, found.bank, offsets[site], *found.args[-3:])
    return found


def together(norm: Callable[..., tuple[torch.Tensor, ...]], case: Case, index: list[torch.Tensor], offsets: list[torch.Tensor], *how: Any
             ) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """The case after a norm in which these taps ride, and what the norm returned. how: its weight, eps, shifted and alone."""
    found = case.copy(str(case.x.device))
    x, residual, rows, _, words, numbers, bank, _, arena, measures, opens = found.args
    return found, *norm(x, residual, rows, index, words, numbers, bank, offsets, arena, measures, opens, *how)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the stored bits are equal, for which NaN equals itself and 0.0 differs from -0.0."""
    kind = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
