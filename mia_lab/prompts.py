"""Prompts: text, token ids or chat messages, made into token ids and checked before anything runs."""
from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import PromptError


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of each prompt, its chat messages where it was given as such; `one` when the caller gave a single prompt."""

    ids: list[list[int]]
    one: bool
    messages: list[list[dict] | None]

    @classmethod
    def of(cls, ids: list[list[int]]) -> Prompts:
        """Prompts given as token ids, unchecked."""
        return cls(ids, False, [None] * len(ids))

    def times(self, n: int) -> Prompts:
        """Each prompt `n` times in a row."""
        return Prompts([ids for ids in self.ids for _ in range(n)], self.one and n == 1,
                       [found for found in self.messages for _ in range(n)])


def read(prompts: Any, tokenizer: Any, max_len: int) -> Prompts:
    """Return the token ids of a str, a token-id list or tensor, chat messages, or a list of these.

    Raises PromptError for an empty prompt, one that leaves no room for a generated token, or another type.
    """
    one = _is_one(prompts)
    items = [prompts] if one else list(prompts)
    if not items:
        raise PromptError("no prompt was given")
    messages = [list(item) if isinstance(item, Sequence) and item and all(map(_is_message, item)) else None for item in items]
    return Prompts([_ids(item, i, tokenizer, max_len) for i, item in enumerate(items)], one, messages)


def _is_one(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if isinstance(value, torch.Tensor):
        return value.ndim < 2
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise PromptError(f"a prompt is a string, a list of token ids or a list of chat messages, not {type(value).__name__}")
    return bool(value) and (isinstance(value[0], int) or _is_message(value[0]))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _ids(prompt: Any, index: int, tokenizer: Any, max_len: int) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError(f"prompt {index} is empty")
        ids = list(tokenizer.encode(prompt))
    elif isinstance(prompt, torch.Tensor) and prompt.ndim:
        ids = prompt.tolist()
    elif isinstance(prompt, Sequence) and prompt and all(map(_is_message, prompt)):
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError("this model's tokenizer has no chat template; give the prompt as plain text")
        ids = list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False))
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        ids = list(prompt)
    else:
        raise PromptError(f"prompt {index} is of type {type(prompt).__name__}; "
                          f"give a string, a list of token ids or a list of chat messages")
    if not ids:
        raise PromptError(f"prompt {index} is empty")
    vocab = len(tokenizer)
    wrong = [t for t in ids if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab]
    if wrong:
        raise PromptError(f"prompt {index} holds {wrong[0]!r}, which is no token id of this model (0 to {vocab - 1})")
    if len(ids) >= max_len:
        raise PromptError(f"prompt {index} has {len(ids)} tokens; the context holds {max_len} with at least one generated. "
                          f"Shorten it or load with max_model_len={len(ids) + 1} or more")
    return ids


def resolve_at(at: Any, n_prompt: int) -> list[int]:
    """Return the prompt positions that `at` names: an int, a slice, a list of ints, or None for all."""
    every = range(n_prompt)
    try:
        if isinstance(at, (bool, str)):
            raise TypeError
        if at is None or isinstance(at, slice):
            found = list(every[at or slice(None)])
        elif hasattr(at, "__index__") and not getattr(at, "ndim", 0):
            found = [every[operator.index(at)]]
        else:
            found = [every[_place(p)] for p in at]
    except (IndexError, TypeError, ValueError):
        raise PromptError(f"at={at!r} does not fit a prompt of {n_prompt} tokens (positions 0 to {n_prompt - 1})") from None
    if not found:
        raise PromptError(f"at={at!r} names no position of a prompt of {n_prompt} tokens")
    return found


def _place(at: Any) -> int:
    """One position of a list; a mask's True and False are none, though Python counts them as 1 and 0."""
    if isinstance(at, bool) or getattr(at, "dtype", None) == torch.bool:
        raise TypeError
    return operator.index(at)


def following(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens as they follow another text, without special ones: some tokenizers put a space before what they are given."""
    mark, after, alone = (list(tokenizer.encode(part, add_special_tokens=False)) for part in ("\n", "\n" + text, text))
    return after[len(mark):] if mark and after[: len(mark)] == mark else alone
