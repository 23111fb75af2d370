"""Turns a Gemma 3 GGUF file into a Hugging Face folder that vLLM and transformers both load.

Written out here instead of through transformers' GGUF reader, which keeps the weights packed, drops the
tokenizer's BOS and needs a further package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from gguf import GGUFReader

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Token types of the GGUF format (gguf.TokenType).
_CONTROL, _USER_DEFINED = 3, 4
# Not in the file: the local rope base and the pattern of windows, which llama.cpp also hard-codes for Gemma 3.
_LOCAL_ROPE_BASE = 10_000.0
_FULL_ATTENTION_EVERY = 6


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes config, weights in bfloat16 and tokenizer into `folder`. About half a minute and 2 GB of memory."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file, "c")  # copy on write: torch warns about arrays that it may not write
    config = model_config(reader)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _token_ids(config))
    save_file(dict(_weights(reader)), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer, settings = _tokenizer(reader)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", settings | {"model_max_length": config["max_position_embeddings"]})


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """The `config.json` of the model in `reader`."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    layers = field("gemma3.block_count")
    kinds = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "default"}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "transformers_version": "5.0.0",  # whose config format this is; transformers takes none for an old Mistral's
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("gemma3.embedding_length"),
        "intermediate_size": field("gemma3.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": field("gemma3.attention.head_count"),
        "num_key_value_heads": field("gemma3.attention.head_count_kv"),
        "head_dim": field("gemma3.attention.key_length"),
        "query_pre_attn_scalar": field("gemma3.attention.key_length"),
        "max_position_embeddings": field("gemma3.context_length"),
        "sliding_window": field("gemma3.attention.sliding_window"),
        "layer_types": [kinds[(layer + 1) % _FULL_ATTENTION_EVERY == 0] for layer in range(layers)],
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": field("gemma3.rope.freq_base")},
            "sliding_attention": rope | {"rope_theta": _LOCAL_ROPE_BASE},
        },
        # The file stores it as a float32, so 1e-6 comes back as 9.99999997e-07.
        "rms_norm_eps": float(f"{field('gemma3.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def _token_ids(config: dict[str, Any]) -> dict[str, int]:
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _weights(reader: GGUFReader) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf import dequantize

    for packed in reader.tensors:
        weight = torch.from_numpy(dequantize(packed.data, packed.tensor_type))
        if packed.name.endswith("norm.weight"):
            weight = weight - 1  # llama.cpp folds the 1 of Gemma's `1 + w` into the stored weight
        yield _hugging_face_name(packed.name), weight.to(torch.bfloat16).contiguous()


def _hugging_face_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_BLOCK[part]}.weight"


def _tokenizer(reader: GGUFReader) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, which puts BOS first, and its `tokenizer_config.json`. Ten seconds: the merges are searched."""
    fields = {name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")}
    types = fields["token_type"]
    # The file spells runs of spaces with spaces; the vocabulary spells a space as U+2581.
    pieces = [piece.replace(" ", "▁") for piece in fields["tokens"]]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab), fuse_unk=True, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer.add_special_tokens(_added(pieces, types, _CONTROL))
    tokenizer.add_tokens(_added(pieces, types, _USER_DEFINED))
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
    return tokenizer, names | {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "spaces_between_special_tokens": False,
    }


def _added(pieces: list[str], types: list[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(piece, normalized=False, special=kind == _CONTROL)
        for piece, of_kind in zip(pieces, types, strict=True)
        if of_kind == kind
    ]


def _merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose concatenation is a piece, in the order SentencePiece would merge them."""
    found = [
        (index, cut, piece)
        for piece, index in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(piece[:cut], piece[cut:]) for _, cut, piece in sorted(found)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
