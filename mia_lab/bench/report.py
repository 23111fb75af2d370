"""The overhead card: measured rows as a table, a JSON file and a plot."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..lazy import human_bytes
from ..show.parts import Curve, Series
from ..show.png import png
from .overhead import Facts, Figure, Row
from .peers import PeerRow


def percent(figure: Figure) -> str:
    """A ratio as how much more it is, with its interval, in percent."""
    return f"{100 * (figure.ratio - 1):+.2f} [{100 * (figure.low - 1):+.2f}, {100 * (figure.high - 1):+.2f}]"


def cells(row: Row) -> tuple[str, ...]:
    """One line of the card."""
    delivered = f"{human_bytes(row.delivered)}, {human_bytes(int(row.bandwidth))}/s" if row.delivered else ""
    gpu = "" if row.gpu is None else f"{row.gpu.native[0]:.3f} -> {row.gpu.case[0]:.3f}"
    return (str(row.work.batch), f"{row.work.tokens_in}+{row.work.tokens_out}", row.case, f"{row.step_ms.native:.3f}", percent(row.step_ms),
            percent(row.tpot_ms), percent(row.ttft_ms), percent(row.seconds), delivered, gpu)


HEADER = ("batch", "tokens", "case", "native ms a step", "step, %", "time per token, %", "time to first token, %", "whole run, %",
          "delivered", "GPU ms a step")


def text(rows: Sequence[Row]) -> str:
    """The card as a Markdown table."""
    lines = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe(facts: Facts) -> str:
    """What the taps hold in memory."""
    return (f"{facts.model}: taps hold {human_bytes(facts.device_bytes)} on the device, {human_bytes(facts.arena_bytes)} of it the arena "
            f"of 2 x {facts.arena_rows} rows; that is room for {facts.kv_tokens_lost} tokens of KV cache")


def describe_peer(row: PeerRow) -> str:
    """One line about a peer's case."""
    return (f"{row.peer} {row.version}, batch {row.work.batch}, {row.work.tokens_in}+{row.work.tokens_out} tokens, {row.case}: whole run "
            f"{row.seconds.case:.3f} s, native {row.seconds.native:.3f} s, {percent(row.seconds)} %")


def save(path: Path, machine: dict[str, Any], facts: Sequence[Facts], rows: Sequence[Row], peers: Sequence[PeerRow] = ()) -> None:
    """Write all figures as JSON."""
    path.write_text(json.dumps({"machine": machine, "facts": list(map(asdict, facts)), "rows": list(map(asdict, rows)),
                                "peers": list(map(asdict, peers))}, indent=1))


def curves(rows: Sequence[Row]) -> tuple[Curve, ...]:
    """Time per token beside no taps, in percent more, by batch size: one series a case, one curve a model and kind of work."""
    panels: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.model, row.work.tokens_in, row.work.tokens_out), []).append(row)
    found = []
    for (model, tokens_in, tokens_out), mine in panels.items():
        batches = sorted({row.work.batch for row in mine})
        series = tuple(_series(name, [row for row in mine if row.case == name], batches) for name in dict.fromkeys(r.case for r in mine))
        found.append(Curve(series, "requests in the batch", "time per token, % more", f"{model}, {tokens_in} tokens in, {tokens_out} out: "
                           f"what taps add, with intervals", ticks=tuple(map(str, batches))))
    return tuple(found)


def _series(name: str, rows: Sequence[Row], batches: Sequence[int]) -> Series:
    more = ([100 * (getattr(row.tpot_ms, end) - 1) for row in rows] for end in ("ratio", "low", "high"))
    return Series(name, tuple(float(batches.index(row.work.batch)) for row in rows), *map(tuple, more))


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw the curves as a PNG."""
    path.write_bytes(png(*curves(rows)))
