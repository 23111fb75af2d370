"""vLLM's outputs as lines of JSON, which `client/outputs.py` reads."""
from __future__ import annotations

import json
import math
from typing import Any


def line(index: int, output: Any) -> bytes:
    """What came of one request of a batch, new since the last line about it."""
    steps = output.prompt_logprobs
    said = {"at": index, "finished": output.finished, "cached": output.num_cached_tokens,
            "prompt_logprobs": None if steps is None else [None if step is None else _step(step) for step in steps],
            "outputs": [{"index": one.index, "text": one.text, "tokens": list(one.token_ids), "reason": one.finish_reason,
                         "stop": one.stop_reason, "cumulative": _number(one.cumulative_logprob),
                         "logprobs": None if one.logprobs is None else [_step(step) for step in one.logprobs]} for one in output.outputs]}
    return as_line(said)


def as_line(said: Any) -> bytes:
    """One line of a stream."""
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _step(step: Any) -> list[list[Any]]:
    return [[token, _number(found.logprob), found.rank, found.decoded_token] for token, found in step.items()]


def _number(value: float | None) -> float | str | None:
    """A number as JSON has it: minus infinity, the log-probability of what cannot be, as its text."""
    return value if value is None or math.isfinite(value) else str(value)
