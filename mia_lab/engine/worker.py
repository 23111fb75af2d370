"""The worker's side: taps installed between loading and the first forward, and the calls a client makes."""
from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mia_lab.kernels import launch

from ..errors import MiaError, MissingRowsError, PointError, UnsupportedError
from . import graphs, heads, lens, shared, splitting, taps, unembedding
from .adapters import adapter_for, without_lora
from .claims import Claims
from .collecting import held_of
from .config import EngineOptions, Sizes, refuse_unsupported
from .courier import Courier
from .discover import PROBE_TOKENS, Layout, discover, in_turn
from .router import Router
from .settings import Settings
from .tables import Tables
from .wire import ATTENTION, KEY, Site, Span, address

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


def attach(worker: WorkerBase, options: EngineOptions) -> None:
    """Arrange that `worker.load_model` installs the taps, and give the worker its `mia_*` calls."""
    load_model = worker.load_model

    def load_then_tap(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        lab = Lab(worker, options)
        for name in ("describe", "register", "forget", "fetch", "drop", "unembed", "sample_weights", "recover",
                     "pattern", "experts", "settle", "readout", "lens", "split", "call", "rows", "counts"):
            setattr(worker, f"mia_{name}", getattr(lab, name))

    worker.load_model = load_then_tap


class Lab:
    """Everything mia_lab keeps in one worker. Its public methods are called by name through `collective_rpc`,
    so they take and return plain values and bytes only."""

    def __init__(self, worker: WorkerBase, options: EngineOptions) -> None:
        runner, config = worker.model_runner, worker.vllm_config
        self._runner, self._config, self._edits = runner, config, options.edits
        self._sizes = Sizes.of(config, options)
        refuse_unsupported(config, self._sizes)
        self._model = runner.get_model()
        without_lora(runner, PROBE_TOKENS)
        self._layout = discover(self._model, config, runner.device)
        self._sites = _existing(options, self._layout)
        self._shapes = {site: place.shape for site, place in self._layout.places.items()}
        places = self._layout.chosen(self._sites)
        self._tables = Tables([0 if isinstance(p.at, taps.Biased) else math.prod(p.shape) for p in places],
                              [getattr(p.at, "wide", False) for p in places], self._sizes, config.model_config.dtype, runner.device)
        self._install_taps()
        # vLLM counts this as weights, so that the KV cache is sized for what is left.
        if hasattr(runner, "model_memory_usage"):
            runner.model_memory_usage += self._tables.nbytes
        # Without this, vLLM would load the compiled graph of the same model without taps.
        config.additional_config[KEY]["fingerprint"] = taps.fingerprint(self._layout.describe(self._sites), self._tables)
        claims = Claims()
        self._router = Router(self._tables, self._sites, claims)
        self._courier = Courier(self._tables, self._sites, claims, options.complete)
        object.__setattr__(config, "mia_courier", weakref.ref(self._courier))  # for the scheduler, where that is in this process
        self._adapter = adapter_for(runner)
        self._adapter.install(self._router, self._courier)
        graphs.install(runner, self._tables, self._router)
        self._rows_at_once = max(1, lens.LOGIT_BYTES // (4 * config.model_config.get_vocab_size()))

    def _install_taps(self) -> None:
        order = sorted(range(len(self._sites)), key=lambda site: in_turn(self._sites[site]))  # of those at one place
        sides: dict[torch.nn.Module, list[int]] = {}
        places = self._layout.chosen(self._sites)
        for site in order:
            sides.setdefault(places[site].module, []).append(site)
        for module, sites in sides.items():
            taps.attach(module, self._tables, sites)
            for at, site in enumerate(sites):
                if self._sites[site][0] == ATTENTION:
                    taps.attach_biased(module, self._tables, site, at)
            taps.swap(module, [places[site].at for site in sites])
        if launch.EARLY:  # what taps cost is gained back where there are none
            for place in self._layout.spare(self._sites):
                taps.swap(place.module, [taps.Early(place.at.x, place.at.residual, place.at.shifted)])

    def describe(self) -> dict[str, Any]:
        """Facts for the client: which points exist and their shapes, table bytes, runner."""
        layout = self._layout
        return {"n_layers": layout.n_layers, "sandwich": layout.sandwich, "has_unembedding": layout.has_unembedding,
                "absent": [[*site, reason] for site, reason in layout.absent.items()],
                "shapes": [[*site, list(place.shape)] for site, place in layout.places.items()],
                "windows": [[layer, place.module.sliding_window] for (kind, layer), place in layout.places.items()
                            if kind == "q" and getattr(place.module, "sliding_window", None)],
                "sites": [list(site) for site in self._sites],
                "wide": sorted({kind for (kind, _), place in layout.places.items() if getattr(place.at, "wide", False)}),
                "read_only": sorted({kind for (kind, _), place in layout.places.items() if not getattr(place.at, "edits", True)}),
                "table_bytes": self._tables.nbytes, "arena_bytes": self._tables.arena.nbytes,
                "captured_tokens": self._sizes.captured_tokens, "bank_rows": self._tables.bank_rows,
                "programs": self._sizes.programs, "terms": self._sizes.terms, "plans": self._sizes.plans,
                "biased_tokens": self._sizes.biased_tokens, "runner": self._adapter.name,
                "settings": Settings.of(self._config, self._edits).as_json()}

    def call(self, name: str, args: Sequence[Any]) -> tuple[str, Any]:
        """Call another of these methods; return "" and what it gives, or the name of a MiaError and its message: an error that leaves
        for another process loses its type."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return "", getattr(self, name)(*args)
        except MiaError as error:
            return type(error).__name__, str(error)

    def register(self, vectors: dict[str, tuple[int, bytes]]) -> None:
        """Hold vectors, `[n width]` float32 as (n, bytes), under their content address, which is checked."""
        for sha, (rows, data) in vectors.items():
            if address(rows, data) != sha or not rows or len(data) % (4 * rows):
                raise ValueError(f"vector {sha} does not hold what its address says")
            self._tables.register(sha, torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, -1))

    def fetch(self, uids: Sequence[str], kind: str, layer: int, before: bool, here: bool,
              since: int = 0) -> list[tuple[Any, Any]]:
        """Return per request the positions, from `since` on, and the values captured at one point, before its edits or after.

        As tensors, int64 `[n]` and `[n width]`, where the client is `here` in this process. Otherwise as bytes; or, where they
        are many, the values as the name of a file in memory that the client maps and removes.
        """
        site = self._sites.index((kind, layer))
        found = [self._courier.rows(uid, site, before, since) for uid in uids]
        if here:
            return [(torch.from_numpy(positions), values) for positions, values in found]
        return [(positions.tobytes(), shared.put(values)) for positions, values in found]

    @torch.inference_mode()
    def pattern(self, uids: Sequence[str], layer: int, at: Sequence[Sequence[int]], scores: bool,
                spans: Sequence[Sequence[Span]] | None) -> list[tuple[list[int], bytes]]:
        """Return per request the attention (or scores) `[pos head key]`, as shape and float32 bytes, of its positions `at`,
        or its sum over the keys in `spans`."""
        found = []
        for i, (uid, places) in enumerate(zip(uids, at)):
            value = heads.attention(self._layout.places["q", layer].module, *self._rows(uid, "q", layer), *self._rows(uid, "k", layer),
                                    places, scores, self._tables.device)
            if spans is not None:
                value = sum((value[..., a:b].sum(-1) for a, b in spans[i]), torch.zeros_like(value[..., 0]))
            found.append((list(value.shape), value.cpu().numpy().tobytes()))
        return found

    @torch.inference_mode()
    def experts(self, uids: Sequence[str], layer: int) -> list[tuple[bytes, int, bytes, bytes]]:
        """Return per request the int64 positions of its captured rows, how many experts a row has, their float32 weights and
        int64 ids."""
        place = self._layout.places["router", layer].module
        router = next(m.router for m in self._model.modules() if getattr(m, "gate", None) is place or m is place if hasattr(m, "router"))
        found = []
        for uid in uids:
            positions, logits = self._rows(uid, "router", layer)
            logits = logits.to(self._tables.device)
            hidden = torch.zeros(len(logits), self._layout.width, device=logits.device, dtype=self._tables.arena.dtype)
            try:
                weights, ids = router.select_experts(hidden_states=hidden, router_logits=logits)
            except AttributeError as error:  # older CPU builds route inside their experts' kernel
                raise UnsupportedError(f"this vLLM build routes to experts without a function of its own ({error}); the router's "
                                       f"logits are captured, the choice is not") from None
            values = (weights.float(), ids.long())
            found.append((positions.numpy().tobytes(), weights.shape[1], *(v.cpu().numpy().tobytes() for v in values)))
        return found

    def _rows(self, uid: str, kind: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one request's positions and values `[n *shape]`, whichever side of its edits was captured."""
        site = self._sites.index((kind, layer))
        positions, values = max((self._courier.rows(uid, site, before) for before in (False, True)), key=lambda rows: len(rows[0]))
        return torch.from_numpy(positions), values.view(-1, *self._layout.places[kind, layer].shape)

    def settle(self) -> int:
        """Wait until all that was captured is on the host; return how many rows were dropped since the engine started."""
        self._courier.wait()
        return self._courier.dropped

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

    def rows(self, uid: str, since: int) -> list[list[Any]]:
        """Return all that is held of one request from position `since` on, as `held_of` gives it."""
        return held_of(self._courier, uid, since, self._sites, self._shapes)

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the engine started: rows captured and dropped, and the gates that opened and that did not."""
        return {"rows": self._courier.captured, "dropped": self._courier.dropped, "gates": list(self._router.gates.decisions())}

    @torch.inference_mode()
    def unembed(self, rows: bytes, normed: bool) -> bytes:
        """Return float32 logits `[n d_vocab]` for last-layer stream rows `[n d_model]`, or for rows after the final norm where
        `normed`, given in the model's dtype."""
        stream = torch.frombuffer(bytearray(rows), dtype=self._tables.arena.dtype).view(-1, self._layout.width)
        return self._logits(stream.to(self._tables.device), normed).cpu().numpy().tobytes()

    def _logits(self, stream: torch.Tensor, normed: bool = False) -> torch.Tensor:
        """Float32 logits `[n d_vocab]` of last-layer stream rows `[n d_model]`, or of rows after the final norm where `normed`."""
        without_lora(self._runner, len(stream))
        if self._layout.final_norm is not None and not normed:
            stream = unembedding.apply_norm(self._layout.final_norm, stream)
        return self._model.compute_logits(stream).float()

    @torch.inference_mode()
    def lens(self, uids: Sequence[str], at: Sequence[Sequence[int]], sites: Sequence[Site], before: bool, top: Site, k: int,
             tokens: Sequence[int] | None, shifts: Sequence[str | None]) -> tuple[bytes | str, bytes | str]:
        """Return what the streams captured at `sites` would say next at requests' positions `at`, by the model's own end:
        float32 and int64 values as `lens.read` gives them, rows of one request after those of another (see `shared.put`).

        top: the point that the model's own logits come from. shifts: for each site the address of an affine map before it.
        """
        if not self._layout.has_unembedding:
            raise UnsupportedError("this model transforms its hidden states after the final norm, so a stream has no logits of its own")
        streams = [self._picked(uids, tuple(site), at, before) for site in sites]
        maps = [None if sha is None else self._tables.vectors[sha] for sha in shifts]
        values, places = lens.read(self._picked(uids, tuple(top), at, False), streams, maps, k, tokens, self._rows_at_once, self._logits,
                                   lambda rows: self._logits(rows, top[0] == "final_norm"), self._tables.device)
        return shared.put(values.cpu()), shared.put(places.cpu())

    def split(self, uids: Sequence[str], kind: str, layer: int, at: Sequence[Sequence[int]], before: bool,
              parts: Sequence[int] | None) -> tuple[int, bytes | str]:
        """Return what each head ("z") or neuron ("mlp_act") adds to the stream at requests' positions `at`, and, last, what none
        of them does: how many parts that is, and float32 `[row part d_model]`, rows of one request after those of another."""
        branch = {"z": "attn_out", "mlp_act": "mlp_out"}[kind]
        linear = self._layout.maps.get((kind, layer))
        if linear is None or (branch, layer) not in self._layout.places:
            why = self._layout.absent.get((branch, layer), "no one linear map makes of them what the block adds")
            raise UnsupportedError(f"{kind} of layer {layer} cannot be told apart in the stream: {why}")
        if getattr(self._runner, "lora_config", None) is not None:
            raise UnsupportedError("this engine runs LoRA adapters, which change how parts add up; load without enable_lora")
        norm = self._layout.places[branch, layer].module if (f"{branch}_raw", layer) in self._layout.places else None
        x = self._picked(uids, (kind, layer), at, before).to(self._tables.device)
        found = splitting.split(x.view(len(x), *self._parts_of(kind, layer)), linear, norm, parts, self._tables.arena.dtype)
        return found.shape[1], shared.put(found.cpu())

    def _parts_of(self, kind: str, layer: int) -> tuple[int, int]:
        shape = self._layout.places[kind, layer].shape
        return shape if len(shape) == 2 else (shape[0], 1)

    def _picked(self, uids: Sequence[str], site: Site, at: Sequence[Sequence[int]], before: bool) -> torch.Tensor:
        """The values `[row width]` of requests' positions, on the host; MissingRowsError where one was never computed."""
        found = []
        for i, (uid, places) in enumerate(zip(uids, at)):
            positions, values = self._courier.rows(uid, self._sites.index(site), before)
            missing = np.setdiff1d(places, positions)
            if len(missing):
                raise MissingRowsError(f"{site[0]}.{site[1]} of prompt {i} lacks position {missing[0]}: it was never computed")
            found.append(values[torch.from_numpy(np.searchsorted(positions, places))])
        return torch.cat(found)

    @torch.inference_mode()
    def readout(self, tokens: Sequence[int]) -> tuple[bytes, bytes, bool, float]:
        """Return how the final norm and the unembedding read tokens: float32 vectors `[token d_model]`, biases, whether the norm
        takes the mean off, and its epsilon. A logit before any soft cap is a normed stream along a vector, plus the bias."""
        if self._layout.final_norm is None or not self._layout.has_unembedding:
            raise UnsupportedError("this model has no final norm and unembedding that could be taken apart")
        read = unembedding.read(self._model, self._layout.final_norm, self._layout.width, tokens, self._tables.arena.dtype,
                                self._tables.device, lambda rows: without_lora(self._runner, rows))
        return read.vectors.cpu().numpy().tobytes(), read.bias.cpu().numpy().tobytes(), read.centred, read.eps

    def sample_weights(self) -> str:
        """Return a hash over a sample of every weight: identity of the loaded model, cheap at any size."""
        digest = hashlib.sha256()
        for name, weight in self._model.named_parameters():
            flat = weight.detach().flatten()
            picked = flat[:: max(1, flat.numel() // 256)][:256]
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
            digest.update(picked.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()[:32]


def _existing(options: EngineOptions, layout: Layout) -> tuple[Site, ...]:
    """Return the declared sites that the model has; PointError where one is missing that must be there."""
    found = tuple(site for site in options.sites if site in layout.places)
    lacking = options.kinds - {kind for kind, _ in found}
    for kind, layer in options.sites:
        if layer >= layout.n_layers:
            raise PointError(f"{kind}.{layer} was declared; the model has layers 0 to {layout.n_layers - 1}")
        if (kind, layer) not in layout.places and ((kind, layer) in options.exact or kind in lacking):
            raise PointError(f"{kind}.{layer} does not exist in this model: {layout.absent.get((kind, layer), 'unknown point')}. "
                             f"Declare points without {kind!r}")
    return found
