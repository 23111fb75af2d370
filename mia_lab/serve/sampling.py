"""Sampling parameters as a notebook client may send them: a fixed list of names, each with bounds, before vLLM sees any."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_N = 16
_TEXTS, _TEXT = 64, 512  # of stop texts and bad words, and characters of each


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one model: tokens of its context and of its vocabulary, and log-probabilities a position."""

    max_len: int
    d_vocab: int
    max_logprobs: int


def checked(params: object, bounds: Bounds) -> dict[str, Any]:
    """Return parameters as SamplingParams takes them, without those that are None. ValueError for another name or a value out of bounds."""
    if not isinstance(params, Mapping):
        raise ValueError("sampling parameters are names and values")
    unknown = sorted(str(name)[:64] for name in params if name not in _CHECKS)
    if unknown:
        raise ValueError(f"a server takes no sampling parameter {unknown[0]!r}; it takes {', '.join(sorted(_CHECKS))}")
    found = {}
    for name, value in params.items():
        if value is not None:
            reason = _CHECKS[name](value, bounds)
            if reason:
                raise ValueError(f"{name} is {reason}, not {str(value)[:64]!r}")
            found[name] = {int(token): bias for token, bias in value.items()} if name == "logit_bias" else value
    return found


Check = Callable[[Any, Bounds], str]  # "" for a value that is right, else what it should be


def _whole(low: int, high: Callable[[Bounds], int]) -> Check:
    return lambda value, b: "" if _is_int(value) and low <= value <= high(b) else f"a whole number from {low} to {high(b)}"


def _real(low: float, high: float) -> Check:
    return lambda value, b: "" if _is_real(value) and low <= value <= high else f"a number from {low:g} to {high:g}"


def _flag(value: Any, bounds: Bounds) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _texts(value: Any, bounds: Bounds) -> str:
    listed = [value] if isinstance(value, str) else value
    right = (isinstance(listed, (list, tuple)) and len(listed) <= _TEXTS
             and all(isinstance(one, str) and 0 < len(one) <= _TEXT for one in listed))
    return "" if right else f"a text or a list of {_TEXTS} at most, each of {_TEXT} characters at most"


def _tokens(most: Callable[[Bounds], int]) -> Check:
    def check(value: Any, bounds: Bounds) -> str:
        right = (isinstance(value, (list, tuple)) and 0 < len(value) <= most(bounds)
                 and all(_is_int(token) and 0 <= token < bounds.d_vocab for token in value))
        return "" if right else f"a list of token ids, {most(bounds)} at most"

    return check


def _bias(value: Any, bounds: Bounds) -> str:
    def is_token(name: Any) -> bool:
        text = str(name)
        return text.isascii() and text.isdigit() and len(text) < 10 and int(text) < bounds.d_vocab

    right = isinstance(value, Mapping) and len(value) <= 1024 and all(is_token(name) and _is_real(bias) and abs(bias) <= 1000
                                                                      for name, bias in value.items())
    return "" if right else "a bias from -1000 to 1000 for token ids, 1024 at most"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_int(value)


_LOGPROBS = _whole(0, lambda b: b.max_logprobs)
_LENGTH = lambda b: b.max_len  # noqa: E731
_CHECKS: dict[str, Check] = {
    "n": _whole(1, lambda b: MAX_N), "max_tokens": _whole(1, _LENGTH), "min_tokens": _whole(0, _LENGTH),
    "temperature": _real(0, 100), "top_p": _real(0, 1), "top_k": _whole(-1, lambda b: b.d_vocab), "min_p": _real(0, 1),
    "presence_penalty": _real(-2, 2), "frequency_penalty": _real(-2, 2), "repetition_penalty": _real(0, 100),
    "seed": _whole(-(1 << 63), lambda b: (1 << 63) - 1), "logprobs": _LOGPROBS, "prompt_logprobs": _LOGPROBS,
    "stop": _texts, "bad_words": _texts, "stop_token_ids": _tokens(lambda b: 1024), "allowed_token_ids": _tokens(lambda b: b.d_vocab),
    "logit_bias": _bias,
    **dict.fromkeys(("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
                     "skip_reading_prefix_cache"), _flag)}
