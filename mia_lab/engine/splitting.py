"""What each head, or neuron, of a branch adds to the stream: its share of the linear map that ends the branch.

Where a norm follows the branch, its scale is that of the whole output, so that the shares still sum to what is added.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import UnsupportedError
from .unembedding import apply_norm, norm_of

Tensor = torch.Tensor
_ROWS = 1024


@torch.inference_mode()
def split(x: Tensor, linear: nn.Module, norm: nn.Module | None, parts: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """Return what each part of `x [row part e]` adds, then what none of them does (biases): float32 `[row part + 1 d]`.

    linear: the map from all parts to the branch's output, by which `norm`, if any, is followed. parts: those to return,
    by default all.
    """
    weight, bias = _matrix(linear, x[0].numel(), dtype, x.device)
    x = x.double()
    chosen = list(range(x.shape[1])) if parts is None else list(parts)
    each = torch.einsum("npe,ped->npd", x[:, chosen], weight.view(*x.shape[1:], -1)[chosen])
    rest = bias.expand(len(x), 1, -1)
    if norm is not None:
        total = x.flatten(1) @ weight + bias
        how = norm_of(norm, total.shape[1], dtype, x.device)
        scale = how.scale(total)
        _check(how.centre(total) / scale * how.weight + how.offset, apply_norm(norm, total.to(dtype)).double(), norm, dtype)
        each, rest = (how.centre(value) / scale[:, None] * how.weight for value in (each, rest))
        rest = rest + how.offset
    return torch.cat([each, rest], 1).float()


def _matrix(linear: nn.Module, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The weight `[size d]` and bias `[d]` of a linear layer, float64, however it keeps them."""
    bias = getattr(linear, "bias", None)
    if bias is not None and getattr(linear, "skip_bias_add", False):
        raise UnsupportedError(f"{type(linear).__name__} leaves its bias to what follows it, so its output cannot be taken apart")
    if isinstance(linear, nn.Linear):
        weight = linear.weight.T.double()
    else:
        eye = torch.eye(size, dtype=dtype, device=device)
        weight = torch.cat([linear.quant_method.apply(linear, rows, None) for rows in eye.split(_ROWS)]).double()
    return weight, torch.zeros(weight.shape[1], dtype=torch.float64, device=device) if bias is None else bias.double()


def _check(ours: Tensor, theirs: Tensor, norm: nn.Module, dtype: torch.dtype) -> None:
    """UnsupportedError where a norm does not compute what it was taken for."""
    error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    if not error < 8 * torch.finfo(dtype).eps:
        raise UnsupportedError(f"{type(norm).__name__} is not a norm whose output is a sum over parts (relative error {error:.1e})")
