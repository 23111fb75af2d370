"""Statistics of settings compared on the same prompts: intervals over whole groups, many tests at once, fronts, equal costs."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval and the p-value of it being zero; `wrong` is the share of values of the other sign.

    The interval is a bootstrap over whole groups, and somewhat narrow for fewer than ten of them. p is of a t-test over the means
    of groups: a bootstrap's own would be too small for few of them. Where all groups are equal it is of a sign test. With fewer than
    two groups there is neither, and both are NaN.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int
    groups: int
    wrong: float

    def __repr__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def estimate(values: Sequence[float] | np.ndarray, groups: Sequence[str], draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Estimate the mean of values `[n]`, differences from the same prompt unsteered, that belong to `groups`.

    ValueError for a value that was not computed (NaN).
    """
    found = np.asarray(values, dtype=np.float64)
    if np.isnan(found).any() or not len(found):
        raise ValueError("a mean was asked of values that were not all computed")
    sums, counts = _by_group(found, groups)
    mean, wrong = float(found.mean()), float((np.sign(found) == -np.sign(found.mean())).mean()) if found.mean() else 0.0
    low, high = np.percentile(_means(sums, counts, draws, seed), [2.5, 97.5]) if len(sums) > 1 else (np.nan, np.nan)
    return Estimate(mean, float(low), float(high), _p_value(sums / counts), len(found), len(sums), wrong)


def _by_group(values: np.ndarray, groups: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the values of each group."""
    _, place = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(place, weights=values), np.bincount(place)


def _means(sums: np.ndarray, counts: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """The mean over all values in each of `draws` samples of groups with replacement, `[draw]`."""
    times = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=draws)
    return (times @ sums) / (times @ counts)


def _p_value(means: np.ndarray) -> float:
    """Two-sided, of a one-sample t-test; of a sign test where the means are equal, for two equal ones leave a t-test no doubt at all."""
    if len(means) < 2:
        return float("nan")
    largest = np.abs(means).max()
    if np.ptp(means) <= 1e-9 * largest:
        return 2.0 ** (1 - len(means)) if largest else 1.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(means, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Adjust p-values `[n]` so that any of them below a level errs, over all n tests, no more often than that level says.

    A NaN stays, and counts as a test. Source: Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(np.where(np.isnan(p), np.inf, p))
    scaled = np.minimum(1.0, p[order] * np.arange(len(p), 0, -1))
    out = np.empty(len(p))
    out[order] = np.where(np.isnan(scaled), np.nan, np.fmax.accumulate(scaled))
    return out


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """The exact two-sided p-value of as many items going from right to wrong as from wrong to right.

    Source: McNemar, Note on the sampling error of the difference between correlated proportions, 1947.
    """
    from scipy.stats import binomtest

    one, other = np.asarray(before, dtype=bool), np.asarray(after, dtype=bool)
    lost, won = int((one & ~other).sum()), int((~one & other).sum())
    return float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0


def pareto(effects: Sequence[float], costs: Sequence[float]) -> np.ndarray:
    """Which settings `[n]` no other beats: none has at least the effect at no more cost, and more of one of them. NaN is beaten."""
    effect, cost = (np.asarray(values, dtype=np.float64) for values in (effects, costs))
    real = ~(np.isnan(effect) | np.isnan(cost))
    at_least = (effect[:, None] >= effect) & (cost[:, None] <= cost)
    better = at_least & ((effect[:, None] > effect) | (cost[:, None] < cost))
    return real & ~(better & real[:, None]).any(0)


def at_equal_cost(costs: Sequence[float], effects: Sequence[float], cost: float) -> float:
    """The effect at one cost, between the settings of a curve that begins at (0, 0); NaN beyond its greatest cost.

    In the root of the cost, in which an effect is nearly linear: KL grows with the square of a small edit. Where a curve comes
    back to a cost, its first passage counts.
    """
    roots = np.sqrt(np.maximum([0.0, *costs], 0.0))
    curve = np.array([0.0, *effects], dtype=np.float64)
    goal = float(np.sqrt(cost))
    for i in range(len(curve) - 1):
        if roots[i] <= goal <= roots[i + 1]:
            share = (goal - roots[i]) / (roots[i + 1] - roots[i]) if roots[i + 1] > roots[i] else 1.0
            return float(curve[i] + share * (curve[i + 1] - curve[i]))
    return float("nan")
