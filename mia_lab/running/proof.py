"""The start-up proof: every tap is shown to read, and every edit to write, at prefill and at decode, before a session is
handed out."""
from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..edits import Ablate, Add, Affine, AttentionBias, Clamp, ClampFeature, Edit, Replace, Scale
from ..engine.wire import ATTENTION, Take
from ..errors import ProofError
from ..points import STREAM, Point
from ..prompts import Prompts
from ..selectors import generated, prompt, window
from .launch import EngineRows

if TYPE_CHECKING:
    from ..session import Session

_PROMPT = 6
_KEY = 2  # the position that an attention bias weighs


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the proof saw of one edit at one point: the relative error of what it moved each kind of row by."""

    point: Point
    edit: str
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Subject:
    """What is proved: which points are tapped, which of them can be edited and how, and the model's shape."""

    tapped: tuple[Point, ...]
    editable: frozenset[Point]
    edit_kinds: tuple[str, ...]
    n_layers: int
    vocab: int
    dtype: torch.dtype
    has_bos: Callable[[list[int]], bool]


Read = Callable[[Point, int], tuple[torch.Tensor, torch.Tensor]]  # positions [n] and values [n *shape] of one request of a batch


@dataclass(frozen=True, slots=True)
class Trials:
    """A batch to run: the same prompt for every list of edits, `params` for the sampling, and every tapped point captured."""

    ids: list[int]
    edits: list[list[Edit]]
    params: dict[str, Any]


def prove(session: Session) -> list[Verdict]:
    """Raise ProofError unless each point's rows are there and every edit moves them by exactly what its formula says."""
    subject = Subject(session.tapped, session._submit.model.editable, session.edit_kinds, session.n_layers,
                      session._engine.settings.d_vocab, session.dtype, session._has_bos)
    takes = [Take(p.kind, p.layer, ((0, None),)) for p in session.tapped]
    proof = proving(subject)
    batch = next(proof)
    while True:
        n = len(batch.edits)
        source = session._run(Prompts.of([batch.ids] * n), batch.edits, batch.params, [takes] * n)[1]
        try:
            batch = proof.send(partial(_of_batch, source))
        except StopIteration as done:
            return done.value


