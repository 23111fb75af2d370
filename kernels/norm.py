"""Taps and the RMS norm that reads the stream right after them, as one kernel.

A tap of its own costs a launch and a pass over the row. Where a block passes on a pending pair and an RMS norm adds it
up, up to three taps ride in that norm, one after the other: of the branch, whose value is the half that was added last, and
of the stream before and behind the block's border. The row is there already, and nothing is launched that was not before.
What is captured is what the taps one by one would capture, and what is returned is what the norm behind them would give,
to the rounding of one sum.

`norm` is the same without a tap. Launched early, it gains what the taps beside it cost.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import tap
from .launch import PARTS, Part, extent, launch
from .tap import tap_reference

if tap.triton is not None:
    import triton
    import triton.language as tl

    from .terms import apply, capture, places, prologue

Tensor = torch.Tensor
TAPS = 3  # that one norm carries


def tap_norm_reference(x: Tensor, residual: Tensor, rows: Tensor, index: Sequence[Tensor], words: Tensor, numbers: Tensor, bank: Tensor,
                       offsets: Sequence[Tensor], arena: Tensor, measures: Tensor, opens: Tensor, weight: Tensor, eps: float,
                       shifted: bool, alone: bool) -> tuple[Tensor, Tensor]:
    """Tap the stream x + residual by each site's tables in turn, then return its RMS norm and the stream itself, each `[..., d]`
    of x's type.

    Arguments as `tap_reference`, with an index and offsets for each site; the first one's value is x without the residual where
    `alone`. weight `[d]`, to which 1 is added where `shifted` (Gemma). x and residual stay as they are.
    """
    awake = [i for i, line in enumerate(index) if not tap.sleeps(line)]
    if awake:
        x = x.clone(memory_format=torch.contiguous_format)
    for i in awake:
        other = None if alone and i == 0 else residual
        tap_reference(x, other, rows, index[i], words, numbers, bank, offsets[i], arena, measures, opens, tap.edits(index[i]))
    return rms_norm(x.float() + residual.float(), weight, eps, shifted, x.dtype)


def rms_norm(whole: Tensor, weight: Tensor, eps: float, shifted: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of a float32 stream and the stream, both rounded to `dtype` as vLLM's norms round them."""
    normed = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + eps)
    normed = normed * (weight.float() + 1.0) if shifted else normed.to(weight.dtype) * weight
    return normed.to(dtype, memory_format=torch.contiguous_format), whole.to(dtype, memory_format=torch.contiguous_format)


