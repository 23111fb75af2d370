"""Prefix-cache identity: a block's key differs exactly when what is done to its rows does."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mia_lab as mia
from mia_lab.engine.cachekey import block_key
from mia_lab.engine.wire import Gate, Spec, Take, Term
from mia_lab.points import Point
from mia_lab.running.compile import Model, compile_edits
from mia_lab.selectors import Context, Selector

BLOCK, D, LAYERS = 4, 3, 4
SHAPES = {Point(kind, layer): (D,) for kind in ("resid_post", "mlp_out") for layer in range(LAYERS)}
MODEL = Model(LAYERS, SHAPES, frozenset(SHAPES), edit_kinds=("add", "ablate", "clamp", "scale", "replace", "affine"))
V, W = torch.tensor([1.0, 2, 3]), torch.tensor([0.0, -1, 5])


def spec(*edits: mia.Edit, n: int = 16, has_bos: bool = False) -> Spec:
    """The spec that a session sends for these edits and a prompt of `n` tokens."""
    found = compile_edits(edits, Context(range(n), has_bos), MODEL)
    return Spec(tuple(found.terms), (), tuple(found.gates))


def keys(asked: Spec, n: int = 16) -> list[str | None]:
    """The key of each whole block of `n` tokens."""
    return [block_key(asked, start, start + BLOCK) for start in range(0, n - BLOCK + 1, BLOCK)]


def add(vector: torch.Tensor = V, coeff: float = 1.0, layer: int = 1, point: str = "resid_post",
        where: Selector = mia.everywhere(), **rest: object) -> mia.Add:  # noqa: B008
    return mia.Add(vector, coeff, [layer], point, where, **rest)


def test_requests_that_only_capture_or_do_nothing_have_no_key() -> None:
    assert keys(Spec()) == keys(Spec((), (Take("resid_post", 1, ((0, None),)),))) == [None] * 4
    assert keys(spec(add(coeff=0.0))) == keys(spec(mia.Scale(1.0, layers=[1]))) == [None] * 4


def test_what_is_captured_does_not_change_the_key() -> None:
    edited = spec(add())
    assert keys(replace(edited, takes=(Take("resid_post", 1, ((0, None),), True),))) == keys(edited)


def test_equal_edits_have_equal_keys() -> None:
    base = keys(spec(add()))
    assert base == keys(spec(add(V.clone()))) == keys(spec(mia.Add(V[None], 1.0, [1], where=mia.window(0))))
    assert base == keys(spec(add(), add(W, coeff=0.0)))


@pytest.mark.parametrize("other", [
    add(W), add(V * 2), add(-V), add(coeff=0.5), add(coeff=-1.0), add(layer=2), add(point="mlp_out"), add(V + 1e-6), add(keep_norm=True),
    add(schedule=mia.Decay(50)), mia.Ablate(V, layers=[1], where=mia.everywhere()),
    mia.Clamp(V, 1.0, layers=[1], where=mia.everywhere()), mia.Replace(V, [1], where=mia.everywhere())])
def test_another_edit_vector_coefficient_or_point_has_another_key(other: mia.Edit) -> None:
    ours, theirs = keys(spec(add())), keys(spec(other))
    assert None not in ours + theirs
    assert all(a != b for a, b in zip(ours, theirs, strict=True))
    assert all(a not in theirs for a in ours)


def test_two_edits_differ_from_each_of_them_and_from_the_other_order() -> None:
    one, other = mia.Ablate(V, layers=[1]), add(W, where=mia.window(0))
    found = [keys(s)[0] for s in (spec(one), spec(other), spec(one, other), spec(other, one))]
    assert len(set(found)) == 4


@pytest.mark.parametrize("n", [6, 8, 13])
def test_blocks_before_the_first_edited_token_have_no_key(n: int) -> None:
    found = keys(spec(add(where=mia.window(n))))
    first = n // BLOCK
    assert found[:first] == [None] * first
    assert None not in found[first:]


def test_an_edit_of_one_token_marks_only_its_block() -> None:
    found = keys(spec(add(where=mia.positions([5]))))
    assert [key is not None for key in found] == [False, True, False, False]
    assert found[1] != keys(spec(add(where=mia.positions([6]))))[1]


def test_a_block_boundary_belongs_to_the_block_that_starts_there() -> None:
    found = keys(spec(add(where=mia.window(4, 8))))
    assert [key is not None for key in found] == [False, True, False, False]


def test_prompts_of_two_lengths_share_the_blocks_that_both_fill() -> None:
    short, long = spec(add(where=mia.prompt()), n=10), spec(add(where=mia.prompt()), n=16)
    assert keys(short)[:2] == keys(long)[:2]
    assert keys(short)[2] != keys(long)[2]  # rows 10 and 11 are generated in one, prompt in the other
    assert keys(short)[3] is None
    assert keys(spec(add(), n=10)) == keys(spec(add(), n=16))


def test_the_first_block_of_a_prompt_with_bos_differs_from_one_without() -> None:
    with_bos, without = (keys(spec(add(where=mia.prompt()), has_bos=has_bos)) for has_bos in (True, False))
    assert with_bos[0] != without[0]
    assert with_bos[1:] == without[1:]


def test_a_schedule_is_told_apart_by_where_it_began() -> None:
    found = [keys(spec(add(schedule=mia.Decay(8), where=mia.window(start)))) for start in (0, 1)]
    assert all(a != b for a, b in zip(*found))


def test_rows_by_position_are_told_apart_by_where_they_begin() -> None:
    rows = torch.stack([V, W, V, W, V, W, V, W])
    found = [keys(spec(mia.Replace(rows, [1], start=start, where=mia.everywhere()))) for start in (0, 2)]
    assert found[0][1] != found[1][1]
    assert found[0][1:] != [None] * 3


# -- gates ------------------------------------------------------------------------------------------------------------


def gated(direction: torch.Tensor = V, above: float = 0.5, over: str = "row", n: int = 6, **probe: object) -> list[str | None]:
    """The keys of an edit behind a gate, for a prompt that leaves generated tokens in the second block."""
    gate = mia.Gate(mia.Probe(direction, 0, **probe), above=above, over=over)
    return keys(spec(add(when=gate), n=n))


@pytest.mark.parametrize("over", ["row", "prompt_mean", "prompt_max", "prompt_last", "since"])
def test_everything_that_decides_a_gate_is_in_the_key_of_the_blocks_it_may_edit(over: str) -> None:
    base = gated(over=over)
    assert gated(V.clone(), over=over) == base != keys(spec(add()))
    assert (base[0] is None) == (over != "row")  # one that is decided after the prompt edits none of its rows
    others = [gated(W, over=over), gated(above=0.6, over=over), gated(bias=1.0, over=over), gated(cosine=True, over=over),
              gated(point="mlp_out", over=over), keys(spec(add(when=mia.Gate(mia.Probe(V, 0), below=0.5, over=over)), n=6))]
    for other in others:
        assert None not in other[1:]
        assert not set(other[1:]) & set(base[1:])
    assert len({key for found in [base, *others] for key in found[1:]}) == 7 * 3


def test_gates_over_other_rows_or_tokens_differ() -> None:
    found = [gated(over=over)[1] for over in ("row", "prompt_mean", "prompt_max", "prompt_last", "since")]
    found += [keys(spec(add(when=mia.After(token)), n=6))[1] for token in ([7], [8], [7, 8])]
    found += [gated(over="prompt_mean", n=5)[1]]
    assert None not in found
    assert len(set(found)) == len(found)


def test_a_reading_alone_forks_nothing() -> None:
    measure = Term("measure", "resid_post", 0, ((0, None),), "ab", gate=0)
    assert keys(Spec((measure,), (), (Gate("row", 0.5),))) == [None] * 4


# -- against what the edits do ----------------------------------------------------------------------------------------


@st.composite
def random_specs(draw: st.DrawFn, distinct: bool) -> Spec:
    """Terms, each on up to two spans apart from each other; distinct: of one (point, vector) each, in a fixed order."""
    place = st.tuples(st.sampled_from(["resid_post", "mlp_out"]), st.integers(0, 1), st.sampled_from("ab"))
    terms = []
    for kind, layer, vector in draw(st.lists(place, max_size=3, unique=True).map(sorted) if distinct else st.lists(place, max_size=3)):
        edges = sorted(draw(st.sets(st.integers(0, 16), min_size=2, max_size=4)))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        if draw(st.booleans()):
            spans[-1] = (spans[-1][0], None)
        terms.append(Term("add", kind, layer, tuple(spans), write=vector, coeff=draw(st.sampled_from([0.5, 1.0]))))
    return Spec(tuple(terms))


def rows(asked: Spec, start: int) -> list[list[tuple]]:
    """What is done to each row of a block, in order, by plain search."""
    return [[(t.kind, t.layer, t.write, t.coeff) for t in asked.terms if any(a <= row and (b is None or row < b) for a, b in t.spans)]
            for row in range(start, start + BLOCK)]


@given(random_specs(True), random_specs(True))
@settings(max_examples=300, deadline=None)
def test_keys_are_equal_exactly_when_every_row_of_the_block_is_edited_alike(one: Spec, other: Spec) -> None:
    for start in range(0, 20, BLOCK):
        ours, theirs = block_key(one, start, start + BLOCK), block_key(other, start, start + BLOCK)
        assert (ours == theirs) == (rows(one, start) == rows(other, start))
        assert (ours is None) == (not any(rows(one, start)))


@given(random_specs(False), random_specs(False))
@settings(max_examples=200, deadline=None)
def test_whatever_the_order_equal_keys_mean_equal_edits(one: Spec, other: Spec) -> None:
    for start in range(0, 20, BLOCK):
        same = block_key(one, start, start + BLOCK) == block_key(other, start, start + BLOCK)
        assert not same or rows(one, start) == rows(other, start)


@given(random_specs(False), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_what_is_beyond_a_block_does_not_change_its_key(one: Spec, block: int) -> None:
    start = block * BLOCK
    kept = [tuple((max(a, start), min(start + BLOCK if b is None else b, start + BLOCK)) for a, b in t.spans
                  if a < start + BLOCK and (b is None or b > start)) for t in one.terms]
    local = Spec(tuple(replace(t, spans=spans) for t, spans in zip(one.terms, kept) if spans))
    assert block_key(local, start, start + BLOCK) == block_key(one, start, start + BLOCK)
