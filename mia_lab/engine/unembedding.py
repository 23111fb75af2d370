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


@dataclass(frozen=True, slots=True)
class Norm:
    """What a norm does: `(x - mean) / scale * weight + offset`, weight and offset `[d]` float64, the mean only where `centred`."""

    weight: Tensor
    offset: Tensor
    centred: bool
    eps: float

    def centre(self, x: Tensor) -> Tensor:
        """x `[... d]`, less its mean where the norm takes that off."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def scale(self, x: Tensor) -> Tensor:
        """What the norm divides x `[... d]` by, `[... 1]`."""
        return (self.centre(x).square().mean(-1, keepdim=True) + self.eps).sqrt()


def apply_norm(norm: nn.Module, rows: Tensor) -> Tensor:
    """Run a norm on rows `[n d]` without the tap that it may carry."""
    out = getattr(type(norm), "mia_inner", type(norm).forward)(norm, rows)
    return out[0] if isinstance(out, tuple) else out


def norm_of(norm: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> Norm:
    """Read off what a norm does to rows of `width`."""
    eps = float(next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)))
    sign = torch.ones(width, dtype=dtype, device=device)
    sign[1::2] = -1.0
    plus, minus, level = apply_norm(norm, torch.stack([sign, -sign, sign.abs()])).double()
    offset = (plus + minus) / 2
    weight = (plus - minus) / (2 * sign) * (1 + eps) ** 0.5
    return Norm(weight, offset, bool((level - offset).abs().max() < 0.01 * weight.abs().max()), eps)


def read(model: nn.Module, norm: nn.Module, width: int, tokens: Sequence[int], dtype: torch.dtype, device: torch.device,
         prepare: Callable[[int], None]) -> Read:
    """Read how a model's end reads some tokens; `prepare` is told how many rows come next."""
    cap = getattr(getattr(model, "logits_processor", None), "soft_cap", None)

    def logits(rows: Tensor) -> Tensor:
        prepare(len(rows))
        found = model.compute_logits(rows)[:, list(tokens)].double()
        return cap * torch.atanh(found / cap) if cap else found

    prepare(3)
    how = norm_of(norm, width, dtype, device)
    zero = logits(torch.zeros(1, width, dtype=dtype, device=device))[0]
    columns = torch.cat([logits(part) - zero for part in torch.eye(width, dtype=dtype, device=device).split(_ROWS)])  # [d token]
    return Read((columns * how.weight[:, None]).T.float().contiguous(), (how.offset @ columns + zero).float(), how.centred, how.eps)
