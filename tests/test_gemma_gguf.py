"""The conversion, on a two-layer Gemma 3 written as GGUF by the gguf package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

WIDTH, HIDDEN, HEADS, HEAD_DIM, LAYERS = 32, 64, 2, 16, 2
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n", "  ", *(f"<0x{byte:02X}>" for byte in range(256))]
LETTERS = ["ab", "▁ab", "abc", "▁", "a", "b", "c"]
SHAPES = {
    "token_embd": (len(TOKENS + LETTERS), WIDTH),
    "output_norm": (WIDTH,),
} | {
    f"blk.{layer}.{name}": shape
    for layer in range(LAYERS)
    for name, shape in {
        "attn_norm": (WIDTH,),
        "post_attention_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "post_ffw_norm": (WIDTH,),
        "attn_q": (HEADS * HEAD_DIM, WIDTH),
        "attn_k": (HEAD_DIM, WIDTH),
        "attn_v": (HEAD_DIM, WIDTH),
        "attn_output": (WIDTH, HEADS * HEAD_DIM),
        "attn_q_norm": (HEAD_DIM,),
        "attn_k_norm": (HEAD_DIM,),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }.items()
}


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, stored: dict[str, np.ndarray]) -> Path:
    from mia_lab._gemma_gguf import convert

    folder = tmp_path_factory.mktemp("converted")
    source = folder.with_name("tiny.gguf")
    write_gguf(source, stored)
    convert(source, folder)
    return folder


def write_gguf(path: Path, stored: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(8)
    control, user, byte, normal = (gguf.TokenType[name] for name in ("CONTROL", "USER_DEFINED", "BYTE", "NORMAL"))
    writer.add_token_list(TOKENS + LETTERS)
    writer.add_token_types([control] * 5 + [user] * 2 + [byte] * 256 + [normal] * len(LETTERS))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    for name, array in stored.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        if name.startswith("blk") and name.endswith("ffn_up"):
            writer.add_tensor(f"{name}.weight", gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_weight_of_the_model_is_there(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model.config.num_hidden_layers == LAYERS


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model.norm", "output_norm"),
        ("model.layers.1.input_layernorm", "blk.1.attn_norm"),
        ("model.layers.0.pre_feedforward_layernorm", "blk.0.ffn_norm"),
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
    ],
)
def test_norms_lose_the_one_that_llama_cpp_added(
    folder: Path, stored: dict[str, np.ndarray], name: str, source: str
) -> None:
    expected = torch.from_numpy(stored[source] - 1).bfloat16()
    torch.testing.assert_close(weights(folder)[f"{name}.weight"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model.embed_tokens", "token_embd"),
        ("model.layers.0.self_attn.o_proj", "blk.0.attn_output"),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
    ],
)
def test_matrices_keep_values_and_orientation(
    folder: Path, stored: dict[str, np.ndarray], name: str, source: str
) -> None:
    expected = torch.from_numpy(stored[source]).bfloat16()
    torch.testing.assert_close(weights(folder)[f"{name}.weight"], expected, rtol=0, atol=0)


def test_quantised_matrices_come_back_near(folder: Path, stored: dict[str, np.ndarray]) -> None:
    found = weights(folder)["model.layers.0.mlp.up_proj.weight"].float()
    torch.testing.assert_close(found, torch.from_numpy(stored["blk.0.ffn_up"]), rtol=0.01, atol=0.03)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_config_comes_from_the_file(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["head_dim"], config["sliding_window"]) == (WIDTH, HEAD_DIM, 8)
    assert config["rms_norm_eps"] == 1e-6
    assert config["vocab_size"] == len(TOKENS + LETTERS)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc ab", ["<bos>", "abc", "▁ab"]),
        ("a  b", ["<bos>", "a", "▁▁", "b"]),
        ("a\né", ["<bos>", "a", "\n", "<0xC3>", "<0xA9>"]),
    ],
)
def test_tokenizer_merges_in_the_order_of_the_vocabulary(folder: Path, text: str, pieces: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
