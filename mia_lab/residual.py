"""The stream taken apart: its course through the blocks, what each of them adds, and what that does to a logit.

Names, labels and shapes are TransformerLens's. Stacks are float32 `[component batch pos d_model]`; padded positions stay NaN.
What each part adds is exact: no norm is folded into weights, and the final norm's scale is that of the whole stream.
Under edits of the stream between branches, what these add is in no part, and the parts sum to the stream less that.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import EditError, MissingRowsError, PointError
from .lazy import LazyTensor

Tensor = torch.Tensor
Slice = int | slice | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Readout:
    """How the final norm and the unembedding read some tokens: a logit, before any soft cap, is `x / scale @ vectors[t] + bias[t]`.

    vectors `[token d_model]`, bias `[token]`, float32. centred: the norm first takes the mean of x off; eps: its epsilon.
    """

    vectors: Tensor
    bias: Tensor
    centred: bool
    eps: float

    def scale(self, stream: Tensor) -> Tensor:
        """What the norm divides a stream `[... d_model]` by, `[... 1]`."""
        return (self.centre(stream).square().mean(-1, keepdim=True) + self.eps).sqrt()

    def centre(self, x: Tensor) -> Tensor:
        """x, less its mean where the norm takes that off."""
        return x - x.mean(-1, keepdim=True) if self.centred else x


class Residual:
    """The methods of an ActivationCache that need nothing but its values, and the model's own readout."""

    _batch: Any
    _source: Any

    def __getitem__(self, key: object) -> LazyTensor:
        raise NotImplementedError

    def accumulated_resid(self, layer: int | None = None, incl_mid: bool = False, apply_ln: bool = False, pos_slice: Slice = None,
                          mlp_input: bool = False, return_labels: bool = False) -> Tensor | tuple[Tensor, list[str]]:
        """Return the stream before each block up to `layer`, by default before all of them and after the last.

        incl_mid: also between attention and MLP; mlp_input: end before that layer's MLP; apply_ln: divide by the final norm's scale.
        """
        last = self._until(layer)
        labels, parts = [], []
        for i in range(last + 1):
            if i == self._n_layers:
                labels.append("final_post")
                parts.append(self._stream(i))
                continue
            labels.append(f"{i}_pre")
            parts.append(self._stream(i))
            if (incl_mid and i < last) or (mlp_input and i == last):
                labels.append(f"{i}_mid")
                parts.append(self._float("resid_mid", i))
        return self._stacked(parts, labels, apply_ln, layer, mlp_input, pos_slice, return_labels)

    def decompose_resid(self, layer: int | None = None, mlp_input: bool = False, mode: str = "all", apply_ln: bool = False,
                        pos_slice: Slice = None, incl_embeds: bool = True,
                        return_labels: bool = False) -> Tensor | tuple[Tensor, list[str]]:
        """Return what the embedding and each branch before `layer` (by default all) added; the sum is the stream there.

        mode: "all", "attn" or "mlp", the branches to return. The embedding includes positions where the model adds them.
        """
        if mode not in ("all", "attn", "mlp"):
            raise PointError(f'mode is "all", "attn" or "mlp", not {mode!r}')
        self._refuse_mixed()
        last = self._until(layer)
        labels, parts = (["embed"], [self._stream(0)]) if incl_embeds else ([], [])
        for i in range(last + (mlp_input and last < self._n_layers)):
            for kind in ("attn", "mlp"):
                if mode in ("all", kind) and not (i == last and kind == "mlp"):
                    labels.append(f"{i}_{kind}_out")
                    parts.append(self._float(f"{kind}_out", i))
        return self._stacked(parts, labels, apply_ln, layer, mlp_input, pos_slice, return_labels)

    def apply_ln_to_stack(self, residual_stack: Tensor, layer: int | None = None, mlp_input: bool = False,
                          pos_slice: Slice = None) -> Tensor:
        """Divide parts of the stream `[component batch pos d_model]` by the scale that a norm has for the whole stream at `layer`.

        The norm's mean is taken off where it does that; its weight is not applied. By default the final norm's.
        """
        read = self._readout([0])
        last = self._until(layer)
        whole = self._float("resid_mid", last) if mlp_input and last < self._n_layers else self._stream(last)
        stream = cut(whole, pos_slice)
        _fits(residual_stack, stream)
        return read.centre(residual_stack) / read.scale(stream)

    def logit_attrs(self, residual_stack: Tensor, tokens: Any, incorrect_tokens: Any = None, pos_slice: Slice = None) -> Tensor:
        """Return what each part of the stream adds to a token's logit, `[component batch pos]`, or to the difference of two.

        residual_stack: as `decompose_resid` gives it for all layers, with the same pos_slice. tokens, incorrect_tokens: one token,
        as an id or text, or one a prompt. Logits are those before a soft cap. The parts, and the bias `logit_bias`, sum to the logit.
        """
        stream = cut(self._stream(self._n_layers), pos_slice)
        _fits(residual_stack, stream)
        found = 0.0
        for sign, asked in ((1.0, tokens), (-1.0, incorrect_tokens)):
            if asked is not None:
                read = self._reading(asked)
                along = read.vectors[:, None] if stream.dim() == 3 else read.vectors  # [batch (pos) d_model]
                found = found + sign * (read.centre(residual_stack) / read.scale(stream) * along).sum(-1)
        return found

    def logit_bias(self, tokens: Any, incorrect_tokens: Any = None) -> Tensor:
        """Return the part of a logit, or of the difference of two, that no part of the stream adds, `[batch]`."""
        found = self._reading(tokens).bias
        return found if incorrect_tokens is None else found - self._reading(incorrect_tokens).bias

    def _refuse_mixed(self) -> None:
        if self._batch.mixed:
            raise EditError("this cache was read before the edits of its run, so its parts do not sum to a stream; leave out before=True")

    @property
    def _n_layers(self) -> int:
        return self._batch.n_layers

    def _until(self, layer: int | None) -> int:
        """The block that the stream is taken before; the number of blocks for the end. PointError where there is none."""
        if layer in (None, -1):
            return self._n_layers
        if not 0 <= layer <= self._n_layers:
            raise PointError(f"layer={layer} is no block to stop before; give 0 to {self._n_layers}, or leave it out for the end")
        return layer

    def _float(self, kind: str, layer: int) -> Tensor:
        return self[kind, layer].get().float()

    def _stream(self, layer: int) -> Tensor:
        """The stream before a block, from whichever point holds it; after the last one for the number of blocks."""
        if layer == self._n_layers or (layer and ("resid_pre", layer) not in self):
            return self._float("resid_post", layer - 1)
        return self._float("resid_pre", layer)

    def _stacked(self, parts: list[Tensor], labels: list[str], apply_ln: bool, layer: int | None, mlp_input: bool, pos_slice: Slice,
                 return_labels: bool) -> Tensor | tuple[Tensor, list[str]]:
        stack = torch.stack([cut(part, pos_slice) for part in parts])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice)
        return (stack, labels) if return_labels else stack

    def _readout(self, ids: list[int]) -> Readout:
        if self._source is None:
            raise MissingRowsError("the model's unembedding is read from its session, which this cache no longer holds")
        return self._source.readout(ids)

    def _reading(self, tokens: Any) -> Readout:
        """How the model's end reads one token a prompt."""
        self._refuse_mixed()
        if self._batch.normed:
            raise EditError("an edit acts on the final norm's output, after which no part of the stream has a share of a logit")
        return self._readout(self._ids(tokens))

    def _ids(self, tokens: Any) -> list[int]:
        """One token id a prompt."""
        n = len(self._batch.n_prompt)
        listed = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
        listed = [listed] * n if isinstance(listed, (int, str)) else list(listed)
        if len(listed) != n:
            raise PointError(f"give one token, or one for each of the {n} prompts; these are {len(listed)}")
        return [self._source.token_id(token) if isinstance(token, str) else int(token) for token in listed]


def _fits(stack: Tensor, stream: Tensor) -> None:
    """PointError unless a stack has the stream's prompts and positions, which broadcasting could otherwise mix up."""
    if stack.shape[1:] != stream.shape:
        raise PointError(f"the stack is {list(stack.shape)}; here it is [component, {', '.join(map(str, stream.shape))}]: give the "
                         f"pos_slice= that it was made with")


def cut(x: Tensor, pos_slice: Slice) -> Tensor:
    """Choose positions of `[batch pos d_model]`; an int drops their axis."""
    return x if pos_slice is None else x[:, list(pos_slice) if isinstance(pos_slice, Sequence) else pos_slice]
