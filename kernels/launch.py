"""Launching a Triton kernel, one program a row, at a fraction of what Triton's own front end takes.

Triton looks at every argument of every launch from Python, tens of microseconds. In a step that no CUDA graph holds, such
as a large prefill, every tap in use is launched so. Here a kernel that was compiled for such arguments before is found by
what it was specialised for, and started directly.
"""
from __future__ import annotations

from typing import Any

import torch

EARLY = torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
_FEW = 16
_ALIGNED = 15  # Triton compiles another kernel for pointers that are not at a multiple of 16 bytes

_compiled: dict[tuple, Any] = {}


def extent(x: torch.Tensor) -> tuple[int, int]:
    """How many rows `[..., d]` has, and how far apart they are; RuntimeError where they are not at equal distances."""
    if x.dim() != 2:
        x = x.view(-1, x.shape[-1])
    return x.shape[0], x.stride(0)


def launch(kernel: Any, rows: int, d: int, args: tuple[torch.Tensor | int | float, ...],
           constants: tuple[tuple[str, int | bool], ...]) -> None:
    """Run `rows` programs, one a row of `d` columns, of a kernel whose parameters are `args`, then `constants`, EARLY and BLOCK.

    From Hopper on a kernel starts while the one before it still runs, and waits for that one only when it is on the chip.
    Few rows are a matter of latency, for which fewer warps are better.
    """
    few, block, places, kind = rows <= _FEW, 1 << (d - 1).bit_length(), [], [id(kernel), constants]
    for value in args:
        if isinstance(value, torch.Tensor):
            place = value.data_ptr()
            places.append(place)
            kind.append((value.dtype, place & _ALIGNED == 0))
        else:
            places.append(value)
            kind.append(value)
    key = (few, torch.cuda.current_device(), *kind)
    known = _compiled.get(key)
    if known is not None:
        known[rows, 1, 1](*places, *(value for _, value in constants), EARLY, block)
        return
    warps = min(8 if few else 16, max(1, block // 256))
    _compiled[key] = kernel[(rows,)](*args, **dict(constants), EARLY=EARLY, BLOCK=block, launch_pdl=EARLY, num_warps=warps)
