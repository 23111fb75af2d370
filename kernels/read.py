"""Capture what a module is given or gives, without editing it: up to three values of a row, such as q, k and v, by one kernel.

For views of a larger tensor, which declared as edited would be cloned, and for logits that are stored as float32.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from . import tap
from .launch import extent, launch
from .tap import copy_out

if tap.triton is not None:
    import triton
    import triton.language as tl

    from .terms import capture, places

Tensor = torch.Tensor
AT_ONCE = 3


def read_reference(x: Sequence[Tensor], rows: Tensor, index: Sequence[Tensor], offsets: Sequence[Tensor], arena: Tensor, *,
                   wide: bool) -> None:
    """Capture rows of each `x [..., d]`, by the tables of its own site; all have as many rows. Arguments as `tap_reference`.

    index: tells the sites apart, and is not read. wide: the values are stored as float32, whatever the arena's type.
    """
    for value, offset in zip(x, offsets):
        flat = value.view(-1, value.shape[-1])
        for side in (0, 1):
            copy_out(flat, None, rows[: len(flat)], offset[:, side], arena, wide)


if tap.triton is not None:

    @triton.jit
    def _load(x, before, after, row, d, stride, cols):
        """A row's values, where they go anywhere."""
        return tl.load(x + row * stride + cols, mask=cols < tl.where((before >= 0) | (after >= 0), d, 0), other=0.0)

    @triton.jit
    def _store(arena, before, after, value, d, cols, RATIO: tl.constexpr):
        """Put them where the plan wants them: as nothing is edited, before and after are the same."""
        capture(arena, tl.where(before >= 0, before // RATIO, -1), value, cols, cols < d)
        capture(arena, tl.where(after >= 0, after // RATIO, -1), value, cols, cols < d)

    @triton.jit
    def mia_read(x0, x1, x2, rows, index0, index1, index2, offsets0, offsets1, offsets2, arena, d0, d1, d2, stride0, stride1, stride2,
                 COUNT: tl.constexpr, RATIO: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        before0, after0 = places(rows, offsets0, row)
        if COUNT > 1:
            before1, after1 = places(rows, offsets1, row)
        if COUNT > 2:
            before2, after2 = places(rows, offsets2, row)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        value0 = _load(x0, before0, after0, row, d0, stride0, cols)
        if COUNT > 1:
            value1 = _load(x1, before1, after1, row, d1, stride1, cols)
        if COUNT > 2:
            value2 = _load(x2, before2, after2, row, d2, stride2, cols)
        _store(arena, before0, after0, value0, d0, cols, RATIO)
        if COUNT > 1:
            _store(arena, before1, after1, value1, d1, cols, RATIO)
        if COUNT > 2:
            _store(arena, before2, after2, value2, d2, cols, RATIO)


def read_cuda(x: Sequence[Tensor], rows: Tensor, index: Sequence[Tensor], offsets: Sequence[Tensor], arena: Tensor, *, wide: bool) -> None:
    """The same with one Triton launch, one program a row. Arguments as the reference."""
    count, (n, _) = len(x), extent(x[0])
    if count > AT_ONCE:
        raise ValueError(f"one kernel reads {AT_ONCE} values of a row, not {count}")
    x, index, offsets = ([*some, *some[:1] * (AT_ONCE - count)] for some in (x, index, offsets))
    widths = [value.shape[-1] for value in x]
    launch(mia_read, n, max(widths), (*x, rows, *index, *offsets, arena.view(torch.float32) if wide else arena),
           (*widths, *(extent(value)[1] for value in x)),
           (("COUNT", count), ("RATIO", 4 // arena.element_size() if wide else 1)))


def _waking(body: Callable[..., None]) -> Callable[..., None]:
    """A kernel's body that does nothing where all of its sites sleep."""

    @wraps(body)
    def awake(x: Sequence[Tensor], rows: Tensor, index: Sequence[Tensor], *rest: Any, wide: bool) -> None:
        if not all(map(tap.sleeps, index)):
            body(x, rows, index, *rest, wide=wide)

    return awake


tap.LIBRARY.define("read_(Tensor[] x, Tensor rows, Tensor[] index, Tensor[] offsets, Tensor(a!) arena, *, bool wide) -> ()")
tap.LIBRARY.impl("read_", _waking(read_reference), "CPU")
tap.LIBRARY.impl("read_", _waking(read_cuda), "CUDA")
tap.LIBRARY.impl("read_", lambda *args, **kwargs: None, "Meta")
read_ = torch.ops.mia_lab.read_.default
