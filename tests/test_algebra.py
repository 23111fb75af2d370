"""Vectors together: sums in one unit, parts that are orthogonal and add up, directions made orthogonal, cosines with their labels."""
from __future__ import annotations

import pytest
import torch

import mia_lab as mia
from mia_lab.analysis.judging import cosines
from mia_lab.analysis.vectors import Vector
from mia_lab.errors import EditError

LAYERS, D = (2, 3, 5), 16
UNIT = torch.tensor([2.0, 3.0, 7.0])


def vector(seed: int, layers: tuple[int, ...] = LAYERS, unit: torch.Tensor = UNIT, lean: Vector | None = None) -> Vector:
    """A fitted vector: each row one unit long, from a raw difference of another length."""
    raw = torch.randn(len(layers), D, generator=torch.Generator().manual_seed(seed))
    raw = raw if lean is None else raw + 3 * lean.rows / lean.rows.norm(dim=-1, keepdim=True)
    norms = raw.norm(dim=-1)
    return Vector("resid_post", layers, raw * (unit / norms)[:, None], norms, unit, f"fit{seed}")


def correlated() -> tuple[Vector, Vector, Vector]:
    first = vector(0)
    return first, vector(1, lean=first), vector(2, lean=first)


def test_a_combination_is_the_weighted_sum_as_it_stands() -> None:
    v, w = vector(0), vector(1)
    found = mia.combine([v, w], [0.5, -2])
    torch.testing.assert_close(found.rows, 0.5 * v.rows - 2 * w.rows)
    assert torch.equal(found.unit, UNIT) and "as it stands" in repr(found)
    assert torch.equal(mia.combine([v, w]).rows, (v + w).rows)
    for summed in (found, v + w):
        assert torch.equal(summed.natural.rows, summed.rows)
    torch.testing.assert_close(found.normalised().rows.norm(dim=-1), UNIT)
    torch.testing.assert_close(found.normalised().natural.rows, found.rows)


def test_the_natural_length_is_that_of_the_fit_and_is_taken_once() -> None:
    v = vector(0)
    torch.testing.assert_close(v.natural.rows.norm(dim=-1), v.raw_norms)
    torch.testing.assert_close((2 * v).natural.rows, 2 * v.natural.rows)
    assert torch.equal(v.natural.natural.rows, v.natural.rows)
    torch.testing.assert_close(v.natural.normalised().rows, v.rows)


