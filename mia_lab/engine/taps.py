"""Taps: classes swapped onto a model's modules, whose forward calls the fused operator at its input or output.

The swap happens after the weights are loaded and before the first forward, which is when vLLM traces. Everything a
tap reads hangs on the module as a plain tensor attribute: Dynamo lifts these as graph inputs, so that layers which
are alike still compile once. Which rows do what is data in the tables; the traced code never branches on it.
"""
from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mia_lab.kernels import tap
from mia_lab.kernels.bias import bias_
from mia_lab.kernels.norm import norm, tap_norm
from mia_lab.kernels.read import read_
from mia_lab.kernels.tap import tap_

from . import heads
from .tables import Tables

_SWAPPED: dict[tuple[type, object, tuple], type] = {}


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
    """Tap what the module is given: the value is `x`, plus `residual` where the block passes a pending pair.

    Those of a module that are only read are read together, and are `wide` all or none.
    """

    x: Arg
    residual: Arg | None = None
    edits: bool = True  # False for a view of a larger tensor, which would be cloned if it were edited
    wide: bool = False  # stored as float32 whatever the model's type; only where not edited, and with no residual


@dataclass(frozen=True, slots=True)
class Normed:
    """Tap the pair that an RMS norm adds up, within that norm; its weight counts from 1 where `shifted`.

    alone: the value is `x` without `residual`: what the branch adds. Several of these run one after the other.
    """

    x: Arg
    residual: Arg
    shifted: bool
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Early:
    """Add up the pair in an RMS norm where no tap rides, by the kernel that is launched early."""

    x: Arg
    residual: Arg
    shifted: bool


@dataclass(frozen=True, slots=True)
class After:
    """Tap what the module returns: its tensor, or the first of its tuple, plus the second where `pair`.

    edits, wide: as in Before; a `pair` is never only read.
    """

    is_tuple: bool = False
    pair: bool = False
    edits: bool = True
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Within:
    """Tap what an attention layer's kernel wrote, from within the operator at which vLLM splits its graphs.

    Outside of it the value is a view of another graph's buffer, which a compiled edit would copy twice.
    """


@dataclass(frozen=True, slots=True)
class Biased:
    """Let an attention layer's output be recomputed for rows under a bias, right after its kernel."""


Side = Before | Normed | Early | After | Within | Biased


def swap(module: nn.Module, sides: Sequence[Side]) -> None:
    """Give `module` a subclass of its own class whose forward runs the taps, in the order given."""
    base = type(module)
    inside = [i for i, side in enumerate(sides) if isinstance(side, (Biased, Within))]
    for i in sorted(inside, key=lambda i: not isinstance(sides[i], Biased)):  # z is read after the bias
        _wrap_kernel(module, module.mia_tables[i], biased=isinstance(sides[i], Biased))
    if len(inside) == len(sides):
        return
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__self__", None) is not module:
        raise RuntimeError(f"{base.__name__} carries an instance forward, which a class swap cannot reach")
    # vLLM's Transformers backend binds rewritten methods to the instance, which would hide the subclass's.
    inner = base.forward if own is None else own.__func__
    key = (base, inner, tuple(sides))
    if key not in _SWAPPED:
        _SWAPPED[key] = type(f"Tapped{base.__name__}", (base,), {"forward": _forward(inner, key[2]), "mia_inner": inner})
    if own is not None:
        del module.forward
    module.__class__ = _SWAPPED[key]


def _forward(inner: Callable[..., Any], sides: tuple[Side, ...]) -> Callable[..., Any]:
    edited = [(i, side) for i, side in enumerate(sides) if isinstance(side, Before) and side.edits]
    read = [(i, side) for i, side in enumerate(sides) if isinstance(side, Before) and not side.edits]
    within = [(i, side) for i, side in enumerate(sides) if isinstance(side, (Normed, Early))]
    afters = [(i, side) for i, side in enumerate(sides) if isinstance(side, After)]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for i, side in edited:
            tap_(side.x.pick(args, kwargs), None if side.residual is None else side.residual.pick(args, kwargs), *self.mia_tables[i])
        given = [(side.x.pick(args, kwargs), self.mia_tables[i]) for i, side in read]
        given = [(x, tables) for x, tables in given if x is not None]  # a layer that shares another's keys gets none
        if given:
            _read([x for x, _ in given], [tables for _, tables in given], read[0][1].wide)
        residual = within[0][1].residual.pick(args, kwargs) if within else None
        out = inner(self, *args, **kwargs) if residual is None else _normed(self, within, args, kwargs)
        for i, side in afters:
            x = out[0] if side.is_tuple else out
            if side.edits:
                tap_(x, out[1] if side.pair else None, *self.mia_tables[i])
            else:
                _read([x], [self.mia_tables[i]], side.wide)
        return out

    return forward


