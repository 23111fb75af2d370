"""What the Triton kernels of taps share: reading a row's tables, running its program, capturing it.

`tap.py` holds the meaning, as plain torch; this is its other form. Import it only where Triton is installed.
"""
from __future__ import annotations

import triton
import triton.language as tl

_ADD, _AFFINE, _CLIP, _FEATURE, _SCALE, _RENORM, _MEASURE = (tl.constexpr(op) for op in range(7))
_FRESH, _PER_ROW, _ALIGNED, _COSINE, _VOTE, _BEGINS = (tl.constexpr(1 << bit) for bit in range(6))


@triton.jit
def keep(pointer):
    """Read a table entry, and ask the L2 cache to hold it while weights stream through: the next layer reads it again."""
    return tl.load(pointer, eviction_policy="evict_last")


@triton.jit
def keep_if(pointer, there):
    """The same where there is such an entry, otherwise -1."""
    return tl.load(pointer, mask=there, other=-1, eviction_policy="evict_last")


@triton.jit
def vector(bank, place, width, cols, mask):
    """Read a vector of the bank, which is likely to be read again."""
    return tl.load(bank + place.to(tl.int64) * width + cols, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def capture(arena, place, values, cols, mask):
    """Store a row in the arena, unless `place` is -1.

    Rows begin at whole 16 bytes. Said so that the compiler sees it, a thread stores these at once, not value by value.
    """
    UNIT: tl.constexpr = 128 // arena.dtype.element_ty.primitive_bitwidth
    if place >= 0:
        tl.store(arena + place // UNIT * UNIT + cols, values.to(arena.dtype.element_ty), mask=mask)


@triton.jit
def places(rows, offsets, row):
    """Where in the arena a row's value goes before and after its edits (or -1)."""
    plan = keep(rows + row * 6 + 1)
    base = keep(rows + row * 6 + 2).to(tl.int64)
    first = keep_if(offsets + plan * 2, plan >= 0)
    last = keep_if(offsets + plan * 2 + 1, plan >= 0)
    return tl.where(first >= 0, base + first, -1), tl.where(last >= 0, base + last, -1)


@triton.jit
def prologue(rows, index, bank, row, d, width, cols):
    """Read what the tables say of a row's edits: its program's line of `index` (or -1 for none), and its plain addition if
    it is one. Without branches, so that the reads of several sites are under way together."""
    program = keep(rows + row * 6)
    count = keep_if(index + program * 4 + 1, program >= 0)
    plain = keep_if(index + program * 4 + 2, program >= 0)
    coeff = keep_if(index + program * 4 + 3, program >= 0).to(tl.float32, bitcast=True)
    added = coeff * vector(bank, plain, width, cols, cols < tl.where(plain >= 0, d, 0))
    return tl.where(count > 0, program, -1).to(tl.int64), plain, added


@triton.jit
def apply(value, other, line, plain, added, row, rows, index, words, numbers, bank, measures, opens, width, cols, mask,
          GATES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the half `value` of a row's stream as its program leaves it."""
    if plain >= 0:
        value += added
    elif line >= 0:
        value += _program(value + other, keep(index + line * 4), keep(index + line * 4 + 1), row, rows, words, numbers, bank,
                          measures, opens, width, cols, mask, GATES, BLOCK)
    return value


@triton.jit
def _program(h0, first, count, row, rows, words, numbers, bank, measures, opens, width, cols, mask,
             GATES: tl.constexpr, BLOCK: tl.constexpr):
    """Run terms one after the other."""
    position = keep(rows + row * 6 + 3)
    slot = keep(rows + row * 6 + 4)
    delta = tl.zeros([BLOCK], dtype=tl.float32)
    seen = h0
    for k in range(count):
        w = words + (first + k) * 8
        f = numbers + (first + k) * 8
        op = keep(w)
        flags = keep(w + 7)
        gate = keep(w + 3)
        write = keep(w + 2)
        coeff = _coefficient(w, f, op, flags, gate, position, slot, row, measures, opens, GATES)
        if (flags & _FRESH) > 0:
            seen = h0 + delta
        if coeff != 0:
            p = 0.0
            if (op != _ADD) & (op != _SCALE) & (op != _RENORM):
                p = tl.sum(seen * vector(bank, keep(w + 1), width, cols, mask), axis=0)
            if op == _MEASURE:
                _accumulate(f, flags, gate, write, coeff, p, seen, row, bank, measures, width, cols, mask, GATES)
            elif op == _RENORM:
                now = h0 + delta
                factor = tl.sqrt_rn(tl.sum(seen * seen, axis=0)) / tl.sqrt_rn(tl.sum(now * now, axis=0))
                delta = now * factor - h0
            else:
                inside = (cols >= keep(w + 4)) & (cols < keep(w + 5))
                if op == _SCALE:
                    delta += tl.where(inside, coeff * seen, 0.0)
                else:
                    if (flags & _ALIGNED) > 0:
                        write += position - keep(w + 6)
                    delta += _weight(f, op, coeff, p) * vector(bank, write, width, cols, mask & inside)
    return delta


@triton.jit
def _coefficient(w, f, op, flags, gate, position, slot, row, measures, opens, GATES: tl.constexpr):
    """A term's coefficient at this position; 0 where its gate is closed."""
    coeff = keep(f)
    rate = keep(f + 5)
    if rate != 0:
        coeff *= tl.exp2(rate * (position - keep(w + 6)).to(tl.float32))
    if (gate >= 0) & (op != _MEASURE):
        if (flags & _PER_ROW) > 0:
            is_open = tl.load(measures + row * GATES + gate) > keep(f + 7)
        else:
            is_open = position >= tl.load(opens + slot * GATES + gate)
        coeff = tl.where(is_open, coeff, 0.0)
    return coeff


@triton.jit
def _weight(f, op, coeff, p):
    """What multiplies the WRITE vector, for a reading `p`."""
    weight = coeff
    if op != _ADD:
        offset = keep(f + 2)
        low = keep(f + 3)
        threshold = keep(f + 6)
        if op == _AFFINE:
            weight = coeff * (keep(f + 1) * p + offset)
        elif op == _CLIP:
            weight = coeff * (tl.minimum(tl.maximum(p, low), keep(f + 4)) - p)
        else:
            weight = coeff * (low - tl.where(p + offset > threshold, p + offset, 0.0))
    return weight


@triton.jit
def _accumulate(f, flags, gate, write, coeff, p, seen, row, bank, measures, width, cols, mask, GATES: tl.constexpr):
    """Add a reading to the row's accumulator."""
    reading = p + keep(f + 2)
    if (flags & _COSINE) > 0:
        mean = tl.zeros_like(seen)
        if write >= 0:
            mean = vector(bank, write, width, cols, mask)
        away = tl.where(mask, seen - mean, 0.0)
        reading = reading / tl.sqrt_rn(tl.sum(away * away, axis=0))
    taken = coeff * reading
    if (flags & _VOTE) > 0:
        taken = tl.where(taken > keep(f + 6), 1.0, 0.0)
    if (flags & _BEGINS) == 0:
        taken += tl.load(measures + row * GATES + gate)
    tl.store(measures + row * GATES + gate, taken)
    tl.debug_barrier()  # one thread stored it, all of them read it for the terms that follow
