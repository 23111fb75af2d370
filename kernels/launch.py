"""Launching a Triton kernel, one program a row, at a fraction of what Triton's own front end takes.

Triton looks at every argument of every launch from Python, tens of microseconds. In a step that no CUDA graph holds, such
as a large prefill, every tap in use is launched so. Here a kernel that was compiled for such arguments before is found by
what it was specialised for, and started directly.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any

import torch

EARLY = torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
REGISTERS = {True: 64, False: 32}  # of a thread, where rows crowd, by whether its kernel edits: what two rows have, and four
_FEW = 16
_VALUES = 8  # of a row in a thread, at most, for which these suffice
_ALIGNED = 15  # Triton compiles another kernel for pointers that are not at a multiple of 16 bytes

Numbers = tuple[int | float, ...]
Constants = tuple[tuple[str, int | bool], ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A compiled kernel on its device, which is there as long as Triton's own: how that runs it, the driver's handle of it, its last
    parameters, and what a block of it takes."""

    kernel: Any
    run: Any
    function: int
    metadata: Any
    last: tuple[int | bool, ...]
    threads: int
    shared: int


@dataclass(frozen=True, slots=True)
class Lesser:
    """What may run in place of a kernel that edits: where rows are only read, and, if such a kernel exists, where nothing is asked of
    its taps. The latter's parameters are those at `places` among the whole kernel's; reading takes all of them."""

    reading: Loaded
    plain: Loaded | None = None
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A kernel that does what another does without its taps, from some of its tensors and numbers, by place, and of its constants."""

    kernel: Any
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: tuple[str, ...]


PARTS: dict[str, Part] = {}  # by the other kernel's name
in_place_of: dict[int, Lesser] = {}  # by the driver's handle of the kernel that edits

_loaded: dict[tuple, Loaded] = {}


def extent(x: torch.Tensor) -> tuple[int, int]:
    """How many rows `[..., d]` has, and how far apart they are; RuntimeError where they are not at equal distances."""
    if x.dim() != 2:
        x = x.view(-1, x.shape[-1])
    return x.shape[0], x.stride(0)


def launch(kernel: Any, rows: int, d: int, tensors: Sequence[torch.Tensor], numbers: Numbers, constants: Constants) -> None:
    """Run `rows` programs, one a row of `d` columns, of a kernel with these parameters: tensors, numbers, constants, EARLY and BLOCK.

    From Hopper on a kernel starts while the one before it still runs, and waits for that one only when it is on the chip.
    """
    device, places = torch.cuda.current_device(), [x.data_ptr() for x in tensors]
    few, crowded = rows <= _FEW, rows > _processors(device)
    aligned = reduce(or_, places) & _ALIGNED == 0 or tuple(place & _ALIGNED == 0 for place in places)
    key = (id(kernel), device, few, crowded, aligned, numbers, constants, *[x.dtype for x in tensors])
    known = _loaded.get(key)
    if known is None:
        known = _loaded[key] = _load(kernel, rows, d, tensors, numbers, constants)
        if ("EDITS", True) in constants:  # a step without edits is not to wait for its kernels
            in_place_of[known.function] = _lesser(kernel, rows, d, tensors, numbers, constants)
    known.run(rows, 1, 1, torch._C._cuda_getCurrentRawStream(device), known.function, known.metadata, None, None, None,
              *places, *numbers, *known.last)


def _load(kernel: Any, rows: int, d: int, tensors: Sequence[torch.Tensor], numbers: Numbers, constants: Constants) -> Loaded:
    """Compile a kernel for such parameters and bring it onto the device.

    Few rows are a matter of latency, for which fewer warps are better. Where a processor has several rows to do, its registers
    must suffice for some of them, of which one then waits for memory while another works.
    """
    block = 1 << (d - 1).bit_length()
    warps = min(8 if rows <= _FEW else 16, max(1, block // 256))
    limited = rows > _processors(torch.cuda.current_device()) and EARLY and block <= 32 * _VALUES * warps
    limit = {"maxnreg": REGISTERS[dict(constants).get("EDITS", False)]} if limited else {}
    made = kernel.warmup(*tensors, *numbers, grid=(rows,), **dict(constants), EARLY=EARLY, BLOCK=block, launch_pdl=EARLY, num_warps=warps,
                         **limit)
    run = made.run  # which loads it
    return Loaded(made, run, made.function, made.packed_metadata, (*(value for _, value in constants), EARLY, block), 32 * warps,
                  made.metadata.shared)


def _lesser(kernel: Any, rows: int, d: int, tensors: Sequence[torch.Tensor], numbers: Numbers, constants: Constants) -> Lesser:
    reading = _load(kernel, rows, d, tensors, numbers, tuple((name, name != "EDITS" and value) for name, value in constants))
    part = PARTS.get(kernel.__name__)
    if part is None:
        return Lesser(reading)
    own = [tensors[i] for i in part.tensors], tuple(numbers[i] for i in part.numbers)
    plain = _load(part.kernel, rows, d, *own, tuple((name, value) for name, value in constants if name in part.constants))
    return Lesser(reading, plain, (*part.tensors, *(len(tensors) + i for i in part.numbers)))


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
