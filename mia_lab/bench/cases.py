"""What is timed, and the proof that it happened: each case checks the tokens or the rows of the very runs that are timed."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..edits import Add, Edit
from ..engine.wire import Take
from ..errors import ProofError
from ..points import Point
from ..prompts import Prompts
from ..running.launch import EngineRows
from ..running.submit import per_prompt
from ..session import Session
from .drive import Run, drive

_FAR = 300.0  # times the stream's length: so far along a direction that only it decides the next token
IN_TURN = 16  # edits that a batch's requests take in turn: rows that all say one token are alike, and a GPU multiplies these faster
_CHOICE = 8  # directions drawn for each that is taken, those that leave the least doubt about the token


@dataclass(frozen=True, slots=True)
class Work:
    """What every run of a comparison does: `batch` prompts of `tokens_in`, each continued by `tokens_out`."""

    batch: int
    tokens_in: int
    tokens_out: int

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """Return random prompts, other ones for each seed."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(10, vocab, (self.batch, self.tokens_in), generator=draw).tolist()

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling arguments."""
        return dict(max_tokens=self.tokens_out, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A way to run the work with taps. `run` returns its times and where its rows are; `prove`, given both, the bytes of rows
    that were delivered, or ProofError."""

    name: str
    run: Callable[[list[list[int]]], tuple[Run, EngineRows]]
    prove: Callable[[Run, EngineRows], int]


class Steering:
    """Edits whose effect shows in every token: pushed far along a direction at the last layer, a model says one token only."""

    def __init__(self, session: Session, edits: int) -> None:
        self._last = session.n_layers - 1
        draw = torch.Generator().manual_seed(0)
        scale = _FAR * float(session.capture([list(range(10, 20))], layers=self._last, at=-1).float().norm())
        ways = torch.randn(max(64, _CHOICE * edits), session.d_model, generator=draw)
        ways = ways / ways.norm(dim=1, keepdim=True) * scale
        best = session.unembed(ways).topk(2, dim=-1)
        clearest, said = (best.values[:, 0] - best.values[:, 1]).argsort(descending=True).tolist(), best.indices[:, 0].tolist()
        first = {said[i]: i for i in reversed(clearest)}  # of those that make a token, the one that leaves the least doubt
        chosen = sorted(clearest, key=lambda i: first[said[i]] != i)[:edits]  # each another token, as long as there are any
        self._far, self.tokens = ways[chosen], [said[i] for i in chosen]
        self._small = torch.randn(session.n_layers, session.d_model, generator=draw) * 1e-3

    def one(self, i: int) -> list[Edit]:
        """One addition at the last layer, which makes every token `tokens[i]`."""
        return [Add(self._far[i], 1.0, [self._last])]

    def rows(self, i: int) -> torch.Tensor:
        """What to add at each layer `[layer d_model]` to make every token `tokens[i]`."""
        rows = self._small.clone()
        rows[self._last] = self._far[i]
        return rows

    def every_layer(self, i: int) -> list[Edit]:
        """An addition at each layer, which makes every token `tokens[i]`."""
        return [Add(self.rows(i), 1.0, range(self._last + 1))]

    def turns(self, batch: int) -> list[int]:
        """Which of a few edits each request of a batch is steered by."""
        return [i % min(IN_TURN, len(self.tokens)) for i in range(batch)]


def cases(session: Session, work: Work) -> list[Case]:
    """Return the cases for one engine and one kind of work."""
    steering = Steering(session, work.batch)
    turns = steering.turns(work.batch)
    one, whole = [steering.one(i) for i in range(work.batch)], [steering.every_layer(i) for i in sorted(set(turns))]
    last = [Point("resid_post", session.n_layers - 1)]
    every = [Point("resid_post", layer) for layer in range(session.n_layers)]
    said = [steering.tokens[i] for i in turns]
    return [
        Case("idle", lambda prompts: _run(session, work, prompts), lambda run, source: 0),
        _steered("steer one layer", session, work, [one[i] for i in turns], said),
        _steered("steer every layer", session, work, [whole[i] for i in turns], said),
        _steered("another edit in each request", session, work, one, steering.tokens),
        _captured("capture last token, one layer", session, work, last, False),
        _captured("capture last token, all layers", session, work, every, False),
        _captured("capture every token, one layer", session, work, last, True),
        _captured("capture every token, all layers", session, work, every, True),
        *_undelivered(session, work),
    ]


