"""vLLM's V2 model runner: `model_state.prepare_inputs` sees every batch, real or dummy, just before the forward."""
from __future__ import annotations

from typing import Any

from ..courier import Courier
from ..router import Router
from . import takes
from .base import RunnerAdapter


class V2Adapter(RunnerAdapter):
    """Hooks one V2 runner instance."""

    name = "V2"

    @staticmethod
    def fits(runner: Any) -> bool:
        """Whether this is a V2 runner with the expected methods."""
        state = getattr(runner, "model_state", None)
        return (state is not None and takes(state.prepare_inputs, "input_batch", "req_states")
                and takes(runner.execute_model, "scheduler_output") and takes(runner.sample_tokens, "grammar_output"))

    def install(self, router: Router, courier: Courier) -> None:
        """Hook admission, routing and delivery. A dummy batch's request ids are unknown, so it routes as neutral."""
        runner, state = self._runner, self._runner.model_state
        execute_model, prepare_inputs = runner.execute_model, state.prepare_inputs

        def execute(scheduler_output: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
            if not dummy_run:
                router.admit(scheduler_output)
            return execute_model(scheduler_output, *args, dummy_run=dummy_run, **kwargs)

        def prepare(input_batch: Any, req_states: Any) -> Any:
            self._route(router, courier, input_batch.req_ids, input_batch.num_scheduled_tokens, input_batch.num_computed_tokens_np,
                        input_batch.input_ids)
            return prepare_inputs(input_batch, req_states)

        runner.execute_model, state.prepare_inputs = execute, prepare
        self._deliver_before_sampling(router, courier)
