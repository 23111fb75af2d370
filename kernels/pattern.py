"""Attention rebuilt from queries and keys, for chosen rows only."""
from __future__ import annotations

import torch

Tensor = torch.Tensor


def attention_scores(q: Tensor, k: Tensor, rows: Tensor, *, scale: float, softcap: float = 0.0, window: int | None = None,
                     slopes: Tensor | None = None) -> Tensor:
    """Return float32 scores `[row head key]`, -inf where a row cannot see a key.

    q `[row head e]` at absolute positions `rows`; k `[key kv_head e]` at positions 0, 1, ...; query head h reads key head
    h // (heads / kv_heads). softcap: 0 for none. window: keys that a row sees, itself included. slopes `[head]`: ALiBi.
    """
    q, k = q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("rhe,khe->rhk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = rows[:, None] - torch.arange(len(k), device=k.device)  # [row key]
    if slopes is not None:
        scores = scores - slopes.float()[None, :, None] * distance[:, None]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return scores.masked_fill(hidden[:, None], float("-inf"))


def attention_pattern(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the softmax over keys, float32. sinks `[head]`: a logit per head in the denominator, so rows sum to less."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float()[None, :, None].expand(len(scores), -1, 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