def test_what_is_projected_out_and_what_is_left_are_orthogonal_and_sum_to_the_vector() -> None:
    first, second, third = correlated()
    for others in ((first,), (first, second), (first.rows[0], second)):
        left, inside = third.project_out(*others), third.projected_on(*others)
        torch.testing.assert_close(left.rows + inside.rows, third.rows, rtol=1e-5, atol=1e-5)
        for other in others:
            rows = other.rows if isinstance(other, Vector) else other
            along = torch.nn.functional.cosine_similarity(left.rows.double(), rows.double(), dim=-1)
            assert along.abs().max() < 1e-6
        torch.testing.assert_close(left.project_out(*others).rows, left.rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(left.rows.norm(dim=-1) ** 2 + inside.rows.norm(dim=-1) ** 2, UNIT**2)


def test_taking_several_out_is_one_step_whatever_their_order_and_not_one_after_the_other() -> None:
    first, second, third = correlated()
    joint = third.project_out(first, second)
    torch.testing.assert_close(joint.rows, third.project_out(second, first).rows, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(joint.rows, third.project_out(first).project_out(second).rows, atol=1e-2)
    wide = vector(3, layers=(1, *LAYERS), unit=torch.tensor([1.0, 2.0, 3.0, 7.0]))
    torch.testing.assert_close(third.project_out(wide).rows, third.project_out(wide[2:]).rows)


def test_orthogonalised_vectors_keep_to_theirs_and_symmetrically_if_not_ordered() -> None:
    vectors = correlated()
    for ordered in (False, True):
        made = mia.orthogonalise(vectors, ordered)
        stack = torch.stack([v.rows / UNIT[:, None] for v in made])  # [vector layer d]
        torch.testing.assert_close(torch.einsum("ild,jld->lij", stack, stack), torch.eye(3).expand(3, 3, 3), rtol=0, atol=1e-5)
        assert all((torch.nn.functional.cosine_similarity(a.rows, b.rows, dim=-1) > 0.2).all() for a, b in zip(made, vectors))
    torch.testing.assert_close(mia.orthogonalise(vectors, ordered=True)[0].rows, vectors[0].rows, rtol=1e-5, atol=1e-5)
    turned = mia.orthogonalise(vectors[::-1])[::-1]
    for one, other in zip(mia.orthogonalise(vectors), turned):
        torch.testing.assert_close(one.rows, other.rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("act", "says"), [
    (lambda v: v.project_out(3 * v), "nothing of the vector is left"),
    (lambda v: v.project_out(), "names no direction"),
    (lambda v: v.project_out(v[2:4]), "has no layer 5"),
    (lambda v: v.project_out(torch.zeros(D)), "is zero"),
    (lambda v: v.project_out(Vector("resid_post", LAYERS, torch.ones(3, D + 1), UNIT, UNIT)), "of different models"),
    (lambda v: (v - v).normalised(), "zero at layer 2"),
    (lambda v: (v - v).cosine(v), "has no cosine"),
    (lambda v: v + vector(1, unit=2 * UNIT), "different norms"),
    (lambda v: mia.combine([v, v], [1.0]), "2 vectors and 1 weights"),
    (lambda v: mia.combine([v, v], [1.0, float("nan")]), "a weight is nan"),
    (lambda v: mia.combine([]), "as many weights as vectors"),
    (lambda v: mia.combine([v, torch.ones(D)]), "takes Vectors"),
    (lambda v: mia.orthogonalise([v]), "two or more"),
    (lambda v: mia.orthogonalise([v, -v]), "nearly dependent"),
    (lambda v: mia.orthogonalise([v, v[2:5]]), "index them to the same layers"),
    (lambda v: mia.CosineMap.of(), "name one or more"),
])
def test_what_has_no_meaning_is_an_error(act, says: str) -> None:
    with pytest.raises(EditError, match=says):
        act(vector(0))


def test_a_map_of_cosines_is_labelled_by_vector_and_layer() -> None:
    v, w = vector(0), vector(1, layers=(3, 5, 9))
    found = v.cosine(w)
    assert found.values.shape == (3, 3) and found.rows[0] == ("fit0", 2) and found.columns[2] == ("fit1", 9)
    for record in found.data:
        a, b = v[record["row_layer"]].rows[0], w[record["column_layer"]].rows[0]
        assert record["cosine"] == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), abs=1e-6)
    torch.testing.assert_close(found.diagonal, torch.cosine_similarity(v[3:].rows, w[[3, 5]].rows, dim=-1))
    torch.testing.assert_close(v.cosine().values, cosines(v))
    whole = mia.CosineMap.of(mood=v, style=w)
    assert whole.values.shape == (6, 6) and "mood 2" in repr(whole) and "<table" in whole._repr_html_() and "style 9" in whole._repr_html_()
    with pytest.raises(EditError, match="no diagonal"):
        _ = whole.diagonal
    grid = whole.figure.data[0].z
    assert [value for row in grid for value in row] == pytest.approx([record["cosine"] for record in whole.data], abs=1e-6)


def test_a_map_says_when_one_dimension_speaks_for_all() -> None:
    loud = torch.randn(3, D, generator=torch.Generator().manual_seed(4))
    loud[:, 5] = 40.0
    v = Vector("resid_post", LAYERS, loud, UNIT, UNIT)
    assert v.cosine().loud > 0.9 and "One dimension holds" in repr(v.cosine()) and "One dimension" not in repr(vector(0).cosine())


def test_a_vector_comes_back_from_its_file_as_it_was(tmp_path) -> None:
    v = vector(0)
    path = v.save(tmp_path / "v.safetensors")
    found = Vector.load(path)
    assert (found.kind, found.layers, found.method) == (v.kind, v.layers, v.method)
    assert all(torch.equal(getattr(found, name), getattr(v, name)) for name in ("rows", "raw_norms", "unit"))
    assert [p.name for p in tmp_path.iterdir()] == ["v.safetensors"]
    (tmp_path / "other.safetensors").write_bytes(b"nonsense")
    with pytest.raises(EditError, match="cannot be read"):
        Vector.load(tmp_path / "other.safetensors")
