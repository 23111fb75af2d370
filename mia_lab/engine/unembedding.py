"""The linear map from a normed stream to logits, read off by running the model's own modules on chosen rows.

Whatever holds the weights (tied, quantised, multiplied), a logit is linear in the final norm's output but for a soft cap; and that
output is linear in the stream but for its scale. So rows of an identity matrix show one, and rows of +1 and -1 the other.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Tensor = torch.Tensor
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Read:
    """vectors `[token d]` and bias `[token]`, float32, on the device; centred: the norm takes the mean off; eps: its epsilon."""

    vectors: Tensor
    bias: Tensor
    centred: bool
    eps: float


def read(model: nn.Module, norm: nn.Module, width: int, tokens: Sequence[int], dtype: torch.dtype, device: torch.device,
         prepare: Callable[[int], None]) -> Read:
    """Read how a model's end reads some tokens; `prepare` is told how many rows come next."""
    cap = getattr(getattr(model, "logits_processor", None), "soft_cap", None)

    def logits(rows: Tensor) -> Tensor:
        prepare(len(rows))
        found = model.compute_logits(rows)[:, list(tokens)].double()
        return cap * torch.atanh(found / cap) if cap else found

    def normed(rows: Tensor) -> Tensor:
        prepare(len(rows))
        out = getattr(type(norm), "mia_inner", type(norm).forward)(norm, rows)
        return (out[0] if isinstance(out, tuple) else out).double()

    eps = float(next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)))
    sign = torch.ones(width, dtype=dtype, device=device)
    sign[1::2] = -1.0
    plus, minus, level = normed(torch.stack([sign, -sign, sign.abs()]))
    offset = (plus + minus) / 2
    weight = (plus - minus) / (2 * sign) * (1 + eps) ** 0.5
    centred = bool((level - offset).abs().max() < 0.01 * weight.abs().max())
    zero = logits(torch.zeros(1, width, dtype=dtype, device=device))[0]
    columns = torch.cat([logits(part) - zero for part in torch.eye(width, dtype=dtype, device=device).split(_ROWS)])  # [d token]
    return Read((columns * weight[:, None]).T.float().contiguous(), (offset @ columns + zero).float(), centred, eps)
