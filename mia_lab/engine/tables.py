"""The fixed-address tables that the taps read, and the host's book of who uses which entry."""
from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

import numpy as np
import torch

from mia_lab.kernels import program as P
from mia_lab.kernels.tap import asleep, unedited

from ..errors import UnsupportedError
from .config import Sizes, aligned
from .mirror import Mirror, send
from .wire import MAX_GATES, Term

K = TypeVar("K", bound=Hashable)


class FullError(RuntimeError):
    """No run of free places is long enough, with all idle entries gone."""


class Shelf(Generic[K]):
    """Runs of places for content-addressed entries: equal ones share, counted by use; idle ones stay until needed.

    `places`: by entry, its first place and its length. `gone` is told of each entry that is evicted.
    """

    def __init__(self, size: int, what: str, gone: Callable[[K], None] = lambda key: None) -> None:
        self.size, self.what, self._gone = size, what, gone
        self.places: dict[K, tuple[int, int]] = {}
        self._uses: dict[K, int] = {}
        self._idle: dict[K, None] = {}  # in the order they fell idle
        self._free = [(0, size)]  # ascending (start, length), none touching the next

    def take(self, key: K, length: int = 1) -> tuple[int, bool]:
        """Return the entry's first place and whether it must be written; FullError when no run of places is free."""
        if key in self.places:
            self._uses[key] += 1
            self._idle.pop(key, None)
            return self.places[key][0], False
        start = self._find(length)
        while start is None:
            if not self.evict_oldest():
                raise FullError(f"all {self.size} {self.what} are in use")
            start = self._find(length)
        self.places[key], self._uses[key] = (start, length), 1
        return start, True

    def _find(self, length: int) -> int | None:
        for i, (start, free) in enumerate(self._free):
            if free >= length:
                self._free[i : i + 1] = [(start + length, free - length)] if free > length else []
                return start
        return None

    def give(self, key: K) -> bool:
        """Drop one use of the entry; True when that was the last."""
        self._uses[key] -= 1
        if self._uses[key]:
            return False
        self._idle[key] = None
        return True

    def evict(self, key: K) -> None:
        """Forget an idle entry and free its places."""
        del self._idle[key], self._uses[key]
        start, length = self.places.pop(key)
        at = bisect_left(self._free, (start, length))
        if at < len(self._free) and self._free[at][0] == start + length:
            length += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == start:
            at -= 1
            start, before = self._free.pop(at)
            length += before
        self._free.insert(at, (start, length))
        self._gone(key)

    def evict_oldest(self) -> bool:
        """Forget the entry that has been idle longest; False where none is idle."""
        for key in self._idle:
            self.evict(key)
            return True
        return False


@dataclass(frozen=True, slots=True)
class Line:
    """One term of a program, without its spans. `level`: what the row's measure must pass, where its gate is per row;
    `begins`: it is the first measure of its gate."""

    site: int
    term: Term
    level: float | None = None
    begins: bool = False


def _head_mask(heads: tuple[int, ...]) -> tuple[int, int]:
    """Return a mask of heads 0 to 63 as two int32; all of them where none is named."""
    mask = sum(1 << head for head in heads) if heads else (1 << 64) - 1
    return tuple(part - (1 << 32) if part >> 31 else part for part in (mask & 0xFFFFFFFF, mask >> 32))


def _numbers(line: Line) -> tuple[float, ...]:
    """A term's columns in `numbers`."""
    term = line.term
    return term.coeff, term.slope, term.offset, term.low, term.high, term.rate, term.threshold, line.level or 0.0


Program = tuple[Line, ...]  # in the order they act
Plan = tuple[tuple[int, bool], ...]  # captured (site, before its edits), sorted


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """How a plan's rows lie in the arena, in values: one row's stride, and (start, width) of each entry within it."""

    stride: int
    cuts: dict[tuple[int, bool], tuple[int, int]]


