"""What streams would say next, read on the device by the model's own norm and unembedding: only a summary of the logits leaves it."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor
LOGIT_BYTES = 64 << 20  # float32 logits that are worked on at once


def read(top: Tensor, streams: Sequence[Tensor], shifts: Sequence[Tensor | None], k: int, tokens: Sequence[int] | None, step: int,
         logits: Callable[[Tensor], Tensor], final: Callable[[Tensor], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Summarise what each stream says at each row: float32 `[stream row 2 + k + m]`, and int64 `[stream row k + 2 m]`.

    top `[row d]`: what the model's logits come from, by `final`; streams `[row d]` each, by `logits`, after a `shift`
    `[d d + 1]` (a matrix beside a bias) where there is one. Values are the entropy, KL(model || stream), the k largest
    log-probabilities and those of the m tokens; places are the k tokens, the m tokens and their ranks, from 1. Without tokens
    m is 1: the model's own first choice at that row. step: rows at once.
    """
    values: list[list[Tensor]] = []
    places: list[list[Tensor]] = []
    placed = [None if shift is None else shift.to(device) for shift in shifts]
    for start in range(0, len(top), step):
        said = log_softmax(final(top[start : start + step].to(device)))
        asked = said.argmax(-1, keepdim=True) if tokens is None else torch.tensor(tokens, device=device).expand(len(said), -1)
        found = [_summary(log_softmax(logits(_shifted(stream[start : start + step].to(device), shift))), said, k, asked)
                 for stream, shift in zip(streams, placed)]
        values.append([v for v, _ in found])
        places.append([p for _, p in found])
    join = lambda parts: torch.stack([torch.cat(rows) for rows in zip(*parts)])  # noqa: E731
    return join(values), join(places)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of float32 logits `[row d_vocab]`. Torch's own, on a CPU, adds up 262 144 terms with an error of 3e-5."""
    below = logits - logits.amax(-1, keepdim=True)
    return below - below.exp().sum(-1, keepdim=True).log()  # `sum` adds in pairs


def _shifted(rows: Tensor, shift: Tensor | None) -> Tensor:
    """h + A h + b, computed in float32."""
    return rows if shift is None else (rows.float() + torch.addmm(shift[:, -1], rows.float(), shift[:, :-1].T)).to(rows.dtype)


def _summary(lens: Tensor, said: Tensor, k: int, asked: Tensor) -> tuple[Tensor, Tensor]:
    """lens, said: log-probabilities `[row d_vocab]`; asked `[row m]`. Tokens of equal probability share a rank."""
    top = lens.topk(k, dim=-1)
    along = lens.gather(1, asked)
    rank = torch.stack([(lens > column[:, None]).sum(-1) + 1 for column in along.T], 1)
    entropy = -_mean(lens, lens)
    kl = _mean(said, said - lens).clamp(min=0.0)  # rounding may leave a little below zero
    return torch.cat([entropy, kl, top.values, along], 1), torch.cat([top.indices, asked, rank], 1)


def _mean(log_weights: Tensor, x: Tensor) -> Tensor:
    """The mean of x over the vocabulary, `[row 1]`; a token of probability 0 counts nothing."""
    weights = log_weights.exp()
    return torch.where(weights > 0, weights * x, 0.0).sum(-1, keepdim=True)
