"""The fused tap: steer a row of the stream and copy it out, in one pass, by what the tables say.

One operator serves every point. For each row of the batch `rows` holds (program, plan, arena base, unused); -1 is
neutral. A program names up to K vectors of the bank with their coefficients; a plan names where in the arena, after
the row's base, this point's value goes. Tables keep their addresses for the life of the engine, so a captured CUDA
graph replays with whatever they hold.
"""
from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build without Triton runs the reference
    triton = None

Tensor = torch.Tensor


def tap_reference(x: Tensor, residual: Tensor | None, rows: Tensor, vec: Tensor, coef: Tensor, bank: Tensor,
                  offsets: Tensor, arena: Tensor) -> None:
    """Apply the tap in place with plain torch operators, on any device.

    x `[..., d]`: the half of the stream that is edited; residual `[..., d]` or None: the other half.
    rows int32 `[tokens 4]`; vec int32 and coef float32 `[programs K]`; bank float32 `[vectors d]`;
    offsets int32 `[plans]`; arena `[values]`, flat. Sums are in float32 and cast once.
    """
    d = x.shape[-1]
    flat = x.view(-1, d)
    table = rows[: flat.shape[0]]
    edited = (table[:, 0] >= 0).nonzero().flatten()
    if edited.numel():
        program = table[edited, 0].long()
        delta = torch.zeros(len(edited), d, device=x.device)
        for k in range(vec.shape[1]):
            index = vec[program, k].long()
            term = coef[program, k, None] * bank[index.clamp(min=0)]
            delta += torch.where(index[:, None] >= 0, term, 0.0)
        here = vec[program, 0] >= 0
        edited, delta = edited[here], delta[here]
        flat[edited] = (flat[edited].float() + delta).to(x.dtype)
    taken = (table[:, 1] >= 0).nonzero().flatten()
    if taken.numel():
        offset = offsets[table[taken, 1].long()].long()
        taken, offset = taken[offset >= 0], offset[offset >= 0]
        value = flat[taken].float()
        if residual is not None:
            value = value + residual.view(-1, d)[taken].float()
        place = table[taken, 2].long() + offset
        arena[place[:, None] + torch.arange(d, device=x.device)] = value.to(arena.dtype)


if triton is not None:

    @triton.jit
    def _tap(x, residual, rows, vec, coef, bank, offsets, arena, d, x_stride, r_stride,
             K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        program = tl.load(rows + row * 4)
        plan = tl.load(rows + row * 4 + 1)
        if (program < 0) & (plan < 0):
            return
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < d
        at = x + row * x_stride + cols
        value = tl.load(at, mask=mask)
        if program >= 0:
            first = tl.load(vec + program * K)
            if first >= 0:
                delta = tl.zeros([BLOCK], dtype=tl.float32)
                for k in range(K):
                    index = tl.load(vec + program * K + k).to(tl.int64)
                    weight = tl.load(coef + program * K + k)
                    delta += weight * tl.load(bank + index * d + cols, mask=mask & (index >= 0), other=0.0)
                value = (value.to(tl.float32) + delta).to(x.dtype.element_ty)
                tl.store(at, value, mask=mask)
        if plan >= 0:
            offset = tl.load(offsets + plan).to(tl.int64)
            if offset >= 0:
                base = tl.load(rows + row * 4 + 2).to(tl.int64)
                total = value.to(tl.float32)
                if HAS_RESIDUAL:
                    total += tl.load(residual + row * r_stride + cols, mask=mask).to(tl.float32)
                tl.store(arena + base + offset + cols, total.to(arena.dtype.element_ty), mask=mask)


def tap_cuda(x: Tensor, residual: Tensor | None, rows: Tensor, vec: Tensor, coef: Tensor, bank: Tensor,
             offsets: Tensor, arena: Tensor) -> None:
    """Apply the tap in place with one Triton launch; a neutral row costs one 8-byte read. Arguments as the reference."""
    d = x.shape[-1]
    flat = x.view(-1, d)
    other = flat if residual is None else residual.view(-1, d)
    block = min(1024, triton.next_power_of_2(d))
    _tap[(flat.shape[0], triton.cdiv(d, block))](
        flat, other, rows, vec, coef, bank, offsets, arena, d, flat.stride(0), other.stride(0),
        K=vec.shape[1], HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=4)


_LIBRARY = torch.library.Library("mia_lab", "DEF")
_LIBRARY.define("tap_(Tensor(a!) x, Tensor? residual, Tensor rows, Tensor vec, Tensor coef, Tensor bank, "
                "Tensor offsets, Tensor(b!) arena) -> ()")
_LIBRARY.impl("tap_", tap_reference, "CPU")
_LIBRARY.impl("tap_", tap_cuda, "CUDA")
_LIBRARY.impl("tap_", lambda *args: None, "Meta")

tap_ = torch.ops.mia_lab.tap_.default
