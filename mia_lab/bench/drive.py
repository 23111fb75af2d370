"""One run of the work, step by step, and when what happened."""
from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams

METRICS = ("step_ms", "tpot_ms", "ttft_ms", "seconds")


@dataclass(frozen=True, slots=True)
class Run:
    """vLLM's outputs, in the prompts' order, and the times of one run.

    step_ms: the median step while every request decodes, which a busy host disturbs least; tpot_ms: the mean time per output
    token after the first; ttft_ms: the mean time to the first; seconds: the whole run.
    """

    outputs: list[Any]
    step_ms: float
    tpot_ms: float
    ttft_ms: float
    seconds: float


def drive(llm: Any, prompts: Sequence[list[int]], params: Sequence[SamplingParams], began: float | None = None) -> Run:
    """Run prompts of which each yields the same number of tokens, at least two.

    began: when the run's clock started, by default now.
    """
    engine, names = llm.llm_engine, [uuid.uuid4().hex for _ in prompts]
    start = time.perf_counter()
    began = start if began is None else began
    for name, prompt, asked in zip(names, prompts, params, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, asked)
    first, last, outputs, stamps = {}, {}, {}, []
    while engine.has_unfinished_requests():
        moved = engine.step()
        now = time.perf_counter()
        for output in moved:
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
                outputs[output.request_id] = output
        if len(first) == len(names) and moved:
            stamps.append(now)
    tokens = len(outputs[names[0]].outputs[0].token_ids)
    gaps = [b - a for a, b in pairwise(stamps)] or [0.0]
    return Run([outputs[name] for name in names], 1e3 * median(gaps), 1e3 * mean((last[n] - first[n]) / (tokens - 1) for n in names),
               1e3 * mean(first[n] - start for n in names), stamps[-1] - began)