def _of_batch(source: EngineRows, point: Point, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    return source.rows(point, [request])[0]


def proving(subject: Subject) -> Generator[Trials, Read, list[Verdict]]:
    """Yield batches to run, take what reads their rows, and return the verdicts; ProofError as soon as one is not what it should be.

    One request a point, in one batch: it adds one random vector to the prompt rows and another to the generated ones,
    and captures the same point; a clean request captures all points; one request an edit kind, at one point. The sampled
    token is forced, so that the decode row is the same token everywhere. A point's own edit at earlier rows cannot reach
    its later rows, so at each row the difference to the clean run must be the row's edit alone.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(10, subject.vocab - 1), subject.vocab, (_PROMPT,), generator=generator).tolist()
    params = dict(max_tokens=2, temperature=0.0, allowed_token_ids=[ids[-1]], ignore_eos=True)
    read = yield Trials(ids, [[]], params)
    clean = {p: _rows(read, p, 0) for p in subject.tapped}
    points = [p for p in subject.tapped if p in subject.editable]
    if not points:
        return []
    trials = _trials(subject, points, clean, subject.has_bos(ids), generator)
    read = yield Trials(ids, [edits for _, edits, _ in trials], params)
    tolerance = 1e-3 if subject.dtype == torch.float32 else 0.1
    found = [_judged(*trial, _rows(read, trial[0], i) - clean[trial[0]], tolerance) for i, trial in enumerate(trials)]
    layers = sorted(p.layer for p in subject.editable if p.kind == ATTENTION)
    if "attentionbias" in subject.edit_kinds and layers:
        edit = AttentionBias(window(_KEY, _KEY + 1), bias=4.0, layers=layers)
        read = yield Trials(ids, [[edit]], params)
        top = subject.tapped[-1] if subject.tapped[-1].kind in STREAM else Point("resid_post", subject.n_layers - 1)
        found.append(_bias(layers[0], _rows(read, top, 0), clean[top], tolerance))
    return found


def _trials(subject: Subject, points: list[Point], clean: dict[Point, torch.Tensor], has_bos: bool,
            generator: torch.Generator) -> list[tuple[Point, list[Edit], torch.Tensor]]:
    """Where, what, and what it must move each row by."""
    trials = [_addition(p, clean[p], has_bos, generator) for p in points] if "add" in subject.edit_kinds else []
    at = next((p for p in points if p.kind in STREAM), points[0])
    for edit, delta in _others(at, clean[at], generator):
        if type(edit).__name__.lower() in subject.edit_kinds:
            delta[: int(has_bos)] = 0
            trials.append((at, [edit], delta))
    return trials


def _judged(point: Point, edits: list[Edit], expected: torch.Tensor, moved: torch.Tensor, tolerance: float) -> Verdict:
    cuts = (slice(0, _PROMPT), slice(_PROMPT, None))
    errors = [float((moved[rows] - expected[rows]).norm() / expected[rows].norm()) for rows in cuts]
    for name, error in zip(("prefill", "decode"), errors):
        if not error < tolerance:
            raise ProofError(f"the start-up proof failed: {type(edits[0]).__name__} at {point} moved the {name} rows by something "
                             f"else than it should (relative error {error:.3g}); this model or vLLM build is not safe to steer")
    return Verdict(point, type(edits[0]).__name__, *errors)


def _bias(layer: int, rows: torch.Tensor, clean: torch.Tensor, tolerance: float) -> Verdict:
    """A bias on one key moves the rows that see it, at prefill and decode, and no row before it."""
    size = (rows - clean).norm(dim=-1) / clean.norm(dim=-1)
    early = float(size[:_KEY].max())
    if not (early < tolerance and size[_KEY + 1 : _PROMPT].min() > 1e-6 and size[_PROMPT:].min() > 1e-6):
        raise ProofError(f"the start-up proof failed: a bias on position {_KEY} moved the rows by {size.tolist()}")
    return Verdict(Point(ATTENTION, layer), "AttentionBias", early, early)


def _rows(read: Read, point: Point, request: int) -> torch.Tensor:
    positions, values = read(point, request)
    if positions[: _PROMPT + 1].tolist() != list(range(_PROMPT + 1)):
        raise ProofError(f"the start-up proof failed: {point} gave rows {positions.tolist()} of 0 to {_PROMPT}")
    values = values[: _PROMPT + 1].float().flatten(1)
    if not torch.isfinite(values).all() or not values.abs().sum(-1).all():
        raise ProofError(f"the start-up proof failed: {point} read rows that are zero or not finite")
    return values


def _addition(point: Point, clean: torch.Tensor, has_bos: bool, generator: torch.Generator) -> tuple[Point, list[Edit], torch.Tensor]:
    """Two random vectors about as long as a row, so that rounding in 16 bits hides neither the row nor the vector."""
    norm = clean[1:].norm(dim=-1).median()
    draws = torch.randn(2, clean.shape[-1], generator=generator)
    first, second = draws * (norm / draws.norm(dim=-1, keepdim=True))
    expected = torch.zeros_like(clean)
    expected[int(has_bos) : _PROMPT], expected[_PROMPT:] = first, second
    edits = [Add(first, 1.0, [point.layer], point.kind, prompt()), Add(second, 1.0, [point.layer], point.kind, generated())]
    return point, edits, expected


def _others(at: Point, h: torch.Tensor, generator: torch.Generator) -> list[tuple[Edit, torch.Tensor]]:
    """One edit of each other kind at one point, with what it moves the clean rows `h [row d]` by, from its formula."""
    place = dict(layers=[at.layer], point=at.kind)
    norm = float(h[1:].norm(dim=-1).median())
    u, v, w = torch.nn.functional.normalize(torch.randn(3, h.shape[-1], generator=generator), dim=1)
    u = torch.nn.functional.normalize(h[-1] / norm + 0.3 * u, dim=0)  # so that it holds much of every edited row
    p = (h @ u)[:, None]
    return [
        (Ablate(u, **place), -p * u),
        (Clamp(u, value=-norm, **place), (-norm - p) * u),
        (Scale(0.5, **place), -0.5 * h),
        (Replace(v * norm, blend=0.75, **place), 0.75 * (v * norm - h)),
        (Affine(u[None], w[None], torch.tensor([norm]), **place), (p + norm) * w),
        (ClampFeature(u, w, 2 * norm, bias=0.1 * norm, **place), (2 * norm - (p + 0.1 * norm).relu()) * w),
    ]
