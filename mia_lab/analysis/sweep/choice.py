"""Choice: the setting that a sweep was asked for, chosen on some prompts and reported on others; or why there is none."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING, Any

from ...counted import counted
from ...edits import Add, Edit
from ...errors import EditError, MiaError
from ...shown import Shown
from .effects import Null, Result, results
from .measuring import Measured, measure
from .metrics import Metric
from .settings import BASE, RANDOM, Setting
from .side_metrics import KL, Capability, Perplexity, capability
from .statistics import Estimate, mcnemar

if TYPE_CHECKING:
    from ...show.parts import Curve
    from .result import Sweep

_ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Rules:
    """What a setting must keep. sign: the side on which an effect is wanted."""

    sign: int
    target: float
    max_perplexity_ratio: float | None
    max_kl: float | None
    min_capability: float | None  # share of the unsteered accuracy

    def broken(self, r: Result, capable: str | None, baseline: Mapping[str, float]) -> str:
        """Why a result is not enough, "" where it is. capable: the metric of accuracy; baseline: the unsteered means on its prompts."""
        fault = self._guards(r, capable, baseline)
        fault = fault or ("" if r.p < _ALPHA else f"is not significant after Holm's correction, over {r.effect.groups} groups")
        return fault or self._beats(r.effect, r.random)

    def _guards(self, r: Result, capable: str | None, baseline: Mapping[str, float]) -> str:
        if self.max_perplexity_ratio is not None and not r.perplexity_ratio <= self.max_perplexity_ratio:
            return f"has a perplexity ratio above {self.max_perplexity_ratio:g}"
        if self.max_kl is not None and not r.kl <= self.max_kl:
            return f"has a KL above {self.max_kl:g}"
        if self.min_capability is not None and not r.effects[capable].mean >= (self.min_capability - 1.0) * baseline[capable]:
            return "loses too much capability"
        return ""

    def _beats(self, effect: Estimate, null: Null | None) -> str:
        near = min(self.sign * effect.low, self.sign * effect.high)
        if not near > self.target:
            return f"has an effect whose interval reaches {self.sign * self.target + 0.0:g}"
        if null is not None and not near > null.limit:
            return "does no more than its placebos may"
        return ""


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Shown):
    """A setting chosen on the select prompts; everything below is of the holdout.

    effect, kl, perplexity_ratio, capability (change of accuracy), side: estimates over holdout items. random: placebos with the
    covariance of unrelated text and the edit's own length; shuffled: fitted on shuffled labels. flipped: the opposite coefficient.
    holds: whether it keeps there what it was chosen for. reasons: how many settings failed by what, on the select prompts; with
    no setting, why there is none. looks: how many settings of this sweep have been tried on the holdout, this one included.
    """

    setting: Setting | None
    metric: str
    reasons: Mapping[str, int]
    selected: Result | None = None
    effect: Estimate | None = None
    random: Null | None = None
    shuffled: Null | None = None
    flipped: Estimate | None = None
    kl: Estimate | None = None
    placebo_kl: float | None = None
    perplexity_ratio: Estimate | None = None
    capability: Estimate | None = None
    capability_p: float | None = None
    side: Mapping[str, Estimate] | None = None
    holds: bool = False
    fault: str = ""
    looks: int = 0

    def __bool__(self) -> bool:
        return self.setting is not None and self.holds

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The chosen edits; MiaError where nothing passed."""
        if self.setting is None:
            raise MiaError(f"no setting passed: {self._why()}")
        return self.setting.edits

    @property
    def edit(self) -> Edit:
        """The chosen edit, where it is one; MiaError otherwise."""
        if len(self.edits) != 1:
            raise MiaError(f"the setting {self.setting.label!r} has {len(self.edits)} edits; take choice.edits")
        return self.edits[0]

    @property
    def data(self) -> dict[str, Any]:
        """Everything as a flat dict; estimates as (mean, low, high)."""
        out: dict[str, Any] = {"setting": self.setting and self.setting.label, "metric": self.metric, "holds": self.holds,
                               "fault": self.fault, "looks": self.looks, "reasons": dict(self.reasons),
                               "placebo_kl": self.placebo_kl, "capability_p": self.capability_p}
        estimates = {"selected": self.selected and self.selected.effect, "effect": self.effect, "placebo": self.random,
                     "shuffled": self.shuffled, "flipped": self.flipped, "kl": self.kl, "perplexity_ratio": self.perplexity_ratio,
                     "capability": self.capability, **(self.side or {})}
        return out | {name: found and (found.mean, found.low, found.high) for name, found in estimates.items()}

    def _why(self) -> str:
        return "; ".join(f"{n} {'setting' if n == 1 else 'settings'}: {why}" for why, n in self.reasons.items()) or "there was none"

    def _parts(self) -> tuple[Any, ...]:
        verdict, *rest = self._brief()
        return verdict, *self._plots(), *rest

    def _brief(self) -> tuple[Any, ...]:
        from ...show.parts import Prose, Table

        if self.setting is None:
            return (Prose(f"Choice: nothing passes, and the holdout was not touched. {self._why()}."),)
        rows = [("effect, on the prompts it was chosen on", self.selected.effect), ("effect, on the holdout", self.effect),
                ("placebos", self.random), ("label-shuffled", self.shuffled), ("opposite sign", self.flipped), ("KL", self.kl),
                ("placebos' KL", self.placebo_kl), ("perplexity ratio", self.perplexity_ratio), ("capability", self.capability),
                *(self.side or {}).items()]
        verdict = "holds" if self.holds else f"does NOT hold on the holdout: it {self.fault}"
        again = f" The holdout has been used {self.looks} times; its intervals are too narrow by now." if self.looks > 1 else ""
        alone = "" if self.random is not None else " It has no placebo."
        prompts = f"{counted(self.effect.n, 'prompt')} in {counted(self.effect.groups, 'group')}"
        shown = tuple((name, f"{v:.3g}" if isinstance(v, float) else repr(v)) for name, v in rows if v is not None)
        return Prose(f"Choice: {self.setting.label} {verdict} ({self.metric}; {prompts}).{alone}{again}"), Table(("", "mean [95 %]"), shown)

    def _plots(self) -> tuple[Curve, ...]:
        """The effect where it was chosen and on the holdout, its opposite, and placebos."""
        from ...show.parts import Curve, Series

        estimates = {"chosen on": self.selected and self.selected.effect, "holdout": self.effect, "opposite": self.flipped,
                     "placebos": self.random, "shuffled": self.shuffled}
        shown = {name: found for name, found in estimates.items() if found is not None}
        y, low, high = zip(*((v.mean, v.low, v.high) for v in shown.values())) if shown else ((), (), ())
        series = Series("effect", tuple(map(float, range(len(shown)))), y, low, high)
        return (Curve((series,), "", f"change of {self.metric}", "Effect with its 95 % interval", ticks=tuple(shown)),) if shown else ()


