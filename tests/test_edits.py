"""Edits: frozen data with a content address, compiled to terms that are equal exactly when their effect is."""
from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import pickle
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.analysis.vectors import Vector
from mia_lab.edits import compile_edits, digest
from mia_lab.engine.wire import MAX_TERMS, Spec, Term, decode, encode
from mia_lab.errors import EditError, PointError
from mia_lab.lazy import LazyTensor
from mia_lab.points import Point

D, LAYERS = 6, 4
EDITABLE = [Point("resid_post", layer) for layer in range(LAYERS)]
ONES = torch.ones(D)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vector(layers: tuple[int, ...] = (1, 2, 3), kind: str = "resid_post") -> Vector:
    return Vector(kind, layers, draw(len(layers), D), torch.ones(len(layers)), torch.ones(len(layers)))


def compiled(*edits: Any, n: int = 5, has_bos: bool = True, editable: Any = EDITABLE) -> tuple[list[Term], dict]:
    return compile_edits(edits, n, has_bos, D, LAYERS, editable)


def effect(*edits: Any, n: int = 5, has_bos: bool = True) -> torch.Tensor:
    """What compiled edits add to each of 8 positions of each layer, `[layer pos d_model]`."""
    out = torch.zeros(LAYERS, 8, D, dtype=torch.float64)
    terms, vectors = compiled(*edits, n=n, has_bos=has_bos)
    for term in terms:
        for start, stop in term.spans:
            out[term.layer, start:stop] += term.coeff * vectors[term.vector].double()
    return out


# -- what an edit is made from ----------------------------------------------------------------------------------------


def test_one_tensor_serves_all_its_layers_and_a_matrix_has_a_row_for_each() -> None:
    rows = draw(2, D)
    assert {p: r.tolist() for p, r in mia.Add(rows[0], layers=[3, 1]).rows.items()} == {
        Point("resid_post", 3): rows[0].tolist(), Point("resid_post", 1): rows[0].tolist()}
    assert {p: r.tolist() for p, r in mia.Add(rows, layers=[3, 1], point="hook_mlp_out").rows.items()} == {
        Point("mlp_out", 3): rows[0].tolist(), Point("mlp_out", 1): rows[1].tolist()}


def test_a_vector_brings_its_own_layers_and_point_of_which_some_may_be_chosen() -> None:
    v = vector((1, 2, 3), "attn_out")
    assert list(mia.Add(v).rows) == [Point("attn_out", layer) for layer in (1, 2, 3)]
    chosen = mia.Add(v, layers=[3, 1], point="attn_out").rows
    assert {p.layer: r.tolist() for p, r in chosen.items()} == {3: v.rows[2].tolist(), 1: v.rows[0].tolist()}
    assert mia.Add(v, layers=2) == mia.Add(v[2]) == mia.Add(v.rows[1], layers=2, point="attn_out")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64])
def test_any_number_type_becomes_float32(dtype: torch.dtype) -> None:
    (row,) = mia.Add(torch.tensor([0, 1, 2, 3, 4, 200]).to(dtype), layers=[0]).rows.values()
    assert row.dtype == torch.float32
    assert row.tolist() == [0, 1, 2, 3, 4, 200]


@pytest.mark.parametrize("given", [
    ONES.clone().requires_grad_(), torch.nn.Parameter(ONES.clone()), torch.ones(D, 2)[:, 0],
    LazyTensor(lambda: torch.ones(D), (D,), torch.float32), ONES.bfloat16(), torch.ones(1).expand(D),
])
def test_any_kind_of_tensor_with_the_same_values_is_the_same_edit(given: torch.Tensor) -> None:
    assert mia.Add(given, layers=[0]) == mia.Add(ONES, layers=[0])


