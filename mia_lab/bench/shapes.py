"""Made-up models of real shapes: overhead does not depend on the weights, so they are random."""
from __future__ import annotations

import json
from pathlib import Path

_LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama")
SHAPES: dict[str, dict] = {
    "llama-8b": _LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                              num_key_value_heads=8, vocab_size=128256),
    "qwen-1.5b": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=1536, intermediate_size=8960,
                      num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936),
    "qwen3-30b-a3b": dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
                          moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
                          mlp_only_layers=[], num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                          vocab_size=151936),
    "llama-70b": _LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                               num_key_value_heads=8, vocab_size=128256),
    "tiny": _LLAMA | dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                          vocab_size=1024),
}
_COMMON = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=8192, bos_token_id=1,
               eos_token_id=2, tie_word_embeddings=False, torch_dtype="bfloat16")


def write(shape: str, folder: Path, layers: int | None = None) -> tuple[Path, Path]:
    """Write the config of a shape and a small tokenizer under `folder`; return both paths.

    layers: how many blocks it keeps, by default all.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model, tokenizer = folder / shape, folder / "tokenizer"
    model.mkdir(parents=True, exist_ok=True)
    config = _COMMON | SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    (model / "config.json").write_text(json.dumps(config))
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, config["vocab_size"])}}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), bos_token="<s>",
                            eos_token="</s>", pad_token="<pad>").save_pretrained(tokenizer)
    return model, tokenizer