def choose(sweep: Sweep, max_perplexity_ratio: float | None, max_kl: float | None, min_capability: float | None, target: float,
           towards: str, questions: int) -> Choice:
    """Return what `Sweep.best` promises."""
    first = sweep.metrics[0]
    sides = {"better": first.better, "higher": 1, "lower": -1}
    if towards not in sides or sides[towards] == 0:
        raise EditError(f'towards is "better", "higher" or "lower", not {towards!r}')
    if target < 0:
        raise EditError(f"target={target:g}: give the size that the effect must exceed on the asked side")
    for limit, kind in ((max_perplexity_ratio, Perplexity), (max_kl, KL), (min_capability, Capability)):
        if limit is not None and not any(isinstance(m, kind) for m in sweep.metrics):
            raise EditError(f"this bound needs mia.{kind.__name__.lower()}() among the metrics of the sweep")
    capable = _capability_of(sweep.metrics)
    rules = Rules(sides[towards], target, max_perplexity_ratio, max_kl, min_capability)
    reasons: dict[str, int] = {}
    passing = []
    for r in sweep.table:
        why = "" if r.setting.asked else "has a coefficient that was not asked for, there as a control"
        why = why or rules.broken(r, capable, sweep.baseline)
        if why:
            reasons[why] = reasons.get(why, 0) + 1
        else:
            passing.append(r)
    if not passing:
        return Choice(None, first.name, reasons)
    chosen = min(passing, key=lambda r: (r.kl or 0.0 if r.setting.coeff is None else abs(r.setting.coeff), -rules.sign * r.effect.mean))
    return _report(sweep, chosen, rules, questions, reasons)


