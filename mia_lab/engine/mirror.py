"""Device tables that are written on the host first: all that changed since the last step goes over in one copy."""
from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

Tensor = torch.Tensor


class Mirror:
    """Tables of 32-bit words in one allocation on the device, each with a twin on the host.

    shapes: by table, its shape; fills: what it holds at first, where that is not 0.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], fills: Mapping[str, int], device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self._host = np.zeros(sum(sizes.values()), np.int32)
        self._starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist()))
        self._shapes = dict(shapes)
        self._columns = {name: self._starts[name] + _first_column(shape) for name, shape in shapes.items()}
        self._dirty: list[np.ndarray] = []
        for name, fill in fills.items():
            self._host[self._starts[name] : self._starts[name] + sizes[name]] = fill
        self._device = torch.from_numpy(self._host).to(device, copy=True)

    def table(self, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        """One table on the device, as `dtype` of four bytes."""
        start, shape = self._starts[name], self._shapes[name]
        return self._device[start : start + int(np.prod(shape))].view(dtype).view(shape)

    def write_lines(self, name: str, first: int, lines: np.ndarray) -> None:
        """Write `table[first : first + n] = lines` on the host; floats are kept bit by bit. The device follows at `flush`."""
        self._put(self._starts[name] + first * lines[0].size + np.arange(lines.size), lines)

    def write_column(self, name: str, place: int, column: np.ndarray) -> None:
        """Write `table[:, place] = column` for a column `[n ...]`, as `write_lines` does."""
        self._put(self._columns[name] + place * math.prod(self._shapes[name][2:]), column)

    def _put(self, places: np.ndarray, values: np.ndarray) -> None:
        self._host[places] = np.ascontiguousarray(values).view(np.int32).ravel()
        self._dirty.append(places)

    def flush(self) -> None:
        """Bring the device up to date, with one copy however much was written."""
        if not self._dirty:
            return
        places = np.concatenate(self._dirty)
        # A place written twice is sent twice, with one and the same value.
        sent = torch.from_numpy(np.stack([places, self._host[places]]))
        sent = send(sent, self._device.device)
        self._device.index_copy_(0, sent[0], sent[1].to(torch.int32))
        self._dirty.clear()  # last: what is interrupted is sent again


def _first_column(shape: tuple[int, ...]) -> np.ndarray:
    """Where `table[:, 0]` lies in a table of this shape."""
    rows, across, *inner = shape
    size = math.prod(inner)
    return (np.arange(rows)[:, None] * across * size + np.arange(size)).ravel()


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it; the pinned buffer is used again once the copy is done."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
