"""Steering vectors: the identities of a mean difference, pairs in every form, slices and arithmetic of a Vector."""
from __future__ import annotations

import dataclasses

import pytest
import torch

from mia_lab.analysis.fitting import mean_difference
from mia_lab.analysis.vectors import Vector, centred_norm
from mia_lab.edits import Directions
from mia_lab.errors import EditError

LAYERS, D = (2, 3, 5, 8), 6


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vector(seed: int = 0, layers: tuple[int, ...] = LAYERS, kind: str = "resid_post") -> Vector:
    n = len(layers)
    return Vector(kind, layers, draw(n, D, seed=seed), torch.arange(1.0, n + 1), torch.arange(n, 0.0, -1))


# -- mean difference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_difference_of_means_is_the_mean_of_differences(dtype: torch.dtype) -> None:
    pos, neg = (draw(40, 3, 64, seed=seed).to(dtype) for seed in (1, 2))
    found = mean_difference(pos, neg)
    assert (found.shape, found.dtype) == ((3, 64), torch.float32)
    torch.testing.assert_close(found, (pos.double() - neg.double()).mean(0).float(), rtol=0, atol=1e-6)


def test_swapped_labels_give_exactly_the_opposite() -> None:
    pos, neg = draw(40, 3, 64, seed=1), draw(40, 3, 64, seed=2)
    assert torch.equal(mean_difference(neg, pos), -mean_difference(pos, neg))


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_direction_is_recovered(seed: int) -> None:
    truth = 3 * torch.nn.functional.normalize(draw(2, 64, seed=seed + 10), dim=-1)  # another one in each of two layers
    shared = draw(400, 2, 64, seed=seed + 20) * 10  # what a pair has in common
    pos, neg = (shared + sign * truth + draw(400, 2, 64, seed=seed + 30 + sign) for sign in (1, -1))
    found = mean_difference(pos, neg)
    assert (torch.cosine_similarity(found, truth, dim=-1) > 0.99).all()
    assert (torch.cosine_similarity(found, truth.flip(0), dim=-1).abs() < 0.5).all()
    torch.testing.assert_close((found * truth).sum(-1) / 9, torch.tensor([2.0, 2.0]), rtol=0, atol=0.1)


def test_a_common_offset_cancels_even_where_it_is_large() -> None:
    pos, neg, offset = draw(50, 1, 8, seed=1), draw(50, 1, 8, seed=2), torch.full((8,), 2.0**20)
    exact = ((pos + offset).double() - (neg + offset).double()).mean(0).float()
    assert torch.equal(mean_difference(pos + offset, neg + offset), exact)


def test_a_streaming_mean_in_float64_gives_the_same() -> None:
    pos, neg = draw(100, 2, 16, seed=1), draw(100, 2, 16, seed=2)
    total = torch.zeros(2, 16, dtype=torch.float64)
    for one, other in zip(pos, neg, strict=True):
        total += one.double() - other.double()
    torch.testing.assert_close(mean_difference(pos, neg), (total / 100).float(), rtol=0, atol=1e-6)


def test_prompts_of_unequal_number_may_be_compared() -> None:
    pos, neg = torch.tensor([[[1.0]], [[3.0]], [[5.0]]]), torch.tensor([[[1.0]]])
    assert mean_difference(pos, neg).tolist() == [[2.0]]


# -- the unit ---------------------------------------------------------------------------------------------------------


def test_the_centred_norm_is_the_mean_distance_from_the_mean() -> None:
    rows = draw(30, 2, 8) * torch.tensor([1.0, 5.0])[:, None]
    expected = [sum(float((row - rows[:, layer].mean(0)).norm()) for row in rows[:, layer]) / 30 for layer in (0, 1)]
    torch.testing.assert_close(centred_norm(rows), torch.tensor(expected))
    torch.testing.assert_close(centred_norm(3 * rows), 3 * centred_norm(rows))


