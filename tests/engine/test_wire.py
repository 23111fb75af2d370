"""The wire: what is encoded comes back, and nothing that is not a spec gets through or breaks the engine."""
from __future__ import annotations

import json
import pickle
from copy import copy, deepcopy
from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.wire import (
    KEY,
    MAX_BYTES,
    MAX_GATES,
    MAX_TERMS,
    VERSION,
    Gate,
    Spec,
    Take,
    Term,
    busiest,
    decode,
    depth,
    encode,
    of_request,
    segments,
)

READ, WRITE = "ab" * 16, "cd" * 16
MEASURE = {"op": "measure", "kind": "resid_post", "layer": 1, "spans": [[1, 2], [4, None]], "read": READ, "gate": 0, "coeff": -1.0}
EDIT = {"op": "affine", "kind": "mlp_out", "layer": 2, "spans": [[1, 2], [5, None]], "read": READ, "write": WRITE, "coeff": -0.5,
        "gate": 0}
GOOD = {"v": VERSION, "terms": [MEASURE, EDIT], "takes": [["resid_post", 3, [[0, 4], [6, None]], True]],
        "gates": [["row", 0.25, 0, 0, []]], "reduce": None}
SPEC = Spec((Term("measure", "resid_post", 1, ((1, 2), (4, None)), READ, coeff=-1.0, gate=0),
             Term("affine", "mlp_out", 2, ((1, 2), (5, None)), READ, WRITE, -0.5, gate=0)),
            (Take("resid_post", 3, ((0, 4), (6, None)), True),), (Gate("row", 0.25),))

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


@st.composite
def terms(draw: st.DrawFn) -> Term:
    """An edit without a gate, of any op."""
    op = draw(st.sampled_from(["add", "affine", "clip", "feature", "scale", "renorm"]))
    rows, rate = draw(spans()), draw(st.sampled_from([0.0, -0.5]))
    aligned = bool(rows) and rows[-1][1] is not None and not rate and draw(st.booleans())
    origin = rows[0][0] if rows else draw(indices)
    return Term(op, draw(names), draw(indices), rows, draw(names) if op in ("affine", "clip", "feature") else "",
                draw(names) if op not in ("scale", "renorm") else "", *draw(st.tuples(*[numbers] * 5)), rate, draw(numbers), -1,
                draw(st.tuples(indices, indices)), origin, rows[-1][1] - origin if aligned else 0, *draw(st.tuples(*[st.booleans()] * 3)))


@st.composite
def gated(draw: st.DrawFn) -> tuple[tuple[Term, ...], tuple[Gate, ...]]:
    """Gates of every rule, each with its readings and an edit that it governs."""
    made, gates = [], []
    for i, rule in enumerate(draw(st.lists(st.sampled_from(["row", "mean", "max", "last", "since", "token"]), max_size=MAX_GATES))):
        start = draw(st.integers(0, 9))
        stop = {"row": None, "since": None, "token": None}.get(rule, start + draw(st.integers(1, 9)))
        tokens = tuple(draw(st.lists(indices, max_size=64))) if rule == "token" else ()
        gates.append(Gate(rule, draw(numbers), start, stop or 0, tokens))
        if rule != "token":
            made.append(Term("measure", "resid_post", 0, ((start, stop),), READ, draw(st.sampled_from(["", WRITE])), gate=i,
                             cosine=draw(st.booleans()), vote=draw(st.booleans())))
        made.append(Term("scale", "resid_post", 1, (((stop or start) + draw(st.integers(0, 9)), None),), gate=i))
    return tuple(made), tuple(gates)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    takes = draw(st.lists(st.builds(Take, names, indices, spans(), st.booleans()), max_size=4, unique_by=lambda t: (t.site, t.before)))
    made, gates = draw(gated())
    return Spec((*draw(st.lists(terms(), max_size=4)), *made), tuple(takes), gates)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner, max_size=5),
    max_leaves=20)


def body(**changed: Any) -> str:
    return "r " + json.dumps(GOOD | changed)


