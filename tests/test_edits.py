"""Edits: frozen data with a content address, compiled to terms that do what each edit's formula says."""
from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from parity import formulas

import mia_lab as mia
from mia_lab.analysis.vectors import Vector
from mia_lab.edits import digest
from mia_lab.engine.claims import Claims
from mia_lab.engine.config import Sizes
from mia_lab.engine.router import Router
from mia_lab.engine.tables import Tables
from mia_lab.engine.wire import KEY, Spec, encode
from mia_lab.errors import EditError, PointError
from mia_lab.kernels.tap import tap_reference
from mia_lab.lazy import LazyTensor
from mia_lab.points import Point
from mia_lab.running.compile import Compiled, Model, compile_edits
from mia_lab.selectors import Context

D, LAYERS, TOTAL = 6, 4, 8  # rows of six values; z has two heads of three
SHAPES = {Point("resid_post", layer): (D,) for layer in range(LAYERS)} | {Point("z", layer): (2, 3) for layer in range(LAYERS)}
READ_ONLY = {Point("q", layer): (2, 3) for layer in range(LAYERS)}
KINDS = ("add", "ablate", "clamp", "scale", "replace", "affine", "clampfeature")
MODEL = Model(LAYERS, SHAPES | READ_ONLY, frozenset(SHAPES), frozenset({"q"}), KINDS)
ONES = torch.ones(D)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vector(layers: tuple[int, ...] = (1, 2, 3), kind: str = "resid_post") -> Vector:
    return Vector(kind, layers, draw(len(layers), D), torch.ones(len(layers)), torch.ones(len(layers)))


def compiled(*edits: Any, n: int = 5, has_bos: bool = True, model: Model = MODEL, **context: Any) -> Compiled:
    return compile_edits(edits, Context(range(n), has_bos, **context), model)


def applied(*edits: mia.Edit, n: int = 5, has_bos: bool = True, seed: int = 7) -> dict[Point, tuple[torch.Tensor, torch.Tensor]]:
    """Values `[pos d]` at each point before and after edits, by the wire, the tables and the taps."""
    points = sorted(SHAPES, key=lambda p: (p.layer, p.kind != "z"))
    sizes = Sizes(TOTAL, requests=2, programs=32, plans=1, terms=512, bank_bytes=256 * 4 * D, captured_tokens=1)
    tables = Tables([D] * len(points), [False] * len(points), sizes, torch.float32, torch.device("cpu"))
    router = Router(tables, [(p.kind, p.layer) for p in points], Claims())
    found = compiled(*edits, n=n, has_bos=has_bos)
    for sha, rows in found.vectors.items():
        tables.register(sha, rows)
    params = SimpleNamespace(extra_args={KEY: encode("r", Spec(tuple(found.terms), (), tuple(found.gates)))})
    router.admit(SimpleNamespace(finished_req_ids=[], scheduled_new_reqs=[SimpleNamespace(req_id="r", sampling_params=params)]))
    router.route(["r"], np.array([TOTAL]), np.array([0]), torch.zeros(TOTAL, dtype=torch.int64))
    out = {}
    for site, point in enumerate(points):
        before = draw(TOTAL, D, seed=seed + site)
        after = before.clone()
        tap_reference(after, None, *tables.of_site(site))
        out[point] = before, after
    return out


def meant(edit: mia.Edit, point: Point, h: torch.Tensor, n: int, has_bos: bool) -> torch.Tensor:
    """The value after an edit, from its formula."""
    if point not in edit.steps:
        return h
    return formulas.edited(edit, point, h, formulas.mask(edit, Context(range(n), has_bos), TOTAL), SHAPES[point])


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_coefficient_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(EditError, match=re.escape(f"the coefficient is {bad}; it must be a finite number")):
        mia.Add(ONES, bad, layers=[0])


# -- identity ---------------------------------------------------------------------------------------------------------


