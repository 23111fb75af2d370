"""What is timed over HTTP, under the names that the same work has in one process, and the proof that it happened.

Edits are bundles in the server's folder that requests name; captures are fetched as safetensors by their handles.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors

from ..bundles.bundle import export
from ..bundles.pushing import push
from ..edits import Edit
from ..errors import ProofError
from ..serve.client.client import Client
from ..serve.client.transport import Transport
from ..serve.front import CAPTURE, CONFIG, EDITS
from ..serve.telling import reload
from ..session import Session
from .cases import Steering, Work, lead_to
from .load import Answer

ANOTHER = "another edit in each request"
NAMES = ("idle", "steer one layer", "steer every layer", ANOTHER, "capture last token, one layer", "capture last token, all layers",
         "capture every token, one layer", "capture every token, all layers")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests to a server with mia_lab. asks: what each says to it; `prove`, given the answers, the bytes of rows that were
    fetched, or ProofError."""

    name: str
    asks: tuple[Mapping[str, Any], ...]
    prove: Callable[[Sequence[Answer]], int]


def publish(client: Client, server: Transport, folder: Path, scratch: Path, steering: Steering) -> None:
    """Export what the cases steer with, from the served model itself, push it into the folder and have it served."""
    edits: dict[str, Sequence[Edit]] = {_every(i): steering.every_layer(i) for i in set(steering.turns(len(steering.tokens)))}
    edits |= {_far(i): steering.one(i) for i in range(len(steering.tokens))}
    for name, mine in edits.items():
        push(export(mine, scratch / f"{name}.steer.zip", session=client, prompts=[[10, 11]], max_tokens=1), folder / "bundles")
    told, status = reload(server)
    if status:
        raise ProofError(f"the server did not take the bench's bundles over: {told}")


def cases(session: Session, steering: Steering, work: Work) -> list[Case]:
    """Return the cases for one served model and one kind of work, as `NAMES` has them."""
    last = [session.n_layers - 1]
    turns, every = steering.turns(work.batch), list(range(session.n_layers))
    said = [steering.tokens[i] for i in turns]
    idle, one_layer, every_layer, _, *captures = NAMES
    return [
        _idle(idle, work),
        _steered(one_layer, work, list(map(_far, turns)), said),
        _steered(every_layer, work, list(map(_every, turns)), said),
        _steered(ANOTHER, work, list(map(_far, range(work.batch))), steering.tokens),
        *(_captured(name, session, work, layers, at) for name, layers, at in
          zip(captures, (last, every, last, every), ("last", "last", "all", "all"), strict=True)),
    ]


def check_native(answers: Sequence[Answer], work: Work) -> None:
    """ProofError unless every answer is whole and of a server without mia_lab."""
    for i, answer in enumerate(answers):
        _count(f"native beside mia_lab, request {i}", answer, work)
        ours = [header for header in answer.headers if header.startswith("x-mia-lab-")]
        if ours:
            raise ProofError(f"the server without mia_lab answered request {i} with {ours[0]}")


def check(name: str, i: int, answer: Answer, work: Work, edit: str = "", captures: bool = False) -> None:
    """ProofError unless an answer is whole, and its headers name the one edit, or none, and a capture, or none."""
    what = f"{name}: request {i}"
    _count(what, answer, work)
    if CONFIG not in answer.headers:
        raise ProofError(f"{what} was answered without {CONFIG}, so not by mia_lab")
    acted = answer.headers.get(EDITS, "")
    if acted != (f"{edit};coeff=1" if edit else ""):
        raise ProofError(f"{what} was to run under {edit or 'no edit'}, and {EDITS} says {acted or 'nothing'!r}")
    if (CAPTURE in answer.headers) != captures:
        raise ProofError(f"{what} {'captured nothing' if captures else 'was captured'}: {CAPTURE} is {answer.headers.get(CAPTURE)!r}")


def check_rows(what: str, captured: bytes, layers: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Return the rows of the last layer, `[position d_model]`; ProofError unless a capture has finite rows of all these layers at
    just these positions."""
    try:
        found = read_tensors(captured)
    except SafetensorError as error:
        raise ProofError(f"{what}: what was fetched is no safetensors: {error}") from None
    if len(found) != 2 * len(layers):
        raise ProofError(f"{what}: {len(found) // 2} layers were fetched, and {len(layers)} asked for")
    for layer in layers:
        point = f"resid_post.{layer}"
        at, rows = found.get(f"{point}.positions"), found.get(point)
        if at is None or rows is None or at.tolist() != list(positions) or len(rows) != len(positions) or not rows.isfinite().all():
            raise ProofError(f"{what}: {point} has rows at {None if at is None else at.tolist()[:8]}, and finite ones were asked for "
                             f"at {positions}")
    return found[f"resid_post.{layers[-1]}"]


def _count(what: str, answer: Answer, work: Work) -> None:
    if len(answer.tokens) != work.tokens_out:
        raise ProofError(f"{what} said {len(answer.tokens)} tokens of {work.tokens_out}")


def _far(i: int) -> str:
    return f"far-{i}"


def _every(i: int) -> str:
    return f"every-{i}"


def _idle(name: str, work: Work) -> Case:
    def prove(answers: Sequence[Answer]) -> int:
        for i, answer in enumerate(answers):
            check(name, i, answer, work)
        return 0

    return Case(name, ({},) * work.batch, prove)


def _steered(name: str, work: Work, edits: Sequence[str], tokens: Sequence[int]) -> Case:
    def prove(answers: Sequence[Answer]) -> int:
        for i, answer in enumerate(answers):
            check(name, i, answer, work, edits[i])
            if answer.tokens != (tokens[i],) * work.tokens_out:
                raise ProofError(f"{name}: request {i} was steered towards token {tokens[i]} and said {list(answer.tokens[:8])}")
        return 0

    return Case(name, tuple({"edits": [edit]} for edit in edits), prove)


def _captured(name: str, session: Session, work: Work, layers: Sequence[int], at: str) -> Case:
    positions = range(work.tokens_in + work.tokens_out - 1) if at == "all" else range(work.tokens_in - 1, work.tokens_in)

    def prove(answers: Sequence[Answer]) -> int:
        fetched = 0
        for i, answer in enumerate(answers):
            check(name, i, answer, work, captures=True)
            rows = check_rows(f"{name}: request {i}", answer.captured, layers, positions)
            fetched += len(layers) * math.prod(rows.shape) * rows.itemsize
            if i in (0, work.batch - 1):
                said = answer.tokens[: len(positions)]
                lead_to(session.unembed(rows[-len(said):]), said, f"{name}: request {i}")
        return fetched

    asked = {"capture": [{"point": "resid_post", "layers": list(layers), "at": at}]}
    return Case(name, (asked,) * work.batch, prove)
