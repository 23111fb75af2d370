"""vLLM's engine core, which sees every request and every call first: where an engine opted in, they pass its desk."""
from __future__ import annotations

import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any

from ..errors import MiaError
from .config import EngineOptions
from .desk import Desk

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine


def hook(core: type[EngineCore]) -> None:
    """Give engine cores a desk. An exception where a request comes in ends that request: an engine that runs by itself sends
    its client an error, one in the client's process raises."""
    if not all(hasattr(core, name) for name in ("_initialize_kv_caches", "preprocess_add_request", "collective_rpc")):
        return  # engines that opt in are then refused, for want of a desk
    # vLLM loads plugins within an engine core's __init__, which calls this between making its workers and its scheduler.
    initialise, preprocess, collective_rpc = core._initialize_kv_caches, core.preprocess_add_request, core.collective_rpc

    @wraps(initialise)
    def with_desk(self: EngineCore, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        found = initialise(self, vllm_config, *args, **kwargs)
        if EngineOptions.of(vllm_config) is not None:
            ask = lambda name, *given: self.model_executor.collective_rpc(f"mia_{name}", args=given)[0]  # noqa: E731
            self.mia_desk = Desk(ask("describe"), ask, ranked=vllm_config.scheduler_config.policy == "priority")
            object.__setattr__(vllm_config, "mia_desk", weakref.ref(self.mia_desk))  # for the scheduler
        return found

    @wraps(preprocess)
    def let_in(self: EngineCore, request: EngineCoreRequest) -> Any:
        desk = getattr(self, "mia_desk", None)
        if desk is None:
            return preprocess(self, request)
        desk.enter(request)
        try:
            return preprocess(self, request)
        except BaseException:
            desk.undo(request.request_id)
            raise

    @wraps(collective_rpc)
    def answered(self: EngineCore, method: Any, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None) -> Any:
        desk = getattr(self, "mia_desk", None)
        found = desk.answer(method, args) if desk is not None and isinstance(method, str) and not kwargs else None
        return collective_rpc(self, method, timeout, args, kwargs) if found is None else found

    core._initialize_kv_caches, core.preprocess_add_request, core.collective_rpc = with_desk, let_in, answered


def hook_client(client: type[LLMEngine]) -> None:
    """Have a client whose engine is in its process forget a request that was turned away: vLLM would wait for it for ever."""
    add_request = client.add_request

    @wraps(add_request)
    def add(self: LLMEngine, *args: Any, **kwargs: Any) -> Any:
        known = self.output_processor.request_states
        before = len(known)
        try:
            return add_request(self, *args, **kwargs)
        except MiaError:
            self.abort_request(list(known)[before:], internal=True)
            raise

    client.add_request = add