def _run(session: Session, work: Work, prompts: list[list[int]], edits: Any = None,
         takes: Sequence[Sequence[Take]] = ()) -> tuple[Run, EngineRows]:
    """Run the work; its clock starts with the edits still to be compiled, and stops when all rows are on the host."""
    session._engine.let_go()  # of the rows of an earlier run
    began = time.perf_counter()
    params, uids = session._submit.prepare(Prompts.of(prompts), per_prompt(edits, len(prompts)), work.sampling, takes)
    source = EngineRows(session._engine, uids)
    run = drive(session._engine.llm, prompts, params, began)
    if takes:
        source.wait()
        run = replace(run, seconds=time.perf_counter() - began)
    return run, source


def _steered(name: str, session: Session, work: Work, edits: Sequence[Sequence[Edit]], tokens: Sequence[int]) -> Case:
    def prove(run: Run, source: EngineRows) -> int:
        for i, (output, token) in enumerate(zip(run.outputs, tokens, strict=True)):
            said = list(output.outputs[0].token_ids)
            if said != [token] * work.tokens_out:
                raise ProofError(f"{name}: request {i} was steered towards token {token} and said {said[:8]}")
        return 0

    return Case(name, lambda prompts: _run(session, work, prompts, edits), prove)


def _captured(name: str, session: Session, work: Work, asked: Sequence[Point], every: bool) -> Case:
    span = (0, None) if every else (work.tokens_in - 1, work.tokens_in)
    takes = [[Take(p.kind, p.layer, (span,)) for p in asked]] * work.batch

    def prove(run: Run, source: EngineRows) -> int:
        positions = range(work.tokens_in + work.tokens_out - 1) if every else [work.tokens_in - 1]
        for request in {0, work.batch - 1}:
            found, rows = source.rows(asked[-1], [request])[0]
            if found.tolist() != list(positions) or not rows.isfinite().all():
                raise ProofError(f"{name}: request {request} gave rows {found.tolist()[:8]} for positions {positions}")
            said = run.outputs[request].outputs[0].token_ids[: len(found)]
            lead_to(session.unembed(rows[-len(said):]), said, name)
        return work.batch * len(positions) * sum(session._engine.row_bytes((p.kind, p.layer)) for p in asked)

    return Case(name, lambda prompts: _run(session, work, prompts, takes=takes), prove)


def _undelivered(session: Session, work: Work) -> list[Case]:
    """Every token at every tapped point, where these are more than the stream's, as far as the device's arena."""
    kinds = {p.kind for p in session.tapped}
    if kinds == {"resid_post"}:
        return []
    courier = session._engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.mia_fetch.__self__._courier
    takes = [[Take(p.kind, p.layer, ((0, None),)) for p in session.tapped]] * work.batch
    taken: list[int] = []

    def run(prompts: list[list[int]]) -> tuple[Run, EngineRows]:
        deliver, courier.after_forward = courier.after_forward, lambda step: taken.append(len(step.claims))
        try:
            return _run(session, work, prompts, takes=takes)
        finally:
            courier.after_forward = deliver

    def prove(run: Run, source: EngineRows) -> int:
        rows, expected = sum(taken), work.batch * (work.tokens_in + work.tokens_out - 1)
        taken.clear()
        if rows != expected or not courier._tables.arena.isfinite().all() or not courier._tables.arena.any():
            raise ProofError(f"{rows} rows of {expected} were copied into the arena")
        return 0

    return [Case(f"capture every token, {len(kinds)} kinds of point, on the device", run, prove)]


def lead_to(logits: torch.Tensor, said: Sequence[int], name: str) -> None:
    """ProofError unless each row's token is what its logits `[rows d_vocab]` lead to, up to the rounding of 16 bits."""
    best = logits.max(-1).values
    lag = best - logits[torch.arange(len(said)), torch.tensor(list(said))]
    if not (lag <= 2**-6 * logits.abs().max(-1).values).all():
        raise ProofError(f"{name}: the rows do not lead to the tokens that were said; worst lag {float((lag / best.abs()).max()):.2e}")
