"""OpenTelemetry: what acted on a request, as attributes of vLLM's own `llm_request` span and of the span around it."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

_said: dict[str, Mapping[str, Any]] = {}  # attributes by the request's id, while it runs
_attributes: ContextVar[Mapping[str, Any] | None] = ContextVar("mia_lab_attributes", default=None)  # of the span that is being made


def install() -> None:
    """Have vLLM's spans carry what is said of their requests. Safe to call many times."""
    from vllm.v1.engine import output_processor
    from vllm.v1.engine.output_processor import OutputProcessor

    trace, make = OutputProcessor.do_tracing, output_processor.instrument_manual
    if getattr(trace, "mia_lab", False):
        return

    @wraps(trace)
    def do_tracing(self: OutputProcessor, engine_core_output: Any, req_state: Any, iteration_stats: Any) -> None:
        token = _attributes.set(_said.get(req_state.external_req_id))
        try:
            trace(self, engine_core_output, req_state, iteration_stats)
        finally:
            _attributes.reset(token)

    @wraps(make)
    def instrument_manual(*args: Any, attributes: dict[str, Any] | None = None, **options: Any) -> Any:
        return make(*args, attributes={**(attributes or {}), **(_attributes.get() or {})}, **options)

    do_tracing.mia_lab = True
    OutputProcessor.do_tracing, output_processor.instrument_manual = do_tracing, instrument_manual


@contextmanager
def said(request_id: str, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Say something of a request while it runs."""
    span = _current()
    if span is not None and span.is_recording():
        span.set_attributes(attributes)
    _said[request_id] = attributes
    try:
        yield
    finally:
        _said.pop(request_id, None)


def _current() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:  # which some releases of vLLM do without
        return None
    return trace.get_current_span()
