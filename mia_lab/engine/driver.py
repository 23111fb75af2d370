"""The few calls of CUDA's driver that torch does not offer."""
from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    """Call a function of the driver; RuntimeError where it fails."""
    error = getattr(_library(), name)(*args)
    if error:
        raise RuntimeError(f"CUDA's {name} failed with error {error}")


@cache
def parameter_sizes(function: int) -> list[int]:
    """Bytes of each parameter of a kernel, by the driver's handle of it; none from a driver older than CUDA 12.4, which cannot tell."""
    sizes, offset, size, ask = [], ctypes.c_size_t(), ctypes.c_size_t(), getattr(_library(), "cuFuncGetParamInfo", None)
    while ask is not None and ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


def copy_to_host(place: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """Enqueue a copy between flat tensors of one size on a stream, which need not be the current one."""
    if place.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes were to be copied into {place.nbytes}")
    call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(place.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(source.nbytes),
         ctypes.c_void_p(stream))
