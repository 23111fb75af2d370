"""Fitted directions: each method finds what was planted where its formula says so, and misses what it must miss."""
from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from mia_lab.analysis.fitting import METHODS, lat, lda, logistic, mean_difference, pca, pca_centred

D, N, LAYERS = 64, 400, 2


def planted(nuisance: float = 0.0, spread: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of both sides that differ by a direction a layer, and along an axis that has nothing to do with the label."""
    draw = torch.Generator().manual_seed(seed)
    truth, other = torch.linalg.qr(torch.randn(LAYERS, D, 2, generator=draw))[0].unbind(-1)
    noise = lambda: spread * torch.randn(N, LAYERS, D, generator=draw)  # noqa: E731
    loud = lambda: nuisance * torch.randn(N, LAYERS, 1, generator=draw) * other  # noqa: E731
    common = 3.0 * torch.randn(N, LAYERS, D, generator=draw)  # what the two prompts of a pair share
    return common + 2.0 * truth + noise() + loud(), common - 2.0 * truth + noise() + loud(), truth, other


def cosine(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(found, truth, dim=-1)


@pytest.mark.parametrize("method", ["mean_diff", "pca", "lat"])
def test_a_planted_direction_is_found(method: str) -> None:
    positive, negative, truth, _ = planted(spread=0.5)
    assert (cosine(METHODS[method](positive, negative), truth) > 0.98).all()


@pytest.mark.parametrize("method", METHODS)
def test_swapped_labels_give_the_opposite_and_every_direction_is_its_dose(method: str) -> None:
    positive, negative, _, _ = planted()
    found = METHODS[method](positive, negative)
    assert found.shape == (LAYERS, D) and found.dtype == torch.float32
    torch.testing.assert_close(METHODS[method](negative, positive), -found, rtol=1e-3, atol=1e-4)
    unit = found / found.norm(dim=-1, keepdim=True)
    apart = ((positive.mean(0) - negative.mean(0)) * unit).sum(-1)
    torch.testing.assert_close(found.norm(dim=-1), apart, rtol=1e-4, atol=1e-5)


def test_the_mean_difference_is_the_mean_of_the_differences() -> None:
    positive, negative, _, _ = planted()
    torch.testing.assert_close(mean_difference(positive, negative), (positive - negative).mean(0), rtol=1e-5, atol=1e-6)


def test_centring_the_differences_would_delete_what_the_pairs_share() -> None:
    """The trap that `pca` avoids: with all pairs in one order, the mean of the differences is the direction."""
    positive, negative, truth, nuisance = planted(nuisance=1.5, spread=0.3)
    differences = (positive - negative).double()
    centred = torch.linalg.svd((differences - differences.mean(0)).transpose(0, 1), full_matrices=False).Vh[:, 0]
    assert (cosine(centred, truth).abs() < 0.1).all() and (cosine(centred, nuisance).abs() > 0.9).all()
    assert (cosine(pca(positive, negative), truth) > 0.95).all()
    assert (cosine(lat(positive, negative), truth) > 0.95).all()


def test_a_loud_axis_misleads_pca_and_not_the_mean() -> None:
    positive, negative, truth, nuisance = planted(nuisance=6.0, spread=0.3)
    assert (cosine(pca(positive, negative), nuisance).abs() > 0.9).all()
    assert (cosine(mean_difference(positive, negative), truth) > 0.9).all()


def test_centred_pca_follows_what_varies_most() -> None:
    draw = torch.Generator().manual_seed(0)
    truth = torch.nn.functional.normalize(torch.randn(LAYERS, D, generator=draw), dim=-1)
    sides = [sign * 3.0 * truth + 0.5 * torch.randn(N, LAYERS, D, generator=draw) for sign in (1, -1)]
    assert (cosine(pca_centred(*sides), truth) > 0.99).all()
    assert (cosine(pca_centred(*planted(nuisance=30.0)[:2]), planted()[3]).abs() > 0.9).all()


def correlated(n: int = 4000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two Gaussians of one covariance, and their best linear discriminant."""
    draw = torch.Generator().manual_seed(1)
    mix = torch.randn(16, 16, generator=draw).double() / 8 + torch.diag(torch.linspace(0.5, 2.0, 16)).double()
    shift = torch.randn(16, generator=draw).double() / 2
    sides = [torch.randn(n, 16, generator=draw).double() @ mix.T + sign * shift / 2 for sign in (1, -1)]
    return sides[0][:, None], sides[1][:, None], torch.linalg.solve(mix @ mix.T, shift)


def test_probes_tend_to_the_best_discriminant_which_is_not_the_mean_difference() -> None:
    positive, negative, best = correlated()
    for method, least in ((lda, 0.99), (logistic, 0.98)):
        assert cosine(method(positive, negative)[0].double(), best) > least
    assert cosine(mean_difference(positive, negative)[0].double(), best) < 0.8


def test_a_probe_s_weights_are_those_of_the_rows_themselves() -> None:
    """Standardised features of very different scales: the converted weights give the same logits as the fitted ones."""
    positive, negative, _ = correlated(300)
    scales = torch.logspace(-2, 2, 16).double()
    positive, negative = positive * scales, negative * scales
    rows = torch.cat([positive, negative])[:, 0]
    standard = ((rows - rows.mean(0)) / rows.std(0)).numpy()
    fitted = LogisticRegression(C=1.0, max_iter=2000).fit(standard, [1] * 300 + [0] * 300)
    logits = torch.from_numpy(standard @ fitted.coef_[0])
    found = rows @ logistic(positive, negative)[0].double()
    logits, found = logits - logits.mean(), found - found.mean()
    assert torch.corrcoef(torch.stack([logits, found]))[0, 1] > 1 - 1e-6


def test_separability_of_gaussians_is_what_theory_says() -> None:
    """AUROC = Phi(d' / sqrt 2), along the best discriminant."""
    positive, negative, best = correlated(20000)
    a, b = positive[:, 0] @ best, negative[:, 0] @ best
    d = float((a.mean() - b.mean()) / ((a.var() + b.var()) / 2).sqrt())
    order = torch.cat([a, b]).argsort().argsort().double()
    auroc = float((order[: len(a)].mean() - (len(a) - 1) / 2) / len(b))
    assert auroc == pytest.approx(NormalDist().cdf(d / 2**0.5), abs=0.01)
