"""The worker's side: taps installed between loading and the first forward, and the calls a client makes."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PointError
from ..points import ranges
from . import taps
from .adapters import adapter_for
from .config import EngineOptions, Sizes, refuse_unsupported
from .courier import Courier
from .discover import Layout, discover
from .router import Router
from .tables import Tables
from .taps import After, Before
from .wire import KEY

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


def attach(worker: WorkerBase, options: EngineOptions) -> None:
    """Arrange that `worker.load_model` installs the taps, and give the worker its `mia_*` calls."""
    load_model = worker.load_model

    def load_then_tap(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        lab = Lab(worker, options)
        for name in ("describe", "register", "forget", "fetch", "drop", "unembed", "sample_weights",
                     "recover"):
            setattr(worker, f"mia_{name}", getattr(lab, name))

    worker.load_model = load_then_tap


class Lab:
    """Everything mia_lab keeps in one worker. Its public methods are called by name through `collective_rpc`,
    so they take and return plain values and bytes only."""

    def __init__(self, worker: WorkerBase, options: EngineOptions) -> None:
        runner, config = worker.model_runner, worker.vllm_config
        self._runner, self._sites = runner, options.sites
        self._sizes = Sizes.of(config, options)
        refuse_unsupported(config, self._sizes)
        self._model = runner.get_model()
        self._layout = discover(self._model, config, runner.device)
        _check_sites(options.sites, self._layout)
        self._tables = Tables(len(options.sites), self._sizes, config.model_config.dtype, runner.device)
        self._install_taps()
        # vLLM counts this as weights, so that the KV cache is sized for what is left.
        if hasattr(runner, "model_memory_usage"):
            runner.model_memory_usage += self._tables.nbytes
        # Without this, vLLM would load the compiled graph of the same model without taps.
        config.additional_config[KEY]["fingerprint"] = taps.fingerprint(self._layout.describe(options.sites), self._tables)
        self._router, self._courier = Router(self._tables, options.sites), Courier(self._tables)
        self._adapter = adapter_for(runner)
        self._adapter.install(self._router, self._courier)

    def _install_taps(self) -> None:
        sides: dict[torch.nn.Module, dict[type, Before | After]] = {}
        for site, key in enumerate(self._sites):
            place = self._layout.places[key]
            sides.setdefault(place.module, {})[type(place.at)] = place.at
            taps.attach(place.module, "in" if isinstance(place.at, Before) else "out", self._tables, site)
        for module, at in sides.items():
            taps.swap(module, at.get(Before), at.get(After))

    def describe(self) -> dict[str, Any]:
        """Facts for the client: layers, which points exist, table bytes, runner."""
        absent = [[*key, why] for key, why in self._layout.absent.items()]
        return {"n_layers": self._layout.n_layers, "absent": absent, "sandwich": self._layout.sandwich,
                "available": [list(key) for key in self._layout.places], "table_bytes": self._tables.nbytes,
                "arena_bytes": self._tables.arena.nbytes, "captured_tokens": self._sizes.captured_tokens,
                "bank_rows": self._sizes.bank_rows, "programs": self._sizes.programs, "runner": self._adapter.name,
                "has_unembedding": self._layout.has_unembedding}

    def register(self, vectors: dict[str, bytes]) -> None:
        """Hold vectors (float32 bytes) under their content address, which is checked."""
        for sha, data in vectors.items():
            if hashlib.sha256(data).hexdigest()[:32] != sha or len(data) != 4 * self._sizes.width:
                raise ValueError(f"vector {sha} does not hold what its address says")
            self._tables.register(sha, torch.frombuffer(bytearray(data), dtype=torch.float32))

    def fetch(self, uids: Sequence[str], kind: str, layer: int) -> list[tuple[bytes, bytes]]:
        """Return per request the int64 positions and the values (model dtype) captured at one point."""
        site = self._sites.index((kind, layer))
        found = [self._courier.rows(uid, site) for uid in uids]
        return [(positions.tobytes(), values.contiguous().view(torch.uint8).numpy().tobytes())
                for positions, values in found]

    def forget(self, shas: Sequence[str]) -> None:
        """Let go of vectors that no request uses."""
        for sha in shas:
            self._tables.forget(sha)

    def recover(self) -> None:
        """Put runner and tables in order after a step that was broken off."""
        self._adapter.recover()
        self._router.recover()

    def drop(self, uids: Sequence[str]) -> None:
        """Let go of these requests' rows."""
        for uid in uids:
            self._courier.drop(uid)

    @torch.inference_mode()
    def unembed(self, rows: bytes) -> bytes:
        """Return float32 logits `[n d_vocab]` for last-layer stream rows `[n d_model]` given in the model's dtype."""
        dtype = self._tables.arena.dtype
        stream = torch.frombuffer(bytearray(rows), dtype=dtype).view(-1, self._sizes.width).to(self._tables.device)
        if self._layout.final_norm is not None:
            stream = self._layout.final_norm(stream)
            stream = stream[0] if isinstance(stream, tuple) else stream
        return self._model.compute_logits(stream).float().cpu().numpy().tobytes()

    def sample_weights(self) -> str:
        """Return a hash over a sample of every weight: identity of the loaded model, cheap at any size."""
        digest = hashlib.sha256()
        for name, weight in self._model.named_parameters():
            flat = weight.detach().flatten()
            picked = flat[:: max(1, flat.numel() // 256)][:256]
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
            digest.update(picked.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()[:32]


def _check_sites(sites: Sequence[tuple[str, int]], layout: Layout) -> None:
    for kind, layer in sites:
        if layer >= layout.n_layers:
            raise PointError(f"{kind}.{layer} was declared; the model has layers 0 to {layout.n_layers - 1}")
        if (kind, layer) not in layout.places:
            held = [other for name, other in layout.places if name == kind]
            fix = f"Declare it at layers {ranges(held)} only" if held else f"Declare points without {kind!r}"
            raise PointError(f"{kind}.{layer} does not exist in this model: {layout.absent.get((kind, layer), 'unknown point')}. {fix}")
