"""The overhead card: measured rows as a table, a JSON file and a plot."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..lazy import human_bytes
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


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw time per token against batch size, one line a case with its interval, one panel a model and kind of work."""
    from matplotlib.figure import Figure as Canvas

    panels = list(dict.fromkeys((row.model, row.work.tokens_in, row.work.tokens_out) for row in rows))
    canvas = Canvas(figsize=(6.0 * len(panels), 4.2), layout="constrained")
    for axes, panel in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels):
        mine = [row for row in rows if (row.model, row.work.tokens_in, row.work.tokens_out) == panel]
        for name in dict.fromkeys(row.case for row in mine):
            line = [row for row in mine if row.case == name]
            figures = [row.tpot_ms for row in line]
            middle = [100 * (f.ratio - 1) for f in figures]
            spread = [[100 * (f.ratio - f.low) for f in figures], [100 * (f.high - f.ratio) for f in figures]]
            axes.errorbar([row.work.batch for row in line], middle, yerr=spread, marker="o", capsize=2, label=name)
        axes.axhline(0.0, color="grey", linewidth=0.8)
        axes.set(title=f"{panel[0]}, {panel[1]} tokens in, {panel[2]} out", xlabel="requests in the batch", xscale="log",
                 ylabel="time per token beside no taps, %")
        axes.legend(fontsize="small")
    canvas.savefig(path, dpi=110)
