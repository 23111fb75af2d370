"""ActivationCache: the captured values of a batch, by point, in TransformerLens shapes and spellings."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from .errors import MissingRowsError, PointError
from .lazy import LazyTensor, human_bytes
from .points import Point, parse, undeclared


class RowSource(Protocol):
    """Where rows come from: per prompt, ascending positions `[n]` and values `[n d]` at one point."""

    def rows(self, point: Point, prompts: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """A captured batch: the token at each computed position of each prompt, and how many of them are the prompt's."""

    tokens: tuple[tuple[int, ...], ...]
    n_prompt: tuple[int, ...]
    width: int
    dtype: torch.dtype
    n_layers: int
    sandwich: bool = False

    @property
    def n_positions(self) -> tuple[int, ...]:
        """Computed positions of each prompt."""
        return tuple(map(len, self.tokens))


class ActivationCache:
    """Maps points to lazy tensors `[batch pos d_model]`, right-padded with NaN; `mask [batch pos]` is True on real rows.

    `cache["resid_post", 3]`, `cache["blocks.3.hook_resid_post"]` and `cache["model.layers.3.output"]` are one tensor;
    `cache[i]` is prompt i alone, unpadded. Generated positions follow the prompt's: `n_prompt[i]` marks the border.
    A row that should have been computed and was not raises MissingRowsError when its values are used.
    """

    def __init__(self, source: RowSource, points: Sequence[Point], batch: Batch) -> None:
        self._source: RowSource | None = source
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
        point = parse(key, self._batch.n_layers, sandwich=self._batch.sandwich)
        if point not in self._points:
            raise undeclared(str(point), self._points)
        if point not in self._held:
            shape = (len(self.n_prompt), max(self._batch.n_positions), self._batch.width)
            self._held[point] = LazyTensor(partial(_padded, self._source, self._batch, point), shape, self._batch.dtype, str(point))
        return self._held[point]

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
            return parse(key, self._batch.n_layers, sandwich=self._batch.sandwich) in self._points
        except PointError:
            return False

    def fetch(self) -> ActivationCache:
        """Bring every value here, so that the cache outlives its session; returns the cache."""
        for tensor in self.values():
            tensor.get()
        self._source = None  # the worker need not hold what is here
        return self

    def stack_activation(self, kind: str) -> torch.Tensor:
        """Return every held layer of one kind, `[layer batch pos d_model]`."""
        found = [self[p] for p in self._points if p.kind == kind]
        if not found:
            raise undeclared(kind, self._points)
        return torch.stack([t.get() for t in found])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, fetched or not."""
        row = self._batch.width * self._batch.dtype.itemsize
        return len(self._points) * len(self.n_prompt) * max(self._batch.n_positions) * row

    @property
    def nbytes_fetched(self) -> int:
        """Bytes of the tensors whose values are here."""
        return sum(t.numel() * t.dtype.itemsize for t in self._held.values() if t.fetched)

    def __repr__(self) -> str:
        layers = sorted({p.layer for p in self._points})
        kinds = ", ".join(dict.fromkeys(p.kind for p in self._points))
        dtype = str(self._batch.dtype).removeprefix("torch.")
        return (f"ActivationCache: {len(self.n_prompt)} prompts, up to {max(self._batch.n_positions)} positions, "
                f"d_model {self._batch.width}, {dtype}\n"
                f"  {kinds} at {len(layers)} layers ({layers[0]} to {layers[-1]}): {len(self)} tensors\n"
                f"  {human_bytes(self.nbytes)} held, {human_bytes(self.nbytes_fetched)} fetched")


def _padded(source: RowSource, batch: Batch, point: Point) -> torch.Tensor:
    """Assemble `[batch pos d_model]` at one point; apart from the cache, whose tensors must not keep it alive."""
    out = torch.full((len(batch.n_prompt), max(batch.n_positions), batch.width), float("nan"), dtype=batch.dtype)
    every = range(len(batch.n_prompt))
    for i, (positions, values) in zip(every, source.rows(point, every)):
        n = batch.n_positions[i]
        kept = positions < n  # under async scheduling a finished request may run one step more
        if not torch.equal(positions[kept], torch.arange(n)):
            absent = sorted(set(range(n)) - set(positions.tolist()))
            raise MissingRowsError(f"{point} of prompt {i} lacks positions {absent[:5]} of {n}: they were never computed")
        out[i, :n] = values[kept]
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
