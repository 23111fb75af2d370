"""Watching: the rows of a generation while it goes on."""
from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ..engine.wire import Take
from ..errors import MissingRowsError, PointError
from ..points import DERIVED, Point, kind_of, select
from .launch import EngineRows
from .reading import asked_points
from .submit import per_prompt

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, slots=True)
class Moment:
    """One position of one prompt, as it was computed: its token, the token that it led to, and its values `[layer *shape]`."""

    prompt: int
    position: int
    token: int
    next_token: int
    rows: torch.Tensor


def watch(session: Session, prompts: Any, point: str, layers: int | Iterable[int] | None, max_tokens: int, edits: Any,
          before: bool, sampling: dict[str, Any]) -> Iterator[Moment]:
    """Check all that was asked, with the edits that are in force now, and return what `Session.watch` promises."""
    kind, read = kind_of(point), session._read(prompts)
    if kind in DERIVED:
        raise PointError(f"{kind} is rebuilt once all its rows are there; watch {' or '.join(DERIVED[kind])}")
    asked = asked_points(session, kind, layers)
    select(asked, session.tapped, session.n_layers)  # PointError for one that is not tapped
    takes = [[Take(p.kind, p.layer, ((len(ids) - 1, None),), before) for p in asked] for ids in read.ids]
    edits = session._scoped(per_prompt(edits, len(read.ids)))
    params, uids = session._submit.prepare(read, edits, {"max_tokens": max_tokens} | sampling, takes)
    return _moments(session._engine.steps(read.ids, params), EngineRows(session._engine, uids), read.ids, asked, before)


def _moments(steps: Generator[list], source: EngineRows, ids: list[list[int]], asked: list[Point], before: bool) -> Iterator[Moment]:
    starts = [len(prompt) - 1 for prompt in ids]
    with closing(steps):  # so that closing this one ends the generation at once
        for i, output in chain.from_iterable(steps):
            tokens = [*ids[i], *output.outputs[0].token_ids]
            ready = range(starts[i], len(tokens) - 1)
            if not ready:
                continue
            found = [source.rows(p, [i], before, since=starts[i])[0] for p in asked]
            if any(positions[: len(ready)].tolist() != list(ready) for positions, _ in found):
                raise MissingRowsError(f"prompt {i} went on to position {len(tokens) - 1} without its rows")
            for k, position in enumerate(ready):
                yield Moment(i, position, tokens[position], tokens[position + 1], torch.stack([values[k] for _, values in found]))
            starts[i] = len(tokens) - 1
