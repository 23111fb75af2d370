"""An engine that did not opt in runs as it would without the plugin."""
from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from mia_lab.running.launch import bare_engine, close_engine

pytestmark = pytest.mark.full


def test_an_engine_without_the_opt_in_is_left_alone(models: Path) -> None:
    from mia_lab.engine.plugin import register

    register()
    register()
    llm = bare_engine(str(tiny.build("llama", models)), dict(tokenizer=str(tiny.tokenizer(models)), dtype="float32",
                                                             max_model_len=64, enforce_eager=True))
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    assert not hasattr(worker, "mia_fetch")
    assert not hasattr(core, "mia_desk")
    assert not [name for name in ("execute_model", "sample_tokens", "_prepare_inputs") if name in vars(worker.model_runner)]
    assert not [name for name in ("schedule", "add_request", "_free_request") if name in vars(core.scheduler)]
    assert not [m for m in worker.model_runner.get_model().modules() if type(m).__name__.startswith("Tapped")]
    close_engine(llm)
