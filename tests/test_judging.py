"""Judging directions: AUROC against scikit-learn and theory, intervals that cover, halves that agree only where there is something."""
from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from mia_lab.analysis.judging import auroc, cosines, separability, stability
from mia_lab.analysis.vectors import Vector
from mia_lab.errors import EditError


def sides(n: int, shift: float, seed: int, layers: int = 1, d: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that differ by `shift` standard deviations along a direction of each layer, and these directions."""
    draw = torch.Generator().manual_seed(seed)
    truth = torch.nn.functional.normalize(torch.randn(layers, d, generator=draw), dim=-1)
    return (torch.randn(n, layers, d, generator=draw) + shift * truth, torch.randn(n, layers, d, generator=draw), truth)


@pytest.mark.parametrize(("n", "m", "values"), [(5, 7, 3), (1, 1, 2), (40, 25, 1000), (30, 30, 4)])
def test_auroc_is_scikit_learn_s_with_ties_and_for_every_layer(n: int, m: int, values: int) -> None:
    draw = torch.Generator().manual_seed(n)
    positive, negative = (torch.randint(values, (count, 3), generator=draw).double() for count in (n, m))
    for layer in range(3):
        expected = roc_auc_score([1] * n + [0] * m, torch.cat([positive, negative])[:, layer])
        assert float(auroc(positive, negative)[layer]) == pytest.approx(expected, abs=1e-12)
        assert float(auroc(positive[:, layer], negative[:, layer])) == pytest.approx(expected, abs=1e-12)


def test_gaussians_are_as_separable_as_theory_says() -> None:
    positive, negative, truth = sides(4000, 1.5, 0, layers=2)
    found = separability(positive, negative, 7.0 * truth, [3, 5], [f"g{i}" for i in range(4000)], draws=200)
    for layer in range(2):
        assert float(found.d_prime[layer]) == pytest.approx(1.5, abs=0.08)
        assert float(found.auroc[layer]) == pytest.approx(NormalDist().cdf(1.5 / 2**0.5), abs=0.012)
        assert found.low[layer] < found.auroc[layer] < found.high[layer]
        assert float(found.accuracy[layer]) == pytest.approx(NormalDist().cdf(1.5 / 2), abs=0.012)
        assert found.accuracy_low[layer] < found.accuracy[layer] < found.accuracy_high[layer]
    assert found.best in (3, 5) and "3      0.8" in repr(found)
    turned = separability(positive, negative, -truth, [3, 5], ["g"] * 4000, draws=5)
    torch.testing.assert_close(turned.auroc, 1 - found.auroc)


def test_an_interval_over_groups_covers_where_pairs_of_a_group_are_alike() -> None:
    """Twenty groups of five pairs that share a shift of their own: pairs are not independent, groups are."""
    truth, covered, naive = torch.ones(1, 1), [], []
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        own = torch.randn(20, 1, 1, generator=draw).repeat_interleave(5, 0)
        positive, negative = 1.0 + own + 0.3 * torch.randn(100, 1, 1, generator=draw), torch.randn(20, 1, 1, generator=draw)
        negative = negative.repeat_interleave(5, 0) + 0.3 * torch.randn(100, 1, 1, generator=draw)
        expected = NormalDist().cdf(1.0 / (2 * 1.09) ** 0.5)
        for groups, seen in (([f"g{i // 5}" for i in range(100)], covered), ([f"g{i}" for i in range(100)], naive)):
            found = separability(positive, negative, truth, [0], groups, draws=200, seed=seed)
            seen.append(bool(found.low[0] <= expected <= found.high[0]))
    assert np.mean(covered) > 0.85 > 0.75 > np.mean(naive)


def test_halves_agree_where_there_is_a_direction_and_not_where_there_is_none() -> None:
    strong, none = (stability(*sides(60, shift, 1, layers=2)[:2]) for shift in (4.0, 0.0))
    assert strong.shape == (20, 2)
    assert strong.min() > 0.9 and none.mean().abs() < 0.3
    with pytest.raises(EditError, match="at least 4"):
        stability(*(rows[:3] for rows in sides(60, 1.0, 1)[:2]))


def test_cosines_are_between_layers() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, -3.0]])
    vector = Vector("resid_post", (1, 2, 4), rows, rows.norm(dim=-1), torch.ones(3))
    expected = torch.tensor([[1.0, 0.5**0.5, 0.0], [0.5**0.5, 1.0, -(0.5**0.5)], [0.0, -(0.5**0.5), 1.0]])
    torch.testing.assert_close(cosines(vector), expected)


def test_one_group_has_no_interval_and_no_best_layer() -> None:
    positive, negative, truth = sides(6, 1.0, 0, layers=2)
    found = separability(positive, negative, truth, [3, 5], ["g"] * 6, draws=5)
    assert found.auroc.isfinite().all() and found.low.isnan().all() and found.high.isnan().all() and found.accuracy.isnan().all()
    with pytest.raises(EditError, match="several groups"):
        _ = found.best


def test_a_threshold_knows_nothing_of_the_group_that_it_judges() -> None:
    """Three groups of one pair; a threshold from all of them would put every prompt on its right side."""
    positive, negative = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in ([1.0, 1.0, -8.0], [0.0, 0.0, -9.0]))
    found = separability(positive, negative, torch.ones(1, 1), [4], list("abc"), draws=20)
    # a: above (1 - 8 + 0 - 9) / 4 = -4 is 1, and 0 is not below; so b. c: above (1 + 1 + 0 + 0) / 4 = 0.5 is not -8, and -9 is below.
    assert float(found.accuracy[0]) == 0.5


def test_what_has_no_direction_or_no_value_is_not_judged() -> None:
    positive, negative, truth = sides(6, 1.0, 0, layers=2)
    with pytest.raises(EditError, match="zero at layer 5"):
        separability(positive, negative, truth * torch.tensor([[1.0], [0.0]]), [3, 5], list("abcdef"), draws=5)
    values = torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])
    assert auroc(values, torch.zeros(3, 2)).isnan().tolist() == [True, False]
