"""Attention of chosen rows with a bias on a span of keys, computed anew beside the fused kernel, which has no entry for it.

Requests with a bias keep their keys and values in `history`, at their place there plus the position; everything is
recomputed from these, so no layout of the KV cache is assumed. `program.py` says what the tables hold; a BIAS term's
columns are the span of keys, READ and WRITE a mask of its heads.
"""
from __future__ import annotations

import torch

from . import program as P

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = None

Tensor = torch.Tensor


def bias_reference(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, index: Tensor, words: Tensor, numbers: Tensor,
                   measures: Tensor, opens: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, window: int,
                   sinks: Tensor | None) -> None:
    """Keep this step's keys and values, and replace the output of rows under a bias, with plain torch operators.

    out `[rows head ev]`, q `[rows head e]`, k `[rows kv_head e]`, v `[rows kv_head ev]`; keys `[tokens kv_head e]` and
    values `[tokens kv_head ev]`: the history; window: keys that a row sees, 0 for all; sinks `[head]` or None.
    """
    table = rows[: len(q)]
    kept = (table[:, P.HISTORY] >= 0).nonzero().flatten()
    if not kept.numel():
        return
    at = table[kept, P.HISTORY].long() + table[kept, P.POSITION].long()
    keys[at], values[at] = k[kept].to(keys.dtype), v[kept].to(values.dtype)
    for row in kept.tolist():
        program, _, _, position, slot, base = table[row].tolist()
        if program < 0 or not index[program, 1]:
            continue
        w, f = words[index[program, 0]].tolist(), numbers[index[program, 0]].tolist()
        if not _open(w, f, row, position, slot, measures, opens):
            continue
        seen = slice(base, base + position + 1)
        group = q.shape[1] // k.shape[1]
        s = torch.einsum("he,khe->hk", q[row].float(), keys[seen].float().repeat_interleave(group, 1)) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        place = torch.arange(position + 1, device=q.device)
        if window:
            s[:, place <= position - window] = float("-inf")
        inside = (place >= w[P.FIRST_COLUMN]) & (place < w[P.LAST_COLUMN])
        extra = s.new_full((len(s), 0), 0.0) if sinks is None else sinks.float()[:, None]
        bias = torch.full((len(s),), f[P.COEFF], device=q.device)
        if f[P.SLOPE]:  # the share that the span is to have
            share = torch.cat([s, extra], 1).softmax(1)[:, : len(place)][:, inside].sum(1)
            bias = torch.where((share > 0) & (share < f[P.COEFF]), torch.logit(bias) - torch.logit(share), 0.0)
        s = s + (bias * _heads(w, len(s), q.device))[:, None] * inside
        weights = torch.cat([s, extra], 1).softmax(1)[:, : len(place)]
        out[row] = torch.einsum("hk,khe->he", weights, values[seen].float().repeat_interleave(group, 1)).to(out.dtype)


def _open(w: list[int], f: list[float], row: int, position: int, slot: int, measures: Tensor, opens: Tensor) -> bool:
    if w[P.GATE] < 0:
        return True
    if w[P.FLAGS] & P.PER_ROW:
        return bool(measures[row, w[P.GATE]] > f[P.LEVEL])
    return position >= int(opens[slot, w[P.GATE]])


def _heads(w: list[int], n: int, device: torch.device) -> Tensor:
    mask = (w[P.READ] & 0xFFFFFFFF) | ((w[P.WRITE] & 0xFFFFFFFF) << 32)
    return torch.tensor([float(h >= 64 or bool(mask >> h & 1)) for h in range(n)], device=device)


