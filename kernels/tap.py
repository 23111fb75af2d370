"""The fused tap: edit a row and copy it out, in one pass, by what the tables say.

One operator serves every point. For each row of the batch `rows` names an edit program and a capture plan; -1 is
neutral. `index` gives a program's terms at this point, a run of lines in `words` and `numbers` (see `program.py`),
whose vectors are in `bank`. `offsets` gives, for a plan, where in the arena after the row's base this point's value goes
as it was before the edits and as it is after them. Tables keep their addresses for the life of the engine, so a captured
CUDA graph replays with whatever they hold.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from . import program as P
from .launch import extent, launch

try:
    import triton
    import triton.language as tl

    from .terms import apply, capture, places, prologue
except ImportError:  # a CPU build without Triton runs the reference
    triton = None

Tensor = torch.Tensor


def tap_reference(x: Tensor, residual: Tensor | None, rows: Tensor, index: Tensor, words: Tensor, numbers: Tensor,
                  bank: Tensor, offsets: Tensor, arena: Tensor, measures: Tensor, opens: Tensor, edits: bool = True) -> None:
    """Apply the tap in place with plain torch operators, on any device.

    x `[..., d]`: the half of the stream that is edited; residual `[..., d]` or None: the other half.
    rows int32 `[tokens 6]`; index int32 `[programs 4]`: see `program.py`; words int32 and numbers float32 `[terms 8]`;
    bank float32 `[vectors width]`, width >= d; offsets int32 `[plans 2]`: before, after; arena `[values]`, flat;
    measures float32 `[tokens gates]`; opens int32 `[slots gates]`. Sums are in float32 and cast once. edits: False where no row
    has a program here, so that only captures are left to do.
    """
    d = x.shape[-1]
    flat = x.view(-1, d)
    other = None if residual is None else residual.view(-1, d)
    table = rows[: flat.shape[0]]
    count = torch.where(table[:, P.PROGRAM] >= 0, index[table[:, P.PROGRAM].clamp(min=0).long(), P.COUNT], 0)
    edited = (count > 0).nonzero().flatten() if edits else count[:0]
    copy_out(flat, other, table, offsets[:, 0], arena)
    if edited.numel():
        line, value = index[table[edited, P.PROGRAM].long()], flat[edited].float()
        if bool((line[:, P.PLAIN] >= 0).all()):
            delta = line[:, P.PLAIN_COEFF, None].contiguous().view(torch.float32) * bank[line[:, P.PLAIN].long(), :d]
        else:
            whole = value if other is None else value + other[edited].float()
            delta = _run(whole, table[edited], edited, line[:, P.FIRST].long(), count[edited], words, numbers, bank[:, :d], measures, opens)
        flat[edited] = (value + delta).to(x.dtype)
    copy_out(flat, other, table, offsets[:, 1], arena)


# Addresses of index tables: of sites at which nobody's rows do anything now, where a tap is not even launched; and of those
# at which none is edited, where the kernel that is launched cannot edit: it leaves room for twice as many rows beside it.
asleep: set[int] = set()
unedited: set[int] = set()


def sleeps(index: Tensor) -> bool:
    """Whether a site's tap can be left out of this forward. A graph that is being captured needs all of them."""
    return _now(index, asleep)


def edits(index: Tensor) -> bool:
    """Whether a site's rows may be edited in this forward. A graph that is being captured must be able to."""
    return not _now(index, unedited)


def _now(index: Tensor, some: set[int]) -> bool:
    return index.data_ptr() in some and not (index.is_cuda and torch.cuda.is_current_stream_capturing())


def copy_out(flat: Tensor, other: Tensor | None, table: Tensor, offsets: Tensor, arena: Tensor, wide: bool = False) -> None:
    """Copy rows `flat [n d]`, plus `other [n d]` where there is one, into the arena, by one side `[plans]` of a point's offsets."""
    offset = torch.where(table[:, P.PLAN] >= 0, offsets[table[:, P.PLAN].clamp(min=0).long()], -1)
    taken = (offset >= 0).nonzero().flatten()
    if taken.numel():
        value = flat[taken].float() if other is None else flat[taken].float() + other[taken].float()
        ratio = 4 // arena.element_size() if wide else 1
        place = (table[taken, P.BASE].long() + offset[taken].long()) // ratio
        target = arena.view(torch.float32) if wide else arena
        target[place[:, None] + torch.arange(flat.shape[1], device=flat.device)] = value.to(target.dtype)


