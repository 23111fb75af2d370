"""Prefix-cache identity: a block's key differs exactly when what is added to its rows does."""
from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mia_lab as mia
from mia_lab.edits import compile_edits
from mia_lab.engine.cachekey import block_key
from mia_lab.engine.wire import Spec, Term
from mia_lab.points import Point
from mia_lab.selectors import Selector

BLOCK, D, LAYERS = 4, 3, 4
EDITABLE = [Point(kind, layer) for kind in ("resid_post", "mlp_out") for layer in range(LAYERS)]
V, W = torch.tensor([1.0, 2, 3]), torch.tensor([0.0, -1, 5])


def spec(*edits: mia.Add, n: int = 16, has_bos: bool = False) -> Spec:
    """The spec that a session sends for these edits and a prompt of `n` tokens."""
    return Spec(tuple(compile_edits(edits, n, has_bos, D, LAYERS, EDITABLE)[0]))


def keys(asked: Spec, n: int = 16) -> list[str | None]:
    """The key of each whole block of `n` tokens."""
    return [block_key(asked, start, start + BLOCK) for start in range(0, n - BLOCK + 1, BLOCK)]


def add(vector: torch.Tensor = V, coeff: float = 1.0, layer: int = 1, point: str = "resid_post",
        where: Selector = mia.everywhere()) -> mia.Add:  # noqa: B008
    return mia.Add(vector, coeff, [layer], point, where)


def test_requests_that_only_capture_or_do_nothing_have_no_key() -> None:
    assert keys(Spec()) == keys(Spec(sites=(("resid_post", 1),), rows=((0, None),))) == [None] * 4
    assert keys(spec(add(coeff=0.0))) == keys(spec(add(), add(coeff=-1.0))) == [None] * 4


def test_what_is_captured_does_not_change_the_key() -> None:
    edited = spec(add())
    assert keys(Spec(edited.terms, (("resid_post", 1),), ((0, None),))) == keys(edited)


def test_equal_edits_have_equal_keys() -> None:
    base = keys(spec(add()))
    assert base == keys(spec(add(V.clone()))) == keys(spec(mia.Add(V[None], 1.0, [1], where=mia.window(0))))
    assert base == keys(spec(add(coeff=0.25), add(coeff=0.75)))


@pytest.mark.parametrize("other", [add(W), add(V * 2), add(-V), add(coeff=0.5), add(coeff=-1.0), add(layer=2),
                                   add(point="mlp_out"), add(V + 1e-6)])
def test_another_vector_coefficient_or_point_has_another_key(other: mia.Add) -> None:
    ours, theirs = keys(spec(add())), keys(spec(other))
    assert None not in ours + theirs
    assert all(a != b for a, b in zip(ours, theirs, strict=True))
    assert all(a not in theirs for a in ours)


def test_two_edits_differ_from_each_of_them() -> None:
    one, other, both = spec(add()), spec(add(W, layer=2)), spec(add(), add(W, layer=2))
    assert len({keys(s)[0] for s in (one, other, both)}) == 3


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


def test_the_order_of_terms_does_not_matter() -> None:
    terms = spec(add(), add(W, layer=2), add(W, 0.5, where=mia.window(2, 7)), add(point="mlp_out")).terms
    assert len(terms) == 4
    assert len({tuple(keys(Spec(order))) for order in permutations(terms)}) == 1


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


# -- against what the edits do ----------------------------------------------------------------------------------------


@st.composite
def random_specs(draw: st.DrawFn) -> Spec:
    """Terms of distinct (point, vector), each on up to two spans apart from each other."""
    place = st.tuples(st.sampled_from(["resid_post", "mlp_out"]), st.integers(0, 1), st.sampled_from("ab"))
    terms = []
    for kind, layer, vector in draw(st.lists(place, max_size=3, unique=True)):
        edges = sorted(draw(st.sets(st.integers(0, 16), min_size=2, max_size=4)))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        if draw(st.booleans()):
            spans[-1] = (spans[-1][0], None)
        terms.append(Term(kind, layer, vector, draw(st.sampled_from([0.5, 1.0])), tuple(spans)))
    return Spec(tuple(terms))


def rows(asked: Spec, start: int) -> list[list[tuple]]:
    """What each row of a block has added, by plain search."""
    return [sorted((t.kind, t.layer, t.vector, t.coeff) for t in asked.terms
                   if any(a <= row and (b is None or row < b) for a, b in t.spans))
            for row in range(start, start + BLOCK)]


@given(random_specs(), random_specs())
@settings(max_examples=300, deadline=None)
def test_keys_are_equal_exactly_when_every_row_of_the_block_is_edited_alike(one: Spec, other: Spec) -> None:
    for start in range(0, 20, BLOCK):
        ours, theirs = block_key(one, start, start + BLOCK), block_key(other, start, start + BLOCK)
        assert (ours == theirs) == (rows(one, start) == rows(other, start))
        assert (ours is None) == (not any(rows(one, start)))