def _read(x: list[torch.Tensor], tables: list[tuple[torch.Tensor, ...]], wide: bool) -> None:
    rows, arena = tables[0][0], tables[0][6]
    read_(x, rows, [own[1] for own in tables], [own[5] for own in tables], arena, wide=wide)


def _normed(module: nn.Module, sides: Sequence[tuple[int, Normed | Early]], args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """What a norm gives for a pair, with the taps that ride in it."""
    first = sides[0][1]
    x, residual = first.x.pick(args, kwargs), first.residual.pick(args, kwargs)
    how = module.weight, module.variance_epsilon, first.shifted
    if isinstance(first, Early):
        return norm(x, residual, *how)
    tables = [module.mia_tables[i] for i, _ in sides]
    rows, _, words, numbers, bank, _, arena, measures, opens = tables[0]
    index, offsets = [own[1] for own in tables], [own[5] for own in tables]
    return tap_norm(x, residual, rows, index, words, numbers, bank, offsets, arena, measures, opens, *how, first.alone)


def _wrap_kernel(module: nn.Module, tables: tuple[torch.Tensor, ...], biased: bool) -> None:
    impl = module.impl
    inner, shape = impl.forward, (-1, module.num_heads, getattr(module, "head_size_v", module.head_size))
    place = list(inspect.signature(inner).parameters).index("output")
    if biased:
        window, _, sinks, softcap = heads.parameters(module)
        how = impl.scale, softcap, window or 0, sinks

    @wraps(inner)
    def forward(layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = inner(layer, query, key, value, *args, **kwargs)
        output = kwargs["output"] if "output" in kwargs else (layer, query, key, value, *args)[place]
        if biased:
            bias_(output.view(shape), query, key, value, *tables, *how)
        else:
            tap_(output.view(len(output), -1), None, *tables)
        return result

    impl.forward = forward


def attach(module: nn.Module, tables: Tables, sites: Sequence[int]) -> None:
    """Hang the tables of the module's sites on it, in the order of its taps."""
    # Not buffers: state_dict, dtype casts and weight reloads must not see them.
    object.__setattr__(module, "mia_tables", tuple(tables.of_site(site) for site in sites))


def attach_biased(module: nn.Module, tables: Tables, site: int, at: int) -> None:
    """Give an attention layer room for the keys and values of rows under a bias, and the tables of its `at`-th tap."""
    size = tables.sizes.biased_tokens, module.num_kv_heads
    keys = torch.zeros(*size, module.head_size, dtype=tables.arena.dtype, device=tables.device)
    values = torch.zeros(*size, getattr(module, "head_size_v", module.head_size), dtype=tables.arena.dtype, device=tables.device)
    rows, index, words, numbers, _, _, _, measures, opens = tables.of_site(site)
    held = list(module.mia_tables)
    held[at] = (rows, index, words, numbers, measures, opens, keys, values)
    object.__setattr__(module, "mia_tables", tuple(held))
    tables.extra_bytes += keys.nbytes + values.nbytes


def fingerprint(places: str, tables: Tables) -> str:
    """Identity of the compiled taps, for vLLM's compile-cache key: sources, places and table shapes."""
    kernels = (Path(tap.__file__).with_name(f"{name}.py") for name in ("program", "terms", "tap", "read", "norm"))
    text = [*(file.read_text() for file in (*kernels, Path(__file__))), places, repr((tables.sizes, tables.widths))]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:32]
