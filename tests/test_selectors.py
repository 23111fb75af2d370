"""Selectors: rules for positions, resolved to disjoint ascending spans of one prompt."""
from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mia_lab as mia
from mia_lab.errors import EditError
from mia_lab.selectors import CONTENT, Selector, merge

N = 10


@pytest.mark.parametrize(("selector", "with_bos", "without"), [
    (CONTENT, [(1, None)], [(0, None)]),
    (mia.everywhere(), [(0, None)], [(0, None)]),
    (mia.prompt(), [(1, N)], [(0, N)]),
    (mia.generated(), [(N, None)], [(N, None)]),
    (mia.last(), [(N - 1, N)], [(N - 1, N)]),
    (mia.window(2, 5), [(2, 5)], [(2, 5)]),
    (mia.window(0), [(0, None)], [(0, None)]),
    (mia.window(-3), [(7, None)], [(7, None)]),
    (mia.window(-3, -1), [(7, 9)], [(7, 9)]),
    (mia.window(2, -1), [(2, 9)], [(2, 9)]),
    (mia.window(8, 14), [(8, 14)], [(8, 14)]),  # into the generation
    (mia.window(20), [(20, None)], [(20, None)]),
    (mia.positions([4]), [(4, 5)], [(4, 5)]),
    (mia.positions([-1, 0]), [(0, 1), (9, 10)], [(0, 1), (9, 10)]),
    (mia.positions([5, 3, 4, 7, 3]), [(3, 6), (7, 8)], [(3, 6), (7, 8)]),
    (mia.positions([9, -1]), [(9, 10)], [(9, 10)]),
    (mia.positions([12]), [(12, 13)], [(12, 13)]),
    (mia.positions(range(2, 5)), [(2, 5)], [(2, 5)]),
])
def test_a_rule_resolves_to_spans(selector: Selector, with_bos: list, without: list) -> None:
    assert selector.spans(N, has_bos=True) == with_bos
    assert selector.spans(N, has_bos=False) == without


def test_a_prompt_of_bos_alone_has_no_content() -> None:
    assert mia.prompt().spans(1, has_bos=True) == []
    assert mia.prompt().spans(1, has_bos=False) == [(0, 1)]
    assert mia.generated().spans(1, has_bos=True) == CONTENT.spans(1, has_bos=True) == [(1, None)]


@pytest.mark.parametrize(("selector", "says"), [
    (mia.window(5, 5), r"window\(5, 5\) selects nothing in a prompt of 10 tokens"),
    (mia.window(5, -5), r"window\(5, -5\) selects nothing"),
    (mia.window(5, 3), r"window\(5, 3\) selects nothing"),
    (mia.window(-11), r"window\(-11, None\) selects nothing"),
    (mia.window(3, -11), r"window\(3, -11\) selects nothing"),
    (mia.positions([0, -11]), r"positions\(0, -11\) reach before the start of a prompt of 10 tokens"),
    (Selector("sometimes"), "there is no selector 'sometimes'"),
])
def test_a_rule_that_selects_nothing_is_an_error_with_the_prompt_s_length(selector: Selector, says: str) -> None:
    with pytest.raises(EditError, match=says):
        selector.spans(N, has_bos=True)


def test_no_positions_are_an_error_at_once() -> None:
    with pytest.raises(EditError, match="at least one position"):
        mia.positions([])


def test_equal_rules_are_equal_and_cannot_be_changed() -> None:
    assert mia.window(1, 4) == mia.window(1, 4) != mia.window(1, 5)
    assert len({mia.positions([1, 2]), mia.positions([1, 2]), mia.positions([2, 1])}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        mia.last().rule = "prompt"


RULES = st.one_of(
    st.sampled_from([CONTENT, mia.everywhere(), mia.prompt(), mia.generated(), mia.last()]),
    st.builds(mia.window, st.integers(-6, 12), st.none() | st.integers(-6, 12)),
    st.builds(mia.positions, st.lists(st.integers(-6, 12), min_size=1, max_size=6)))


@given(RULES, st.integers(1, 8), st.booleans())
def test_spans_ascend_apart_from_each_other_and_hold_what_the_rule_says(rule: Selector, n: int, has_bos: bool) -> None:
    try:
        spans = rule.spans(n, has_bos)
    except EditError:
        assert rule.rule in ("window", "positions")
        return
    edges = [edge if edge is not None else 10**9 for span in spans for edge in span]
    assert edges == sorted(set(edges))  # so neither empty, nor overlapping, nor touching
    held = {p for start, stop in spans for p in range(start, 20 if stop is None else stop)}
    everything = range(20)
    a, b = (*rule.args, None, None)[:2]
    from_end = lambda p: p + n if p is not None and p < 0 else p  # noqa: E731
    expected = {
        "content": everything[has_bos:], "everywhere": everything, "prompt": everything[has_bos:n], "last": [n - 1],
        "generated": everything[n:], "window": everything[from_end(a): from_end(b)] if rule.rule == "window" else (),
        "positions": [from_end(p) for p in rule.args],
    }[rule.rule]
    assert held == set(expected)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=6), st.booleans())
def test_merging_joins_what_touches_and_keeps_the_rest(steps: list[tuple[int, int]], open_end: bool) -> None:
    spans, at = [], 0
    for gap, length in steps:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    if open_end and spans:
        spans[-1] = (spans[-1][0], None)
    merged = merge(spans)
    rows = lambda parts: [p for a, b in parts for p in range(a, 99 if b is None else b)]  # noqa: E731
    assert rows(merged) == rows(spans)
    assert all(stop < start for (_, stop), (start, _) in pairwise(merged))