def _report(sweep: Sweep, chosen: Result, rules: Rules, questions: int, reasons: Mapping[str, int]) -> Choice:
    """Measure the chosen setting, its opposite and its placebos on the holdout."""
    setting, bench = chosen.setting, sweep.bench
    lab = replace(bench.lab, items=bench.holdout, part="holdout")
    metrics: list[Metric] = list(sweep.metrics)
    if questions and not any(isinstance(m, Capability) for m in metrics):
        metrics.append(capability(questions))
    opposite = [] if setting.coeff is None else [replace(setting, coeff=-setting.coeff, edits=_opposite(setting.edits))]
    settings = [Setting("unsteered", BASE), setting, *opposite, *bench.placebos.of([setting])]

    def wanted(other: Setting, metric: Metric, at: int) -> bool:
        cheap = isinstance(metric, KL) and other.role == RANDOM and at == other.draw % metric.n
        return other is setting or metric.name == metrics[0].name or cheap

    measured = measure(lab, settings, metrics, bench.temperature, bench.progress, wanted)
    if not measured.done:
        raise MiaError("the report on the holdout was broken off; call best() again")
    sweep.looks.append(setting.label)
    mine = results(settings[:2] + settings[2 + len(opposite):], metrics, _without(measured, 2, len(opposite)))[0]
    flipped = opposite and results(settings[:3:2], metrics[:1], _only(measured, metrics[0].name, [0, 2]))[0].effect
    baseline = {name: float(values[0].mean()) for name, values in measured.values.items()}
    fault = rules.broken(mine, _capability_of(metrics), baseline)
    return Choice(setting, metrics[0].name, reasons, chosen, mine.effect, mine.random, mine.shuffled, flipped or None,
                  **_costs(settings, metrics, measured, mine), holds=not fault, fault=fault, looks=len(sweep.looks))


def _costs(settings: Sequence[Setting], metrics: Sequence[Metric], measured: Measured, mine: Result) -> dict[str, Any]:
    """What the chosen setting costs on the holdout, by the fields of a Choice."""
    out: dict[str, Any] = {"side": {}}
    for metric in metrics[1:]:
        found, values = mine.effects[metric.name], measured.values[metric.name]
        if isinstance(metric, KL) and "kl" not in out:
            placebos = values[[i for i, s in enumerate(settings) if s.role == RANDOM]]
            out |= {"kl": found, "placebo_kl": float(placebos.nanmean()) if len(placebos) else None}
        elif isinstance(metric, Perplexity) and "perplexity_ratio" not in out:
            out["perplexity_ratio"] = replace(found, mean=exp(found.mean), low=exp(found.low), high=exp(found.high))
        elif isinstance(metric, Capability):
            out |= {"capability": found, "capability_p": mcnemar(*(values[i] > 0.5 for i in (0, 1)))}
        else:
            out["side"][metric.name] = found
    return out


def _capability_of(metrics: Sequence[Metric]) -> str | None:
    return next((m.name for m in metrics if isinstance(m, Capability)), None)


def _opposite(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    return tuple(edit.scaled(-1.0) for edit in edits if isinstance(edit, Add))


def _without(measured: Measured, start: int, n: int) -> Measured:
    """Without `n` settings from `start` on."""
    kept = [i for i in range(len(next(iter(measured.values.values())))) if not start <= i < start + n]
    return replace(measured, values={name: values[kept] for name, values in measured.values.items()})


def _only(measured: Measured, name: str, settings: Sequence[int]) -> Measured:
    """One metric, some settings."""
    return replace(measured, values={name: measured.values[name][list(settings)]})
