"""Whether requests fit the engine's fixed tables together: arithmetic on their specs, done before they run.

Requests wait in vLLM's queue, and only so many run at once; what must fit is the worst choice of so many. Equal entries
share a place in the tables, so they count once.
"""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..errors import EditError, RoomError
from .segments import Segment, acting, segments
from .wire import Spec, addresses

Entries = Mapping[Hashable, int]  # by what shares a place: how many places it takes
_ANY = 1 << 30  # as many as there are


@dataclass(frozen=True, slots=True)
class Room:
    """How much the tables of one engine hold. together: requests that run at once; chunked: whether prompts may be cut."""

    bank_rows: int
    programs: int
    terms: int
    plans: int
    biased_tokens: int
    together: int
    chunked: bool = True

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Room:
        """From what the worker says of itself (`Lab.describe`)."""
        return cls(*(facts[name] for name in ("bank_rows", "programs", "terms", "plans", "biased_tokens")),
                   facts["settings"]["max_requests"], facts["settings"]["chunked"])

    @property
    def gated(self) -> int:
        """How many requests whose gates hold there are places for (`Sizes.requests`)."""
        return 2 * self.together

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The places of each table, as `_demand` goes through them."""
        return self.bank_rows, self.programs, self.terms, self.plans

    def share(self, parts: int) -> Room:
        """One part of several equal ones, for as many processes that do not know of one another's requests."""
        sizes = {name: getattr(self, name) // parts for name in ("bank_rows", "programs", "terms", "plans", "biased_tokens")}
        return replace(self, **sizes)

    def check(self, specs: Iterable[Spec], vectors: Mapping[str, Sized]) -> None:
        """EditError where requests with these specs might not fit together. vectors: `[n d]`, by address."""
        distinct = dict.fromkeys(specs)
        if not self.chunked and any(spec.takes_twice for spec in distinct):
            raise EditError("a point captured both before and after its edits takes twice the room, for which prompts must be "
                            "chunked; load with enable_chunked_prefill=True")
        wanted = [_demand(spec, vectors) for spec in distinct]
        if all(sum(map(_places, entries)) <= size for size, entries in zip(self.sizes, zip(*wanted))):
            return  # even if no two shared a place, and all ran at once
        book = InFlight(self)
        for spec in distinct:
            book._add(spec, vectors)
        fault = book._fault()
        if fault:
            raise EditError(f"these requests name {fault}. Use fewer selectors or points, or fewer prompts at a time, or "
                            f"load with a larger max_num_seqs")

    def check_lengths(self, lengths: Iterable[int]) -> None:
        """EditError where requests under an attention bias, of these tokens each, might not fit together."""
        book = _Lengths(self.biased_tokens, self.together)
        for length in lengths:
            book.add(length)
        if not book.fits:
            raise EditError(f"these requests under an AttentionBias hold up to {book.wanted} tokens together; the engine keeps "
                            f"{self.biased_tokens}. Load with max_biased_tokens={book.wanted} or more")


class InFlight:
    """The requests that are under way, held against the room for them (of one process among several: `room.share`).

    A request that was preempted keeps its places. Others can run in its stead only where requests differ in rank, their priority:
    all that is in flight must fit then. Entering costs next to nothing where an equal spec is in flight, or where all fit at once.
    Not for several threads.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._uses: Counter[Spec] = Counter()
        self._demands: dict[Spec, tuple[Entries, ...]] = {}
        self._tables = tuple(_Table(size, room.together) for size in room.sizes)
        self._lengths = _Lengths(room.biased_tokens, room.together)
        self._ranks: Counter[int] = Counter()
        self._gated = 0  # requests whose gates hold

    def __len__(self) -> int:
        """How many different specs are in flight."""
        return len(self._uses)

    def __contains__(self, spec: Spec) -> bool:
        return spec in self._uses

    def enter(self, spec: Spec, vectors: Mapping[str, Sized], length: int = 0, rank: int = 0) -> None:
        """Let a request in, or RoomError where the tables might not hold what is then in flight.

        vectors: those that its edits name, `[n d]` by address, at least. length: its tokens, prompt and generated, at most; they
        count where its attention is biased. rank: its priority, where requests run by it.
        """
        fault, new, mixed = "", spec not in self._uses, bool(self._ranks.keys() - {rank})
        for table in (*self._tables, self._lengths):
            table.together = _ANY if mixed else self._room.together
        if new:
            self._add(spec, vectors)
        if new or mixed:
            fault = self._fault()
        if mixed and not fault and self._gated + _holds(spec) > self._room.gated:
            fault = f"{self._gated + _holds(spec)} times gates that hold; the engine follows {self._room.gated} such requests at once"
        if mixed and not fault and not self._lengths.fits:
            fault = f"attention biases over {self._lengths.wanted} tokens; the engine keeps {self._room.biased_tokens} at once"
        if spec.keeps_history and not fault:
            self._lengths.add(length)
            if not self._lengths.fits:
                self._lengths.take_back(length)
                fault = f"an attention bias over {length} more tokens; the engine keeps {self._room.biased_tokens} at once"
        if fault:
            if new:
                self._remove(spec)
            raise RoomError(f"too many different edits at once: the requests in flight name {fault}. Try again when some have ended")
        self._uses[spec] += 1
        self._ranks[rank] += 1
        self._gated += _holds(spec)

    def leave(self, spec: Spec, length: int = 0, rank: int = 0) -> None:
        """Let a request out that was let in with the same arguments."""
        if spec.keeps_history:
            self._lengths.remove(length)
        self._gated -= _holds(spec)
        self._ranks[rank] -= 1
        self._ranks = +self._ranks
        self._uses[spec] -= 1
        if not self._uses[spec]:
            del self._uses[spec]
            self._remove(spec)

    @contextmanager
    def held(self, spec: Spec, vectors: Mapping[str, Sized], length: int = 0) -> Iterator[None]:
        """`enter` for as long as the `with` block lasts."""
        self.enter(spec, vectors, length)
        try:
            yield
        finally:
            self.leave(spec, length)

    def _add(self, spec: Spec, vectors: Mapping[str, Sized]) -> None:
        self._demands[spec] = _demand(spec, vectors)
        for table, entries in zip(self._tables, self._demands[spec]):
            table.add(entries)

    def _remove(self, spec: Spec) -> None:
        for table, entries in zip(self._tables, self._demands.pop(spec)):
            table.remove(entries)

    def _fault(self) -> str:
        """What there is no room for; "" where there is."""
        for table, what in zip(self._tables, ("different vectors", "different programs of edits", "terms of edits",
                                              "different sets of points to capture")):
            if not table.fits:
                return f"up to {table.wanted} {what}; the engine holds {table.room} at once"
        return ""


class _Table:
    """What distinct specs want of one table. Any `together` of them may run at a time."""

    def __init__(self, room: int, together: int) -> None:
        self.room, self.together = room, together
        self._uses: dict[Hashable, int] = {}
        self._total = 0  # places of all entries
        self._costs: list[int] = []  # of each spec that wants any, ascending

    def add(self, entries: Entries) -> None:
        if entries:
            insort(self._costs, _places(entries))
        for key, places in entries.items():
            uses = self._uses.get(key, 0)
            self._uses[key] = uses + 1
            self._total += 0 if uses else places

    def remove(self, entries: Entries) -> None:
        if entries:
            del self._costs[bisect_left(self._costs, _places(entries))]
        for key, places in entries.items():
            uses = self._uses[key] - 1
            if uses:
                self._uses[key] = uses
            else:
                del self._uses[key]
                self._total -= places

    @property
    def wanted(self) -> int:
        """Places that those which run together could take, at most."""
        return min(self._total, sum(self._costs[-self.together :]))

    @property
    def fits(self) -> bool:
        return self._total <= self.room or self.wanted <= self.room


class _Lengths:
    """Runs of places that cannot be moved once they are taken, so that gaps too small for another may lie between them.

    They find a place, `together` at a time, taken and freed in any order, where all that came since the tables were last
    empty have places of their own, or where there are as many gaps as could lie between them, each as long as the longest.
    """

    def __init__(self, room: int, together: int) -> None:
        self._room, self.together = room, together
        self._lengths: list[int] = []  # ascending
        self._since_empty = 0

    def add(self, length: int) -> None:
        insort(self._lengths, length)
        self._since_empty += length

    def remove(self, length: int) -> None:
        del self._lengths[bisect_left(self._lengths, length)]
        if not self._lengths:
            self._since_empty = 0

    def take_back(self, length: int) -> None:
        """Undo `add` of a length that took no places."""
        self._since_empty -= length
        self.remove(length)

    @property
    def wanted(self) -> int:
        """Places in which all of them find theirs."""
        k = min(len(self._lengths), self.together)
        return min(self._since_empty, (2 * k - 1) * self._lengths[-1]) if k else 0

    @property
    def fits(self) -> bool:
        return self.wanted <= self._room


def _places(entries: Entries) -> int:
    return sum(entries.values())


def _demand(spec: Spec, vectors: Mapping[str, Sized]) -> tuple[Entries, Entries, Entries, Entries]:
    """What a spec wants of each table. vectors: `[n d]`, by address."""
    programs = _programs(spec)
    return {sha: len(vectors[sha]) for sha in addresses(spec)}, dict.fromkeys(programs, 1), programs, _plans(spec)


def _holds(spec: Spec) -> bool:
    """Whether a gate of a request holds once it is decided, for which it has a place of its own."""
    return any(gate.rule != "row" for gate in spec.gates)


@lru_cache(maxsize=1024)
def _programs(spec: Spec) -> Entries:
    """The different programs of a spec, as the tables tell them apart: their terms without spans; with how many terms each has."""
    levels = tuple(gate.threshold if gate.rule == "row" else None for gate in spec.gates)
    return {(levels, tuple(term.bare for term in cut.terms)): len(cut.terms) for cut in acting(segments(spec)) if cut.terms}


@lru_cache(maxsize=1024)
def _plans(spec: Spec) -> Entries:
    """The different sets of points that a spec captures."""
    captured = {id(cut.takes): cut for cut in segments(spec) if cut.takes}
    return dict.fromkeys(map(_plan, captured.values()), 1)


def _plan(cut: Segment) -> Sequence[tuple[str, int, bool]]:
    return tuple(sorted((*take.site, take.before) for take in cut.takes))
