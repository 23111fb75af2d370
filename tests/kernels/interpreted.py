"""The Triton bodies, run by Triton's interpreter, beside one another and their references: `python interpreted.py`.

Not a test file: whether Triton interprets is decided when a kernel is defined, so this needs a process of its own.
"""
from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from programs import DTYPES, ROWS, chain, make, one_by_one, same, together

from mia_lab.kernels import norm, read, tap
from mia_lab.kernels import program as P

WIDTH, EPS = 32, 1e-5


def launch(kernel: Any, rows: int, d: int, tensors: tuple, numbers: tuple, constants: tuple) -> None:
    """As kernels/launch.py, without a device."""
    kernel[(rows,)](*tensors, *numbers, **dict(constants), EARLY=False, BLOCK=1 << (d - 1).bit_length())


def norms(seed: int, dtype: torch.dtype, taps: int, alone: bool, edits: bool) -> None:
    """Taps that ride in a norm do, to the bit, what taps by themselves do in front of it."""
    case = make(WIDTH, dtype, seed=seed)
    if not edits:
        case.rows[:, P.PROGRAM] = -1
    case, index, offsets = chain(case, taps)
    weight = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    apart = one_by_one(tap.tap_cuda, case, index, offsets, alone)
    found, *values = together(norm.tap_norm_cuda, case, index, offsets, weight, EPS, False, alone)
    assert same(found.arena, apart.arena) and same(found.measures, apart.measures) and same(found.x, case.x)
    assert not same(found.arena, case.arena)
    assert all(map(same, values, norm.norm_cuda(apart.x, apart.residual, weight, EPS, False)))
    if dtype == torch.float32:  # the interpreter cuts bfloat16 off where it should round
        expected, *wanted = together(norm.tap_norm_reference, case, index, offsets, weight, EPS, False, alone)
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close([found.arena, found.measures], [expected.arena, expected.measures], rtol=1e-5, atol=1e-5)


def unedited(dtype: torch.dtype) -> None:
    """The kernels that cannot edit capture what the others do where there is nothing to edit."""
    case = make(WIDTH, dtype)
    case.rows[:, P.PROGRAM] = -1
    case, index, offsets = chain(case, 3)
    weight = torch.ones(WIDTH, dtype=dtype)
    expected, *wanted = together(norm.tap_norm_cuda, case, index, offsets, weight, EPS, False, True)
    found, *values = together(partial(norm.tap_norm_cuda, edits=False), case, index, offsets, weight, EPS, False, True)
    apart = one_by_one(partial(tap.tap_cuda, edits=False), case, index, offsets, True)
    assert same(found.arena, expected.arena) and same(apart.arena, expected.arena) and not same(found.arena, case.arena)
    assert all(map(same, values, wanted)) and same(apart.x, case.x)


def reads(seed: int, dtype: torch.dtype, count: int, wide: bool) -> None:
    """Values read together are, to the bit, where the reference puts them."""
    case, index, offsets = chain(make(WIDTH, dtype, residual=False, seed=seed), count)
    sizes = [WIDTH, WIDTH // 2, WIDTH // 4][:count]
    drawn = torch.randn(ROWS, sum(sizes), generator=torch.Generator().manual_seed(seed))
    values, found = list((drawn if wide else drawn.to(dtype)).split(sizes, 1)), case.arena.clone()
    read.read_cuda(values, case.rows, index, offsets, found, wide=wide)
    expected = case.arena.clone()
    read.read_reference(values, case.rows, index, offsets, expected, wide=wide)
    assert same(found, expected) and not same(found, case.arena)


def main() -> None:
    """Run all of them."""
    tap.launch = norm.launch = read.launch = launch
    for seed, dtype in enumerate(DTYPES):
        for taps, alone in ((1, False), (2, True), (3, True)):
            norms(seed, dtype, taps, alone, edits=True)
        norms(seed, dtype, 3, True, edits=False)
        unedited(dtype)
        for count in range(1, read.AT_ONCE + 1):
            reads(seed, dtype, count, wide=count == 1)
    print("interpreted")


if __name__ == "__main__":
    main()