if triton is not None:

    @triton.jit
    def _keep(rows, k, v, keys, values, k_stride, v_stride, k_width, v_width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        base = tl.load(rows + row * 6 + 5).to(tl.int64)
        if base < 0:
            return
        at = base + tl.load(rows + row * 6 + 3)
        cols = tl.arange(0, BLOCK)
        tl.store(keys + at * k_width + cols, tl.load(k + row * k_stride + cols, mask=cols < k_width), mask=cols < k_width)
        tl.store(values + at * v_width + cols, tl.load(v + row * v_stride + cols, mask=cols < v_width), mask=cols < v_width)

    @triton.jit
    def _scores(query, keys, base, j, position, group_offset, k_width, e, scale, softcap, window, cols, SOFTCAP: tl.constexpr,
                WINDOW: tl.constexpr):
        """Scores of one query against a block of keys `j`, -inf where it cannot see them."""
        tile = tl.load(keys + (base + j)[:, None] * k_width + group_offset + cols[None, :],
                       mask=(j <= position)[:, None] & (cols < e)[None, :], other=0.0).to(tl.float32)
        s = tl.sum(tile * query[None, :], axis=1) * scale
        if SOFTCAP:
            s = softcap * libdevice.tanh(s / softcap)
        hidden = j > position
        if WINDOW:
            hidden = hidden | (j <= position - window)
        return tl.where(hidden, float("-inf"), s)

    @triton.jit
    def _bias(out, q, rows, index, words, numbers, measures, opens, keys, values, sinks, out_stride, q_stride, k_width, v_width, e, ev,
              group, scale, softcap, window, GATES: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
              E: tl.constexpr, EV: tl.constexpr, N: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        base = tl.load(rows + row * 6 + 5).to(tl.int64)
        program = tl.load(rows + row * 6)
        if (base < 0) | (program < 0):
            return
        count = tl.load(index + program * 4 + 1)
        if count == 0:
            return
        first = tl.load(index + program * 4)
        w = words + first * 8
        f = numbers + first * 8
        position = tl.load(rows + row * 6 + 3)
        gate = tl.load(w + 3)
        if gate >= 0:
            if (tl.load(w + 7) & 2) > 0:
                is_open = tl.load(measures + row * GATES + gate) > tl.load(f + 7)
            else:
                is_open = position >= tl.load(opens + tl.load(rows + row * 6 + 4) * GATES + gate)
            if is_open == 0:
                return
        mask = tl.load(w + 1) if head < 32 else tl.load(w + 2)
        chosen = (head >= 64) | (((mask >> (head % 32)) & 1) != 0)
        start = tl.load(w + 4)
        stop = tl.load(w + 5)
        bias = tl.load(f)
        cols = tl.arange(0, E)
        vcols = tl.arange(0, EV)
        query = tl.load(q + row * q_stride + head * e + cols, mask=cols < e, other=0.0).to(tl.float32)
        offset = (head // group) * e
        voffset = (head // group) * ev
        top = float("-inf")
        if SINKS:
            top = tl.load(sinks + head).to(tl.float32)
        if tl.load(f + 1) != 0:
            total = 1.0 if SINKS else 0.0
            part = 0.0
            for j0 in range(0, position + 1, N):
                j = j0 + tl.arange(0, N)
                s = _scores(query, keys, base, j, position, offset, k_width, e, scale, softcap, window, cols, SOFTCAP, WINDOW)
                new = tl.maximum(top, tl.max(s, axis=0))
                if new > float("-inf"):
                    weights = tl.exp(s - new)
                    rescale = tl.exp(top - new)
                    total = total * rescale + tl.sum(weights, axis=0)
                    part = part * rescale + tl.sum(tl.where((j >= start) & (j < stop), weights, 0.0), axis=0)
                    top = new
            share = part / total
            logit = tl.log(bias / (1.0 - bias)) - tl.log(share / (1.0 - share))
            bias = tl.where((share > 0) & (share < bias), logit, 0.0)
            top = float("-inf")
            if SINKS:
                top = tl.load(sinks + head).to(tl.float32)
        bias = tl.where(chosen, bias, 0.0)
        total = 1.0 if SINKS else 0.0
        found = tl.zeros([EV], dtype=tl.float32)
        for j0 in range(0, position + 1, N):
            j = j0 + tl.arange(0, N)
            s = _scores(query, keys, base, j, position, offset, k_width, e, scale, softcap, window, cols, SOFTCAP, WINDOW)
            s = tl.where((j >= start) & (j < stop), s + bias, s)
            new = tl.maximum(top, tl.max(s, axis=0))
            if new > float("-inf"):
                weights = tl.exp(s - new)
                rescale = tl.exp(top - new)
                total = total * rescale + tl.sum(weights, axis=0)
                tile = tl.load(values + (base + j)[:, None] * v_width + voffset + vcols[None, :],
                               mask=(j <= position)[:, None] & (vcols < ev)[None, :], other=0.0).to(tl.float32)
                found = found * rescale + tl.sum(weights[:, None] * tile, axis=0)
                top = new
        tl.store(out + row * out_stride + head * ev + vcols, (found / total).to(out.dtype.element_ty), mask=vcols < ev)


def bias_cuda(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, index: Tensor, words: Tensor, numbers: Tensor,
              measures: Tensor, opens: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, window: int,
              sinks: Tensor | None) -> None:
    """The same with two Triton launches; rows without a bias leave at once. Arguments as the reference."""
    n, heads, e = q.shape
    kv, ev = v.shape[1], v.shape[2]
    block = triton.next_power_of_2(kv * max(e, ev))
    _keep[(n,)](rows, k, v, keys, values, k.stride(0), v.stride(0), kv * e, kv * ev, BLOCK=block)
    _bias[(n, heads)](
        out, q, rows, index, words, numbers, measures, opens, keys, values, out if sinks is None else sinks, out.stride(0), q.stride(0),
        kv * e, kv * ev, e, ev, heads // kv, scale, softcap, window, GATES=measures.shape[1], SOFTCAP=softcap > 0, WINDOW=window > 0,
        SINKS=sinks is not None, E=triton.next_power_of_2(e), EV=triton.next_power_of_2(ev), N=32)


def bias_(out: Tensor, *args: object) -> None:
    """Apply on the device where the tensors are. Arguments as the reference."""
    (bias_cuda if out.is_cuda else bias_reference)(out, *args)