@pytest.mark.parametrize(("args", "says"), [
    ((ONES,), "a bare tensor needs its layers: Add(tensor, 4.0, layers=[8])"),
    ((draw(3, D), 1.0, [0, 1]), "the tensor has shape [3, 6]; 2 layers need [d_model] or [2, d_model]"),
    ((draw(1, 2, D), 1.0, [0]), "the tensor has shape [1, 2, 6]; 1 layers need"),
    ((torch.tensor(1.0), 1.0, [0]), "the tensor has shape []; 1 layers need"),
    (([1.0] * D, 1.0, [0]), "an edit takes a Vector or a tensor, not list"),
    ((ONES, 1.0, []), "the edit names no layer"),
    ((ONES, 1.0, [2, 0, 2]), "the layers [2, 0, 2] are not distinct"),
    ((vector(), 1.0, [1, 9]), "the vector has no layer 9; it has [1, 2, 3]"),
    ((vector(), 1.0, None, "mlp_out"), "the vector was fitted at resid_post, the edit asks for mlp_out"),
    pytest.param((vector((0,)), 1.0, []), "the edit names no layer"),
])
def test_an_edit_that_is_not_one_is_an_error_that_says_why(args: tuple, says: str) -> None:
    with pytest.raises(EditError) as caught:
        mia.Add(*args)
    assert says in str(caught.value)


def test_an_unknown_kind_of_point_is_a_point_error() -> None:
    with pytest.raises(PointError, match="there is no point 'resid_pots'"):
        mia.Add(ONES, layers=[0], point="resid_pots")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_value_that_float32_cannot_hold_is_refused(bad: float) -> None:
    given = torch.ones(2, D, dtype=torch.float64)
    given[1, 3] = bad
    with pytest.raises(EditError, match="the vector holds NaN or infinite values"):
        mia.Add(given, layers=[0, 1])
    with pytest.raises(EditError, match="NaN"):
        mia.Add(dataclasses.replace(vector((0, 1)), rows=given))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_coefficient_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(EditError, match=f"the coefficient is {bad}; it must be a finite number"):
        mia.Add(ONES, bad, layers=[0])


@pytest.mark.parametrize("edits", [
    lambda: [mia.Add(ONES, 1e39, layers=[0])],
    lambda: [mia.Add(ONES * 1e38, 1e5, layers=[0])],
    lambda: [mia.Add(ONES * 3e38, layers=[0]), mia.Add(ONES * 2.9e38, layers=[0])],
    lambda: [mia.Add(ONES, 3e38, layers=[0])] * 2])
def test_what_float32_cannot_hold_is_refused(edits: Any) -> None:
    with pytest.raises(EditError):
        compiled(*edits())


# -- identity ---------------------------------------------------------------------------------------------------------


def test_equal_content_is_equal_and_hashes_alike() -> None:
    base = mia.Add(ONES, 0.5, layers=[1, 2])
    same = [mia.Add(ONES.clone(), 0.5, [2, 1]), mia.Add(torch.ones(2, D), 0.5, (1, 2)),
            mia.Add(ONES, 0.25, [1, 2]).scaled(2), copy.deepcopy(base), pickle.loads(pickle.dumps(base))]
    other = [mia.Add(ONES, 0.5, [1]), mia.Add(ONES, 0.6, [1, 2]), mia.Add(ONES * 2, 0.5, [1, 2]),
             mia.Add(ONES, 0.5, [1, 2], "mlp_out"), mia.Add(ONES, 0.5, [1, 2], where=mia.prompt())]
    assert all(edit == base and hash(edit) == hash(base) for edit in same)
    assert len({base, *same, *other}) == 1 + len(other)
    assert base != "an edit"


def test_an_edit_keeps_its_values_when_the_tensor_changes() -> None:
    given = ONES.clone()
    edit, from_vector = mia.Add(given, layers=[0]), mia.Add(dataclasses.replace(vector((0,)), rows=given[None]))
    given.zero_()
    assert edit == from_vector == mia.Add(ONES, layers=[0])
    assert torch.equal(edit.rows[Point("resid_post", 0)], ONES)


def test_a_scaled_edit_keeps_its_values_when_the_tensor_changes() -> None:
    given = ONES.clone()
    edit = mia.Add(given, layers=[0])
    given.zero_()
    assert edit.scaled(2) == mia.Add(ONES, 2.0, layers=[0])


