"""Results of settings: differences to the unsteered model with their intervals, and what placebos do at the same place."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from .measuring import Measured
from .metrics import Metric
from .settings import RANDOM, SHUFFLED, STEERED, Setting
from .side_metrics import KL, Perplexity
from .statistics import Estimate, estimate, holm


@dataclass(frozen=True, slots=True)
class Null:
    """What placebos of a setting do to the first metric. effects `[draw]`: each one's mean over the prompts that it was tried on.

    mean with its 95 % interval over draws, and limit: the size that one draw in twenty exceeds, either way.
    """

    effects: tuple[float, ...]
    mean: float
    low: float
    high: float
    limit: float

    @classmethod
    def of(cls, effects: Sequence[float]) -> Null:
        """Summarise the effects of draws."""
        found = estimate(effects, [str(i) for i in range(len(effects))])
        return cls(tuple(map(float, effects)), found.mean, found.low, found.high, float(np.quantile(np.abs(effects), 0.95)))

    def __repr__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}], 95 % within ±{self.limit:.3g}"


@dataclass(frozen=True, slots=True)
class Result:
    """What one setting changes: each metric's difference to the unsteered model, item by item, and what its placebos do.

    p: of the first metric, adjusted for all settings of the sweep (Holm). random: placebos with the covariance of unrelated text
    and the edit's length; shuffled: vectors fitted on shuffled labels, at their natural length.
    """

    setting: Setting
    effects: Mapping[str, Estimate]
    p: float
    random: Null | None
    shuffled: Null | None
    kl: float | None
    perplexity_ratio: float | None

    @property
    def effect(self) -> Estimate:
        """The change of the first metric."""
        return next(iter(self.effects.values()))


def results(settings: Sequence[Setting], metrics: Sequence[Metric], measured: Measured) -> tuple[Result, ...]:
    """One Result for each steered setting all of whose metrics are there."""
    change = {name: (values - values[0]).numpy() for name, values in measured.values.items()}
    whole = [i for i, s in enumerate(settings) if s.role == STEERED and not any(np.isnan(values[i]).any() for values in change.values())]
    effects = {i: {m.name: estimate(change[m.name][i], measured.groups[m.name]) for m in metrics} for i in whole}
    first, nulls = metrics[0].name, _nulls(settings, change[metrics[0].name])
    adjusted = dict(zip(whole, holm([effects[i][first].p for i in whole])))
    costs = {kind: next((m.name for m in metrics if isinstance(m, kind)), None) for kind in (KL, Perplexity)}
    out = []
    for i in whole:
        random, shuffled = (nulls.get((role, key)) for role, key in zip((RANDOM, SHUFFLED), settings[i].of))
        log_ratio = costs[Perplexity] and effects[i][costs[Perplexity]].mean
        out.append(Result(settings[i], effects[i], float(adjusted[i]), random, shuffled, costs[KL] and effects[i][costs[KL]].mean,
                          None if log_ratio is None else exp(log_ratio)))
    return tuple(out)


def _nulls(settings: Sequence[Setting], change: np.ndarray) -> dict[tuple, Null]:
    """What placebos do, by their role and what they are placebos of."""
    draws: dict[tuple, list[float]] = {}
    for i, s in enumerate(settings):
        tried = change[i][~np.isnan(change[i])]
        if s.role in (RANDOM, SHUFFLED) and len(tried):
            draws.setdefault((s.role, s.of[0]), []).append(float(tried.mean()))
    return {key: Null.of(effects) for key, effects in draws.items() if len(effects) > 1}