def edit(**changed: Any) -> str:
    """The good spec with the edit changed."""
    return body(terms=[MEASURE, EDIT | changed])


@given(names.filter(lambda name: " " not in name), specs())
@settings(max_examples=100, deadline=None)
def test_what_is_encoded_comes_back(uid: str, spec: Spec) -> None:
    assert decode(encode(uid, spec)) == (uid, spec)


def test_the_text_is_a_name_and_plain_json_of_what_is_not_a_default() -> None:
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


def test_a_batch_whose_requests_differ_in_a_vector_is_decoded_once() -> None:
    texts = [encode(f"r{i}", Spec((Term("add", "resid_post", 1, ((0, None),), write=f"{i:032x}"),))) for i in range(1000)]
    found = [decode(text) for text in texts]
    assert [(uid, spec.terms[0].write) for uid, spec in found] == [(f"r{i}", f"{i:032x}") for i in range(1000)]
    assert all(decode(text)[1] is spec for text, (_, spec) in zip(texts, found, strict=True))


def test_a_long_text_is_read_as_a_short_one_is() -> None:
    spec = Spec((), tuple(Take("resid_post", layer, ((0, 4),)) for layer in range(1000)))
    text = encode("r", spec)
    assert len(text) > 1 << 14
    assert decode(text) == ("r", spec)
    with pytest.raises(ValueError, match="named twice"):
        decode(text.replace('["resid_post",999,', '["resid_post",0,'))


def test_terms_are_told_apart_by_their_fields_alone_whatever_was_worked_out_of_them() -> None:
    term, fresh = replace(SPEC.terms[1]), replace(SPEC.terms[1])
    assert term.bare == replace(term, spans=()) != term
    assert term.bare is term.bare
    assert term.bare.bare == term.bare
    moved = replace(term, spans=((7, 8),))
    assert (moved.bare, hash(moved.bare)) == (term.bare, hash(term.bare))
    assert len({term, fresh, moved, replace(term, coeff=2.0)}) == 3
    assert (term, hash(term), repr(term), astuple(term)) == (fresh, hash(fresh), repr(fresh), astuple(fresh))
    for other in (copy(term), deepcopy(term), pickle.loads(pickle.dumps(term))):
        assert not hasattr(other, "_hash")  # another process has other hashes
        assert (other, hash(other), other.bare) == (term, hash(term), term.bare)


