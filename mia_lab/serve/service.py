"""What one API server process knows and does: its engine, the model's facts, the catalogue that it serves, and running requests by it."""
from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Coroutine
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..bundles.golden import tokenizer_hash
from ..engine.room import InFlight, Room
from ..engine.settings import Settings
from ..engine.wire import ATTENTION, KEY
from ..errors import MiaError
from ..points import Point
from ..running.compile import Model
from . import running
from .call import CALL, Call
from .catalogue import Catalogue, ModelFacts
from .metrics import Metrics, metrics
from .policy import EVERYONE, LOCAL, Key
from .sharing import Sharing
from .vectors import Vectors

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Service:
    """Serves one engine's requests in one process. Ready once `start` returned; nothing is served before."""

    nobody: Key = EVERYONE  # who asks for what needs no key

    def __init__(self, engine: AsyncLLM, options: dict[str, Any]) -> None:
        self.engine, self.options, self.folder = engine, options, Path(options["serve"])
        self.processes: int = getattr(engine, "_client_count", 1)
        self.owner = f"{os.getpid()}.{secrets.token_hex(4)}"
        self.vllm_keys = False  # whether vLLM's own keys guard its paths
        self.metrics: Metrics = metrics()
        self.vectors = Vectors(self.rpc, self.owner)
        self.sharing = Sharing(self)
        self.compiled = running.Compiler(self)
        self._starting: asyncio.Lock = asyncio.Lock()
        self._ready = False
        self._tasks: set[asyncio.Task] = set()

    @staticmethod
    def of(engine: Any) -> Service | None:
        """The service of an engine that opted in to serve, made when first asked for; else None."""
        found = getattr(engine, "mia_service", None)
        if found is None:
            options = (getattr(engine.vllm_config, "additional_config", None) or {}).get(KEY)
            if isinstance(options, dict) and "serve" in options:
                found = engine.mia_service = Service(engine, options)
        return found

    # -- starting -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the folder, prove the taps, and join the other processes. MiaError where this server must not take traffic."""
        async with self._starting:
            if self._ready:
                return
            self.facts: dict[str, Any] = await self.rpc("describe")
            self.settings = Settings.read(self.facts["settings"])
            self.shapes = {Point(kind, layer): tuple(shape) for kind, layer, shape in self.facts["shapes"]}
            self.tokenizer: Any = self.engine.get_tokenizer()
            self.model_facts = self._model_facts(await self.rpc("sample_weights"))
            self.in_flight = InFlight(Room.of(self.facts).share(self.processes))
            await self.sharing.start()
            if self.vllm_keys and not self.catalogue.policy.keys:
                raise MiaError(f"vLLM's --api-key keeps nobody from /mia/, and serve.toml in {self.folder} names no key; add [[keys]] for "
                               f"that key there (mia-lab key says how), or start without --api-key")
            if self.options.get("prove", True):
                from .proving import prove

                await prove(self)
            self.later(self.sharing.beat_on())
            self._ready = True

    def _model_facts(self, weights: str) -> ModelFacts:
        config, settings = self.engine.vllm_config.model_config, self.settings
        return ModelFacts(str(config.served_model_name or config.model), settings.n_layers, settings.d_model, settings.dtype, weights,
                          settings.configuration, tokenizer_hash(self.tokenizer), self.model, self.tapped, self.tokenizer,
                          settings.max_len, {"sandwich": self.facts["sandwich"], "rotary": settings.rotary})

    @cached_property
    def model(self) -> Model:
        """What edits are checked against."""
        kinds, read_only = tuple(self.options.get("edits", ())), frozenset(self.facts["read_only"])
        editable = frozenset(p for p in self.sites if p.kind not in read_only) if kinds else frozenset()
        return Model(self.facts["n_layers"], self.shapes, editable, read_only, kinds)

    @cached_property
    def sites(self) -> tuple[Point, ...]:
        """Every point that is tapped, in the order of the forward pass."""
        return tuple(Point(kind, layer) for kind, layer in self.facts["sites"])

    @cached_property
    def tapped(self) -> tuple[Point, ...]:
        """The points that can be captured."""
        return tuple(p for p in self.sites if p.kind != ATTENTION)

    @property
    def catalogue(self) -> Catalogue:
        """What this process serves now."""
        return self.sharing.catalogue

    def dtype_of(self, kind: str) -> torch.dtype:
        """The type in which rows at a kind of point are kept."""
        return torch.float32 if kind in self.facts["wide"] else self.settings.type

    def row_bytes(self, site: tuple[str, int], reduced: bool = False) -> int:
        """Bytes of one captured row at a point; rows of a request that reduces some come as float32."""
        return prod(self.shapes[Point(*site)]) * (4 if reduced else self.dtype_of(site[0]).itemsize)

    # -- running ------------------------------------------------------------------------------------------------------

    async def rpc(self, method: str, *args: Any) -> Any:
        """Call one of the worker's `mia_*` methods and return what it gives."""
        return (await self.engine.collective_rpc(f"mia_{method}", args=args))[0]

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator:
        """Run a request as it is, by vLLM's own `AsyncLLM.generate`."""
        return type(self.engine).generate.__wrapped__(self.engine, prompt, sampling_params, request_id, **options)

    def serve(self, prompt: Any, sampling_params: Any, request_id: str, options: dict[str, Any]) -> AsyncGenerator:
        """Run a request as the HTTP call that it belongs to asks, and its catalogue allows; Refused at once where it does not."""
        if not self._ready:
            return self._served_later(prompt, sampling_params, request_id, options)
        call = CALL.get() or Call(LOCAL, self.catalogue, self)
        return running.run(self, call, prompt, sampling_params, request_id, options)

    async def _served_later(self, prompt: Any, sampling_params: Any, request_id: str, options: dict[str, Any]) -> AsyncGenerator:
        await self.start()
        async for output in self.serve(prompt, sampling_params, request_id, options):
            yield output

    @cached_property
    def routes(self) -> Any:
        """The app behind /mia/."""
        from .routes import app

        return app(self)

    def later(self, work: Coroutine) -> None:
        """Have something done beside what runs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
