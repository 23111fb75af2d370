"""vLLM's V1 model runner (also the CPU build's): the batch's order is final after `_prepare_inputs`."""
from __future__ import annotations

from typing import Any

from ..courier import Courier
from ..router import Router
from . import takes
from .base import RunnerAdapter


class V1Adapter(RunnerAdapter):
    """Hooks one V1 runner instance."""

    name = "V1"

    @staticmethod
    def fits(runner: Any) -> bool:
        """Whether this is a V1 runner with the expected methods."""
        return (hasattr(runner, "input_batch") and hasattr(runner, "_prepare_inputs")
                and takes(runner._prepare_inputs, "scheduler_output", "num_scheduled_tokens")
                and takes(runner.execute_model, "scheduler_output") and takes(runner.sample_tokens, "grammar_output"))

    def install(self, router: Router, courier: Courier) -> None:
        """Hook admission, routing, delivery and dummy runs."""
        runner = self._runner
        execute_model, prepare_inputs, dummy_run = runner.execute_model, runner._prepare_inputs, runner._dummy_run

        def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            router.admit(scheduler_output)
            return execute_model(scheduler_output, *args, **kwargs)

        def prepare(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)
            batch = runner.input_batch
            n = batch.num_reqs
            self._route(router, courier, batch.req_ids[:n], num_scheduled_tokens[:n], batch.num_computed_tokens_cpu[:n],
                        runner.input_ids.gpu)
            return prepared

        def dummy(*args: Any, **kwargs: Any) -> Any:
            router.neutralise()
            return dummy_run(*args, **kwargs)

        runner.execute_model, runner._prepare_inputs, runner._dummy_run = execute, prepare, dummy
        self._deliver_before_sampling(router, courier)
