"""What an engine runs with, in plain values: read from vLLM's config once, in the worker, so that nobody else has to know it."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's model, limits and environment. It crosses to a client as JSON.

    kv_tokens: tokens that the KV cache has room for. rotary: whether positions turn queries and keys. soft_cap: of the logits, None
    without one. edits: the enabled edit kinds. configuration: a hash of the configuration that the model runs with, `hf_overrides` and
    all, not of where it lies. compiled: how vLLM compiles the model, and its CUDA graphs.
    """

    n_layers: int
    d_model: int
    d_vocab: int
    dtype: str
    max_len: int
    max_requests: int
    chunked: bool
    prefix_caching: bool
    block_size: int
    kv_tokens: int
    rotary: bool
    soft_cap: float | None
    edits: tuple[str, ...]
    configuration: str
    compiled: str
    device: str
    vllm: str
    torch: str

    @classmethod
    def of(cls, config: VllmConfig, edits: tuple[str, ...]) -> Settings:
        """Read them from the config of an engine that is up."""
        from vllm import __version__

        model, cache, scheduler, compilation = config.model_config, config.cache_config, config.scheduler_config, config.compilation_config
        text = model.hf_text_config
        said = model.hf_config.to_dict() | {"_name_or_path": ""}
        return cls(
            text.num_hidden_layers, model.get_hidden_size(), model.get_vocab_size(), str(model.dtype).removeprefix("torch."),
            model.max_model_len, scheduler.max_num_seqs, bool(scheduler.enable_chunked_prefill), bool(cache.enable_prefix_caching),
            cache.block_size, (cache.num_gpu_blocks or 0) * cache.block_size,
            bool(getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)),
            getattr(text, "final_logit_softcapping", None), tuple(edits),
            hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32],
            f"{compilation.mode.name}, {compilation.cudagraph_mode.name}",
            torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", __version__, str(torch.__version__))

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Settings:
        """From what `as_json` gave; KeyError or TypeError where it is another thing."""
        return cls(**{field.name: found[field.name] for field in fields(cls)} | {"edits": tuple(found["edits"])})

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"edits": list(self.edits)}

    @property
    def type(self) -> torch.dtype:
        """The type that the model runs in."""
        return getattr(torch, self.dtype)

    @property
    def environment(self) -> dict[str, str]:
        """What decides whether greedy tokens can be the same one by one: device, type, versions, and how the model is compiled."""
        return {name: getattr(self, name) for name in ("device", "dtype", "vllm", "torch", "compiled")}
