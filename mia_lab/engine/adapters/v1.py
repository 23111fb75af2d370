"""vLLM's V1 model runner (also the CPU build's): the batch's order is final after `_prepare_inputs`."""
from __future__ import annotations

from typing import Any

from ..courier import Courier
from ..router import Router, Step
from . import takes


class V1Adapter:
    """Hooks one V1 runner instance."""

    name = "V1"

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._step: Step | None = None

    @staticmethod
    def fits(runner: Any) -> bool:
        """Whether this is a V1 runner with the expected methods."""
        return (hasattr(runner, "input_batch") and hasattr(runner, "_prepare_inputs")
                and takes(runner._prepare_inputs, "scheduler_output", "num_scheduled_tokens")
                and takes(runner.execute_model, "scheduler_output") and takes(runner.sample_tokens, "grammar_output"))

    def recover(self) -> None:
        """Forget a step that was broken off between its forward and its sampling."""
        self._step = None
        self._runner.execute_model_state = None

    def install(self, router: Router, courier: Courier) -> None:
        """Hook admission, routing, delivery and dummy runs."""
        runner = self._runner
        execute_model, prepare_inputs = runner.execute_model, runner._prepare_inputs
        sample_tokens, dummy_run = runner.sample_tokens, runner._dummy_run

        def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            router.admit(scheduler_output)
            return execute_model(scheduler_output, *args, **kwargs)

        def prepare(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)
            batch = runner.input_batch
            n = batch.num_reqs
            self._step = router.route(batch.req_ids[:n], num_scheduled_tokens[:n], batch.num_computed_tokens_cpu[:n],
                                      runner.input_ids.gpu)
            courier.before_forward(self._step)
            return prepared

        def sample(*args: Any, **kwargs: Any) -> Any:
            step, self._step = self._step, None
            router.gates.after_forward()
            if step is not None:
                courier.after_forward(step)
            return sample_tokens(*args, **kwargs)

        def dummy(*args: Any, **kwargs: Any) -> Any:
            router.neutralise()
            return dummy_run(*args, **kwargs)

        runner.execute_model, runner._prepare_inputs = execute, prepare
        runner.sample_tokens, runner._dummy_run = sample, dummy
