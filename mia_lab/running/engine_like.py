"""What a Session needs of an engine, wherever that runs: requests in, outputs and captured rows back."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ..engine.settings import Settings
from ..points import Point
from .turns import Turns


class EngineLike(ABC):
    """An engine as Sessions see it: `launch.Engine` runs one on this machine, `serve.client.RemoteEngine` is one of a server.

    facts: what the worker says of itself (`Lab.describe`). shapes: of one row at each point of the model. tokenizer: the model's.
    in_process: whether rows come as tensors of this process, not as bytes. remote: whether it runs on a server, where also the model's
    files are. turns: who uses the engine now.
    """

    facts: dict[str, Any]
    settings: Settings
    shapes: dict[Point, tuple[int, ...]]
    tokenizer: Any
    in_process: bool = False
    remote: bool = False

    def __init__(self) -> None:
        self.turns = Turns()
        self._dropped: list[str] = []

    def _learn(self, facts: dict[str, Any]) -> None:
        self.facts, self.settings = facts, Settings.read(facts["settings"])
        self.shapes = {Point(kind, layer): tuple(shape) for kind, layer, shape in facts["shapes"]}
        self._row_bytes = {(p.kind, p.layer): prod(shape) * self.dtype_of(p.kind).itemsize for p, shape in self.shapes.items()}

    def dtype_of(self, kind: str) -> torch.dtype:
        """The type in which rows at a kind of point are kept."""
        return torch.float32 if kind in self.facts["wide"] else self.settings.type

    def row_bytes(self, site: tuple[str, int]) -> int:
        """Bytes of one row at a point."""
        return self._row_bytes[site]

    def drop_later(self, uids: list[str]) -> None:
        """Let go of requests' rows at the next call: a finaliser may run while the engine is busy."""
        self._dropped += uids

    def let_go(self) -> None:
        """Drop the rows that nobody holds any more."""
        if self._dropped:
            uids, self._dropped = self._dropped, []
            self.rpc("drop", uids)

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether `close` was called."""

    @abstractmethod
    def require_open(self) -> None:
        """ClosedError where no request can be run any more."""

    @abstractmethod
    def capture_room(self) -> int:
        """Bytes of captured rows that may be asked for at once."""

    @abstractmethod
    def rpc(self, method: str, *args: Any) -> Any:
        """Call one of the worker's `mia_*` methods and return what it gives."""

    @abstractmethod
    def sampling(self, params: Mapping[str, Any], wires: Sequence[str]) -> list[Any]:
        """The sampling parameters of requests that differ in their specs only, as `run` takes them; PromptError for what cannot be.

        wires: each one's spec, "" for none.
        """

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], params: Sequence[Any], lora: Any = None) -> list[Any]:
        """Run token prompts as one batch; return an output each, as vLLM's RequestOutput. What interrupts it leaves no request."""

    @abstractmethod
    def steps(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> Iterator[list[tuple[int, Any]]]:
        """Run token prompts as one batch and yield, as it goes on, the outputs that moved, with whose they are."""

    @abstractmethod
    def register(self, vectors: dict[str, torch.Tensor]) -> None:
        """Make vectors `[n d]` float32 known under their content addresses, until many others were."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False when requests still hold some."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the engine."""