@pytest.mark.parametrize(("uid", "spec"), [
    ("r", replace(SPEC, terms=(replace(SPEC.terms[0], coeff=float("nan")),))),
    ("", SPEC), ("r" * 65, SPEC), ("a b", SPEC),
    ("r", Spec((), (Take("resid_post", 1, ((4, 4),)),))), ("r", Spec((), (Take("resid_post", -1, ((0, 4),)),))),
    ("r", Spec((), (Take("resid_post", 1, tuple((i, i + 1) for i in range(MAX_BYTES // 8))),))),
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


@given(st.sampled_from([*Term.__dataclass_fields__, "x"]), json_values)
@settings(max_examples=300, deadline=None)
def test_a_term_with_one_part_replaced_raises_nothing_but_value_error(name: str, value: Any) -> None:
    only_value_errors(edit(**{name: value}))


@given(st.sampled_from(["takes", "gates"]), st.integers(0, 4), json_values)
@settings(max_examples=300, deadline=None)
def test_a_take_or_gate_with_one_part_replaced_raises_nothing_but_value_error(name: str, place: int, value: Any) -> None:
    item = [*GOOD[name][0]]
    item[place:place + 1] = [value]
    only_value_errors(body(**{name: [item]}))


@given(st.integers(0, 500), st.integers(0, 200), st.text(max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_garbled_text_raises_nothing_but_value_error(start: int, length: int, put: str) -> None:
    text = body()
    only_value_errors(text[:start] + put + text[start + length:])


@pytest.mark.parametrize("text", [
    pytest.param("r " + "[" * 100_000, id="deep"),
    pytest.param(edit(coeff=10**400), id="huge"),
    pytest.param(edit(spans=[[1, 10**400]]), id="huge position"),
    pytest.param(body().replace("-0.5", "9" * 5000), id="huge beyond Python's limit"),
    pytest.param(body().replace("-0.5", "1e999"), id="1e999"),
    pytest.param(body() + " " * MAX_BYTES, id="long"),
])
def test_a_text_made_to_break_the_parser_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


def take(*parts: Any) -> str:
    return body(takes=[list(parts)])


WRONG: dict[str, str] = {
    "no body": "r", "empty": "", "no name": body()[1:], "long name": "r" * 64 + body(), "a list": "r []",
    "version": body(v=1), "no version": body(v=None), "terms are a number": body(terms=5), "gates are a number": body(gates=5),
    "no terms": "r " + json.dumps({name: GOOD[name] for name in ("v", "takes", "gates", "reduce")}),
    "a term is a list": body(terms=[["add", "a"]]), "a term is null": body(terms=[None]), "a gate is null": body(gates=[None]),
    "no vector as 0": edit(op="scale", read=0, write=""), "no vector as a list": edit(op="scale", read=[], write=""),
    "no reduction as a list": body(reduce=[]), "no reduction as false": body(reduce=False),
    "short take": take("resid_post", 3, []), "long take": take("resid_post", 3, [], True, 1), "before is 1": take("resid_post", 3, [], 1),
    "empty kind": take("", 3, [], True), "long kind": take("a" * 65, 3, [], True), "kind is 3": take(3, 3, [], True),
    "negative layer": take("a", -1, [], True), "layer is true": take("a", True, [], True), "layer is 1.0": take("a", 1.0, [], True),
    "layer past 31 bits": take("a", 1 << 31, [], True),
    "negative position": take("a", 3, [[-1, 2]], True), "position past 31 bits": take("a", 3, [[0, 1 << 31]], True),
    "empty span": take("a", 3, [[3, 3]], True), "backward span": take("a", 3, [[3, 1]], True),
    "overlap": take("a", 3, [[0, 4], [3, 6]], True),
    "descending": take("a", 3, [[5, 6], [0, 1]], True), "after an open one": take("a", 3, [[0, None], [9, 10]], True),
    "open start": take("a", 3, [[None, 4]], True), "one edge": take("a", 3, [[1]], True),
    "nan": edit(coeff=float("nan")), "infinite": edit(low=float("-inf")), "coefficient is text": edit(coeff="1"),
    "vector is 7": edit(read=7), "unknown op": edit(op="explode"), "unknown field": edit(x=1), "fresh is 1": edit(fresh=1),
    "three columns": edit(columns=[0, 1, 2]), "negative columns": edit(columns=[-1, 2]), "negative origin": edit(origin=-1),
    "short gate": body(gates=[["row", 0.25, 0, 0]]), "unknown rule": body(gates=[["often", 0.25, 0, 0, []]]),
    "threshold is nan": body(gates=[["row", float("nan"), 0, 0, []]]), "too many tokens": body(gates=[["token", 0.0, 0, 0, [1] * 65]]),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_out_of_bounds_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


@pytest.mark.parametrize("rows", [[], [[0, 1]], [[0, 1], [1, None]], [[(1 << 31) - 2, (1 << 31) - 1]]])
def test_what_is_just_within_bounds_passes(rows: list) -> None:
    assert decode(take("a", 3, rows, False))[1].takes[0].spans == tuple(map(tuple, rows))
    assert decode(encode("r" * 64, SPEC)) == ("r" * 64, SPEC)


# -- what a spec must not ask -----------------------------------------------------------------------------------------


def refused(spec: Spec, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode("r", spec)


def scale(*spans: tuple, **changed: Any) -> Term:
    return Term("scale", changed.pop("kind", "resid_post"), changed.pop("layer", 1), spans, **changed)


def test_as_many_terms_as_may_meet_pass_and_one_more_is_refused() -> None:
    apart = scale((0, 2), (3, None), layer=2)
    full = tuple(scale((1, 5 + i)) for i in range(MAX_TERMS))
    assert decode(encode("r", Spec((*full, apart))))[1].terms == (*full, apart)
    refused(Spec((*full, scale((4, None)))), f"more than {MAX_TERMS} edits meet at one point from position 4 on")


@pytest.mark.parametrize("twice", [False, True])
def test_a_point_may_be_captured_once_before_and_once_after_its_edits(twice: bool) -> None:
    takes = tuple(Take("resid_post", 3, ((0, 1),), before) for before in (False, True))
    assert decode(encode("r", Spec((), takes)))[1].takes == takes
    refused(Spec((), (*takes, Take("resid_post", 3, ((5, 6),), twice))), "a captured point is named twice")


@pytest.mark.parametrize(("term", "says"), [
    (scale((0, 1), gate=0), "a term names gate 0 of 0"),
    (Term("measure", "a", 0, ((0, 1),), READ), "a term names gate -1 of 0"),
    (scale((0, 1), read=READ), "scale takes no vector to read"),
    (Term("renorm", "a", 0, (), READ), "renorm takes no vector to read"),
    (Term("add", "a", 0, (), READ, WRITE), "add takes no vector to read"),
    *[(Term(op, "a", 0, (), write=WRITE), f"{op} needs vector to read") for op in ("affine", "clip", "feature")],
    *[(Term(op, "a", 0, (), READ if op != "add" else ""), f"{op} needs a vector to write") for op in ("add", "affine", "clip", "feature")],
    (scale((3, 4), rate=0.5), "a schedule never grows"),
    (scale((3, 4), rate=-0.5, origin=4), "begins no later than its edit"),
    (Term("add", "a", 0, ((2, 5),), write=WRITE, origin=2, aligned=2), "2 aligned vectors from position 2 on do not cover"),
    (Term("add", "a", 0, ((1, 3),), write=WRITE, origin=2, aligned=2), "do not cover the edited rows"),
    (Term("add", "a", 0, ((2, None),), write=WRITE, origin=2, aligned=2), "do not cover the edited rows"),
])
def test_a_term_that_cannot_run_is_refused(term: Term, says: str) -> None:
    refused(Spec((term,)), says)


def reading(*spans: tuple, **changed: Any) -> Term:
    return Term("measure", changed.pop("kind", "resid_post"), changed.pop("layer", 0), spans, READ, gate=0, **changed)


ROWS = Gate("row", 0.5)


@pytest.mark.parametrize(("gate", "terms", "says"), [
    (ROWS, [scale((0, 1), gate=0)], "decides by row needs readings"),
    (Gate("token"), [reading((0, 1))], "decides by token takes no readings"),
    (ROWS, [reading((0, 4)), reading((0, 5), layer=1)], "readings of one gate are taken on different rows"),
    (ROWS, [reading((0, 4)), reading((0, 4), kind="resid_mid"), reading((0, 4), kind="mlp_out")], "whose order is not fixed"),
    (ROWS, [reading((2, 4)), scale((1, 3), gate=0)], "acts on rows that its gate does not read"),
    (ROWS, [reading((2, 4)), scale((3, 5), gate=0)], "acts on rows that its gate does not read"),
    (ROWS, [reading((2, 4)), scale((3, None), gate=0)], "acts on rows that its gate does not read"),
    (ROWS, [reading((0, None), layer=1), scale((0, None), gate=0)], "comes after, or beside, the edit"),
    (ROWS, [reading((0, None), layer=1, kind="attn_out"), scale((0, None), gate=0, kind="mlp_out")], "comes after, or beside, the edit"),
    *[(Gate(rule, 0.5, 2, 6), [reading((2, 6)), scale((5, None), gate=0)], "before its gate is decided")
      for rule in ("mean", "max", "last")],
    *[(Gate(rule, 0.5, 2, 6), [reading((2, 5)), scale((6, None), gate=0)], "pools other rows than it reads")
      for rule in ("mean", "max", "last")],
    (Gate("since", 0.5, 3), [reading((3, None)), scale((2, None), gate=0)], "before its gate is decided"),
    (Gate("since", 0.5, 3), [reading((2, None)), scale((3, None), gate=0)], "watches other rows than it reads"),
    (Gate("token", 0.0, 3, 0, (7,)), [scale((2, None), gate=0)], "before its gate is decided"),
])
def test_a_gate_that_is_not_decided_before_its_edits_is_refused(gate: Gate, terms: list[Term], says: str) -> None:
    refused(Spec(tuple(terms), (), (gate,)), says)


@pytest.mark.parametrize(("gate", "terms"), [
    (ROWS, [reading((0, None)), reading((0, None), kind="attn_out", layer=1), scale((0, 4), (6, None), gate=0)]),
    (Gate("last", 0.5, 5, 6), [reading((5, 6), layer=3), scale((6, None), gate=0)]),  # decided rows before, so from any layer
    (Gate("since", 0.5, 3), [reading((3, None), layer=3), scale((3, None), gate=0)]),
    (Gate("token", 0.0, 3, 0, (7,)), [scale((3, None), gate=0)]),
])
def test_a_gate_that_is_decided_in_time_passes(gate: Gate, terms: list[Term]) -> None:
    spec = Spec(tuple(terms), (), (gate,))
    assert decode(encode("r", spec))[1] == spec


def test_a_request_has_so_many_gates_at_most() -> None:
    gates = (Gate("token", tokens=(1,)),) * MAX_GATES
    assert decode(encode("r", Spec((), (), gates)))[1].gates == gates
    refused(Spec((), (), (*gates, gates[0])), f"a request has {MAX_GATES} gates at most, not {MAX_GATES + 1}")


# -- what a spec says -------------------------------------------------------------------------------------------------


def test_the_positions_are_cut_where_anything_changes() -> None:
    a, b = scale((1, 4), (6, None)), scale((0, 4), layer=2)
    one, two = Take("resid_post", 0, ((3, None),)), Take("resid_post", 0, ((0, 1), (3, 5)), True)
    found = [(cut.start, cut.terms, cut.takes) for cut in segments(Spec((a, b), (one, two)))]
    assert found == [(0, (b,), (two,)), (1, (a, b), ()), (3, (a, b), (one, two)), (4, (), (one, two)), (5, (), (one,)), (6, (a,), (one,))]
    assert [cut.start for cut in segments(Spec())] == [0]


def test_the_busiest_point_of_a_segment_is_the_one_with_most_terms() -> None:
    (cut,) = segments(Spec((scale((0, None)), scale((0, None), layer=2), scale((0, None), layer=2))))
    assert busiest(cut) == (("resid_post", 2), 2)
    assert busiest(segments(Spec())[0])[1] == 0


@pytest.mark.parametrize(("spec", "row"), [
    (Spec(), None), (Spec((scale((0, None)),)), None), (Spec((), (Take("a", 0, ((4, 5), (7, None))), Take("b", 0, ((3, 4),)))), 3),
    (Spec((), (Take("a", 0, ()),)), None),
    *[(Spec((), (), (Gate(rule, 0.0, 2, 6),)), 2) for rule in ("mean", "max", "since")],
    *[(Spec((), (), (Gate(rule, 0.0, 2, 6),)), None) for rule in ("row", "last", "token")],
    (Spec((), (Take("a", 0, ((4, 5),)),), (Gate("mean", 0.0, 1, 6),)), 1),
])
def test_the_first_row_that_must_be_computed(spec: Spec, row: int | None) -> None:
    assert spec.first_row == row


def test_depth_follows_the_forward_pass() -> None:
    kinds = [["embed", "resid_pre"], ["q", "z", "attn_out", "resid_mid", "mlp_act", "router", "mlp_out"], ["resid_post", "final_norm"]]
    places = [{depth(Term("renorm", kind, layer, ())) for kind in group} for layer in (0, 1) for group in kinds]
    assert [len(place) for place in places] == [1] * 6
    assert sorted(places, key=min) == places
