"""ActivationCache: the captured values of a batch, by point, in TransformerLens shapes and spellings."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import torch

from .components import Components
from .counted import counted
from .errors import EditError, MissingRowsError, PointError
from .lazy import LazyTensor, human_bytes
from .points import DERIVED, Point, kind_of, parse, undeclared
from .residual import Readout


class RowSource(Protocol):
    """Where rows come from: per prompt, ascending positions `[n]` and values `[n *shape]` at one point."""

    def rows(self, point: Point, prompts: Sequence[int], before: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]: ...

    def pattern(self, point: Point, prompts: Sequence[int], at: Sequence[Sequence[int]]) -> list[torch.Tensor]: ...

    def readout(self, tokens: Sequence[int]) -> Readout: ...

    def split(self, point: Point, prompts: Sequence[int], at: Sequence[Sequence[int]], before: bool = False,
              parts: Sequence[int] | None = None) -> list[torch.Tensor]: ...

    def token_id(self, text: str) -> int: ...

    def experts(self, point: Point, prompts: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """A captured batch: the token at each computed position of each prompt, and how many of them are the prompt's.

    shapes, dtypes: of one row at each point. before: rows were read before the edits at their point, not after.
    """

    tokens: tuple[tuple[int, ...], ...]
    n_prompt: tuple[int, ...]
    shapes: Mapping[Point, tuple[int, ...]]
    dtypes: Mapping[Point, torch.dtype]
    n_layers: int
    sandwich: bool = False
    rotary: bool = False
    before: bool = False
    biased: frozenset[int] = frozenset()  # layers whose attention an edit biased: rebuilt, it would lack the bias
    mixed: bool = False  # read before the edits of a run that had some: what edits added is in the stream, and in no part of it
    normed: bool = False  # an edit acted on the final norm's output, from which logits then come

    def point(self, key: object) -> Point:
        """Return the Point that a key names."""
        return parse(key, self.n_layers, sandwich=self.sandwich, rotary=self.rotary)

    def row_bytes(self, point: Point) -> int:
        """Bytes of one row."""
        return prod(self.shapes[point]) * self.dtypes[point].itemsize

    @property
    def n_positions(self) -> tuple[int, ...]:
        """Computed positions of each prompt."""
        return tuple(map(len, self.tokens))


class ActivationCache(Components):
    """Maps points to lazy tensors `[batch pos d_model]` (heads: `[batch pos head d_head]`), right-padded with NaN;
    `mask [batch pos]` is True on real rows. `cache["pattern", 3]` is `[batch head pos pos]`, rebuilt on the device from
    captured q and k: for a few rows of a long prompt, `Session.capture(..., "pattern")` is the smaller thing to ask for.

    `cache["resid_post", 3]`, `cache["blocks.3.hook_resid_post"]` and `cache["model.layers.3.output"]` are one tensor;
    `cache[i]` is prompt i alone, unpadded. Generated positions follow the prompt's: `n_prompt[i]` marks the border.
    A row that should have been computed and was not raises MissingRowsError when its values are used.
    """

    def __init__(self, source: RowSource, points: Sequence[Point], batch: Batch, logits: LazyTensor | None = None) -> None:
        self._source: RowSource | None = source
        self._logits = logits
        self._points, self._batch = list(points), batch
        self._held: dict[Point, LazyTensor] = {}

    @property
    def n_prompt(self) -> tuple[int, ...]:
        """Prompt tokens of each prompt."""
        return self._batch.n_prompt

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Token ids at the computed positions of each prompt, generated ones included."""
        return self._batch.tokens

    @property
    def mask(self) -> torch.Tensor:
        """bool `[batch pos]`: which positions exist."""
        lengths = torch.tensor(self._batch.n_positions)
        return torch.arange(int(lengths.max()))[None, :] < lengths[:, None]

    @property
    def last(self) -> torch.Tensor:
        """int64 `[batch]`: each prompt's last prompt position."""
        return torch.tensor(self._batch.n_prompt) - 1

    def __getitem__(self, key: object) -> LazyTensor | PromptView:
        if isinstance(key, int) and not isinstance(key, bool):
            return PromptView(self, range(len(self.n_prompt))[key])
        point = self._batch.point(key)
        if not self._has(point):
            raise undeclared(str(point), self._points)
        if point.kind == "logits":
            return self._logits
        if point.kind in DERIVED and point.layer in self._batch.biased:
            raise EditError(f"{point} is rebuilt from queries and keys, without the AttentionBias that acted there")
        if point not in self._held and point.kind in DERIVED:
            width = max(self._batch.n_positions)
            shape = (len(self.n_prompt), self._batch.shapes[Point("q", point.layer)][0], width, width)
            self._held[point] = LazyTensor(partial(_attention, self._source, self._batch, point), shape, torch.float32, str(point))
        elif point not in self._held:
            shape = (len(self.n_prompt), max(self._batch.n_positions), *self._batch.shapes[point])
            load = partial(_padded, self._source, self._batch, point)
            self._held[point] = LazyTensor(load, shape, self._batch.dtypes[point], str(point))
        return self._held[point]

    def experts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts that the router of a block chose: weights `[batch pos k]` float32, padded with NaN, and ids
        `[batch pos k]`, padded with -1. Chosen by vLLM's own routing from the captured router logits; PointError without them."""
        point = self._batch.point(("router", layer))
        if point not in self._points or self._source is None:
            raise undeclared(str(point), self._points)
        found = self._source.experts(point, range(len(self.n_prompt)))
        k = found[0][1].shape[1]
        weights = torch.full((*self.mask.shape, k), float("nan"))
        ids = torch.full(weights.shape, -1)
        for i, (n, (at, w, e)) in enumerate(zip(self._batch.n_positions, found)):
            if at[at < n].tolist() != list(range(n)):
                raise MissingRowsError(f"{point} of prompt {i} lacks some of its {n} positions")
            weights[i, :n], ids[i, :n] = w[at < n], e[at < n]
        return weights, ids

    def keys(self) -> list[str]:
        """The TransformerLens names held, in order of layer."""
        return [point.name for point in self._points]

    def values(self) -> list[LazyTensor]:
        """The tensors, in the order of `keys`."""
        return [self[point] for point in self._points]

    def items(self) -> list[tuple[str, LazyTensor]]:
        """Pairs of name and tensor."""
        return list(zip(self.keys(), self.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._points)

    def __contains__(self, key: object) -> bool:
        try:
            return self._has(self._batch.point(key))
        except PointError:
            return False

    def _has(self, point: Point) -> bool:
        if point in self._points or point in self._held:
            return True
        if point.kind == "logits":
            return self._logits is not None
        return self._source is not None and point.kind in DERIVED and all(
            Point(kind, point.layer) in self._points for kind in DERIVED[point.kind])

    def fetch(self) -> ActivationCache:
        """Bring every value here, so that the cache outlives its session; returns the cache."""
        for tensor in self.values():
            tensor.get()
        self._source = None  # the worker need not hold what is here
        return self

    def stack_activation(self, activation_name: str, layer: int | None = None) -> torch.Tensor:
        """Return every held layer of one kind, `[layer batch pos d_model]`, or those of them before `layer`."""
        kind, last = kind_of(activation_name), self._batch.n_layers if layer in (None, -1) else layer
        found = [self[p] for p in (Point(kind, i) for i in range(last)) if kind != "logits" and self._has(p)]
        if not found:
            raise undeclared(kind, self._points)
        return torch.stack([t.get() for t in found])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, fetched or not."""
        return sum(map(self._batch.row_bytes, self._points)) * len(self.n_prompt) * max(self._batch.n_positions)

    @property
    def nbytes_fetched(self) -> int:
        """Bytes of the tensors whose values are here."""
        return sum(t.numel() * t.dtype.itemsize for t in self._held.values() if t.fetched)

    def __repr__(self) -> str:
        layers = sorted({p.layer for p in self._points})
        kinds = ", ".join(dict.fromkeys(p.kind for p in self._points))
        dtypes = ", ".join(sorted({str(self._batch.dtypes[p]).removeprefix("torch.") for p in self._points}))
        return (f"ActivationCache: {counted(len(self.n_prompt), 'prompt')}, up to {max(self._batch.n_positions)} positions, {dtypes}\n"
                f"  {kinds} at {counted(len(layers), 'layer')} ({layers[0]} to {layers[-1]}): {counted(len(self), 'tensor')}\n"
                f"  {human_bytes(self.nbytes)} held, {human_bytes(self.nbytes_fetched)} fetched")

    def _repr_html_(self) -> str:
        from .notebook.cards import as_html, cache_card

        return as_html(cache_card(self))


def _padded(source: RowSource, batch: Batch, point: Point) -> torch.Tensor:
    """Assemble `[batch pos d_model]` at one point; apart from the cache, whose tensors must not keep it alive."""
    out = torch.full((len(batch.n_prompt), max(batch.n_positions), *batch.shapes[point]), float("nan"), dtype=batch.dtypes[point])
    every = range(len(batch.n_prompt))
    for i, (positions, values) in zip(every, source.rows(point, every, batch.before)):
        n = batch.n_positions[i]
        kept = positions < n  # under async scheduling a finished request may run one step more
        if not torch.equal(positions[kept], torch.arange(n)):
            absent = sorted(set(range(n)) - set(positions.tolist()))
            raise MissingRowsError(f"{point} of prompt {i} lacks positions {absent[:5]} of {n}: they were never computed")
        out[i, :n] = values[kept]
    return out


def _attention(source: RowSource, batch: Batch, point: Point) -> torch.Tensor:
    """Rebuild `[batch head pos pos]` float32, padded with NaN, from captured queries and keys."""
    at = [list(range(n)) for n in batch.n_positions]
    found = source.pattern(point, range(len(at)), at)
    out = torch.full((len(at), found[0].shape[1], max(batch.n_positions), max(batch.n_positions)), float("nan"))
    for i, rows in enumerate(found):  # [pos head key]
        out[i, :, : rows.shape[0], : rows.shape[2]] = rows.transpose(0, 1)
    return out


class PromptView:
    """One prompt of a cache: the same keys, tensors `[pos d_model]` without padding."""

    def __init__(self, cache: ActivationCache, index: int) -> None:
        self._cache, self._index = cache, index

    def __getitem__(self, key: object) -> torch.Tensor:
        return self._cache[key][self._index, : self._cache._batch.n_positions[self._index]]

    def keys(self) -> list[str]:
        """The TransformerLens names held."""
        return self._cache.keys()

    def __repr__(self) -> str:
        batch = self._cache._batch
        return (f"prompt {self._index} of {len(batch.n_prompt)}: {batch.n_positions[self._index]} positions "
                f"({batch.n_prompt[self._index]} of the prompt), {len(self._cache)} tensors")

    def _repr_html_(self) -> str:
        from .notebook.cards import as_html, prompt_card

        return as_html(prompt_card(self._cache, self._index))
