"""The only code that knows which model runner it is. A runner is adapted by these calls and no others:

- `router.admit(scheduler_output)` before a step, then `router.route(req_ids, counts, starts, input_ids)` once the batch's
  order is final and before the forward is launched;
- `courier.before_forward(step)` right after routing; `router.gates.after_forward()` and `courier.after_forward(step)`
  once the forward is enqueued;
- `router.neutralise()` before any dummy forward (warm-up, graph capture, idle data-parallel ranks).
"""
from __future__ import annotations

import inspect
import warnings
from typing import Any, Protocol

import vllm

from ...errors import UnsupportedError
from ..courier import Courier
from ..router import Router

SUPPORTED = ((0, 25, 1), (0, 34))
TESTED = ("0.25.1", "0.27.1", "0.30.0", "0.32.0")


class Adapter(Protocol):
    """Connects one runner instance to the router and the courier."""

    name: str

    def install(self, router: Router, courier: Courier) -> None:
        """Hook the runner. Called once, after the model is loaded."""

    def recover(self) -> None:
        """Forget a step that was broken off between its forward and its sampling."""


def adapter_for(runner: Any) -> Adapter:
    """Return the adapter for a runner; UnsupportedError for an unknown version or runner, with what is supported."""
    from . import v1, v2

    release, version = _release()
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UnsupportedError(f"vLLM {vllm.__version__} is not supported; supported is 0.25.1 up to 0.33")
    if release not in TESTED:
        warnings.warn(f"mia_lab is untested with vLLM {release}; tested are {', '.join(TESTED)}", stacklevel=2)
    for adapter in (v2.V2Adapter, v1.V1Adapter):
        if adapter.fits(runner):
            return adapter(runner)
    raise UnsupportedError(f"the model runner {type(runner).__module__}.{type(runner).__name__} is not supported; "
                           f"supported are vLLM's V1 and V2 runners")


def splits_state_blocks() -> bool:
    """Whether this vLLM schedules less than a block of a hybrid model's states where a step's budget is smaller."""
    return _release()[1] >= (0, 32)


def _release() -> tuple[str, tuple[int, ...]]:
    release = vllm.__version__.split("+")[0]
    return release, tuple(int(part) for part in release.split(".")[:3] if part.isdigit())


def takes(method: Any, *names: str) -> bool:
    """Whether a bound method's first parameters are `names`: private API is hooked only where it is as expected."""
    return list(inspect.signature(method).parameters)[: len(names)] == list(names)


def without_lora(runner: Any, rows: int) -> None:
    """Set a LoRA engine to run the next `rows` rows of a forward outside of its loop without an adapter."""
    if getattr(runner, "lora_config", None) is not None:
        runner._set_active_loras((0,) * rows, (0,) * rows, set())
