"""Segments: one sweep finds what a plain search finds, and no text is so made that reading it takes long."""
from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.cachekey import block_key
from mia_lab.engine.segments import MAX_CELLS, MAX_DISTINCT, acting, segments
from mia_lab.engine.wire import MAX_BYTES, VERSION, Spec, Take, Term, decode
from mia_lab.errors import EditError


def spans(rng: random.Random) -> tuple[tuple[int, int | None], ...]:
    edges = sorted(rng.sample(range(12), 2 * rng.randint(0, 3)))
    found = list(zip(edges[::2], edges[1::2]))
    if rng.random() < 0.3:
        found.append((max([12, *edges]), None))
    return tuple(found)


def made(rng: random.Random) -> Spec:
    terms = tuple(Term("scale", "k", n, spans(rng)) for n in range(rng.randint(0, 5)))
    return Spec(terms, tuple(Take("k", n, spans(rng)) for n in range(rng.randint(0, 4))))


def inside(item: Term | Take, at: int) -> bool:
    return any(start <= at and (stop is None or at < stop) for start, stop in item.spans)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30))
def test_each_position_lies_in_the_segment_of_what_acts_there(seed: int) -> None:
    spec = made(random.Random(seed))
    cuts = segments(spec)
    assert [cut.start for cut in cuts] == sorted({0} | {edge for item in (*spec.terms, *spec.takes) for span in item.spans
                                                       for edge in span if edge is not None})
    for at in range(16):
        cut = max((cut for cut in cuts if cut.start <= at), key=lambda cut: cut.start)
        assert cut.terms == tuple(term for term in spec.terms if inside(term, at))
        assert cut.takes == tuple(take for take in spec.takes if inside(take, at))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30))
def test_segments_where_the_same_acts_share_what_they_hold(seed: int) -> None:
    cuts = segments(made(random.Random(seed)))
    for a in cuts:
        for b in cuts:
            assert (a.terms is b.terms, a.takes is b.takes) == (a.terms == b.terms, a.takes == b.takes)
    firsts = {cut.terms: cut for cut in reversed(cuts)}
    assert acting(cuts) == sorted(firsts.values(), key=lambda cut: cut.start)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_block_is_keyed_by_the_edits_on_its_own_rows(seed: int) -> None:
    spec = made(random.Random(seed))
    for start in range(0, 16, 3):
        acts = any(inside(term, at) for term in spec.terms for at in range(start, start + 3))
        assert (block_key(spec, start, start + 3) is not None) == acts


def body(terms: list[dict], takes: list[list] = [], gates: list[list] = []) -> str:  # noqa: B006
    text = "u " + json.dumps({"v": VERSION, "terms": terms, "takes": takes, "gates": gates, "reduce": None}, separators=(",", ":"))
    assert len(text) <= MAX_BYTES
    return text


def scale(kind: str = "k", layer: int = 0, spans: Any = ((0, None),), **other: Any) -> dict:
    return {"op": "scale", "kind": kind, "layer": layer, "spans": spans} | other


def dotted(n: int) -> list[list[int]]:
    return [[2 * i, 2 * i + 1] for i in range(n)]


READS = dict(op="measure", read="a", gate=0)
HOSTILE = {
    "one edit in very many places": body([scale(spans=dotted(60_000))]),
    "very many edits in one place": body([scale(f"k{i}") for i in range(15_000)]),
    "many edits, cut by one that changes often": body([scale(f"k{i}") for i in range(6000)] + [scale("a", spans=dotted(40_000))]),
    "edits that pile up": body([scale(f"k{i}", spans=[[i, None]]) for i in range(12_000)]),
    "a gate that reads in very many places": body([scale(spans=dotted(30_000)) | READS, scale(layer=1, spans=dotted(30_000), gate=0)],
                                                  gates=[["row", 0.0, 0, 0, []]]),
    "a gate with very many readings": body([scale(f"k{i}", i) | READS for i in range(5000)] +
                                           [scale(layer=6000 + i, gate=0) for i in range(4000)], gates=[["row", 0.0, 0, 0, []]]),
    "very many biases": body([{"op": "bias", "kind": "attention", "layer": i, "spans": [[0, None]]} for i in range(14_000)]),
    "very many captures": body([], [[f"k{i}", 0, [[i, i + 1]], False] for i in range(30_000)]),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_takes_long_to_read(text: str) -> None:
    start = time.process_time()
    try:
        decode(text)
    except ValueError as error:
        assert len(str(error)) < 300  # noqa: PT017
    assert time.process_time() - start < 5


def test_what_changes_too_often_is_refused() -> None:
    piled = lambda n: Spec(tuple(Term("scale", "k", i, ((i, None),)) for i in range(n)))  # noqa: E731
    n = int((2 * MAX_DISTINCT) ** 0.5)
    assert len(segments(piled(n - 2))) == n - 2
    with pytest.raises(EditError, match="changes too often along its positions"):
        segments(piled(n + 1))
    always = tuple(Term("scale", "k", i, ((0, None),)) for i in range(63))
    dots = lambda n: Spec((*always, Term("scale", "k", 63, tuple(map(tuple, dotted(n))))))  # noqa: E731
    n = MAX_CELLS // (2 * 64)
    assert len(segments(dots(n))) == 2 * n
    with pytest.raises(ValueError, match=f"{n + 700} times and more"):
        segments(dots(n + 700))
