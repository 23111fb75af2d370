"""Launching a Triton kernel, one program a row, at a fraction of what Triton's own front end takes.

Triton looks at every argument of every launch from Python, tens of microseconds. In a step that no CUDA graph holds, such
as a large prefill, every tap in use is launched so. Here a kernel that was compiled for such arguments before is found by
what it was specialised for, and started directly.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import torch

EARLY = torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
REGISTERS = {True: 64, False: 32}  # of a thread, where rows crowd, by whether its kernel edits: what two rows have, and four
_FEW = 16
_VALUES = 8  # of a row in a thread, at most, for which these suffice
_ALIGNED = 15  # Triton compiles another kernel for pointers that are not at a multiple of 16 bytes

_compiled: dict[tuple, tuple[Any, Any, Any, tuple]] = {}  # how to start a kernel, and its last parameters


def extent(x: torch.Tensor) -> tuple[int, int]:
    """How many rows `[..., d]` has, and how far apart they are; RuntimeError where they are not at equal distances."""
    if x.dim() != 2:
        x = x.view(-1, x.shape[-1])
    return x.shape[0], x.stride(0)


def launch(kernel: Any, rows: int, d: int, tensors: Sequence[torch.Tensor], numbers: tuple[int | float, ...],
           constants: tuple[tuple[str, int | bool], ...]) -> None:
    """Run `rows` programs, one a row of `d` columns, of a kernel with these parameters: tensors, numbers, constants, EARLY and BLOCK.

    From Hopper on a kernel starts while the one before it still runs, and waits for that one only when it is on the chip.
    Few rows are a matter of latency, for which fewer warps are better. Where a processor has several rows to do, its registers
    must suffice for some of them, of which one then waits for memory while another works.
    """
    device, places = torch.cuda.current_device(), [x.data_ptr() for x in tensors]
    few, crowded = rows <= _FEW, rows > _processors(device)
    aligned = reduce(or_, places) & _ALIGNED == 0 or tuple(place & _ALIGNED == 0 for place in places)
    key = (id(kernel), device, few, crowded, aligned, numbers, constants, *[x.dtype for x in tensors])
    known = _compiled.get(key)
    if known is not None:
        run, function, metadata, last = known
        run(rows, 1, 1, torch._C._cuda_getCurrentRawStream(device), function, metadata, None, None, None, *places, *numbers, *last)
        return
    block = 1 << (d - 1).bit_length()
    warps = min(8 if few else 16, max(1, block // 256))
    limited = crowded and EARLY and block <= 32 * _VALUES * warps

    def how(constants: dict[str, int | bool]) -> dict[str, int | bool]:
        limit = {"maxnreg": REGISTERS[constants.get("EDITS", False)]} if limited else {}
        return constants | dict(EARLY=EARLY, BLOCK=block, launch_pdl=EARLY, num_warps=warps) | limit

    made = kernel[(rows,)](*tensors, *numbers, **how(dict(constants)))
    _compiled[key] = made.run, made.function, made.packed_metadata, (*(value for _, value in constants), EARLY, block)
    if ("EDITS", True) in constants:  # a step without edits is not to wait for its kernel
        kernel.warmup(*tensors, *numbers, grid=(rows,), **how(dict(constants) | {"EDITS": False}))


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
