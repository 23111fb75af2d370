"""Trials: many requests, each under its own edits, run as one continuous batch; what is done when it breaks off is kept.

A text whose continuation is given (an answer to score, a paragraph to go on with) is a longer prompt to the engine. Its edits act
all the same where they would act if the model had written that continuation: their selectors see the given part only.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from ...edits import Edit
from ...engine.wire import Take
from ...errors import EditError, MissingRowsError
from ...gates import Gate
from ...points import Point
from ...prompts import Prompts
from ...running.launch import EngineRows
from ...running.submit import has_bos
from ...selectors import CONTENT, Context, Selector, everywhere, merge, window

if TYPE_CHECKING:
    from vllm import RequestOutput

    from ...session import Session

Tensor = torch.Tensor
_AT_ONCE = 128  # finished requests whose rows are fetched together
_GIVEN = ("Its effect on neutral texts and on given answers cannot be measured; use metrics of generated texts, or of the next token, "
          "and guards=()")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: token ids, of which the first `given` are the prompt as selectors see it.

    rows: positions whose next-token logits are wanted. reads: points to read at the prompt's last position, before the edits
    there. max_tokens: tokens to generate, 0 for none.
    """

    ids: tuple[int, ...]
    given: int
    rows: tuple[int, ...] = ()
    reads: tuple[Point, ...] = ()
    max_tokens: int = 0
    seed: int | None = None
    messages: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an Ask: the last block's stream at its rows `[row d_model]`, the values read, and the text.

    logits `[row vocab]` float32 are there where a metric scores it.
    """

    ask: Ask
    stream: Tensor | None
    reads: tuple[Tensor, ...]
    text: str
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """An Ask under edits."""

    ask: Ask
    edits: tuple[Edit, ...]


def run(session: Session, jobs: Sequence[Job], temperature: float = 0.0,
        tick: Callable[[int, int], None] = lambda done, tokens: None) -> list[Outcome | None]:
    """Run jobs and return what came of each, or None for those that an interrupt (Ctrl-C) left undone.

    tick: told how many more are done, and how many tokens were computed for them. Those that generate as many tokens make one
    continuous batch.
    """
    found: list[Outcome | None] = [None] * len(jobs)
    lengths = sorted({job.ask.max_tokens for job in jobs})
    try:
        for length in lengths:
            chosen = [i for i, job in enumerate(jobs) if job.ask.max_tokens == length]
            with closing(_batch(session, [jobs[i] for i in chosen], temperature)) as done:
                for part, tokens in done:
                    for i, outcome in part:
                        found[chosen[i]] = outcome
                    tick(len(part), tokens)
    except KeyboardInterrupt:
        pass
    return found


def _batch(session: Session, jobs: Sequence[Job], temperature: float) -> Iterator[tuple[list[tuple[int, Outcome]], int]]:
    """Run jobs of one length as one batch; yield them as they are done, some at a time, with the tokens computed for them."""
    asks = [job.ask for job in jobs]
    top = Point("resid_post", session.n_layers - 1)
    read = Prompts([list(ask.ids) for ask in asks], False, [ask.messages for ask in asks])
    edits = [[fixed(edit, job.ask, session.tokenizer) for edit in job.edits] for job in jobs]
    if any(job.ask.rows and p.kind == "final_norm" for job in jobs for edit in job.edits for p in edit.steps):
        raise EditError("edits at final_norm act behind the stream that logits are rebuilt from; a sweep cannot measure them so")
    takes = [[*([Take(top.kind, top.layer, tuple(merge([(p, p + 1) for p in sorted(ask.rows)])))] if ask.rows else []),
              *(Take(p.kind, p.layer, ((ask.given - 1, ask.given),), True) for p in ask.reads)] for ask in asks]
    params = dict(max_tokens=max(1, asks[0].max_tokens), temperature=temperature, seed=[ask.seed for ask in asks])
    sampling, uids = session._submit.prepare(read, edits, params, takes)
    source, waiting, tokens = EngineRows(session._engine, uids), {}, 0
    with closing(session._engine.steps(read.ids, sampling)) as steps:
        for moved in steps:
            over = {i: output for i, output in moved if output.finished}
            waiting |= {i: output.outputs[0].text for i, output in over.items()}
            tokens += sum(map(_computed, over.values()))
            if len(waiting) >= _AT_ONCE:
                yield _fetch(source, asks, top, waiting), tokens
                waiting, tokens = {}, 0
    if waiting:
        yield _fetch(source, asks, top, waiting), tokens


def _computed(output: RequestOutput) -> int:
    """The tokens that went through the model for a request: those of the prompt that no cache held, and the generated ones."""
    return len(output.prompt_token_ids) - (output.num_cached_tokens or 0) + len(output.outputs[0].token_ids) - 1


def _fetch(source: EngineRows, asks: Sequence[Ask], top: Point, texts: Mapping[int, str]) -> list[tuple[int, Outcome]]:
    """Bring the rows of finished requests here."""
    streams = _rows(source, top, [(i, asks[i].rows) for i in texts if asks[i].rows], False)
    points = dict.fromkeys(p for i in texts for p in asks[i].reads)
    reads = {p: _rows(source, p, [(i, (asks[i].given - 1,)) for i in texts if p in asks[i].reads], True) for p in points}
    return [(i, Outcome(asks[i], streams.get(i), tuple(reads[p][i][0] for p in asks[i].reads), text if asks[i].max_tokens else ""))
            for i, text in texts.items()]


def _rows(source: EngineRows, point: Point, wanted: Sequence[tuple[int, tuple[int, ...]]], before: bool) -> dict[int, Tensor]:
    """The values `[position d]` at positions of requests."""
    if not wanted:
        return {}
    out = {}
    for (i, at), (positions, values) in zip(wanted, source.rows(point, [i for i, _ in wanted], before)):
        places = {p: k for k, p in enumerate(positions.tolist())}
        if not places.keys() >= set(at):
            raise MissingRowsError(f"{point} of a request lacks positions {sorted(set(at) - set(places))[:5]}: they were never computed")
        out[i] = values[[places[p] for p in at]].clone()
    return out


def fixed(edit: Edit, ask: Ask, tokenizer: Any) -> Edit:
    """The edit as it acts on a prompt of `ask.given` tokens and its continuation, for an engine that is told all of them as a prompt.

    EditError for one that the engine itself times from the end of the prompt.
    """
    if len(ask.ids) == ask.given:
        return edit
    if edit.when is not None and not (isinstance(edit.when, Gate) and edit.when.over == "row"):
        raise EditError(f"{edit} has a gate that opens after the prompt, and a given text is all prompt to the engine. {_GIVEN}")
    prompt = Context(ask.ids[: ask.given], has_bos(tokenizer, ask.ids), tokenizer, ask.messages)
    changes: dict[str, Selector] = {}
    for name in ("where", "span"):
        selector = getattr(edit, name, None)
        if selector is not None and selector not in (CONTENT, everywhere()):
            try:
                spans = selector.spans(prompt)
            except EditError as error:
                raise EditError(f"{error}. {_GIVEN}") from None
            changes[name] = reduce(lambda one, other: one | other, (window(a, b) for a, b in spans)) if spans else ~everywhere()
    return replace(edit, **changes) if changes else edit
