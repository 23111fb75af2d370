"""Between text and tokens, in TransformerLens's words."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import PromptError

if TYPE_CHECKING:
    from .prompts import Prompts
    from .running.engine_like import EngineLike


class Texts:
    """What a Session says about texts and their tokens."""

    _engine: EngineLike

    def _read(self, prompts: Any) -> Prompts:
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def to_tokens(self, text: str | Sequence[str]) -> torch.Tensor:
        """Return token ids `[batch pos]`, right-padded with the pad (or EOS) token, as the model will see them."""
        ids = self._read(text).ids
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.tokenizer.eos_token_id or 0)
        width = max(map(len, ids))
        return torch.tensor([row + [pad] * (width - len(row)) for row in ids])

    def to_str_tokens(self, prompt: Any) -> list[str]:
        """Return the text of each token of one prompt."""
        ids = self._read(prompt).ids
        if len(ids) != 1:
            raise PromptError(f"to_str_tokens takes one prompt, not {len(ids)}")
        return [self.tokenizer.decode([i]) for i in ids[0]]

    def to_string(self, tokens: torch.Tensor | Sequence[int]) -> str | list[str]:
        """Return the text of token ids `[pos]`, or a list of texts for `[batch pos]`."""
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        return self.tokenizer.decode(ids) if not ids or isinstance(ids[0], int) else [self.tokenizer.decode(row) for row in ids]