def test_equal_content_is_equal_and_hashes_alike() -> None:
    base = mia.Add(ONES, 0.5, layers=[1, 2])
    same = [mia.Add(ONES.clone(), 0.5, [2, 1]), mia.Add(torch.ones(2, D), 0.5, (1, 2)),
            mia.Add(ONES, 0.25, [1, 2]).scaled(2), copy.deepcopy(base), pickle.loads(pickle.dumps(base))]
    other = [mia.Add(ONES, 0.5, [1]), mia.Add(ONES, 0.6, [1, 2]), mia.Add(ONES * 2, 0.5, [1, 2]),
             mia.Add(ONES, 0.5, [1, 2], "mlp_out"), mia.Add(ONES, 0.5, [1, 2], where=mia.prompt()),
             mia.Add(ONES, 0.5, [1, 2], keep_norm=True), mia.Replace(ONES, [1, 2]), mia.Replace(ONES, [1, 2], blend=0.5),
             mia.Replace(ONES[None], [1, 2], start=0), mia.Replace(ONES[None], [1, 2], start=1), mia.Scale(0.5, [1, 2]),
             mia.Scale(0.5, [1, 2], "z", heads=0), mia.Scale(0.5, [1, 2], "z", heads=[0, 1]), mia.Ablate(ONES, layers=[1, 2])]
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


@pytest.mark.parametrize("build", [
    lambda t: mia.Ablate(t, layers=[0]), lambda t: mia.Clamp([t], 1.0, layers=[0]), lambda t: mia.Replace(t, [0]),
    lambda t: mia.Replace(t[None], [0], start=2), lambda t: mia.Affine(t[None], t[None], layers=[0]),
    lambda t: mia.ClampFeature(t, t, 1.0, layers=[0]), lambda t: mia.Add(t, layers=[0], when=mia.Gate(mia.Probe(t, 0), above=1))])
def test_no_edit_changes_with_the_tensors_it_was_made_of(build: Any) -> None:
    given = draw(D)
    edit, same = build(given), build(given.clone())
    given.add_(1.0)
    assert edit == same != build(given)
    assert hash(edit) == hash(same)


