"""Sweep: what edits do at many settings, beside the unsteered model and placebos, with intervals; and which setting to trust."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...counted import counted
from ...errors import EditError
from ...shown import Shown
from .effects import Result, results
from .items import Item, Lab
from .measuring import Measured
from .metrics import Metric
from .settings import STEERED, Placebos, Setting
from .side_metrics import KL, Perplexity
from .statistics import at_equal_cost, pareto

if TYPE_CHECKING:
    from ...show.parts import Curve
    from .choice import Choice
    from .curves import LayerEffects

_VIEW = 280_000  # characters of HTML of one view
_CELLS = 900  # of its table


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything a sweep needs to measure again: on the prompts kept for reporting."""

    lab: Lab
    holdout: tuple[Item, ...]
    temperature: float
    placebos: Placebos
    progress: bool


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(Shown):
    """Settings measured on the same prompts. `table` has a Result for each that is complete; the first metric is the effect.

    values[metric] `[setting item]`: the numbers themselves, NaN where not measured; the first setting is the unsteered model.
    texts[setting][prompt]: what was generated, one text a seed. complete: whether nothing broke it off. The holdout prompts are
    untouched until `best`.
    """

    settings: tuple[Setting, ...]
    metrics: tuple[Metric, ...]
    values: Mapping[str, torch.Tensor]
    groups: Mapping[str, tuple[str, ...]]
    texts: Mapping[int, Mapping[int, list[str]]]
    complete: bool
    table: tuple[Result, ...]
    bench: Bench = field(repr=False)
    looks: list[str] = field(default_factory=list, repr=False)  # the settings that were tried on the holdout

    @classmethod
    def of(cls, settings: Sequence[Setting], metrics: Sequence[Metric], measured: Measured, bench: Bench) -> Sweep:
        """Put measured values into a table."""
        return cls(tuple(settings), tuple(metrics), measured.values, measured.groups, measured.texts, measured.done,
                   results(settings, metrics, measured), bench)

    @property
    def baseline(self) -> dict[str, float]:
        """The unsteered model's mean of each metric."""
        return {name: float(values[0].mean()) for name, values in self.values.items()}

    def pareto(self, cost: str = "kl") -> list[Result]:
        """The settings that no other beats: more effect, on the first metric's better side, for no more "kl" or "perplexity_ratio"."""
        if cost not in ("kl", "perplexity_ratio"):
            raise EditError(f'a cost is "kl" or "perplexity_ratio", not {cost!r}')
        costs = [getattr(r, cost) for r in self.table]
        if None in costs:
            raise EditError(f"this sweep has no {cost}; leave its guards as they are by default")
        front = pareto([self.metrics[0].better * r.effect.mean for r in self.table], costs)
        return [r for r, on in zip(self.table, front) if on]

    def at_kl(self, kl: float) -> list[dict[str, Any]]:
        """The effect of each vector, layer and sign at one KL, between the coefficients that were measured; the largest first.

        Methods are compared so, never each at its favourite coefficient. None where a curve does not reach that KL.
        """
        curves: dict[tuple, list[Result]] = {}
        for r in self.table:
            if r.kl is not None and r.setting.coeff is not None:
                curves.setdefault((r.setting.name, r.setting.layer, r.setting.where, np.sign(r.setting.coeff)), []).append(r)
        if not curves:
            raise EditError("effects at equal KL need a sweep over coefficients, with mia.kl() among its guards")
        found = []
        for (name, layer, where, sign), points in curves.items():
            points = sorted(points, key=lambda r: abs(r.setting.coeff))
            value = at_equal_cost([r.kl for r in points], [r.effect.mean for r in points], kl)
            found.append({"vector": name, "layer": layer, "where": where, "sign": int(sign), "effect": None if np.isnan(value) else value})
        return sorted(found, key=lambda row: -1.0 if row["effect"] is None else abs(row["effect"]), reverse=True)

    def regression_only(self, measures: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Each setting's effect less the mean of what it makes worse among side measures; what it makes better is not counted.

        measures: by default all but the first metric. They are subtracted as they are, so give ones on the effect's scale.
        """
        better = {m.name: m.better for m in self.metrics}
        chosen = [m.name for m in self.metrics[1:]] if measures is None else list(measures)
        if not chosen or set(chosen) - better.keys():
            raise EditError(f"there are the measures {list(better)}; {chosen} were asked for")
        found = []
        for r in self.table:
            losses = {name: max(0.0, -better[name] * r.effects[name].mean) for name in chosen}
            gain = self.metrics[0].better * r.effect.mean
            found.append({"setting": r.setting.label, "effect": gain, **losses, "score": gain - sum(losses.values()) / len(losses)})
        return sorted(found, key=lambda row: row["score"], reverse=True)

    def best(self, *, max_perplexity_ratio: float | None = 1.1, max_kl: float | None = None, min_capability: float | None = None,
             target: float = 0.0, towards: str = "better", questions: int = 40) -> Choice:
        """Choose a setting on these prompts, and report what it does on the holdout, which has not been looked at before.

        Chosen is the smallest coefficient whose effect is on the asked side of everything: its whole interval beyond `target` and
        beyond what 95 % of its placebos reach, its p below 0.05 after Holm's correction, its guards kept. towards: "better" (the
        first metric's own), "higher" or "lower". min_capability: the least share of the unsteered accuracy to keep, for a sweep
        with mia.capability() among its metrics. questions: for the capability report, 0 for none.
        """
        from .choice import choose

        return choose(self, max_perplexity_ratio, max_kl, min_capability, target, towards, questions)

    def by_layer(self, coeff: float) -> LayerEffects:
        """Return what one coefficient does at each layer, with intervals, placebos and costs; EditError for one that was not measured."""
        from .curves import by_layer

        return by_layer(self.table, self.metrics[0].name, coeff)

    @property
    def data(self) -> list[dict[str, Any]]:
        """One dict a setting, ready for a data frame."""
        return [{"vector": r.setting.name, "layer": r.setting.layer, "coeff": r.setting.coeff, "where": r.setting.where.removeprefix(", "),
                 **{f"{name}{end}": value for name, e in r.effects.items() for end, value in
                    (("", e.mean), ("_low", e.low), ("_high", e.high), ("_wrong", e.wrong))},
                 "p_holm": r.p, "perplexity_ratio": r.perplexity_ratio, "placebo": r.random and r.random.mean,
                 "placebo_limit": r.random and r.random.limit, "shuffled": r.shuffled and r.shuffled.mean,
                 "shuffled_limit": r.shuffled and r.shuffled.limit} for r in self.table]

    def _parts(self) -> tuple[Any, ...]:
        from ...show.html import render
        from .view import texts_beside

        head, table = self._brief()
        curves = self._plots()
        return head, *curves, *texts_beside(self, _VIEW - len(render(head, *curves, table))), table

    def _brief(self) -> tuple[Any, ...]:
        from ...show.parts import Prose, Table

        steered = sum(s.role == STEERED for s in self.settings)
        broken = "" if self.complete else "; broken off"
        broken += "" if len(self.table) == steered else f"; {len(self.table)} of {steered} settings have all their numbers"
        head = (f"Sweep of {counted(steered, 'setting')} on {counted(len(self.groups[self.metrics[0].name]), 'prompt')}, "
                f"{self.metrics[0].name} against the unsteered model's {self.baseline[self.metrics[0].name]:.3g}{broken}")
        names = [m.name for m in self.metrics[1:] if not isinstance(m, (KL, Perplexity))]
        show = lambda value, form: "" if value is None else format(value, form)  # noqa: E731
        shown = self._listed(6 + len(names))
        rows = tuple((r.setting.label, repr(r.effect), f"{r.p:.1g}", show(r.random and r.random.limit, ".2g"), show(r.kl, ".3f"),
                      show(r.perplexity_ratio, ".3f"), *(f"{r.effects[name].mean:+.3g}" for name in names)) for r in shown)
        left = "" if len(shown) == len(self.table) else (
            f"The {len(shown)} of {len(self.table)} settings with the largest effects; all are in .data and .table")
        header = ("setting", "effect [95 %]", "p (Holm)", "placebos within ±", "KL", "perplexity ratio", *names)
        return Prose(head), Table(header, rows, left)

    def _listed(self, columns: int) -> tuple[Result, ...]:
        """The results for which a table of so many columns has room: those with the largest effects, as they stand in `table`."""
        most = max(1, _CELLS // columns)
        if len(self.table) <= most:
            return self.table
        kept = sorted(range(len(self.table)), key=lambda i: -abs(self.table[i].effect.mean))[:most]
        return tuple(self.table[i] for i in sorted(kept))

    def _plots(self) -> tuple[Curve, ...]:
        from .curves import over_coefficients

        return over_coefficients(self.table, self.metrics[0].name)
