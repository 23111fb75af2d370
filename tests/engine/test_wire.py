"""The wire: what is encoded comes back, and nothing that is not a spec gets through or breaks the engine."""
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.wire import KEY, MAX_BYTES, Spec, Term, decode, encode, of_request

GOOD = {"v": 1, "sites": [["resid_post", 3]], "rows": [[0, 4], [6, None]],
        "terms": [["mlp_out", 2, "ab" * 16, -0.5, [[1, 2], [5, None]]]]}
SPEC = Spec((Term("mlp_out", 2, "ab" * 16, -0.5, ((1, 2), (5, None))),), (("resid_post", 3),), ((0, 4), (6, None)))

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
indices = st.integers(0, (1 << 31) - 1)
numbers = st.floats(-3.4e38, 3.4e38)


@st.composite
def spans(draw: st.DrawFn) -> tuple:
    """Ascending spans apart or touching, the last perhaps open."""
    edges = sorted(draw(st.sets(st.integers(0, 1 << 20), max_size=8)))
    found = list(zip(edges[::2], edges[1::2], strict=False))
    if found and draw(st.booleans()):
        found[-1] = (found[-1][0], None)
    return tuple(found)


terms = st.builds(Term, names, indices, names, numbers, spans())
sites = st.lists(st.tuples(names, indices), max_size=4, unique=True)
specs = st.builds(Spec, st.lists(terms, max_size=4).map(tuple), sites.map(tuple), spans())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner, max_size=5),
    max_leaves=20)


def body(**changed: Any) -> str:
    return "r " + json.dumps(GOOD | changed)


@given(names.filter(lambda name: " " not in name), specs)
@settings(max_examples=100, deadline=None)
def test_what_is_encoded_comes_back(uid: str, spec: Spec) -> None:
    assert decode(encode(uid, spec)) == (uid, spec)


def test_the_text_is_a_name_and_plain_json() -> None:
    uid, _, text = encode("r", SPEC).partition(" ")
    assert uid == "r"
    assert json.loads(text) == GOOD
    assert decode(body()) == ("r", SPEC)


def test_a_request_carries_one_spec_or_none() -> None:
    assert of_request({KEY: encode("r", SPEC), "other": 1}) == ("r", SPEC)
    assert of_request(None) is of_request({}) is of_request({KEY: None}) is None
    for wrong in (5, {"v": 1}, b"r {}", ["r"]):
        with pytest.raises(ValueError, match="a spec is a string of at most"):
            of_request({KEY: wrong})


def test_equal_bodies_share_one_spec() -> None:
    assert decode(encode("a", SPEC))[1] is decode(encode("b", SPEC))[1]