@pytest.mark.parametrize("name", ["coeff", "vector", "where"])
def test_an_edit_cannot_be_changed(name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(mia.Add(ONES, layers=[0]), name, 2.0)


def test_a_scaled_edit_keeps_everything_else() -> None:
    rest = dict(layers=[1], point="z", where=mia.last(), keep_norm=True, head=1, when=mia.After(7), schedule=mia.Decay(3))
    assert mia.Add(draw(3), 0.5, **rest).scaled(3) == mia.Add(draw(3), 1.5, **rest)


def test_the_address_of_vectors_tells_apart_what_the_bytes_do_not() -> None:
    row = draw(D)
    assert digest(row) == digest(row[None]) == digest(torch.stack([row, row], 1)[:, 0]) != digest(-row)
    assert digest(draw(2, D)) != digest(draw(2, D).reshape(-1))
    assert len(digest(row)) == 32


def test_its_text_names_places_coefficient_and_what_is_not_the_default() -> None:
    assert repr(mia.Add(ONES, 0.25, [1, 0])) == "Add(resid_post.0, resid_post.1, coeff=0.25)"
    assert repr(mia.Add(ONES, 2, range(4), where=mia.window(2, -1))) == (
        "Add(resid_post.0, resid_post.1, resid_post.2, ..., coeff=2, where=window(2, -1))")
    assert repr(mia.Add(ONES, layers=[0], where=mia.last())) == "Add(resid_post.0, coeff=1, where=last())"
    assert repr(mia.Ablate(ONES, layers=[0], when=mia.After(7), schedule=mia.Decay(3))) == (
        "Ablate(resid_post.0, when=After, schedule=Decay(half_life=3))")


# -- what each edit does ----------------------------------------------------------------------------------------------

PLACE = dict(layers=[1, 2])
ROWS = draw(3, D, seed=3)
EDITS: dict[str, mia.Edit] = {
    "add": mia.Add(ROWS[0], 1.5, **PLACE), "add by layer": mia.Add(ROWS[:2], -1.0, **PLACE), "add a vector": mia.Add(vector((1, 2))),
    "add, norm kept": mia.Add(ROWS[0], 1.5, keep_norm=True, **PLACE),
    "add to a head": mia.Add(ROWS[0, :3], 2.0, point="z", head=1, **PLACE),
    "add, decaying": mia.Add(ROWS[0], 1.5, schedule=mia.Decay(2), **PLACE), "add a wide row to z": mia.Add(ROWS[0], point="z", **PLACE),
    "ablate": mia.Ablate(ROWS[0], **PLACE), "ablate a subspace": mia.Ablate([ROWS[2], ROWS[:2], vector((1, 2))], 0.5, **PLACE),
    "clamp": mia.Clamp(ROWS[0], 2.0, **PLACE), "clamp several": mia.Clamp(list(ROWS), [1.0, -2.0, 0.0], **PLACE),
    "clamp from below": mia.Clamp(list(ROWS), low=[0.0, -1.0, 1.0], **PLACE),
    "clamp between": mia.Clamp(ROWS[0], low=-0.3, high=0.2, **PLACE),
    "clamp from above, decaying": mia.Clamp(ROWS[0], high=-0.5, schedule=mia.Decay(3), where=mia.generated(), **PLACE),
    "scale": mia.Scale(0.25, **PLACE), "switch a head off": mia.Scale(0.0, point="z", heads=1, **PLACE),
    "scale heads": mia.Scale(-2.0, point="z", heads=[1, 0], **PLACE), "replace": mia.Replace(ROWS[0], **PLACE),
    "replace by layer": mia.Replace(ROWS[:2], **PLACE), "blend": mia.Replace(ROWS[0], blend=0.25, **PLACE),
    "replace a head": mia.Replace(ROWS[0, :3], point="z", head=0, **PLACE),
    "replace by position": mia.Replace(ROWS, start=3, **PLACE), "by layer and position": mia.Replace(draw(2, 3, D), start=0, **PLACE),
    "by position up to the prompt's end": mia.Replace(ROWS, start=3, where=mia.prompt(), **PLACE),
    "affine": mia.Affine(ROWS[:2], ROWS[1:], torch.tensor([0.5, -1.0]), **PLACE),
    "affine without bias": mia.Affine(ROWS, ROWS.flip(0), coeff=0.3, **PLACE),
    "loreft": mia.Affine.loreft(torch.linalg.qr(ROWS.T)[0].T, ROWS, torch.ones(3), **PLACE),
    "clamp a feature": mia.ClampFeature(ROWS[0], ROWS[1], 3.0, bias=0.2, threshold=0.5, **PLACE),
    "a feature of a ReLU": mia.ClampFeature(ROWS[0], ROWS[1], 1.0, where=mia.last(), **PLACE),
}


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_does_what_its_formula_says_where_it_says(name: str, has_bos: bool) -> None:
    edit = EDITS[name]
    for point, (before, after) in applied(edit, has_bos=has_bos).items():
        expected = meant(edit, point, before.double(), 5, has_bos)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(after, before) == (point not in edit.steps)
        idle = formulas.mask(edit, Context(range(5), has_bos), TOTAL) == 0
        assert torch.equal(after[idle], before[idle])


def test_loreft_puts_the_projection_where_its_map_says() -> None:
    rotation, weight, bias = torch.linalg.qr(ROWS.T)[0].T, ROWS, torch.tensor([1.0, 2.0, 3.0])
    before, after = applied(mia.Affine.loreft(rotation, weight, bias, layers=[1], where=mia.everywhere()))[Point("resid_post", 1)]
    torch.testing.assert_close(after @ rotation.T, before @ weight.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_edits_at_one_point_act_in_the_order_in_which_they_are_stated(seed: int) -> None:
    order = torch.randperm(len(EDITS), generator=torch.Generator().manual_seed(seed)).tolist()[:5]
    edits = [list(EDITS.values())[i] for i in order]
    for point, (before, after) in applied(*edits).items():
        expected = before.double()
        for edit in edits:
            expected = meant(edit, point, expected, 5, True)
        torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_gate_per_row_lets_the_edit_through_where_its_readings_pass() -> None:
    probes = [mia.Probe(ROWS[0], 0), mia.Probe(ROWS[1], 1, "z", cosine=True, mean=ROWS[2])]
    edit = mia.Add(ROWS[0], layers=[2, 3], when=mia.Gate(probes, above=0.25), where=mia.everywhere())
    found = applied(edit)
    passed = formulas.readings(edit.when, {point: before for point, (before, _) in found.items()}).sum(0) > 0.25
    assert passed.any() and not passed.all()
    for layer in (2, 3):
        before, after = found[Point("resid_post", layer)]
        assert torch.equal((after != before).any(1), passed)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "says"), [
    (lambda: mia.Ablate([], layers=[1]), "the edit names no direction"),
    (lambda: mia.Ablate(torch.zeros(D), layers=[1]), "a direction at resid_post.1 is zero"),
    (lambda: mia.Ablate([ONES, ONES * 2], layers=[1]), "the directions at resid_post.1 are nearly dependent"),
    (lambda: mia.Clamp([vector((1, 2)), vector((1, 3))], 0.0), "the vectors have different points or layers"),
    (lambda: mia.Clamp(ONES, layers=[1]), "Clamp takes value=..., or low=... and/or high=..."),
    (lambda: mia.Clamp(ONES, 1.0, low=0.0, layers=[1]), "Clamp takes value=..., or low=... and/or high=..."),
    (lambda: mia.Clamp(ONES, [1.0, 2.0], layers=[1]), "Clamp has 1 directions and 2 values"),
    (lambda: mia.Clamp(ONES, low=1.0, high=0.5, layers=[1]), "Clamp: low [1.0] is above high [0.5]"),
    (lambda: mia.Clamp(ONES, float("nan"), layers=[1]), "a projection is nan; it must be a finite number"),
    (lambda: mia.Scale(2.0), "Scale needs its layers, for example layers=[8]"),
    (lambda: mia.Scale("x", [1]), "the factor is 'x'; it must be a finite number"),
    (lambda: mia.Scale(2.0, [1], heads=[]), "the edit names no head"),
    (lambda: mia.Scale(2.0, [1], heads=[0, 0]), "the heads [0, 0] are not distinct"),
    (lambda: mia.Scale(2.0, "1"), "layers='1' are not integers"),
    (lambda: mia.Replace(ONES), "Replace needs its layers"),
    (lambda: mia.Replace(draw(3, D), [1, 2]), "the source has shape [3, 6]; 2 layers need [d] or [2, ...]"),
    (lambda: mia.Replace(ONES, [1], start=0), "the source has shape [6]; 1 layers need [pos d] or [1, ...]"),
    (lambda: mia.Replace(torch.ones(0, D), [1], start=0), "the source has shape [0, 6]"),
    (lambda: mia.Replace(draw(2, D), [1], start=-1), "start=-1 is no position"),
    (lambda: mia.Replace(draw(2, D), [1], start=True), "start=True is no position"),
    (lambda: mia.Replace(ONES * float("inf"), [1]), "the source holds NaN or infinite values"),
    (lambda: mia.Affine(ROWS, ROWS[:2], layers=[1]), "Affine needs read and write [r, d] and bias [r]; got [3, 6], [2, 6], [3]"),
    (lambda: mia.Affine(ONES, ONES, layers=[1]), "Affine needs read and write [r, d]"),
    (lambda: mia.Affine(ROWS, ROWS, torch.ones(2), layers=[1]), "got [3, 6], [3, 6], [2]"),
    (lambda: mia.Affine(ROWS * float("nan"), ROWS, layers=[1]), "the map holds NaN or infinite values"),
    (lambda: mia.Affine.loreft(ROWS, ROWS, layers=[1]), "R has shape [3, 6]; LoReFT needs [r, d] with orthonormal rows"),
    (lambda: mia.ClampFeature(ROWS, ROWS[0], 1.0, layers=[1]), "the tensor has shape [3, 6]; 1 layers need"),
])
def test_an_edit_that_means_nothing_is_an_error(build: Any, says: str) -> None:
    with pytest.raises(EditError) as caught:
        build()
    assert says in str(caught.value)




def test_an_edit_that_was_compiled_travels_without_the_ids_of_this_process() -> None:
    import pickle

    edit = mia.Add(torch.randn(12, D), 1.0, range(12))
    edit._addresses[id(edit)] = "another"
    again = pickle.loads(pickle.dumps(edit))
    assert again == edit
    assert again._addresses == {}
    edit.rows[next(iter(edit.rows))].mul_(5)
    assert edit == again
