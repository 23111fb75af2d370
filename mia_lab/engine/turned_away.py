"""Why the desk turned a request away, on its way to whoever sent it: an engine in a process of its own ends the request by an output
of finish reason "error", which has the error's name and words for a stop reason."""
from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING

from ..errors import MiaError, named

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCoreProc

_MARK = "mia_lab"
_CHARS = 1000  # of the words


def hook(core: type[EngineCoreProc]) -> None:
    """Have engine cores that run by themselves say why; vLLM's own say "error", and write a traceback for each into their log."""
    failed = getattr(core, "_handle_request_preproc_error", None)
    if failed is None:  # then the log alone says why
        return

    @wraps(failed)
    def told(self: EngineCoreProc, request: EngineCoreRequest) -> None:
        error = sys.exception()
        if not isinstance(error, MiaError):
            failed(self, request)
            return
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        last = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=as_text(error))
        self.output_queue.put_nowait((request.client_index, EngineCoreOutputs(outputs=[last], finished_requests={request.request_id})))

    core._handle_request_preproc_error = told


def as_text(error: MiaError) -> str:
    """An error as a stop reason."""
    return f"{_MARK} {type(error).__name__} {str(error)[:_CHARS]}"


def reason(output: RequestOutput) -> MiaError | None:
    """The error for which the desk turned a request away; None where it did not, whatever else ended it."""
    for one in output.outputs:
        if one.finish_reason == "error" and isinstance(one.stop_reason, str):
            mark, _, rest = one.stop_reason.partition(" ")
            if mark == _MARK:
                name, _, words = rest.partition(" ")
                return named(name, words)
    return None


def check(output: RequestOutput) -> None:
    """Raise the error for which the desk turned a request away, if it did."""
    error = reason(output)
    if error is not None:
        raise error