@pytest.mark.parametrize(("uid", "spec"), [
    ("r", replace(SPEC, terms=(replace(SPEC.terms[0], coeff=float("nan")),))),
    ("", SPEC), ("r" * 65, SPEC), ("a b", SPEC),
    ("r", replace(SPEC, rows=((4, 4),))), ("r", replace(SPEC, sites=(("resid_post", -1),))),
    ("r", replace(SPEC, rows=tuple((i, i + 1) for i in range(MAX_BYTES // 8)))),
])
def test_what_would_not_be_read_is_not_written(uid: str, spec: Spec) -> None:
    with pytest.raises(ValueError, match=r"."):
        encode(uid, spec)


# -- what is not a spec -----------------------------------------------------------------------------------------------


def only_value_errors(text: Any) -> None:
    try:
        uid, spec = decode(text)
    except ValueError:
        return
    assert decode(encode(uid, spec)) == (uid, spec)  # what does get through is a whole spec


@given(st.text(max_size=200) | st.binary(max_size=20) | json_values)
@settings(deadline=None)
def test_arbitrary_text_raises_nothing_but_value_error(text: Any) -> None:
    only_value_errors(text)


@given(json_values)
@settings(max_examples=200, deadline=None)
def test_arbitrary_json_raises_nothing_but_value_error(value: Any) -> None:
    only_value_errors("r " + json.dumps(value))


@given(st.sampled_from(list(GOOD)), json_values)
@settings(max_examples=300, deadline=None)
def test_a_spec_with_one_part_replaced_raises_nothing_but_value_error(name: str, value: Any) -> None:
    only_value_errors(body(**{name: value}))


@given(st.integers(0, 4), json_values)
@settings(max_examples=300, deadline=None)
def test_a_term_with_one_part_replaced_raises_nothing_but_value_error(place: int, value: Any) -> None:
    term = list(GOOD["terms"][0])
    term[place] = value
    only_value_errors(body(terms=[term]))


@given(st.integers(0, 200), st.integers(0, 200), st.text(max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_garbled_text_raises_nothing_but_value_error(start: int, length: int, put: str) -> None:
    text = body()
    only_value_errors(text[:start] + put + text[start + length:])


@pytest.mark.parametrize("text", [
    pytest.param("r " + "[" * 100_000, id="deep"),
    pytest.param(body(terms=[["mlp_out", 2, "ab", 10**400, [[1, 2]]]]), id="huge"),
    pytest.param(body(terms=[["mlp_out", 2, "ab", 1, [[1, 10**400]]]]), id="huge position"),
    pytest.param("r " + json.dumps(GOOD).replace("-0.5", "9" * 5000), id="huge beyond Python's limit"),
    pytest.param("r " + json.dumps(GOOD).replace("-0.5", "1e999"), id="1e999"),
    pytest.param("r " + json.dumps(GOOD) + " " * MAX_BYTES, id="long"),
])
def test_a_text_made_to_break_the_parser_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


TERM = GOOD["terms"][0]
WRONG: dict[str, str] = {
    "no body": "r", "empty": "", "no name": body()[1:], "long name": "r" * 64 + body(), "a list": "r []",
    "version": body(v=2), "no version": body(v=None), "terms are a number": body(terms=5),
    "short term": body(terms=[TERM[:4]]), "long term": body(terms=[[*TERM, 1]]),
    "no terms": "r " + json.dumps({name: GOOD[name] for name in ("v", "sites", "rows")}),
    "empty kind": body(sites=[["", 3]]), "long kind": body(sites=[["a" * 65, 3]]), "kind is 3": body(sites=[[3, 3]]),
    "negative layer": body(sites=[["resid_post", -1]]), "layer is true": body(sites=[["resid_post", True]]),
    "layer is 1.0": body(sites=[["resid_post", 1.0]]), "layer past 31 bits": body(sites=[["resid_post", 1 << 31]]),
    "negative position": body(rows=[[-1, 2]]), "position past 31 bits": body(rows=[[0, 1 << 31]]),
    "empty span": body(rows=[[3, 3]]), "backward span": body(rows=[[3, 1]]), "overlap": body(rows=[[0, 4], [3, 6]]),
    "descending": body(rows=[[5, 6], [0, 1]]), "span after an open one": body(rows=[[0, None], [9, 10]]),
    "open start": body(rows=[[None, 4]]), "one edge": body(rows=[[1]]),
    "nan": body(terms=[[*TERM[:3], float("nan"), []]]), "infinite": body(terms=[[*TERM[:3], float("-inf"), []]]),
    "coefficient is text": body(terms=[[*TERM[:3], "1", []]]), "vector is 7": body(terms=[[*TERM[:2], 7, 1.0, []]]),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_out_of_bounds_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


@pytest.mark.parametrize("rows", [[], [[0, 1]], [[0, 1], [1, None]], [[(1 << 31) - 2, (1 << 31) - 1]]])
def test_what_is_just_within_bounds_passes(rows: list) -> None:
    assert decode(body(rows=rows))[1].rows == tuple(map(tuple, rows))
    assert decode(encode("r" * 64, SPEC)) == ("r" * 64, SPEC)


def test_more_terms_than_may_meet_are_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(body(terms=[[*TERM[:2], str(i), 1.0, [[0, None]]] for i in range(5)]))


def test_a_site_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(body(sites=[["resid_post", 3]] * 2))
