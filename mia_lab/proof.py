"""The start-up proof: every tap is shown to read, and every edit to write, at prefill and at decode, before a session is
handed out."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .edits import Ablate, Add, Affine, AttentionBias, Clamp, ClampFeature, Edit, Replace, Scale
from .engine.wire import ATTENTION, Take
from .errors import ProofError
from .launch import EngineRows
from .points import STREAM, Point
from .prompts import Prompts
from .selectors import generated, prompt, window

if TYPE_CHECKING:
    from .session import Session

_PROMPT = 6


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the proof saw of one edit at one point: the relative error of what it moved each kind of row by."""

    point: Point
    edit: str
    prefill: float
    decode: float


def prove(session: Session) -> list[Verdict]:
    """Raise ProofError unless each point's rows are there and every edit moves them by exactly what its formula says.

    One request a point, in one batch: it adds one random vector to the prompt rows and another to the generated ones,
    and captures the same point; a clean request captures all points; one request an edit kind, at one point. The sampled
    token is forced, so that the decode row is the same token everywhere. A point's own edit at earlier rows cannot reach
    its later rows, so at each row the difference to the clean run must be the row's edit alone.
    """
    vocab = session._engine.config.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(10, vocab - 1), vocab, (_PROMPT,), generator=generator).tolist()
    params = dict(max_tokens=2, temperature=0.0, allowed_token_ids=[ids[-1]], ignore_eos=True)

    def run(edits: list[list[Edit]]) -> EngineRows:
        takes = [Take(p.kind, p.layer, ((0, None),)) for p in session.tapped]
        return session._run(Prompts.of([ids] * len(edits)), edits, params, [takes] * len(edits))[1]

    source = run([[]])
    clean = {p: _rows(source, p, 0) for p in session.tapped}
    points = [p for p in session.tapped if p in session._submit.model.editable]
    if not points:
        return []
    trials: list[tuple[Point, list[Edit], torch.Tensor]] = []  # where, what, and what it must move each row by
    has_bos = session._has_bos(ids)
    if "add" in session.edit_kinds:
        trials += [_addition(p, clean[p], has_bos, generator) for p in points]
    at = next((p for p in points if p.kind in STREAM), points[0])
    for edit, delta in _others(at, clean[at], generator):
        if type(edit).__name__.lower() in session.edit_kinds:
            delta[: int(has_bos)] = 0
            trials.append((at, [edit], delta))
    source = run([edits for _, edits, _ in trials])
    tolerance = 1e-3 if session.dtype == torch.float32 else 0.1
    found = []
    for i, (point, edits, expected) in enumerate(trials):
        moved = _rows(source, point, i) - clean[point]
        cuts = (slice(0, _PROMPT), slice(_PROMPT, None))
        errors = [float((moved[rows] - expected[rows]).norm() / expected[rows].norm()) for rows in cuts]
        found.append(Verdict(point, type(edits[0]).__name__, *errors))
        for name, error in zip(("prefill", "decode"), errors):
            if not error < tolerance:
                raise ProofError(f"the start-up proof failed: {type(edits[0]).__name__} at {point} moved the {name} rows by something "
                                 f"else than it should (relative error {error:.3g}); this model or vLLM build is not safe to steer")
    if "attentionbias" in session.edit_kinds:
        found += _biases(session, clean, run, tolerance)
    return found


def _biases(session: Session, clean: dict[Point, torch.Tensor], run: Callable[[list[list[Edit]]], EngineRows],
            tolerance: float) -> list[Verdict]:
    """A bias on one key moves the rows that see it, at prefill and decode, and no row before it."""
    top = session.tapped[-1] if session.tapped[-1].kind in STREAM else Point("resid_post", session.n_layers - 1)
    layers = sorted(p.layer for p in session._submit.model.editable if p.kind == ATTENTION)
    if not layers:
        return []
    key = 2
    moved = _rows(run([[AttentionBias(window(key, key + 1), bias=4.0, layers=layers)]]), top, 0) - clean[top]
    size = moved.norm(dim=-1) / clean[top].norm(dim=-1)
    early = float(size[:key].max())
    if not (early < tolerance and size[key + 1 : _PROMPT].min() > 1e-6 and size[_PROMPT:].min() > 1e-6):
        raise ProofError(f"the start-up proof failed: a bias on position {key} moved the rows by {size.tolist()}")
    return [Verdict(Point(ATTENTION, layers[0]), "AttentionBias", early, early)]


def _rows(source: EngineRows, point: Point, request: int) -> torch.Tensor:
    positions, values = source.rows(point, [request])[0]
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
