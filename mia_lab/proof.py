"""The start-up proof: every tap is shown to read and to write, at prefill and at decode, before a session is handed out."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .edits import Add
from .errors import ProofError
from .points import Point
from .selectors import generated, prompt

if TYPE_CHECKING:
    from .session import Session

_PROMPT = 6


def prove(session: Session) -> None:
    """Raise ProofError unless each point's rows are there and move by exactly what an edit adds.

    One request a point, in one batch: it adds one random vector to the prompt rows and another to the generated ones,
    and captures the same point; a clean request captures all points. The sampled token is forced, so that the decode
    row is the same token everywhere. A point's own edit at earlier rows cannot reach its later rows, so at each row the
    difference to the clean run must be the row's vector alone.
    """
    points = list(session.tapped)
    vocab = session._engine.config.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(10, vocab - 1), vocab, (_PROMPT,), generator=generator).tolist()
    params = dict(max_tokens=2, temperature=0.0, allowed_token_ids=[ids[-1]], ignore_eos=True)
    rows = [[(0, None)]]
    _, source = session._run([ids], None, dict(params), points, rows)
    clean = {p: _rows(source.rows(p, [0])[0], p) for p in points}
    if not session._editable:
        return
    vectors = {p: _random_like(clean[p], generator) for p in points}
    edits = [[Add(vectors[p][0], 1.0, [p.layer], p.kind, prompt()), Add(vectors[p][1], 1.0, [p.layer], p.kind, generated())]
             for p in points]
    _, edited = session._run([ids] * len(points), edits, dict(params), points, rows * len(points))
    has_bos = session._has_bos(ids)
    tolerance = 1e-3 if session.dtype == torch.float32 else 0.1
    for i, p in enumerate(points):
        moved = _rows(edited.rows(p, [i])[0], p) - clean[p]
        expected = torch.zeros_like(moved)
        expected[int(has_bos): _PROMPT], expected[_PROMPT:] = vectors[p]
        for name, span in (("prefill", slice(0, _PROMPT)), ("decode", slice(_PROMPT, None))):
            error = float((moved[span] - expected[span]).norm() / expected[span].norm())
            if not error < tolerance:
                raise ProofError(f"the start-up proof failed: an edit at {p} on the {name} rows moved the stream by something "
                                 f"else than its vector (relative error {error:.3g}); this model or vLLM build is not safe to steer")


def _rows(found: tuple[torch.Tensor, torch.Tensor], point: Point) -> torch.Tensor:
    positions, values = found
    if positions[: _PROMPT + 1].tolist() != list(range(_PROMPT + 1)):
        raise ProofError(f"the start-up proof failed: {point} gave rows {positions.tolist()} of 0 to {_PROMPT}")
    values = values[: _PROMPT + 1].float()
    if not torch.isfinite(values).all() or not values.abs().sum(-1).all():
        raise ProofError(f"the start-up proof failed: {point} read rows that are zero or not finite")
    return values


def _random_like(rows: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random vectors about as long as a row, so that rounding in 16 bits hides neither the row nor the vector."""
    norm = rows[1:].norm(dim=-1).median()
    draws = torch.randn(2, rows.shape[-1], generator=generator)
    return tuple(draws * (norm / draws.norm(dim=-1, keepdim=True)))
