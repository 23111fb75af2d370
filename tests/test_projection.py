"""Principal components against scikit-learn, and what cannot be projected."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import made_curves as made
import pytest
import torch
from sklearn.decomposition import PCA

import mia_lab as mia
from mia_lab.analysis.projection import components, project
from mia_lab.errors import EditError, PointError

PAIRS = [(f"{a}{b} abc", f"{a}{b} xyz") for a in "abcd" for b in "klm"]


def test_components_are_scikit_learn_s_up_to_their_sign() -> None:
    positive, negative = made.sides(40, 3, 12)
    rows = torch.cat([positive, negative])
    axes, explained = components(rows)
    for layer in range(3):
        fitted = PCA(n_components=2, svd_solver="full").fit(rows[:, layer].double().numpy())
        signs = (torch.from_numpy(fitted.components_) * axes[layer]).sum(-1, keepdim=True).sign()
        torch.testing.assert_close(axes[layer], torch.from_numpy(fitted.components_) * signs, rtol=0, atol=1e-9)
        torch.testing.assert_close(explained[layer], torch.from_numpy(fitted.explained_variance_ratio_), rtol=1e-9, atol=0)


def test_coordinates_are_about_the_common_mean_with_the_positive_side_on_the_positive_side() -> None:
    found = made.projection(n=40)
    positive, negative = made.sides(40)
    rows = torch.cat([positive, negative]).double()
    both = torch.cat([found.positive, found.negative])
    for layer in range(3):
        fitted = PCA(n_components=2, svd_solver="full").fit(rows[:, layer].numpy())
        expected = torch.from_numpy(fitted.transform(rows[:, layer].numpy()))
        torch.testing.assert_close(both[:, layer].abs(), expected.abs(), rtol=0, atol=1e-9)
        torch.testing.assert_close(both[:, layer], (rows[:, layer] - rows[:, layer].mean(0)) @ found.components[layer].T, rtol=0, atol=1e-9)
    assert (found.positive.mean(0) >= 0).all() and both.mean(0).abs().max() < 1e-9


def test_a_direction_within_the_plane_is_all_there_and_one_across_it_is_not() -> None:
    positive, negative = made.sides(40)
    axes, _ = components(torch.cat([positive, negative]))
    names = ("resid_post", (2, 5, 9), "v", [("a", "b")] * 40)
    inside = project(positive, negative, 3.0 * axes[:, 0] - axes[:, 1], *names)
    torch.testing.assert_close(inside.within, torch.ones(3, dtype=torch.float64))
    direction = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    across = direction - torch.einsum("ld,lnd,lne->le", direction, axes, axes)
    assert project(positive, negative, across, *names).within.max() < 1e-12
    angle = inside.direction[:, 0].abs() / inside.direction[:, 1].abs()
    torch.testing.assert_close(angle, torch.full((3,), 3.0, dtype=torch.float64))


def test_rows_without_components_are_refused() -> None:
    positive, negative = made.sides(4)
    names = ("resid_post", (2, 5, 9), "v", [("a", "b")] * 4)
    with pytest.raises(EditError, match="hardly differ"):
        project(torch.ones_like(positive), torch.ones_like(negative), positive.mean(0), *names)
    positive[1, 2, 3] = float("nan")
    with pytest.raises(EditError, match="were not computed"):
        project(positive, negative, negative.mean(0), *names)


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", points=["resid_post"], max_model_len=256, max_num_seqs=16, block_size=32, enforce_eager=True)


@pytest.mark.full
def test_a_session_projects_what_it_captures(session: mia.Session) -> None:
    found = session.pca(PAIRS, layers=[2, 1])
    assert found.layers == (2, 1) and found.vector == "mean difference" and found.prompts[0] == PAIRS[0]
    rows = session.capture([text for side in zip(*PAIRS) for text in side], layers=[2, 1], at=-1).get().float()
    for at in (0, 1):
        fitted = PCA(n_components=2, svd_solver="full").fit(rows[:, at].double().numpy())
        expected = torch.from_numpy(fitted.transform(rows[:, at].double().numpy()))
        torch.testing.assert_close(torch.cat([found.positive, found.negative])[:, at].abs(), expected.abs(), rtol=0, atol=1e-6)
    v = session.vector(PAIRS)
    same = session.pca(PAIRS, layers=1, vector=v)
    torch.testing.assert_close(same.direction[0], found[1].direction[0], rtol=0, atol=1e-5)
    assert same.vector == "mean_diff" and "resid_post 1" in same._repr_html_()


@pytest.mark.full
@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda s: s.pca(PAIRS, at=None), EditError, "one position"),
    (lambda s: s.pca(PAIRS, layers=99), PointError, "layer 99"),
    (lambda s: s.pca(PAIRS, vector=made.vector()), EditError, "no layer 0"),
    (lambda s: s.pca(PAIRS, layers=2, vector=made.vector()), EditError, "another width"),
    (lambda s: s.pca([("ab", "ac"), ("ac", "ab")]), EditError, "equal means"),
    (lambda s: s.pca(PAIRS, point="pattern"), EditError, "no common components"),
])
def test_what_has_no_projection_is_said(session: mia.Session, call: Callable, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call(session)
