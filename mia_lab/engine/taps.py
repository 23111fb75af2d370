"""Taps: classes swapped onto a model's modules, whose forward calls the fused operator at its input or output.

The swap happens after the weights are loaded and before the first forward, which is when vLLM traces. Everything a
tap reads hangs on the module as a plain tensor attribute: Dynamo lifts these as graph inputs, so that layers which
are alike still compile once. Which rows do what is data in the tables; the traced code never branches on it.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mia_lab.kernels import tap as kernel

from .tables import Tables

tap_ = kernel.tap_
_NAMES = ("rows", "vec", "coef", "bank", "offsets", "arena")
_SWAPPED: dict[tuple[type, object, object, object], type] = {}


@dataclass(frozen=True, slots=True)
class Arg:
    """Where a call keeps one of its tensors: a positional index, a keyword, or either."""

    index: int | None
    name: str | None

    def pick(self, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """Return the tensor, or None when the call leaves it out."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        return args[self.index] if self.index is not None and self.index < len(args) else None


@dataclass(frozen=True, slots=True)
class Before:
    """Tap what the module is given: the value is `x`, plus `residual` where the block passes a pending pair."""

    x: Arg
    residual: Arg | None


@dataclass(frozen=True, slots=True)
class After:
    """Tap what the module returns: its tensor, or the first of its tuple, plus the second where `pair`."""

    is_tuple: bool
    pair: bool


def swap(module: nn.Module, before: Before | None, after: After | None) -> None:
    """Give `module` a subclass of its own class whose forward runs the taps."""
    base = type(module)
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__self__", None) is not module:
        raise RuntimeError(f"{base.__name__} carries an instance forward, which a class swap cannot reach")
    # vLLM's Transformers backend binds rewritten methods to the instance, which would hide the subclass's.
    inner = base.forward if own is None else own.__func__
    key = (base, inner, before, after)
    if key not in _SWAPPED:
        _SWAPPED[key] = type(f"Tapped{base.__name__}", (base,), {"forward": _forward(inner, before, after)})
    if own is not None:
        del module.forward
    module.__class__ = _SWAPPED[key]


def _forward(inner: Callable[..., Any], before: Before | None, after: After | None) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            residual = None if before.residual is None else before.residual.pick(args, kwargs)
            tap_(before.x.pick(args, kwargs), residual, self.mia_in_rows, self.mia_in_vec, self.mia_in_coef,
                 self.mia_in_bank, self.mia_in_offsets, self.mia_in_arena)
        out = inner(self, *args, **kwargs)
        if after is not None:
            x = out[0] if after.is_tuple else out
            tap_(x, out[1] if after.pair else None, self.mia_out_rows, self.mia_out_vec, self.mia_out_coef,
                 self.mia_out_bank, self.mia_out_offsets, self.mia_out_arena)
        return out

    return forward


def attach(module: nn.Module, side: str, tables: Tables, site: int) -> None:
    """Hang the tables of one site on the module, for its `in` or `out` tap."""
    for name, tensor in zip(_NAMES, tables.of_site(site)):
        # Not a buffer: state_dict, dtype casts and weight reloads must not see it.
        object.__setattr__(module, f"mia_{side}_{name}", tensor)


def fingerprint(places: str, tables: Tables) -> str:
    """Identity of the compiled taps, for vLLM's compile-cache key: sources, places and table shapes."""
    text = [Path(kernel.__file__).read_text(), Path(__file__).read_text(), places, repr(tables.sizes)]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:32]
