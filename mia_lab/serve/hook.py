"""Where a server's requests pass: `AsyncLLM.generate`, and the stack of middlewares of its app. Only engines that serve are touched."""
from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from ..engine.wire import KEY
from .call import CALL
from .front import HEADERS, Front
from .refusing import Refused
from .service import Service

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from vllm.v1.engine.async_llm import AsyncLLM


def install() -> None:
    """Hook this process's server. Safe to call many times."""
    from fastapi import FastAPI
    from starlette.applications import Starlette
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    _wrap(AsyncLLM, "generate", _generating)
    for app in (Starlette, FastAPI):
        _wrap(app, "build_middleware_stack", _fronted)
    for request in (ChatCompletionRequest, CompletionRequest, TranscriptionRequest, TranslationRequest):
        _wrap(request, "to_beam_search_params", _without_edits)


def _wrap(owner: type, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace a method that a class defines itself, once."""
    original = vars(owner).get(name)
    if original is not None and not getattr(original, "mia_lab", False):
        wrapped = wraps(original)(wrapper(original))
        wrapped.mia_lab = True
        setattr(owner, name, wrapped)


def _generating(original: Callable) -> Callable:
    def generate(self: AsyncLLM, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator:
        service = Service.of(self)
        if service is None:
            return original(self, prompt, sampling_params, request_id, **options)
        return service.serve(prompt, sampling_params, request_id, options)

    return generate


def _fronted(original: Callable) -> Callable:
    def build_middleware_stack(self: Starlette) -> Any:
        stack = original(self)
        return stack if isinstance(stack, _Door) else _Door(self, stack)

    return build_middleware_stack


class _Door:
    """A server's app, with the front before it where its engine serves. Some stacks are built before their app has an engine."""

    def __init__(self, app: Starlette, stack: Any) -> None:
        self._app, self._stack = app, stack
        self._front: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._front is None:
            self._front = self._found()
        await (self._front or self._stack)(scope, receive, send)

    def _found(self) -> Any:
        """What stands first from now on; None as long as the app has no engine."""
        state = self._app.state
        engine = getattr(state, "engine_client", None)
        service = None if engine is None else Service.of(engine)
        if service is None:
            return None if engine is None else self._stack
        service.vllm_keys = bool(getattr(getattr(state, "args", None), "api_key", None) or os.environ.get("VLLM_API_KEY"))
        return _fronting(self._stack, service)


def _fronting(stack: Any, service: Service) -> Any:
    """A stack with the front before all of it but CORS: a browser's preflight carries no key, and every answer needs CORS's headers, a
    refusal too. Which pages may read answers is still what vLLM's --allowed-origins says."""
    from starlette.middleware.cors import CORSMiddleware

    above, cors = stack, getattr(stack, "app", None)
    while cors is not None and not isinstance(cors, CORSMiddleware):
        above, cors = cors, getattr(cors, "app", None)
    if cors is None:
        return Front(stack, service)
    above.app, cors.app = cors.app, Front(stack, service)
    exposed = "Access-Control-Expose-Headers"
    cors.simple_headers[exposed] = ", ".join([one for one in (cors.simple_headers.get(exposed),) if one] + list(HEADERS))
    return cors


def _without_edits(original: Callable) -> Callable:
    """Beam search runs requests of its own, which carry no edit and no capture: it is refused where there should be any."""
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = CALL.get()
        if call is not None and (KEY in (getattr(self, "vllm_xargs", None) or {}) or call.catalogue.policy.defaults):
            raise call.refuse(Refused(400, "beam search takes no edits and no capture, and this request asks for some or the server has "
                                           "default edits; use sampling with n, or ask for neither"))
        return original(self, *args, **kwargs)

    return to_beam_search_params
