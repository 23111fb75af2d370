"""What both runners' adapters share: one step is followed from its routing to the moment its forward is enqueued."""
from __future__ import annotations

from typing import Any

from ..courier import Courier
from ..router import Router, Step


class RunnerAdapter:
    """Hooks one runner instance. A subclass says which runner fits, and hooks admission and routing."""

    name: str

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._step: Step | None = None

    def recover(self) -> None:
        """Forget a step that was broken off between its forward and its sampling."""
        self._step = None
        self._runner.execute_model_state = None

    def _route(self, router: Router, courier: Courier, *batch: Any) -> None:
        self._step = router.route(*batch)
        courier.before_forward(self._step)

    def _deliver_before_sampling(self, router: Router, courier: Courier) -> None:
        sample_tokens = self._runner.sample_tokens

        def sample(*args: Any, **kwargs: Any) -> Any:
            step, self._step = self._step, None
            router.gates.after_forward()
            if step is not None:
                courier.after_forward(step)
            return sample_tokens(*args, **kwargs)

        self._runner.sample_tokens = sample
