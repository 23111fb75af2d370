"""The overhead card as a result: what taps cost, read back from the JSON file that `mia-lab bench` writes."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MiaError
from ..shown import Shown
from .cases import Work
from .drive import METRICS
from .overhead import Facts, Figure, Row
from .peers import PeerRow
from .profile import Account
from .report import HEADER, cells, curves, describe, describe_peer, percent

if TYPE_CHECKING:
    from ..show.parts import Curve, Heat, Part

_END = 5.0  # per cent at which the colour is full
_NAMES = {"step_ms": "step", "tpot_ms": "time per token", "ttft_ms": "time to first token", "seconds": "whole run"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OverheadCard(Shown):
    """Each case beside the same model without taps: a grid of case and batch size for each model and kind of work."""

    machine: dict[str, Any]
    facts: tuple[Facts, ...]
    rows: tuple[Row, ...]
    peers: tuple[PeerRow, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> OverheadCard:
        """Read what `mia-lab bench --out` wrote; MiaError where the file is something else."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            facts = tuple(Facts(**fact) for fact in found["facts"])
            rows = tuple(_row(row) for row in found["rows"])
            peers = tuple(PeerRow(**peer | {"work": Work(**peer["work"]), "seconds": Figure(**peer["seconds"])})
                          for peer in found.get("peers", ()))
            return cls(dict(found["machine"]), facts, rows, peers)
        except (KeyError, TypeError, ValueError) as error:
            raise MiaError(f"{path} is no overhead card: {error!r}. `mia-lab bench MODEL --out FILE.json` writes one") from None

    @property
    def data(self) -> list[dict[str, Any]]:
        """One row a case and kind of work; each metric as native and case (medians), ratio, low and high."""
        return [dict(model=row.model, case=row.case, **asdict(row.work), rounds=row.rounds, delivered=row.delivered,
                     **{f"{metric}_{name}": value for metric in METRICS for name, value in asdict(getattr(row, metric)).items()})
                for row in self.rows]

    def _heats(self) -> list[Heat]:
        from ..show.parts import Heat

        heats = []
        for model, tokens_in, tokens_out in dict.fromkeys((row.model, row.work.tokens_in, row.work.tokens_out) for row in self.rows):
            found = {(row.case, row.work.batch): row for row in self.rows
                     if (row.model, row.work.tokens_in, row.work.tokens_out) == (model, tokens_in, tokens_out)}
            cases, batches = list(dict.fromkeys(case for case, _ in found)), sorted({batch for _, batch in found})
            grid = [[found.get((case, batch)) for batch in batches] for case in cases]
            heats.append(Heat(tuple(cases), tuple(map(str, batches)), tuple(tuple(_more(row) for row in line) for line in grid),
                              f"{model}, {tokens_in} tokens in, {tokens_out} out: time per token beside no taps, %",
                              notes=tuple(tuple(_note(row) for row in line) for line in grid), low=-_END, high=_END,
                              axes=("case", "batch"), unit="%"))
        return heats

    def _parts(self) -> list[Part]:
        from ..show.parts import Prose, Table

        peers = [Prose(describe_peer(row)) for row in self.peers]
        table = Table(("model", *HEADER), tuple((row.model, *cells(row)) for row in self.rows), "All figures")
        return [*self._brief(), *self._plots(), table, *peers]

    def _plots(self) -> tuple[Curve, ...]:
        """Intervals by batch size."""
        return curves(self.rows)

    def _brief(self) -> list[Part]:
        from ..show.parts import Prose

        where = ", ".join(f"{name} {value}" for name, value in self.machine.items() if isinstance(value, str))
        return [Prose(f"What taps cost: {where}"), *self._heats(), *(Prose(describe(fact)) for fact in self.facts)]


def _row(found: dict[str, Any]) -> Row:
    figures = {metric: Figure(**found[metric]) for metric in METRICS}
    return Row(**found | figures | {"work": Work(**found["work"]), "gpu": found["gpu"] and Account(**found["gpu"])})


def _more(row: Row | None) -> float:
    return float("nan") if row is None else 100 * (row.tpot_ms.ratio - 1)


def _note(row: Row | None) -> str:
    if row is None:
        return "not measured"
    lines = [f"{name} {percent(getattr(row, metric))} %" for metric, name in _NAMES.items()]
    return "\n".join([*lines, f"{row.rounds} rounds, intervals of {row.tpot_ms.coverage:.0%}"])
