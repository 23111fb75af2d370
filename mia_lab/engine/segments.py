"""A request's positions, cut where what it asks for changes: in one sweep, however many spans there are."""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import EditError

if TYPE_CHECKING:
    from .wire import Site, Spec, Take, Term

MAX_CELLS = 1 << 21  # terms and captured points of all segments, together
MAX_DISTINCT = 1 << 18  # the same of all segments that differ in what they hold


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions from `start` up to the next segment's: the terms that act there, in order, and what is captured.

    Segments where the same acts, or the same is captured, have one and the same tuple.
    """

    start: int
    terms: tuple[Term, ...]
    takes: tuple[Take, ...]


@lru_cache(maxsize=256)
def segments(spec: Spec) -> tuple[Segment, ...]:
    """Cut the positions of a request where anything changes; the last segment has no end. EditError where that is too often."""
    n = len(spec.terms)
    begins, ends = defaultdict(list), defaultdict(list)
    for i, item in enumerate((*spec.terms, *spec.takes)):
        for start, stop in item.spans:
            begins[start].append(i)
            if stop is not None:
                ends[stop].append(i)
    found: list[Segment] = []
    terms: dict[tuple[int, ...], tuple[Term, ...]] = {}
    takes: dict[tuple[int, ...], tuple[Take, ...]] = {}
    active: list[int] = []  # ascending: terms, then takes
    cells = distinct = 0
    for at in sorted({0, *begins, *ends}):
        for i in ends.get(at, ()):
            del active[bisect_left(active, i)]
        for i in begins.get(at, ()):
            insort(active, i)
        cut = bisect_left(active, n)
        acting, captured = tuple(active[:cut]), tuple(active[cut:])
        if acting not in terms:
            terms[acting] = tuple(spec.terms[i] for i in acting)
            distinct += len(acting)
        if captured not in takes:
            takes[captured] = tuple(spec.takes[i - n] for i in captured)
            distinct += len(captured)
        cells += len(active)
        if cells > MAX_CELLS or distinct > MAX_DISTINCT:
            raise EditError(f"what this request asks for changes too often along its positions: {len(begins)} times and more")
        found.append(Segment(at, terms[acting], takes[captured]))
    return tuple(found)


def acting(cuts: tuple[Segment, ...]) -> list[Segment]:
    """For each set of terms that act together, the first segment where they do; ascending."""
    return sorted({id(cut.terms): cut for cut in reversed(cuts)}.values(), key=lambda cut: cut.start)


def busiest(segment: Segment) -> tuple[Site, int]:
    """Return the point where most terms of a segment meet, and how many."""
    counts = Counter(term.site for term in segment.terms)
    return counts.most_common(1)[0] if counts else (("", 0), 0)