if tap.triton is not None:

    @triton.jit
    def _finish(total, w, normed, whole, eps, d, row, cols, mask, dtype: tl.constexpr, SHIFTED: tl.constexpr):
        """Store a row of the stream, and its norm."""
        tl.store(whole + row * d + cols, total.to(dtype), mask=mask)
        scaled = total * tl.rsqrt(tl.sum(total * total, axis=0) / d + eps)
        scaled = scaled * (w.to(tl.float32) + 1.0) if SHIFTED else scaled.to(w.dtype).to(tl.float32) * w.to(tl.float32)
        tl.store(normed + row * d + cols, scaled.to(dtype), mask=mask)

    @triton.jit
    def mia_norm(x, residual, weight, normed, whole, eps, d, x_stride, r_stride, SHIFTED: tl.constexpr, EARLY: tl.constexpr,
                 BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        mask = cols < d
        w = tl.load(weight + cols, mask=mask, other=0.0)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        total = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(residual + row * r_stride + cols, mask=mask, other=0.0).to(tl.float32)
        _finish(total, w, normed, whole, eps, d, row, cols, mask, x.dtype.element_ty, SHIFTED)

    @triton.jit
    def mia_tap_norm(x, residual, rows, index0, index1, index2, words, numbers, bank, offsets0, offsets1, offsets2, arena, measures, opens,
                     weight, normed, whole, eps, d, width, x_stride, r_stride, EDITS: tl.constexpr, GATES: tl.constexpr,
                     SHIFTED: tl.constexpr, TAPS: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        mask = cols < d
        w = tl.load(weight + cols, mask=mask, other=0.0)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        value = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        other = tl.load(residual + row * r_stride + cols, mask=mask, other=0.0).to(tl.float32)
        for turn in range(TAPS):  # a loop, because their code once over leaves registers for a second row beside this one
            index, offsets, beside = index0, offsets0, other
            if turn == 1:
                index, offsets = index1, offsets1
            if turn == 2:
                index, offsets = index2, offsets2
            if ALONE:
                beside = tl.where(turn > 0, other, 0.0)
            before, after = places(rows, offsets, row)
            if EDITS:
                line, plain, added = prologue(rows, index, bank, row, d, width, cols)
            capture(arena, before, value + beside, cols, mask)
            if EDITS:
                value = apply(value, beside, line, plain, added, row, rows, index, words, numbers, bank, measures, opens, width, cols,
                              mask, GATES, BLOCK).to(x.dtype.element_ty).to(tl.float32)
            capture(arena, after, value + beside, cols, mask)
        _finish(value + other, w, normed, whole, eps, d, row, cols, mask, x.dtype.element_ty, SHIFTED)


    PARTS["mia_tap_norm"] = Part(mia_norm, (0, 1, 15, 16, 17), (0, 1, 3, 4), ("SHIFTED",))


def tap_norm_cuda(x: Tensor, residual: Tensor, rows: Tensor, index: Sequence[Tensor], words: Tensor, numbers: Tensor, bank: Tensor,
                  offsets: Sequence[Tensor], arena: Tensor, measures: Tensor, opens: Tensor, weight: Tensor, eps: float,
                  shifted: bool, alone: bool, edits: bool = True) -> tuple[Tensor, Tensor]:
    """The same with one Triton launch, one program a row. Arguments as the reference; edits: as `tap_reference`, at any site."""
    d, (n, x_stride), (_, r_stride), taps = x.shape[-1], extent(x), extent(residual), len(index)
    if taps > TAPS:
        raise ValueError(f"a norm carries {TAPS} taps at most, not {taps}")
    normed, whole = _outputs(x)
    index, offsets = ([*some, *some[:1] * (TAPS - taps)] for some in (index, offsets))
    launch(mia_tap_norm, n, d,
           (x, residual, rows, *index, words, numbers, bank, *offsets, arena, measures, opens, weight, normed, whole),
           (eps, d, bank.stride(0), x_stride, r_stride),
           (("EDITS", edits), ("GATES", measures.shape[1]), ("SHIFTED", shifted), ("TAPS", taps), ("ALONE", alone)))
    return normed, whole


def _tap_norm_cuda(x: Tensor, residual: Tensor, rows: Tensor, index: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    if all(map(tap.sleeps, index)):
        *_, weight, eps, shifted, _ = rest
        return norm_cuda(x, residual, weight, eps, shifted)
    return tap_norm_cuda(x, residual, rows, index, *rest, edits=any(map(tap.edits, index)))


def norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float, shifted: bool) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of the stream x + residual, and the stream, each `[..., d]` of x's type. Arguments as `tap_norm_reference`."""
    return rms_norm(x.float() + residual.float(), weight, eps, shifted, x.dtype)


def norm_cuda(x: Tensor, residual: Tensor, weight: Tensor, eps: float, shifted: bool) -> tuple[Tensor, Tensor]:
    """The same with one Triton launch, one program a row. Arguments as the reference."""
    d, (n, x_stride), (_, r_stride) = x.shape[-1], extent(x), extent(residual)
    normed, whole = _outputs(x)
    launch(mia_norm, n, d, (x, residual, weight, normed, whole), (eps, d, x_stride, r_stride), (("SHIFTED", shifted),))
    return normed, whole


def _outputs(x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(x, memory_format=torch.contiguous_format)


tap.LIBRARY.define("tap_norm(Tensor x, Tensor residual, Tensor rows, Tensor[] index, Tensor words, Tensor numbers, Tensor bank, "
                   "Tensor[] offsets, Tensor(a!) arena, Tensor(b!) measures, Tensor opens, Tensor weight, float eps, bool shifted, "
                   "bool alone) -> (Tensor, Tensor)")
tap.LIBRARY.impl("tap_norm", tap_norm_reference, "CPU")
tap.LIBRARY.impl("tap_norm", _tap_norm_cuda, "CUDA")
tap.LIBRARY.impl("tap_norm", _outputs, "Meta")
tap.LIBRARY.define("norm(Tensor x, Tensor residual, Tensor weight, float eps, bool shifted) -> (Tensor, Tensor)")
tap.LIBRARY.impl("norm", norm_reference, "CPU")
tap.LIBRARY.impl("norm", norm_cuda, "CUDA")
tap.LIBRARY.impl("norm", _outputs, "Meta")
tap_norm, norm = torch.ops.mia_lab.tap_norm.default, torch.ops.mia_lab.norm.default
