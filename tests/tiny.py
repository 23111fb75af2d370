"""Tiny random models of many families, saved as Hugging Face folders, and a small tokenizer for them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB, WIDTH, LAYERS, HEADS = 320, 128, 4, 4
_COMMON = dict(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, bos_token_id=1,
               eos_token_id=2, pad_token_id=0, max_position_embeddings=512, tie_word_embeddings=False)
_GATED = _COMMON | dict(intermediate_size=128, num_key_value_heads=2)
_ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GATED),
    "qwen2": ("Qwen2", _GATED),
    "qwen3": ("Qwen3", _GATED | dict(head_dim=32)),
    "gemma3": ("Gemma3Text", _GATED | dict(head_dim=32, sliding_window=32, query_pre_attn_scalar=32,
                                           layer_types=["sliding_attention", "full_attention"] * 2)),
    "gpt2": ("GPT2", dict(vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=512, bos_token_id=1,
                          eos_token_id=2)),
    "opt": ("OPT", _COMMON | dict(ffn_dim=128, word_embed_proj_dim=WIDTH)),
    "mixtral": ("Mixtral", _GATED | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2moe": ("Qwen2Moe", _GATED | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                                           shared_expert_intermediate_size=64, norm_topk_prob=True)),
    "cohere": ("Cohere", _GATED | dict(logit_scale=1.0, tie_word_embeddings=True)),
}


def config(family: str) -> transformers.PretrainedConfig:
    """The configuration of one family."""
    name, options = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**options)


def build(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model of `family` under `folder`; return its path."""
    path = folder / f"{family}-{str(dtype).removeprefix('torch.')}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(family)).to(dtype)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:  # larger than the usual 0.02, so that every branch moves the stream visibly
                    weight.normal_(0, 0.04)
                elif "norm" not in name and "ln" not in name:
                    weight.normal_(0, 0.02)
        model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2)
        model.save_pretrained(path)
    return path


def tokenizer(folder: Path) -> Path:
    """Save a tokenizer of single characters, with a BOS that is always added, in a folder of its own.

    Apart from the model: beside some families' config.json, transformers would read it as another class.
    """
    path = folder / "tokenizer"
    if not path.exists():
        characters = {chr(code): code - 29 for code in range(32, 127)}
        words = {"<pad>": 0, "<s>": 1, "</s>": 2} | characters | {f"w{i}": i for i in range(98, VOCAB)}
        core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
        fast.save_pretrained(path)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The model in Hugging Face, eager attention, for comparison."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager",
                                                              experts_implementation="eager")
    return model.eval()
