"""Attention of chosen rows, rebuilt on the device with the parameters that the layer's own kernel uses."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mia_lab.kernels.pattern import attention_pattern, attention_scores

from ..errors import MissingRowsError, UnsupportedError


def attention(layer: Any, q_at: torch.Tensor, q: torch.Tensor, k_at: torch.Tensor, k: torch.Tensor, rows: Sequence[int],
              scores: bool, device: torch.device) -> torch.Tensor:
    """Return the attention, or its scores, `[row head key]` float32 of the positions `rows`.

    q `[n head e]` and k `[m kv_head e]` at positions q_at and k_at; keys must be there from 0 up to the last row.
    """
    place = {position: i for i, position in enumerate(q_at.tolist())}
    missing = [row for row in rows if row not in place]
    last = max(rows)
    if missing or k_at[: last + 1].tolist() != list(range(last + 1)):
        raise MissingRowsError(f"attention of position {missing[0] if missing else last} needs its query and all keys before it; "
                               f"some were never computed")
    window, slopes, sinks, softcap = parameters(layer)
    at = torch.tensor(rows, device=device)
    found = attention_scores(q[[place[row] for row in rows]].to(device), k[: last + 1].to(device), at, scale=layer.impl.scale,
                             softcap=softcap, window=window, slopes=slopes)
    return found if scores else attention_pattern(found, sinks)


def parameters(layer: Any) -> tuple[int | None, torch.Tensor | None, torch.Tensor | None, float]:
    """Return a layer's window, ALiBi slopes, sinks and softcap; UnsupportedError for masks that are not causal windows."""
    impl = layer.impl
    if _own_mask(layer):
        raise UnsupportedError(f"attention of {type(layer).__name__} has a mask of its own and is not rebuilt")
    slopes = getattr(impl, "alibi_slopes", None)
    device = next(iter(layer.parameters()), torch.empty(0)).device
    return (getattr(layer, "sliding_window", None), None if slopes is None else torch.as_tensor(slopes, device=device),
            getattr(impl, "sinks", None), float(getattr(impl, "logits_soft_cap", 0.0) or 0.0))


def unknown_mask(layer: Any) -> str:
    """Why a bias cannot be merged into a layer's attention, or nothing."""
    if _own_mask(layer):
        return "its attention has a mask of its own"
    return "its attention has ALiBi slopes" if getattr(layer.impl, "alibi_slopes", None) is not None else ""


def _own_mask(layer: Any) -> bool:
    return bool(getattr(layer, "attention_chunk_size", None)) or type(layer).__name__.removeprefix("Tapped") != "Attention"