def _run(whole: Tensor, table: Tensor, row: Tensor, first: Tensor, count: Tensor, words: Tensor, numbers: Tensor,
         bank: Tensor, measures: Tensor, opens: Tensor) -> Tensor:
    """Return what the programs of some rows add to their values `whole [n d]`; term by term, all rows at once."""
    delta = torch.zeros_like(whole)
    seen = whole.clone()
    for k in range(int(count.max())):
        live = k < count
        line = (first + k).clamp(max=len(words) - 1)
        w, f = words[line], numbers[line]
        op, flags, position = w[:, P.OP], w[:, P.FLAGS], table[:, P.POSITION]
        seen = torch.where((live & ((flags & P.FRESH) > 0))[:, None], whole + delta, seen)
        reads = (op == P.AFFINE) | (op == P.CLIP) | (op == P.FEATURE) | (op == P.MEASURE)
        p = (seen * bank[w[:, P.READ].clamp(min=0).long()]).sum(1) if bool((reads & live).any()) else torch.zeros_like(f[:, 0])
        coeff = torch.where(live & _open(w, table, row, f, measures, opens), _scheduled(w, f, position), 0.0)
        _measure(live & (op == P.MEASURE), w, f, seen, p, row, bank, measures)
        vector = bank[(w[:, P.WRITE] + torch.where((flags & P.ALIGNED) > 0, position - w[:, P.ORIGIN], 0)).clamp(min=0).long()]
        weight = torch.where(op == P.ADD, coeff, coeff * _activation(op, f, p))
        column = torch.arange(whole.shape[1], device=whole.device)
        inside = (column >= w[:, P.FIRST_COLUMN, None]) & (column < w[:, P.LAST_COLUMN, None]) & (coeff != 0)[:, None]
        step = torch.where((op <= P.FEATURE)[:, None], weight[:, None] * vector, coeff[:, None] * seen)
        delta = torch.where(inside & (op <= P.SCALE)[:, None], delta + step, delta)
        if bool((op == P.RENORM).any()):
            now = whole + delta
            factor = seen.norm(dim=1) / now.norm(dim=1)
            delta = torch.where(((op == P.RENORM) & (coeff != 0))[:, None], now * factor[:, None] - whole, delta)
    return delta


def _open(w: Tensor, table: Tensor, row: Tensor, f: Tensor, measures: Tensor, opens: Tensor) -> Tensor:
    gate = w[:, P.GATE].clamp(min=0).long()
    per_row = measures[row, gate] > f[:, P.LEVEL]
    held = table[:, P.POSITION] >= opens[table[:, P.SLOT].clamp(min=0).long(), gate]
    return (w[:, P.GATE] < 0) | (w[:, P.OP] == P.MEASURE) | torch.where((w[:, P.FLAGS] & P.PER_ROW) > 0, per_row, held)


def _scheduled(w: Tensor, f: Tensor, position: Tensor) -> Tensor:
    return f[:, P.COEFF] * torch.exp2(f[:, P.RATE] * (position - w[:, P.ORIGIN]))


def _activation(op: Tensor, f: Tensor, p: Tensor) -> Tensor:
    """What multiplies the WRITE vector, for terms that read."""
    affine = f[:, P.SLOPE] * p + f[:, P.OFFSET]
    clip = torch.minimum(torch.maximum(p, f[:, P.LOW]), f[:, P.HIGH]) - p
    unit = p + f[:, P.OFFSET]
    feature = f[:, P.LOW] - torch.where(unit > f[:, P.THRESHOLD], unit, 0.0)
    return torch.where(op == P.AFFINE, affine, torch.where(op == P.CLIP, clip, feature))


