"""What an engine was asked to tap, read from `VllmConfig.additional_config`, and what is refused beside it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from .wire import KEY, Site

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ARENA_BYTES = 256 << 20
BANK_BYTES = 256 << 20
PLANS = 256


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The opt-in. `sites` are (kind, layer) pairs, dropped where the model lacks them: but those in `exact` must be there,
    and one at least of each of `kinds`. `edits` are the enabled edit kinds; 0 rows means choose. `complete`: whether an engine
    that captures faster than the host takes rows over waits, or drops them."""

    sites: tuple[Site, ...]
    exact: frozenset[Site] = frozenset()
    kinds: frozenset[str] = frozenset()
    edits: tuple[str, ...] = ("add",)
    max_captured_tokens: int = 0
    max_biased_tokens: int = 0
    complete: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the form that `additional_config` carries."""
        return {"sites": [list(site) for site in self.sites], "edits": list(self.edits),
                "max_captured_tokens": self.max_captured_tokens,
                "max_biased_tokens": self.max_biased_tokens, "exact": sorted(map(list, self.exact)),
                "kinds": sorted(self.kinds), "complete": self.complete}

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> EngineOptions | None:
        """Return the options of an engine that opted in, else None."""
        raw: Any = (vllm_config.additional_config or {}).get(KEY) if isinstance(vllm_config.additional_config, dict) else None
        if raw is None:
            return None
        if "sites" not in raw:
            raise UnsupportedError("the points of additional_config's mia_lab were not spelled out: another vLLM plugin than "
                                   "mia_lab.serve.plugin answers to its name. Install mia_lab anew, and remove any old mia_lab.egg-info")
        sites, exact = (tuple((str(kind), int(layer)) for kind, layer in raw.get(name, ())) for name in ("sites", "exact"))
        return cls(sites, frozenset(exact), frozenset(map(str, raw.get("kinds", ()))), tuple(raw.get("edits", ("add",))),
                   int(raw.get("max_captured_tokens", 0)), int(raw.get("max_biased_tokens", 0)), bool(raw.get("complete", True)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the fixed tables are. Both the scheduler's and the worker's process derive them from the config."""

    tokens: int  # rows of one engine step, at most
    requests: int  # that may have run and not be finished
    programs: int
    plans: int
    terms: int
    bank_bytes: int
    captured_tokens: int  # rows that one step's half of the arena holds with every site captured
    biased_tokens: int = 0  # whose keys and values are kept
    longest: int = 1 << 30  # tokens of one request, at most

    @classmethod
    def of(cls, vllm_config: VllmConfig, options: EngineOptions) -> Sizes:
        """Return the sizes for one engine; raises UnsupportedError when a table cannot be addressed."""
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        row = sum(aligned(width_of(kind, vllm_config)) for kind, _ in options.sites)
        row_bytes = row * model.dtype.itemsize
        budget = min(max(scheduler.max_num_seqs, ARENA_BYTES // (2 * row_bytes)), ((1 << 31) - 1) // (2 * row))
        rows = min(options.max_captured_tokens or budget, scheduler.max_num_batched_tokens)
        if 2 * rows * row >= 1 << 31:
            raise UnsupportedError(f"max_captured_tokens={rows} needs an arena of {2 * rows * row_bytes >> 20} MiB, "
                                   f"more than 2^31 values; ask for fewer rows or points")
        programs = 4 * scheduler.max_num_seqs if options.edits else 1
        vector = 4 * model.get_hidden_size()
        bank = min(BANK_BYTES, max(64, scheduler.max_num_seqs) * len(options.sites) * vector) if options.edits else vector
        return cls(scheduler.max_num_batched_tokens, 2 * scheduler.max_num_seqs, programs, PLANS,
                   min(1 << 17, max(1024, 2 * programs * len(options.sites))) if options.edits else 1, bank, rows,
                   options.max_biased_tokens, model.max_model_len)


    def describe(self, vllm_config: VllmConfig, options: EngineOptions) -> str:
        """The memory that declared points will take, in words."""
        row = sum(aligned(width_of(kind, vllm_config)) for kind, _ in options.sites) * vllm_config.model_config.dtype.itemsize
        return (f"{len(options.sites)} points to tap; captures use an arena of {2 * self.captured_tokens * row / 2**20:.0f} MiB on the "
                f"device, two steps of {self.captured_tokens} rows (max_captured_tokens=)")


def aligned(width: int) -> int:
    """Values that a captured row of `width` takes in the arena: every row starts on a whole 16 bytes."""
    return -(-width // 8) * 8


def width_of(kind: str, vllm_config: VllmConfig) -> int:
    """Values of one row at a kind of point, as the config announces it; the loaded model may say otherwise."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text, width = model.hf_text_config, model.get_hidden_size()
    match kind:
        case "attention":
            return 0
        case "q" | "z":
            return model.get_num_attention_heads(parallel) * model.get_head_size()
        case "k" | "v":
            return model.get_num_kv_heads(parallel) * model.get_head_size()
        case "mlp_act":
            names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "ff_dim")
            found = next((getattr(text, name) for name in names if getattr(text, name, None)), 4 * width)
            return max(found) if isinstance(found, (list, tuple)) else int(found)
        case "router":
            return 2 * max(model.get_num_experts(), 1)  # its logits may be float32 beside a 16-bit model
    return width


def refuse_unsupported(vllm_config: VllmConfig, sizes: Sizes) -> None:
    """Raise UnsupportedError when an engine option would make results wrong or is untested, naming the flag."""
    from vllm.v1.core.sched.scheduler import Scheduler

    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    checks = [
        (parallel.tensor_parallel_size > 1, "tensor parallelism is untested", "tensor_parallel_size=1"),
        (parallel.pipeline_parallel_size > 1, "each pipeline stage owns other layers", "pipeline_parallel_size=1"),
        (parallel.data_parallel_size > 1, "data parallelism is untested", "data_parallel_size=1"),
        (getattr(parallel, "enable_dbo", False), "micro-batches shift the rows", "enable_dbo=False"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "context parallelism splits the rows",
         "prefill_context_parallel_size=1"),
        (vllm_config.speculative_config is not None, "rows of rejected draft tokens would be delivered",
         "speculative_config=None"),
        (vllm_config.kv_transfer_config is not None, "a KV connector would share edited KV by tokens alone",
         "kv_transfer_config=None"),
        (not issubclass(scheduler.get_scheduler_cls(), Scheduler), "a foreign scheduler would not fork edited KV",
         "scheduler_cls=None"),
        (vllm_config.model_config.runner_type != "generate", "only generating models have decode rows", "runner='generate'"),
        (vllm_config.model_config.is_encoder_decoder, "the encoder's rows are not tapped", "a decoder-only model"),
        (getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False), "it skips prompt rows",
         "kv_sharing_fast_prefill=False"),
        (not scheduler.enable_chunked_prefill and sizes.captured_tokens < scheduler.max_num_batched_tokens,
         "captured prompts longer than the arena must be chunked",
         f"enable_chunked_prefill=True or max_captured_tokens={scheduler.max_num_batched_tokens}"),
        (getattr(getattr(vllm_config, "offload_config", None), "offload_backend", "auto") in ("uva", "prefetch")
         or getattr(getattr(getattr(vllm_config, "offload_config", None), "uva", None), "cpu_offload_gb", 0) > 0,
         "weight offloading replaces the layers' forward", "cpu_offload_gb=0"),
    ]
    for wrong, reason, fix in checks:
        if wrong:
            raise UnsupportedError(f"this engine option is not supported: {reason}. Load with {fix}")
