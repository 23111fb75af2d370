"""The vLLM general plugin. It only looks whether an engine opted in; an engine that did not runs as it would without it.

An engine opts in through `additional_config["mia_lab"]` (a Session does, or `vllm serve --additional-config`). vLLM
loads general plugins in every process, before it builds schedulers and workers.
"""
from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from . import turned_away
from .config import EngineOptions
from .core import hook, hook_client

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def register() -> None:
    """Hook the places where an engine comes to life. Safe to call many times."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if getattr(WorkerWrapperBase.init_device, "mia_lab", False):
        return
    init_device, init_scheduler = WorkerWrapperBase.init_device, Scheduler.__init__

    @wraps(init_device)
    def with_worker(self: WorkerWrapperBase) -> None:
        init_device(self)
        options = EngineOptions.of(self.vllm_config)
        if options is not None:
            from .worker import attach

            attach(self.worker, options)

    @wraps(init_scheduler)
    def with_scheduler(self: Scheduler, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        init_scheduler(self, vllm_config, *args, **kwargs)
        options = EngineOptions.of(vllm_config)
        if options is not None:
            from .scheduler import attach

            attach(self, options)

    with_worker.mia_lab = True
    hook(EngineCore)
    turned_away.hook(EngineCoreProc)
    hook_client(LLMEngine)
    WorkerWrapperBase.init_device, Scheduler.__init__ = with_worker, with_scheduler