def _measure(wanted: Tensor, w: Tensor, f: Tensor, seen: Tensor, p: Tensor, row: Tensor, bank: Tensor, measures: Tensor) -> None:
    at = wanted.nonzero().flatten()
    if not at.numel():
        return
    w, f, flags = w[at], f[at], w[at, P.FLAGS]
    mean = torch.where((w[:, P.WRITE] >= 0)[:, None], bank[w[:, P.WRITE].clamp(min=0).long()], 0.0)
    length = (seen[at] - mean).norm(dim=1)
    reading = torch.where((flags & P.COSINE) > 0, (p[at] + f[:, P.OFFSET]) / length, p[at] + f[:, P.OFFSET])
    signed = f[:, P.COEFF] * reading
    taken = torch.where((flags & P.VOTE) > 0, (signed > f[:, P.THRESHOLD]).float(), signed)
    gate = w[:, P.GATE].long()
    measures[row[at], gate] = taken + torch.where((flags & P.BEGINS) > 0, 0.0, measures[row[at], gate])


if triton is not None:

    @triton.jit
    def mia_tap(x, residual, rows, index, words, numbers, bank, offsets, arena, measures, opens, d, width, x_stride, r_stride,
                HAS_RESIDUAL: tl.constexpr, EDITS: tl.constexpr, GATES: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        mask = cols < d
        before, after = places(rows, offsets, row)
        idle = (before < 0) & (after < 0)
        if EDITS:
            line, plain, added = prologue(rows, index, bank, row, d, width, cols)
            idle = idle & (line < 0)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        if idle:
            return
        value = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        other = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_RESIDUAL:
            other = tl.load(residual + row * r_stride + cols, mask=mask, other=0.0).to(tl.float32)
        capture(arena, before, value + other, cols, mask)
        if EDITS:  # noqa: SIM102 - decided when this is compiled, without the line
            if line >= 0:
                value = apply(value, other, line, plain, added, row, rows, index, words, numbers, bank, measures, opens, width, cols, mask,
                              GATES, BLOCK).to(x.dtype.element_ty)
                tl.store(x + row * x_stride + cols, value, mask=mask)
                value = value.to(tl.float32)
        capture(arena, after, value + other, cols, mask)


def tap_cuda(x: Tensor, residual: Tensor | None, rows: Tensor, index: Tensor, words: Tensor, numbers: Tensor, bank: Tensor,
             offsets: Tensor, arena: Tensor, measures: Tensor, opens: Tensor, edits: bool = True) -> None:
    """Apply the tap in place with one Triton launch; a neutral row costs one 8-byte read. Arguments as the reference."""
    d, (n, x_stride) = x.shape[-1], extent(x)
    other, r_stride = (x, x_stride) if residual is None else (residual, extent(residual)[1])
    launch(mia_tap, n, d, (x, other, rows, index, words, numbers, bank, offsets, arena, measures, opens),
           (d, bank.stride(0), x_stride, r_stride),
           (("HAS_RESIDUAL", residual is not None), ("EDITS", edits), ("GATES", measures.shape[1])))


def _waking(body: Callable[..., None]) -> Callable[..., None]:
    """A kernel's body that does nothing at a site that sleeps."""

    @wraps(body)
    def awake(x: Tensor, residual: Tensor | None, rows: Tensor, index: Tensor, *rest: Tensor) -> None:
        if not sleeps(index):
            body(x, residual, rows, index, *rest, edits=edits(index))

    return awake


LIBRARY = torch.library.Library("mia_lab", "DEF")
LIBRARY.define("tap_(Tensor(a!) x, Tensor? residual, Tensor rows, Tensor index, Tensor words, Tensor numbers, Tensor bank, Tensor offsets, "
               "Tensor(b!) arena, Tensor(c!) measures, Tensor opens) -> ()")
LIBRARY.impl("tap_", _waking(tap_reference), "CPU")
LIBRARY.impl("tap_", _waking(tap_cuda), "CUDA")
LIBRARY.impl("tap_", lambda *args: None, "Meta")
tap_ = torch.ops.mia_lab.tap_.default
