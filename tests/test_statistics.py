"""Statistics of settings: against scipy, against definitions worked out in full, and by how often they err."""
from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from mia_lab.analysis.sweep.effects import Null
from mia_lab.analysis.sweep.statistics import at_equal_cost, estimate, holm, mcnemar, pareto


def test_an_interval_of_single_groups_is_scipy_s_percentile_bootstrap() -> None:
    values = np.random.default_rng(0).normal(0.4, 1.0, 60)
    found = estimate(values, [str(i) for i in range(60)], draws=20_000)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)).confidence_interval
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    assert found.low == pytest.approx(theirs.low, abs=0.015) and found.high == pytest.approx(theirs.high, abs=0.015)
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
    assert found.wrong == (values < 0).mean()


def test_an_interval_over_groups_covers_where_prompts_of_a_group_are_alike() -> None:
    covered, naive = [], []
    for seed in range(200):
        draw = np.random.default_rng(seed)
        values = 0.5 + np.repeat(draw.normal(size=15), 6) + 0.2 * draw.normal(size=90)
        for groups, seen in (([i // 6 for i in range(90)], covered), (range(90), naive)):
            found = estimate(values, list(map(str, groups)), draws=400, seed=seed)
            seen.append(found.low <= 0.5 <= found.high)
    assert np.mean(covered) > 0.86 > 0.7 > np.mean(naive)


def test_p_values_of_groups_err_as_often_as_they_say() -> None:
    draws = [np.random.default_rng(seed) for seed in range(400)]
    p = [estimate(np.repeat(d.normal(size=7), 4) + 0.1 * d.normal(size=28), [str(i // 4) for i in range(28)], draws=10).p for d in draws]
    assert 0.02 < np.mean(np.array(p) < 0.05) < 0.085


def test_groups_count_by_their_size() -> None:
    found = estimate([1.0, 1.0, 1.0, 5.0], ["a", "a", "a", "b"], draws=4000)
    assert found.mean == 2.0 and (found.low, found.high) == (1.0, 5.0) and found.groups == 2


def test_one_group_has_no_interval_and_missing_values_have_no_mean() -> None:
    found = estimate([1.0, 2.0], ["a", "a"])
    assert found.mean == 1.5 and np.isnan([found.low, found.high, found.p]).all()
    with pytest.raises(ValueError, match="not all computed"):
        estimate([1.0, float("nan")], ["a", "b"])


def test_no_difference_at_all_is_no_evidence() -> None:
    found = estimate([0.0] * 6, list("abcdef"))
    assert (found.mean, found.low, found.high, found.p, found.wrong) == (0.0, 0.0, 0.0, 1.0, 0.0)


def test_equal_groups_are_a_sign_test_and_not_certainty() -> None:
    """Two prompts whose 0 became 1 are no proof, nor are three whose means differ by rounding."""
    assert estimate([1.0, 1.0], ["a", "b"]).p == 0.5
    assert estimate([0.1 + 0.2, 0.3, 0.3], ["a", "b", "c"]).p == 0.25
    assert estimate([-1.0] * 7, list("abcdefg")).p == pytest.approx(stats.binomtest(0, 7).pvalue)


@pytest.mark.parametrize("seed", range(5))
def test_holm_is_the_closed_test_of_bonferroni(seed: int) -> None:
    """The adjusted p-value of a test is the largest, over all sets of tests that it is in, of the set's size times its least p."""
    p = np.random.default_rng(seed).uniform(0, 0.2, 6)
    sets = [set(chosen) for n in range(1, 7) for chosen in combinations(range(6), n)]
    expected = [max(min(1.0, len(chosen) * min(p[list(chosen)])) for chosen in sets if i in chosen) for i in range(6)]
    np.testing.assert_allclose(holm(p), expected, rtol=1e-12)


def test_holm_keeps_the_order_and_counts_tests_that_gave_nothing() -> None:
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    np.testing.assert_allclose(holm([0.5, float("nan"), 0.01]), [1.0, float("nan"), 0.03])


def test_mcnemar_is_a_binomial_test_of_what_changed() -> None:
    before, after = [True] * 30 + [False] * 20, [True] * 20 + [False] * 10 + [True] * 2 + [False] * 18
    assert mcnemar(before, after) == pytest.approx(stats.binomtest(10, 12).pvalue)
    assert mcnemar(before, before) == 1.0


def test_the_front_holds_what_nothing_beats() -> None:
    effect, cost = [1.0, 2.0, 2.0, 3.0, 0.5, np.nan], [0.1, 0.2, 0.3, 0.9, 0.1, 0.0]
    assert pareto(effect, cost).tolist() == [True, True, False, True, False, False]
    assert pareto([1.0, 1.0], [0.1, 0.1]).tolist() == [True, True]


def test_curves_are_compared_at_one_cost() -> None:
    costs, effects = [0.01, 0.04, 0.16], [1.0, 2.0, 3.0]
    assert at_equal_cost(costs, effects, 0.04) == pytest.approx(2.0)
    assert at_equal_cost(costs, effects, 0.09) == pytest.approx(2.5)
    assert at_equal_cost(costs, effects, 0.0025) == pytest.approx(0.5)  # from (0, 0) on
    assert np.isnan(at_equal_cost(costs, effects, 0.2))


def test_a_null_has_the_limit_that_one_draw_in_twenty_exceeds() -> None:
    found = Null.of([float(i) / 100 * (-1) ** i for i in range(101)])
    assert found.limit == pytest.approx(0.95) and found.low < found.mean < found.high