def test_the_centred_norm_does_not_see_a_common_offset() -> None:
    rows, offset = draw(30, 2, 8), torch.zeros(8)
    offset[3] = 2.0**14  # the outlier dimension that makes a plain norm useless
    torch.testing.assert_close(centred_norm(rows + offset), centred_norm(rows), rtol=1e-3, atol=0)
    assert centred_norm(torch.ones(5, 2, 8)).tolist() == [0.0, 0.0]


# -- Vector -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "layers"), [
    (5, (5,)), (slice(3, 8), (3, 5)), (slice(4, None), (5, 8)), (slice(None, 4), (2, 3)), (slice(None), LAYERS),
    (slice(0, 99, 1), LAYERS), ([8, 2], (8, 2)), (range(2, 4), (2, 3)), ((5,), (5,))])
def test_it_is_indexed_by_layer_numbers(key: object, layers: tuple[int, ...]) -> None:
    v = vector()
    part, at = v[key], [LAYERS.index(layer) for layer in layers]
    assert isinstance(part, Vector)
    assert (part.kind, part.layers, part.method) == ("resid_post", layers, "mean_diff")
    for name in ("rows", "raw_norms", "unit"):
        assert torch.equal(getattr(part, name), getattr(v, name)[at])


@pytest.mark.parametrize(("key", "says"), [
    (4, "the vector has no layer 4; it has layers [2, 3, 5, 8]"),
    (-1, "the vector has no layer -1; it has"),
    ([2, 7], "the vector has no layer 7; it has"),
    (slice(6, 8), "the vector has no layers 6 to 8; it has"),
    (slice(None, None, 2), "a slice of layers has no step"),
    pytest.param([], "the vector has no layer"),
    pytest.param(slice(-2, None), "the vector has no"),
])
def test_a_layer_that_it_lacks_is_an_error_with_those_it_has(key: object, says: str) -> None:
    with pytest.raises(EditError) as caught:
        vector()[key]
    assert says in str(caught.value)


def test_arithmetic_acts_on_every_row_and_leaves_the_operands() -> None:
    v, w = vector(1), vector(2)
    before = v.rows.clone()
    for found, rows in [(2 * v, 2 * before), (v * 0.5, before / 2), (-v, -before), (v + w, before + w.rows),
                        (v - w, before - w.rows), (2 * v - w, 2 * before - w.rows), (torch.tensor(2) * v, 2 * before)]:
        assert torch.equal(found.rows, rows)
        assert (found.kind, found.layers) == (v.kind, v.layers)
        assert torch.equal(found.unit, v.unit)
    assert torch.equal(v.rows, before)
    assert (v + w).method == "mean_diff+mean_diff"


@pytest.mark.parametrize(("other", "says"), [
    (vector(layers=(2, 3, 5)), "cannot add a vector at resid_post [2, 3, 5] to one at resid_post [2, 3, 5, 8]"),
    (vector(kind="mlp_out"), "cannot add a vector at mlp_out [2, 3, 5, 8] to one at resid_post [2, 3, 5, 8]"),
])
def test_vectors_of_other_places_do_not_add(other: Vector, says: str) -> None:
    for combine in (lambda: vector() + other, lambda: vector() - other):
        with pytest.raises(EditError) as caught:
            combine()
        assert str(caught.value) == says


@pytest.mark.parametrize("other", [1, torch.ones(4, D), None])
def test_only_a_vector_adds_to_a_vector(other: object) -> None:
    with pytest.raises(TypeError):
        vector() + other


def test_it_is_frozen_and_fits_what_an_edit_asks_of_a_vector() -> None:
    assert isinstance(vector(), Directions)
    with pytest.raises(dataclasses.FrozenInstanceError):
        vector().layers = (1,)


def test_its_text_gives_place_width_and_raw_norm_in_units() -> None:
    assert repr(vector()) == ("Vector: mean_diff at resid_post, 4 layers (2 to 8), d_model 6\n"
                              "  raw norm is 0.25 to 4 of the mean centred norm")
    assert repr(vector()[3]).splitlines()[0] == "Vector: mean_diff at resid_post, layer 3, d_model 6"
