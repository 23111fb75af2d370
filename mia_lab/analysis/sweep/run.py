"""Running a sweep: settings of vectors or of recipes, their placebos, and the prompts to choose on and to keep for the report."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import EditError
from ..vectors import Vector
from .items import Item, Lab, divide, read_items
from .measuring import measure
from .metrics import Metric
from .result import Bench, Sweep
from .settings import BASE, STEERED, Setting, named, of_recipes, of_vectors
from .settings import placebos as draw_placebos
from .side_metrics import KL, Perplexity, kl, perplexity

if TYPE_CHECKING:
    from ...session import Session


def sweep(session: Session, vectors: Any, coeffs: Iterable[float], where: Any, **options: Any) -> Sweep:
    """Return what `Session.sweep` promises."""
    chosen = named(vectors)
    return _run(session, of_vectors(chosen, coeffs, where), chosen, **options)


def compose(session: Session, recipes: Mapping[str, Any], **options: Any) -> Sweep:
    """Return what `Session.compose` promises."""
    return _run(session, of_recipes(recipes), {}, pairs=None, at=-1, **options)


def _run(session: Session, settings: list[Setting], vectors: Mapping[str, Vector], *, prompts: Any, select: Any, holdout: Any,
         metrics: Sequence[Metric], guards: Sequence[Metric] | None, seeds: Sequence[int], temperature: float, max_tokens: int,
         placebos: int, placebo_prompts: int, pairs: Any, at: int, seed: int, progress: bool) -> Sweep:
    for setting in settings:
        for edit in setting.edits:  # a wrong width or an undeclared point fails here, not after minutes
            session._submit.check(edit)
    metrics = _measures(metrics, guards)
    parts = _parts(prompts, select, holdout, seed)
    if placebos < 0 or placebo_prompts < 1:
        raise EditError(f"placebos={placebos} with placebo_prompts={placebo_prompts}: give 0 or more placebos, each on a prompt or more")
    if len(seeds) > 1 and not temperature:
        raise EditError("greedy texts are the same for every seed; give a temperature with several seeds")
    lab = Lab(session, tuple(parts[0]), "select", max_tokens, tuple(seeds) if temperature else (None,))
    for metric in metrics:  # so does what a metric lacks
        ready = metric.ready(lab)
        ready.asks(lab, ready.items(lab)[0], None)
    drawn = draw_placebos(session, settings, vectors, placebos, placebo_prompts, pairs, at, seed)
    everything = [*settings, *drawn.of(settings)]
    tried = min(placebo_prompts, len(metrics[0].items(lab)))
    n = len(metrics[0].items(lab))

    def wanted(setting: Setting, metric: Metric, at: int) -> bool:
        """Placebos are tried with the first metric, each on some of the prompts, which go round."""
        return setting.role in (BASE, STEERED) or (metric.name == metrics[0].name and (at - setting.draw * tried) % n < tried)

    measured = measure(lab, everything, metrics, temperature, progress, wanted)
    return Sweep.of(everything, metrics, measured, Bench(lab, tuple(parts[1]), temperature, drawn, progress))


def _measures(metrics: Sequence[Metric], guards: Sequence[Metric] | None) -> list[Metric]:
    """The metrics and, where they are not among them, the guards."""
    if not isinstance(metrics, (list, tuple)):
        raise EditError("metrics is a list, for example metrics=[mia.sentiment()]")
    if not metrics:
        raise EditError("a sweep needs a metric, for example metrics=[mia.sentiment()]; the first is the effect")
    given = (kl(), perplexity()) if guards is None else tuple(guards)
    found = [*metrics, *(g for g in given if not any(isinstance(m, type(g)) and isinstance(g, (KL, Perplexity)) for m in metrics))]
    wrong = [m for m in found if not all(hasattr(m, part) for part in ("name", "better", "ready", "items", "asks", "score"))]
    if wrong:
        raise EditError(f"{wrong[0]!r} is no metric; type for example mia.sentiment(), or mia.scored(function) for a function of a text")
    names = [m.name for m in found]
    again = [name for name in names if names.count(name) > 1]
    if again:
        raise EditError(f"two metrics have the name {again[0]!r}; give one of them another: name=...")
    return found


def _parts(prompts: Any, select: Any, holdout: Any, seed: int) -> tuple[list[Item], list[Item]]:
    """The prompts to choose on and those to report on, of different groups."""
    if (prompts is None) == (select is None) or (select is None) != (holdout is None):
        raise EditError("give prompts, which are then divided by group, or both select= and holdout=")
    parts = divide(read_items(prompts), seed) if prompts is not None else (read_items(select), read_items(holdout))
    both = set.intersection(*({item.group for item in part} for part in parts))
    both = both or set.intersection(*({repr(item.prompt) for item in part} for part in parts))
    if both:
        raise EditError(f"the group or prompt {min(both)} is in select and in holdout; a report on prompts that were chosen on flatters")
    return parts
