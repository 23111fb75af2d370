"""Measuring settings: every metric of every setting on every item, from one batch of requests that metrics share."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from ...errors import EditError, MiaError
from ...shown import progress_bar
from .items import Item, Lab
from .metrics import Metric
from .settings import BASE, Setting
from .trials import Ask, Job, Outcome, run

if TYPE_CHECKING:
    from ...session import Session

Wanted = Callable[[Setting, Metric, int], bool]
_ROWS = 128  # rows unembedded together


@dataclass(frozen=True, slots=True)
class Measured:
    """values: by metric, `[setting item]`, NaN where not asked for, not done, or of logits that are not finite. groups: of the
    items. texts: by setting, by prompt, one a seed. done: whether nothing broke it off."""

    values: dict[str, torch.Tensor]
    groups: dict[str, tuple[str, ...]]
    texts: dict[int, dict[int, list[str]]]
    done: bool


@dataclass(frozen=True, slots=True)
class _Cell:
    """What one metric needs for one item: the requests of each setting that is measured on it."""

    metric: Metric
    item: Item
    at: int
    asks: dict[int, tuple[Ask, ...]]  # by setting
    key: tuple  # equal for cells whose requests are the same


def measure(lab: Lab, settings: Sequence[Setting], metrics: Sequence[Metric], temperature: float, progress: bool,
            wanted: Wanted = lambda setting, metric, at: True) -> Measured:
    """Measure settings, the first of which is the base. An interrupt (Ctrl-C) ends it early, with what was done by then."""
    session = lab.session
    if session._scoped([[]])[0]:
        raise EditError("a sweep compares with the unsteered model, and edits are in force here; end the steer scope (and "
                        "s.default([])), or use `with s.unsteered():` and name those edits in s.compose")
    ready = [metric.ready(lab) for metric in metrics]
    cells = [cell for metric in ready for cell in _cells(lab, settings, metric, wanted)]
    wants = dict.fromkeys((s, ask) for cell in cells for s, asks in cell.asks.items() for ask in asks)
    # One setting after the other, so that what breaks off leaves whole ones.
    jobs = {(s, ask): Job(ask, settings[s].edits) for s, ask in sorted(wants, key=lambda want: want[0])}
    values = {metric.name: torch.full((len(settings), len(metric.items(lab))), float("nan"), dtype=torch.float64) for metric in ready}
    with progress_bar(progress) as bar:
        bar.stage(len(jobs), "requests")
        outcomes = dict(zip(jobs, run(session, list(jobs.values()), temperature, bar.add)))
        done = all(outcome is not None for outcome in outcomes.values())
        shared = _shared(cells)
        bar.stage(len(shared), "groups of requests scored")
        try:
            for together in shared:
                _score(session, together, outcomes, values)
                bar.add()
        except KeyboardInterrupt:
            done = False
        if not done:
            bar.broken_off("settings that have all their numbers are kept")
    groups = {metric.name: tuple(item.group for item in metric.items(lab)) for metric in ready}
    return Measured(values, groups, _texts(cells, outcomes), done)


def _cells(lab: Lab, settings: Sequence[Setting], metric: Metric, wanted: Wanted) -> Iterator[_Cell]:
    for at, item in enumerate(metric.items(lab)):
        mine = [i for i, setting in enumerate(settings) if setting.role == BASE or wanted(setting, metric, at)]
        if len(mine) > 1:
            known = {system: tuple(metric.asks(lab, item, system)) for system in {settings[i].system for i in mine}}
            key = tuple(sorted(((system or "", asks) for system, asks in known.items()), key=lambda pair: pair[0]))
            yield _Cell(metric, item, at, {i: known[settings[i].system] for i in mine}, key)


def _shared(cells: Iterable[_Cell]) -> list[list[_Cell]]:
    """Cells that read the same requests, together."""
    found: dict[tuple, list[_Cell]] = {}
    for cell in cells:
        found.setdefault(cell.key, []).append(cell)
    return list(found.values())


def _score(session: Session, cells: Sequence[_Cell], outcomes: dict[tuple[int, Ask], Outcome | None],
           values: dict[str, torch.Tensor]) -> None:
    """Fill in the values of cells that share their requests."""
    settings = dict.fromkeys(s for cell in cells for s in cell.asks)
    found = {s: [outcomes[s, ask] for ask in next(cell.asks[s] for cell in cells if s in cell.asks)] for s in settings}
    whole = {s: mine for s, mine in found.items() if all(mine)}
    if 0 not in whole:
        return
    base = [outcome for _, part in _with_logits(session, {0: whole[0]}) for outcome in part]
    if not _finite(base):
        raise MiaError("the unsteered model gave logits that are not finite; a wider dtype may help")
    rest = _with_logits(session, {s: mine for s, mine in whole.items() if s})
    for s, mine in chain([(0, base)], rest):  # one part after the other: logits of all at once could fill the memory
        for cell in cells:
            if s in cell.asks and _finite(mine):
                values[cell.metric.name][s, cell.at] = cell.metric.score(cell.item, mine, base)


def _with_logits(session: Session, found: dict[int, list[Outcome]]) -> Iterator[tuple[int, list[Outcome]]]:
    """The outcomes of each setting with the logits of their rows, unembedded some settings at a time.

    One row at a time would read the whole unembedding for each.
    """
    part: dict[int, list[Outcome]] = {}
    for i, (s, mine) in enumerate(found.items()):
        part[s] = mine
        rows = sum(len(o.ask.rows) for each in part.values() for o in each)
        if rows >= _ROWS or i == len(found) - 1:
            yield from _unembedded(session, part, rows)
            part = {}


def _unembedded(session: Session, part: dict[int, list[Outcome]], rows: int) -> Iterator[tuple[int, list[Outcome]]]:
    streams = [o.stream for mine in part.values() for o in mine if o.stream is not None]
    logits = session.unembed(torch.cat(streams)) if rows else torch.empty(0)
    start = 0
    for s, mine in part.items():
        out = []
        for o in mine:
            out.append(replace(o, logits=logits[start: start + len(o.ask.rows)]) if o.ask.rows else o)
            start += len(o.ask.rows)
        yield s, out


def _finite(outcomes: Sequence[Outcome]) -> bool:
    return all(o.logits is None or bool(torch.isfinite(o.logits).all()) for o in outcomes)


def _texts(cells: Iterable[_Cell], outcomes: dict[tuple[int, Ask], Outcome | None]) -> dict[int, dict[int, list[str]]]:
    found: dict[int, dict[int, list[str]]] = {}
    for cell in cells:
        for s, asks in cell.asks.items():
            texts = [outcomes[s, ask].text for ask in asks if ask.max_tokens and outcomes[s, ask]]
            if texts:
                found.setdefault(s, {})[cell.at] = texts
    return found
