"""What a server's requests give back, with the names that vLLM's RequestOutput has."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..sampling import MAX_N

Step = dict[int, "Logprob"]


@dataclass(slots=True)
class Logprob:
    """A token's log-probability, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class Completion:
    """One continuation. finish_reason: None while it goes on."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Step] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it is over."""
        return self.finish_reason is not None


@dataclass(slots=True)
class Output:
    """One prompt's continuations, and what is known of the prompt. It grows while the request runs."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[Step | None] | None = None
    num_cached_tokens: int | None = None
    finished: bool = False

    def grow(self, said: Mapping[str, Any]) -> None:
        """Take in what came: of each continuation its new text and tokens. KeyError, TypeError or ValueError for what is none."""
        self.finished, self.num_cached_tokens = bool(said["finished"]), said["cached"]
        if said["prompt_logprobs"] is not None:
            self.prompt_logprobs = [None if step is None else _step(step) for step in said["prompt_logprobs"]]
        for one in said["outputs"]:
            index = int(one["index"])
            if not 0 <= index < MAX_N:
                raise ValueError(f"there is no continuation {index}")
            while index >= len(self.outputs):
                self.outputs.append(Completion(len(self.outputs)))
            found = self.outputs[index]
            found.text += one["text"]
            found.token_ids += map(int, one["tokens"])
            if one["logprobs"] is not None:
                found.logprobs = (found.logprobs or []) + list(map(_step, one["logprobs"]))
            found.cumulative_logprob = None if one["cumulative"] is None else float(one["cumulative"])
            found.finish_reason, found.stop_reason = one["reason"], one["stop"]


def _step(said: Sequence[Sequence[Any]]) -> Step:
    return {int(token): Logprob(float(value), rank, text) for token, value, rank, text in said}
