"""Default and steered generation in one batch, told token by token, with what the edits change in the stream of each layer."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mia_lab.edits import Edit
from mia_lab.engine.wire import Take
from mia_lab.errors import MissingRowsError
from mia_lab.running.launch import EngineRows
from mia_lab.running.turns import Stopped

if TYPE_CHECKING:
    from mia_lab.session import Session


@dataclass(frozen=True, slots=True)
class Side:
    """One text as far as it is generated. rows: the stream at `place`, where both sides are compared, `[layer d_model]`."""

    place: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    done: bool = False
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides. layers: of their rows; generated: whether these are of the first generated position, not of the prompt's last one.
    first_ms: from the request to the first steered token; stopped: whether it was ended before its time."""

    default: Side
    steered: Side
    layers: tuple[int, ...]
    generated: bool
    first_ms: float | None = None
    stopped: bool = False

    @property
    def change(self) -> torch.Tensor | None:
        """What the edits did to the stream, `[layer d_model]`, once it is known, and None where the positions hold different tokens."""
        one, other = self.default, self.steered
        if one.rows is None or other.rows is None or (self.generated and one.tokens[0] != other.tokens[0]):
            return None
        return other.rows - one.rows


def compare(session: Session, prompt: Any, edits: Sequence[Edit], params: dict[str, Any], default: Side | None,
            told: Callable[[Comparison], None], asked_at: float | None = None) -> Comparison:
    """Generate with the session's default edits, and with these after them; tell of each step, and return the end.

    default: the first side where it is known already; then only the other one runs. Open `steer` scopes play no part. Streams are
    compared at the prompt's last position or, where the edits begin after it, at the first generated one.
    """
    asked_at = time.perf_counter() if asked_at is None else asked_at
    read = session._read([prompt])
    n = len(read.ids[0])
    generated = _begins(session, read, edits) >= n and params["max_tokens"] > 1
    place = n if generated else n - 1
    known = default is not None and default.done and default.place == place
    sides = ["steered"] if known else ["default", "steered"]
    read = read.times(len(sides))
    both = {"default": list(session._defaults), "steered": [*session._defaults, *edits]}
    points = [p for p in session.tapped if p.kind == "resid_post"]
    takes = [[Take(p.kind, p.layer, ((place, place + 1),)) for p in points] for _ in sides]
    sampling, uids = session._submit.prepare(read, [both[side] for side in sides], params, takes)
    source = EngineRows(session._engine, uids)
    found = Comparison(default if known else Side(place), Side(place), tuple(p.layer for p in points), generated)
    try:
        with closing(session._engine.steps(read.ids, sampling)) as steps:
            for moved in steps:
                for i, output in moved:
                    one = output.outputs[0]
                    found = replace(found, **{sides[i]: replace(getattr(found, sides[i]), text=one.text, tokens=tuple(one.token_ids),
                                                                done=output.finished)})
                if found.first_ms is None and found.steered.tokens:
                    found = replace(found, first_ms=1e3 * (time.perf_counter() - asked_at))
                session._engine.turns.go_on()  # a newer request need not wait for what is drawn and read here
                told(found)
                found = _with_rows(found, source, sides, points)
    except Stopped:
        told(replace(found, stopped=True))
        raise
    told(found)
    return found


def _begins(session: Session, read: Any, edits: Sequence[Edit]) -> int:
    """The first position that any of the edits touches."""
    spans = [span for edit in edits for span in edit.where.spans(session._submit.context(read, 0))]
    return min((start for start, _ in spans), default=0)


def _with_rows(found: Comparison, source: EngineRows, sides: Sequence[str], points: Sequence[Any]) -> Comparison:
    """The comparison with the rows that have been computed since."""
    for i, side in enumerate(sides):
        mine = getattr(found, side)
        if mine.rows is None and len(mine.tokens) > found.generated:
            rows = [source.rows(p, [i])[0] for p in points]
            if any(positions.tolist() != [mine.place] for positions, _ in rows):
                raise MissingRowsError(f"the stream of the {side} text at position {mine.place} was never computed")
            found = replace(found, **{side: replace(mine, rows=torch.cat([values.float() for _, values in rows]))})
    return found