@pytest.mark.parametrize("name", ["coeff", "vector", "where"])
def test_an_edit_cannot_be_changed(name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(mia.Add(ONES, layers=[0]), name, 2.0)


def test_the_address_of_a_vector_is_the_hash_of_its_float32_bytes() -> None:
    row = draw(D)
    assert digest(row) == hashlib.sha256(row.numpy().tobytes()).hexdigest()[:32]
    assert digest(torch.stack([row, row], 1)[:, 0]) == digest(row) != digest(-row)


def test_its_text_names_places_coefficient_and_a_selector_that_is_not_the_default() -> None:
    assert repr(mia.Add(ONES, 0.25, [1, 0])) == "Add(resid_post.0, resid_post.1, coeff=0.25)"
    assert repr(mia.Add(ONES, 2, range(4), where=mia.window(2, -1))) == (
        "Add(resid_post.0, resid_post.1, resid_post.2, ..., coeff=2, where=window(2, -1))")
    assert repr(mia.Add(ONES, layers=[0], where=mia.last())) == "Add(resid_post.0, coeff=1, where=last)"


# -- compiling --------------------------------------------------------------------------------------------------------


def test_a_term_names_point_address_coefficient_and_spans() -> None:
    v = vector((1, 2))
    terms, vectors = compiled(mia.Add(v, 0.5), mia.Add(ONES, 3, [0], where=mia.positions([0, 1, 4])))
    assert terms == [Term("resid_post", 0, digest(ONES), 3.0, ((0, 2), (4, 5))),
                     Term("resid_post", 1, digest(v.rows[0]), 0.5, ((1, None),)),
                     Term("resid_post", 2, digest(v.rows[1]), 0.5, ((1, None),))]
    assert {sha: digest(row) for sha, row in vectors.items()} == {sha: sha for sha in vectors}
    assert set(vectors) == {term.vector for term in terms}


@pytest.mark.parametrize("edits", [[], [mia.Add(ONES, 0.0, [0])], [mia.Add(ONES, 2, [0]), mia.Add(ONES, -2, [0])],
                                   [mia.Add(torch.zeros(D), layers=[0]), mia.Add(ONES, 0.0, layers=[0])],
                                   [mia.Add(ONES, 2, [0]), mia.Add(ONES * 2, -1, [0])]])
def test_edits_without_an_effect_leave_no_term(edits: list) -> None:
    assert compiled(*edits) == ([], {})


def test_a_selector_that_takes_no_row_of_this_prompt_leaves_no_term() -> None:
    edit = mia.Add(ONES, layers=[0], where=mia.prompt())
    assert compiled(edit, n=1) == ([], {})
    assert len(compiled(edit, n=1, has_bos=False)[0]) == len(compiled(edit, n=2)[0]) == 1


def test_what_meets_under_one_selector_is_one_term_with_the_summed_effect() -> None:
    a, b, c = draw(3, D)
    edits = [mia.Add(a, 2.0, [0]), mia.Add(b, -0.5, [0]), mia.Add(c, 0.0, [0]), mia.Add(a, 1.0, [0, 1])]
    terms, vectors = compiled(*edits)
    assert [(t.layer, t.spans) for t in terms] == [(0, ((1, None),)), (1, ((1, None),))]
    torch.testing.assert_close(terms[0].coeff * vectors[terms[0].vector], 3 * a - b / 2)
    assert terms[1] == Term("resid_post", 1, digest(a), 1.0, ((1, None),))


def test_equal_vectors_only_add_their_coefficients() -> None:
    terms, vectors = compiled(*[mia.Add(ONES.clone(), 0.1, [0]) for _ in range(10)])
    assert terms == [Term("resid_post", 0, digest(ONES), 1.0, ((1, None),))]
    assert list(vectors) == [digest(ONES)]


def test_selectors_that_resolve_alike_meet() -> None:
    (term,), _ = compiled(mia.Add(ONES, 1, [0], where=mia.last()), mia.Add(ONES, 2, [0], where=mia.positions([4])),
                          mia.Add(ONES, 4, [0], where=mia.window(-1, 5)))
    assert (term.coeff, term.spans) == (7.0, ((4, 5),))


@pytest.mark.parametrize("has_bos", [False, True])
def test_the_terms_add_what_the_edits_say_on_the_rows_they_say(has_bos: bool) -> None:
    a, b = draw(2, D)
    edits = [mia.Add(a, 1.5, [0, 2]), mia.Add(b, -2, [0], where=mia.generated()),
             mia.Add(a, 0.5, [0], where=mia.last()), mia.Add(b, 1, [2], where=mia.positions([0, 3])),
             mia.Add(b, 1, [2], where=mia.window(-2, 6))]
    rows = {"all": range(int(has_bos), 8), "new": range(5, 8), "last": [4], "places": [0, 3], "window": range(3, 6)}
    expected = torch.zeros(LAYERS, 8, D)
    for layer, name, row in [(0, "all", 1.5 * a), (2, "all", 1.5 * a), (0, "new", -2 * b), (0, "last", a / 2),
                             (2, "places", b), (2, "window", b)]:
        expected[layer, list(rows[name])] += row
    torch.testing.assert_close(effect(*edits, has_bos=has_bos).float(), expected)


def test_the_order_of_edits_does_not_matter() -> None:
    a, b = draw(2, D)
    edits = [mia.Add(a, 1.5, [0, 2]), mia.Add(b, -2, [0]), mia.Add(b, 1, [2], where=mia.last()), mia.Add(a, 1, [3, 1])]
    assert len({tuple(compiled(*order)[0]) for order in itertools.permutations(edits)}) == 1


def test_compiled_terms_survive_the_wire() -> None:
    terms, _ = compiled(mia.Add(draw(D), 1 / 3, [0]), mia.Add(draw(D), 1e-30, [1], where=mia.positions([1, 3])))
    assert decode(encode("r", Spec(tuple(terms))))[1].terms == tuple(terms)


MEETING = [mia.everywhere(), mia.window(1), mia.prompt(), mia.window(0, 2), mia.positions([1, 3])]  # all of them at 1


def test_up_to_the_limit_edits_with_different_selectors_may_meet() -> None:
    edits = [mia.Add(ONES, 1, [layer], where=where) for layer in (0, 1) for where in MEETING[:MAX_TERMS]]
    assert len(compiled(*edits)[0]) == 2 * MAX_TERMS
    with pytest.raises(EditError, match=f"{MAX_TERMS + 1} edits with different selectors meet at resid_post.1"):
        compiled(*edits, mia.Add(ONES, 1, [1], where=MEETING[MAX_TERMS]))
    assert len(compiled(*edits, mia.Add(ONES, 0, [1], where=MEETING[MAX_TERMS]))[0]) == 2 * MAX_TERMS


def test_any_number_of_edits_may_act_at_one_point_where_they_do_not_meet() -> None:
    edits = [mia.Add(draw(D, seed=p), 1, [0], where=mia.positions([p])) for p in range(3 * MAX_TERMS)]
    assert len(compiled(*edits)[0]) == 3 * MAX_TERMS
    with pytest.raises(EditError, match=r"meet at resid_post\.0"):
        compiled(*edits, *[mia.Add(ONES, 1, [0], where=mia.window(7, 9 + i)) for i in range(MAX_TERMS)])


@pytest.mark.parametrize(("edit", "says"), [
    (mia.Add(torch.ones(5), layers=[0]), "the vector for resid_post.0 has width 5; the model's is 6"),
    (mia.Add(torch.ones(0), layers=[0]), "the vector for resid_post.0 has width 0; the model's is 6"),
    (mia.Add(ONES, layers=[4]), "the edit names layer 4; the model has layers 0 to 3"),
    (mia.Add(ONES, layers=[-1]), "the edit names layer -1; the model has layers 0 to 3"),
    (mia.Add(ONES, 0.0, [2], "mlp_out"), "edits at mlp_out.2 were not declared; declared: resid_post. Load with "
                                         "Session(..., points=['mlp_out', ...], edits=['add'])"),
    ("cheerful", "str is not an edit; type for example mia.Add(vector, 0.2)"),
    (ONES, "Tensor is not an edit"),
    (mia.Add(ONES, layers=[0], where=mia.window(3, 3)), "selects nothing in a prompt of 5 tokens"),
])
def test_an_edit_that_does_not_fit_the_model_is_an_error(edit: Any, says: str) -> None:
    with pytest.raises(EditError) as caught:
        compiled(mia.Add(ONES, layers=[0]), edit)
    assert says in str(caught.value)


def test_where_nothing_was_declared_every_edit_is_an_error() -> None:
    with pytest.raises(EditError, match="were not declared; declared: none"):
        compiled(mia.Add(ONES, layers=[0]), editable=[])
