"""What stops vLLM, as one message with its cause: out of an exception, or out of what a worker process logged before it died."""
from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from .. import errors
from ..errors import EngineError, MiaError
from . import logs

_ROOM = 1500  # characters of a cause
# What vLLM puts before each line: the process, twice where it prints through a pipe, and for its log level, time and place.
_PREFIX = re.compile(r"^(?:\([^()\n]*pid=\d+[^()\n]*\) ?)*(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]*\] ?)?", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TRACE = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*((?![ \t]).+(?:\n(?!Traceback |During handling|The above exc"
                    r"eption|[A-Z]+ \d\d-\d\d |\().+)*)", re.MULTILINE)
_ADVICE = ((r"LocalEntryNotFound|couldn't connect to 'https://huggingface", 'The model is not in the local cache. Unset HF_HUB_OFFLINE to '
            'fetch it, or give a folder, or "demo".'),
           (r"[Oo]ut ?[Oo]f ?[Mm]emory", "close() other sessions, or load with a smaller max_model_len= or max_num_seqs=."))
_ELSEWHERE = re.compile(r"root cause", re.IGNORECASE)  # vLLM's own words for: not in this exception


class Lifted:
    """Raises what stops vLLM inside the `with` block as an EngineError that says `what` failed, why, and where the log is.

    start: where in the log the cause is looked for from, by default where the log ends now. A MiaError goes on as it is, also out of
    a worker process.
    """

    def __init__(self, what: str, start: int | None = None) -> None:
        self._what, self._start = what, logs.mark() if start is None else start

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        __tracebackhide__ = True
        if isinstance(error, Exception) and not isinstance(error, MiaError):
            raise explained(error, self._what, self._start) from None


def explained(error: Exception, what: str, start: int, elsewhere: bool = False) -> MiaError:
    """Return the MiaError that says why; the error itself goes into the log. elsewhere: whether the cause can only be in the log."""
    said = logs.since(start)
    logs.keep(error)
    found = described(error)
    if elsewhere or _ELSEWHERE.search(found):
        found = logged(said) or ("its process ended without a word, as one does that is killed for want of memory"
                                 if not logs.as_vllm_would() else "its process said why in its output")
    name, _, text = found.partition(": ")
    known = getattr(errors, name.removeprefix("mia_lab.errors."), None) if name.startswith("mia_lab.errors.") else None
    advice = "".join(f"\n{said}" for pattern, said in _ADVICE if re.search(pattern, found))
    return known(text) if known else EngineError(f"{what}: {found}{advice}\nThe whole of it is in {logs.path()}")


def died(client: Any, patience: float = 2.0) -> bool:
    """Whether the engine behind vLLM's core client is dead. A call that fails for its worker's death comes before the news of it."""
    resources = getattr(client, "resources", None)  # None for an engine in this process
    end = time.monotonic() + patience
    while resources is not None and not resources.engine_dead and time.monotonic() < end:
        time.sleep(0.02)
    return resources is not None and resources.engine_dead


def logged(text: str) -> str:
    """The exception of the first traceback of a log: those after it follow from it."""
    found = _TRACE.search(_PREFIX.sub("", _COLOUR.sub("", text)))
    return found[1].strip()[:_ROOM] if found else ""


def described(error: Exception) -> str:
    """An exception's type and message; of an argument that pydantic refused, which it is and why."""
    if hasattr(error, "errors") and hasattr(error, "title"):
        faults: dict[str, list[str]] = {}
        for fault in error.errors():
            name = str(fault["loc"][0]).partition(".")[0] if fault["loc"] else ""
            faults.setdefault(name, []).append(fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "))
        return "; ".join(f"{name}: {' or '.join(messages)}" if name else " or ".join(messages) for name, messages in faults.items())[:_ROOM]
    return f"{type(error).__name__}: {error}"[:_ROOM]


def check_options(options: Iterable[str], known: Sequence[str]) -> None:
    """EngineError for a keyword that vLLM does not have, with those that are like it."""
    for name in options:
        if name not in known:
            like = [other for other in known if name in other][:3] or get_close_matches(name, known, 3)
            raise EngineError(f"neither Session nor vLLM has an option {name!r}" + (f"; did you mean {' or '.join(like)}?" if like else ""))
