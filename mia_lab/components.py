"""Branches taken apart: what each head and each neuron adds to the stream. Names, labels and shapes are TransformerLens's.

Stacks are float32 `[component batch pos d_model]`; padded positions stay NaN. The weights stay on the device; on models that
norm what a branch adds, that norm's scale is the whole branch's, so that the parts, and what none of them adds (biases),
still sum to `attn_out` or `mlp_out`.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import psutil
import torch

from .errors import MissingRowsError, PointError
from .lazy import human_bytes
from .points import Point, undeclared
from .prompts import resolve_at
from .residual import Residual, Slice, cut

if TYPE_CHECKING:
    from .analysis.lens.result import LogitLens
    from .analysis.lens.tuned import TunedLens

Tensor = torch.Tensor


class Components(Residual):
    """The methods of an ActivationCache that need the weights behind heads and neurons, which its session holds."""

    _points: list[Point]

    def stack_head_results(self, layer: int | None = None, return_labels: bool = False, incl_remainder: bool = False,
                           pos_slice: Slice = None, apply_ln: bool = False) -> Tensor | tuple[Tensor, list[str]]:
        """Return what each head before `layer` (by default all) adds to the stream, labelled `L0H1`; needs `z` tapped.

        incl_remainder: also the rest of the stream there. apply_ln: divide by the final norm's scale.
        """
        stack, labels, _ = self._heads(layer, pos_slice)
        return self._finished(stack, labels, layer, incl_remainder, pos_slice, apply_ln, return_labels)

    def stack_neuron_results(self, layer: int | None = None, pos_slice: Slice = None, neuron_slice: Slice = None,
                             return_labels: bool = False, incl_remainder: bool = False,
                             apply_ln: bool = False) -> Tensor | tuple[Tensor, list[str]]:
        """Return what each neuron before `layer` adds to the stream, labelled `L0N1`; needs `mlp_act` tapped.

        These are many: choose positions and neurons. PointError where they would not fit into memory.
        """
        stack, labels, _ = self._neurons(layer, pos_slice, neuron_slice)
        return self._finished(stack, labels, layer, incl_remainder, pos_slice, apply_ln, return_labels)

    def logit_lens(self, layers: Any = None, top_k: int = 5, tokens: Any = None, tuned: TunedLens | None = None) -> LogitLens:
        """Return what the stream after each held block would say next, at every position held; see `Session.logit_lens`."""
        from .analysis.lens.reading import Rows, chosen_points, read_lens

        if self._source is None:
            raise MissingRowsError("a lens reads with the session's unembedding, which this cache no longer holds")
        if tuned is not None:
            tuned.check(self._n_layers, self._batch.shapes[Point("resid_post", self._n_layers - 1)][0])
        top = Point("final_norm" if self._batch.normed else "resid_post", self._n_layers - 1)
        at = [list(range(n)) for n in self._batch.n_positions]
        rows = Rows(self._source, self._batch.tokens, at, top, self._batch.before)
        return read_lens(rows, chosen_points(layers, self._points, self._n_layers), top_k, tokens, tuned)

    def head_bias(self, layer: int, pos_slice: Slice = None) -> Tensor:
        """Return what attention of one block adds that no head does, `[batch pos d_model]`: biases, of a norm behind it too."""
        return self._split("z", layer, pos_slice, [])[0]

    def get_full_resid_decomposition(self, layer: int | None = None, mlp_input: bool = False, expand_neurons: bool = True,
                                     apply_ln: bool = False, pos_slice: Slice = None,
                                     return_labels: bool = False) -> Tensor | tuple[Tensor, list[str]]:
        """Return the stream before `layer` (by default after all) as heads, neurons (or `{i}_mlp_out`), `embed` and `bias`.

        The parts sum to the stream. mlp_input: the stream before that layer's MLP.
        """
        last = self._until(layer)
        heads, labels, bias = self._heads(last + (mlp_input and last < self._n_layers), pos_slice)
        found = [heads]
        if expand_neurons:
            neurons, more, rest = self._neurons(last, pos_slice, None)
            bias = bias + rest
        else:
            neurons, more = self._mlps(last, pos_slice)
        embed = self.decompose_resid(0, pos_slice=pos_slice)
        found += [neurons, embed, bias[None]]
        stack = torch.cat(found)
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice)
        return (stack, [*labels, *more, "embed", "bias"]) if return_labels else stack

    def _mlps(self, last: int, pos_slice: Slice) -> tuple[Tensor, list[str]]:
        if not last:
            return self._nothing(pos_slice)[None][:0], []
        return self.decompose_resid(last, mode="mlp", incl_embeds=False, pos_slice=pos_slice, return_labels=True)

    def _heads(self, layer: int | None, pos_slice: Slice) -> tuple[Tensor, list[str], Tensor]:
        return self._every("z", "H", layer, pos_slice, None)

    def _neurons(self, layer: int | None, pos_slice: Slice, neuron_slice: Slice) -> tuple[Tensor, list[str], Tensor]:
        return self._every("mlp_act", "N", layer, pos_slice, neuron_slice)

    def _every(self, kind: str, letter: str, layer: int | None, pos_slice: Slice,
               part_slice: Slice) -> tuple[Tensor, list[str], Tensor]:
        """What each part before a layer adds, its labels, and the sum of what no part adds, `[batch pos d_model]`."""
        self._refuse_mixed()
        last = self._until(layer)
        stacks, labels, rest = [], [], self._nothing(pos_slice)
        parts = {i: resolve_at(part_slice, self._held_shape(kind, i)[0]) for i in range(last)}
        self._check_room(sum(map(len, parts.values())), rest)
        for i, chosen in parts.items():
            found = self._split(kind, i, pos_slice, chosen)
            stacks.append(found[:-1])
            rest = rest + found[-1]
            labels += [f"L{i}{letter}{part}" for part in chosen]
        return torch.cat(stacks) if stacks else rest[None][:0], labels, rest

    def _split(self, kind: str, layer: int, pos_slice: Slice, parts: Sequence[int]) -> Tensor:
        """What some parts of one block add, and, last, what no part does, `[part + 1 batch pos d_model]`."""
        self._held_shape(kind, layer)
        if self._source is None:
            raise MissingRowsError("the weights behind heads and neurons are in the session, which this cache no longer holds")
        lengths = self._batch.n_positions
        places = resolve_at(pos_slice, max(lengths))
        kept = [[j for j, p in enumerate(places) if p < n] for n in lengths]
        at = [[places[j] for j in mine] for mine in kept]
        found = self._source.split(Point(kind, layer), range(len(at)), at, self._batch.before, parts)
        out = torch.full((len(parts) + 1, len(at), len(places), found[0].shape[-1]), float("nan"))
        for i, (mine, rows) in enumerate(zip(kept, found)):  # rows [pos part + 1 d_model]
            out[:, i, mine] = rows.transpose(0, 1)
        return out[:, :, 0] if isinstance(pos_slice, int) else out

    def _held_shape(self, kind: str, layer: int) -> tuple[int, ...]:
        point = self._batch.point((kind, layer))
        if point not in self._points:
            raise undeclared(str(point), self._points)
        return self._batch.shapes[point]

    def _nothing(self, pos_slice: Slice) -> Tensor:
        """Zeros, and NaN where padded, `[batch pos d_model]`."""
        lengths = torch.tensor(self._batch.n_positions)
        places = torch.tensor(resolve_at(pos_slice, int(lengths.max())))
        width = self._batch.shapes[Point("resid_post", self._n_layers - 1)][0]
        out = torch.where(places < lengths[:, None], 0.0, float("nan"))[..., None].expand(-1, -1, width)
        return out[:, 0] if isinstance(pos_slice, int) else out

    def _check_room(self, parts: int, one: Tensor) -> None:
        wanted, free = 4 * (parts + 1) * prod(one.shape), psutil.virtual_memory().available
        if 2 * wanted > free:  # the parts, and their stack
            raise PointError(f"{parts} parts at {one.shape[:-1].numel()} positions take {human_bytes(2 * wanted)} of the "
                             f"{human_bytes(free)} of memory that are free; choose some, pos_slice=-1 or layer=... for example")

    def _finished(self, stack: Tensor, labels: list[str], layer: int | None, incl_remainder: bool, pos_slice: Slice, apply_ln: bool,
                  return_labels: bool) -> Tensor | tuple[Tensor, list[str]]:
        if incl_remainder:
            last = self._until(layer)
            stream = cut(self._stream(last), pos_slice)
            stack, labels = torch.cat([stack, (stream - stack.sum(0))[None]]), [*labels, "remainder"]
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice)
        return (stack, labels) if return_labels else stack