class Tables:
    """Device tables of one engine. All are allocated here, once; afterwards only their contents change.

    widths, wide: per site, the values of one row, and whether they are kept as float32 whatever the arena's type.
    """

    def __init__(self, widths: Sequence[int], wide: Sequence[bool], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.device, self.widths, self.wide = sizes, device, list(widths), list(wide)
        self.room = [width * (4 // dtype.itemsize if is_wide else 1) for width, is_wide in zip(widths, wide)]  # in the arena's values
        n, gates = len(widths), MAX_GATES
        new = lambda shape, fill, kind: torch.full(shape, fill, dtype=kind, device=device)  # noqa: E731
        self.half = sizes.captured_tokens * sum(map(aligned, self.room))
        if 2 * self.half >= 1 << 31:
            raise UnsupportedError(f"the arena would hold {2 * self.half} values, more than 2^31; declare fewer points "
                                   f"or a smaller max_captured_tokens")
        self.bank_width = max(widths)
        self.bank_rows = max(sizes.bank_bytes // (4 * self.bank_width), 1)
        self.rows = new((sizes.tokens, P.ROW_COLUMNS), -1, torch.int32)
        self._mirror = Mirror({"index": (n, sizes.programs, P.INDEX_COLUMNS), "words": (sizes.terms, P.COLUMNS),
                               "numbers": (sizes.terms, P.COLUMNS), "offsets": (n, sizes.plans, 2)}, {"offsets": -1}, device)
        self.index, self.words, self.offsets = map(self._mirror.table, ("index", "words", "offsets"))
        self.numbers = self._mirror.table("numbers", torch.float32)
        self.bank = new((self.bank_rows, self.bank_width), 0.0, torch.float32)
        self.arena = new((2 * self.half,), 0.0, dtype)
        self.measures = new((sizes.tokens, gates), 0.0, torch.float32)
        self.opens = new((sizes.requests, gates), 0, torch.int32)
        self._programs: Shelf[Program] = Shelf(sizes.programs, "edit programs", self._let_go)
        self._plans: Shelf[Plan] = Shelf(sizes.plans, "capture plans")
        self._clear()
        self.history: Shelf[str] = Shelf(sizes.biased_tokens, "places for keys and values under a bias")
        self._no_terms = np.tile(np.array([0, 0, -1, 0], np.int32), (n, 1))  # the index's column of a program that does nothing
        self._addresses = [self.index[site].data_ptr() for site in range(n)]
        for noted in (asleep, unedited):  # other tensors may come to lie there
            weakref.finalize(self, noted.difference_update, self._addresses)
        self.vectors: dict[str, torch.Tensor] = {}
        self.extra_bytes = 0  # held beside the tables, on layers under a bias
        self.plans: dict[int, PlanLayout] = {}

    def _clear(self) -> None:
        self._terms: Shelf[Program] = Shelf(self.sizes.terms, "edit terms")
        self._bank: Shelf[str] = Shelf(self.bank_rows, "vector places")
        self._used: dict[str, torch.Tensor] = {}  # vectors in the bank that programs use
        self._arriving: dict[int, torch.Tensor] = {}  # vectors `[1 d]` to be written into the bank, by place

    def _all(self) -> tuple[torch.Tensor, ...]:
        return (self.rows, self.index, self.words, self.numbers, self.bank, self.offsets, self.arena, self.measures, self.opens)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(t.nbytes for t in self._all()) + self.extra_bytes

    def of_site(self, site: int) -> tuple[torch.Tensor, ...]:
        """The tensors that one site's tap reads, in the operator's order."""
        return (self.rows, self.index[site], self.words, self.numbers, self.bank, self.offsets[site], self.arena, self.measures,
                self.opens)

    def keep_awake(self, sites: Collection[int], edited: Collection[int]) -> None:
        """From the next forward on, leave out the taps of all other sites than `sites`, and edit at none but at `edited`."""
        for noted, some in ((asleep, sites), (unedited, edited)):
            noted.update(self._addresses)
            noted.difference_update(self._addresses[site] for site in some)

    def register(self, sha: str, vectors: torch.Tensor) -> None:
        """Hold vectors `[n d]` float32 on the host, from where programs bring them into the bank."""
        self.vectors[sha] = vectors

    def forget(self, sha: str) -> None:
        """Let go of a vector on the host; a program that uses it keeps its place in the bank."""
        self.vectors.pop(sha, None)

    def take_program(self, program: Program) -> int:
        """Return the table place of a program, writing it and its vectors where they are new."""
        place, fresh = self._programs.take(program)
        if fresh:
            try:
                self._write(program, place)
            except BaseException:
                self._programs.give(program)
                self._programs.evict(program)
                raise
        return place

    def _write(self, program: Program, place: int) -> None:
        while True:
            try:
                return self._try_to_write(program, place)
            except FullError:
                if not self._programs.evict_oldest():
                    break
        self._pack(program)  # it may be that what is free lies in pieces
        return self._try_to_write(program, place)

    def _pack(self, coming: Program) -> None:
        """Move the terms and vectors of all programs but one together. The device follows at `flush`, as for new ones."""
        used = self._used
        self._clear()
        self._used = used  # a vector may have been forgotten since
        for program, (place, _) in self._programs.places.items():
            if program != coming:
                self._try_to_write(program, place)

    def _try_to_write(self, program: Program, place: int) -> None:
        ordered = sorted(program, key=lambda line: line.site)  # stable: the order of the terms of one site stays
        start, _ = self._terms.take(program, max(len(ordered), 1))
        held: list[str] = []
        try:
            words = np.array([self._words(line, held) for line in ordered], np.int32)
            numbers = np.array([_numbers(line) for line in ordered], np.float32)
        except BaseException:
            self._give_vectors(held)
            self._terms.give(program)
            self._terms.evict(program)
            raise
        if ordered:
            self._mirror.write_lines("words", start, words)
            self._mirror.write_lines("numbers", start, numbers)
        index = self._no_terms.copy()
        for site, lines in groupby(range(len(ordered)), key=lambda i: ordered[i].site):
            first, *more = lines
            plain = words[first, P.WRITE] if not more and self._is_plain(ordered[first].term, site) else -1
            index[site] = start + first, 1 + len(more), plain, numbers[first, P.COEFF].view(np.int32)
        self._mirror.write_column("index", place, index)

    def _words(self, line: Line, held: list[str]) -> tuple[int, ...]:
        """A term's columns in `words`. Its vectors are taken, and added to `held`."""
        term, site = line.term, line.site
        read, write = self._place_vector(term.read, 1, site, held), self._place_vector(term.write, term.aligned, site, held)
        if term.op == "bias":
            read, write = _head_mask(term.heads)
        flags = (P.FRESH * term.fresh | P.COSINE * term.cosine | P.VOTE * term.vote | P.ALIGNED * bool(term.aligned)
                 | P.PER_ROW * (line.level is not None) | P.BEGINS * line.begins)
        return P.OPS.index(term.op), read, write, term.gate, *term.columns, term.origin, flags

    def _is_plain(self, term: Term, site: int) -> bool:
        """Whether a term adds coefficient times vector, always and everywhere in the row."""
        first, last = term.columns
        return (term.op == "add" and term.gate < 0 and not term.rate and not term.aligned and first <= 0 and last >= self.widths[site])

    def _place_vector(self, sha: str, rows: int, site: int, held: list[str]) -> int:
        if not sha:
            return -1
        vectors = self._used[sha] if sha in self._used else self.vectors[sha]
        if vectors.shape != (max(rows, 1), self.widths[site]):
            raise ValueError(f"vector {sha} is {list(vectors.shape)}; its term needs [{max(rows, 1)}, {self.widths[site]}]")
        place, fresh = self._bank.take(sha, max(rows, 1))
        held.append(sha)
        self._used[sha] = vectors
        if fresh:
            self._arriving |= {place + i: vector for i, vector in enumerate(vectors.split(1))}
        return place

    def flush(self) -> None:
        """Bring programs, plans and vectors that are new to the device, before rows name them."""
        self._mirror.flush()
        by_width: dict[int, list[int]] = {}
        for place, vector in self._arriving.items():
            by_width.setdefault(vector.shape[1], []).append(place)
        for width, places in by_width.items():
            vectors = send(torch.cat([self._arriving[place] for place in places]), self.device)
            self.bank[:, :width].index_copy_(0, send(torch.tensor(places), self.device), vectors)
        self._arriving.clear()

    def give_program(self, program: Program) -> None:
        """Drop one use of a program. It stays written, with its vectors, until there is no room for another: requests for an edit that
        is served come and go."""
        self._programs.give(program)

    def _let_go(self, program: Program) -> None:
        if program in self._terms.places:
            self._terms.give(program)
            self._terms.evict(program)
            self._give_vectors(sha for line in program for sha in (line.term.read, line.term.write) if sha)

    def _give_vectors(self, shas: Iterable[str]) -> None:
        for sha in shas:
            if self._bank.give(sha):
                del self._used[sha]

    def take_plan(self, plan: Plan) -> int:
        """Return the table place of a capture plan, writing it where it is new."""
        place, fresh = self._plans.take(plan)
        if fresh:
            offsets = np.full((len(self.widths), 2), -1, np.int32)
            cuts, start = {}, 0
            for site, before in plan:
                offsets[site, int(not before)] = start
                cuts[site, before] = start, self.room[site]
                start += aligned(self.room[site])
            try:
                self._mirror.write_column("offsets", place, offsets)
                self.plans[place] = PlanLayout(start, cuts)
            except BaseException:
                self._plans.give(plan)
                self._plans.evict(plan)
                raise
        return place

    def give_plan(self, plan: Plan) -> None:
        """Drop one use of a plan."""
        self._plans.give(plan)
