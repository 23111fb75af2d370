"""GPU time of a decode step, kernel by kernel, from a profile of two runs that differ in their length."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .cases import Work

_SHORT, _LONG = 8, 40


def kernels(run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Return, by kernel, the microseconds it took and how often it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    totals: dict[str, tuple[float, int]] = {}
    for event in found.key_averages():
        totals[event.key] = (event.self_device_time_total, event.count)
    return totals


def decode_step(run: Callable[[Work], Any], work: Work) -> dict[str, tuple[float, float]]:
    """Return, by kernel, milliseconds and launches of one decode step: a long run less a short one, by their steps."""
    short, long = (kernels(lambda n=n: run(replace(work, tokens_out=n))) for n in (_SHORT, _LONG))
    steps, found = _LONG - _SHORT, {}
    for name in long:
        before = short.get(name, (0.0, 0))
        found[name] = ((long[name][0] - before[0]) / steps / 1e3, (long[name][1] - before[1]) / steps)
    return found


@dataclass(frozen=True, slots=True)
class Account:
    """GPU time of a decode step: (milliseconds, launches) without taps and with, and the kernels that make the difference,
    as (name, milliseconds more, launches more), the largest first."""

    native: tuple[float, float]
    case: tuple[float, float]
    difference: tuple[tuple[str, float, float], ...]

    @classmethod
    def of(cls, native: dict[str, tuple[float, float]], case: dict[str, tuple[float, float]], n: int = 12) -> Account:
        """From the kernels of both, keeping the `n` that differ most."""
        zero = (0.0, 0.0)
        parts = [(name, *(case.get(name, zero)[i] - native.get(name, zero)[i] for i in (0, 1))) for name in native.keys() | case.keys()]
        total = lambda found: tuple(sum(values) for values in zip(*found.values())) or zero  # noqa: E731
        return cls(total(native), total(case), tuple(sorted(parts, key=lambda part: -abs(part[1]))[:n]))
