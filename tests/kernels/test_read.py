"""Reading several values of a row at once: each is where its plan wants it, to the bit, and nothing else is touched."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import DTYPES, NOTHING, ROWS, WIDTHS, Case, chain, make, on_gpu, same

from mia_lab.kernels import program as P
from mia_lab.kernels.read import AT_ONCE, read_, read_cuda, read_reference

BODIES = [read_reference, read_, *on_gpu([read_cuda])]
Read = tuple[Case, list[torch.Tensor], list[torch.Tensor]]


def drawn(width: int, dtype: torch.dtype, count: int, wide: bool = False) -> tuple[Read, list[torch.Tensor]]:
    """A case, index and offsets for `count` values, and these: views of one tensor, as queries, keys and values are."""
    case, index, offsets = chain(make(width, dtype, residual=False), count)
    sizes = [width, width // 2, width // 4][:count]
    whole = torch.randn(ROWS, sum(sizes), generator=torch.Generator().manual_seed(2))
    return (case, index, offsets), list((whole if wide else whole.to(dtype)).split(sizes, 1))


def expected(case: Case, offsets: list[torch.Tensor], values: list[torch.Tensor], wide: bool) -> torch.Tensor:
    arena, ratio = case.arena.clone(), 4 // case.arena.element_size() if wide else 1
    target = arena.view(torch.float32) if wide else arena
    for value, offset in zip(values, offsets, strict=True):
        for row in range(ROWS):
            plan, base = int(case.rows[row, P.PLAN]), int(case.rows[row, P.BASE])
            for place in offset[plan].tolist() if plan >= 0 else ():
                if place >= 0:
                    start = (base + place) // ratio
                    target[start : start + value.shape[1]] = value[row]
    return arena


def read(body: Callable, found: Read, values: list[torch.Tensor], wide: bool) -> Case:
    device = "cuda" if body is read_cuda else "cpu"
    case, index, offsets = found
    case = case.copy(device)
    index, offsets, values = ([t.to(device) for t in some] for some in (index, offsets, values))
    body(values, case.rows, index, offsets, case.arena, wide=wide)
    return case.copy()


@pytest.mark.parametrize("count", range(1, AT_ONCE + 1))
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, *on_gpu([*WIDTHS, 96])])
@pytest.mark.parametrize("body", BODIES)
def test_values_are_captured_on_both_sides(body: Callable, width: int, dtype: torch.dtype, wide: bool, count: int) -> None:
    before, values = drawn(width, dtype, count, wide)
    found, wanted = read(body, before, values, wide), expected(before[0], before[2], values, wide)
    assert same(found.arena, wanted) and not same(wanted, before[0].arena)
    for name in ("rows", "measures"):
        assert same(getattr(found, name), getattr(before[0], name)), name


@pytest.mark.parametrize("body", BODIES)
def test_rows_without_a_plan_leave_the_arena_alone(body: Callable) -> None:
    before, values = drawn(64, torch.float32, AT_ONCE)
    before[0].rows[:, P.PLAN] = -1
    before[0].rows[0, P.PLAN] = 3  # a plan that takes nothing at the first of the values
    found = read(body, (before[0], before[1][:1], before[2][:1]), values[:1], False)
    assert (found.arena == NOTHING).all()


def test_more_values_than_a_kernel_reads_are_refused() -> None:
    before, values = drawn(8, torch.float32, AT_ONCE)
    more = [*values, values[0]]
    with pytest.raises(ValueError, match="one kernel reads 3 values of a row, not 4"):
        read_cuda(more, before[0].rows, [*before[1], before[1][0]], [*before[2], before[2][0]], before[0].arena, wide=False)


@pytest.mark.parametrize("wide", [False, True])
def test_the_operator_is_declared_as_what_it_does(wide: bool) -> None:
    before, values = drawn(8, torch.float32, AT_ONCE, wide)
    args = values, before[0].rows, before[1], before[2], before[0].arena
    torch.library.opcheck(read_, args, dict(wide=wide), test_utils=("test_schema", "test_faketensor"))
