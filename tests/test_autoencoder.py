"""Sparse autoencoders of SAELens: their features are what SAELens gives, and what cannot be read exactly is refused.

The folders in tests/files/ were written by SAELens 6.54.12 (SAE.save_model) with random weights; `expected.safetensors` holds what
its encode and decode gave for rows x.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mia_lab as mia
from mia_lab.errors import EditError

FILES = Path(__file__).parent / "files"


@pytest.fixture(params=["standard", "jumprelu", "topk"])
def folder(request: pytest.FixtureRequest) -> Path:
    return FILES / f"sae-lens-6.54.12-{request.param}"


def changed(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of a folder with another configuration."""
    to.mkdir(exist_ok=True)
    found = json.loads((folder / "cfg.json").read_text()) | config
    (to / "cfg.json").write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))
    (to / "sae_weights.safetensors").write_bytes((folder / "sae_weights.safetensors").read_bytes())
    return to


def test_features_and_reconstruction_are_sae_lens_s(folder: Path) -> None:
    sae, expected = mia.SparseAutoencoder.load(folder), load_file(folder / "expected.safetensors")
    found = sae.encode(expected["x"])
    torch.testing.assert_close(found, expected["features"], rtol=1e-5, atol=1e-5)
    assert torch.equal(found > 0, expected["features"] > 0)
    torch.testing.assert_close(sae.decode(found), expected["decoded"], rtol=1e-5, atol=1e-5)
    residual = (expected["x"] - expected["decoded"]).square().sum() / (expected["x"] - expected["x"].mean(0)).square().sum()
    assert sae.unexplained(expected["x"]) == pytest.approx(float(residual), rel=1e-5)
    with pytest.raises(EditError, match="leave padding and BOS out"):
        sae.unexplained(torch.cat([expected["x"], torch.full((1, 16), torch.nan)]))
    assert "blocks.2.hook_resid_post" in repr(sae) and sae.n_features == 8


def test_a_padded_row_has_no_features_rather_than_features_that_are_off(folder: Path) -> None:
    sae, x = mia.SparseAutoencoder.load(folder), load_file(folder / "expected.safetensors")["x"]
    found = sae.encode(torch.cat([x, torch.full((1, 16), torch.nan)]))
    assert found[-1].isnan().all() and torch.equal(found[:-1], sae.encode(x))


def test_a_feature_s_direction_is_its_row_of_the_decoder(folder: Path) -> None:
    sae = mia.SparseAutoencoder.load(folder)
    found = sae.vector(3)
    assert (found.kind, found.layers) == ("resid_post", (2,))
    assert torch.equal(found.rows[0], load_file(folder / "sae_weights.safetensors")["W_dec"][3])
    for wrong in (-1, 8, True, "3"):
        with pytest.raises(EditError, match="0 to 7"):
            sae.vector(wrong)


def test_the_configuration_of_older_versions_is_the_same_autoencoder(tmp_path: Path) -> None:
    for kind, extra in (("standard", {}), ("topk", {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}, "k": ...})):
        folder = FILES / f"sae-lens-6.54.12-{kind}"
        old = changed(folder, tmp_path / kind, metadata=..., architecture=..., apply_b_dec_to_input=..., normalize_activations=False,
                      hook_point="blocks.2.hook_resid_post", hook_point_head_index=None, model_name="tiny-llama", **extra)
        x = load_file(folder / "expected.safetensors")["x"]
        assert torch.equal(mia.SparseAutoencoder.load(old).encode(x), mia.SparseAutoencoder.load(folder).encode(x))


def test_centred_weights_are_folded_so_that_the_raw_stream_is_read(tmp_path: Path, folder: Path) -> None:
    meta = json.loads((folder / "cfg.json").read_text())["metadata"]
    kwargs = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    centred = mia.SparseAutoencoder.load(changed(folder, tmp_path / "sae", metadata=meta | kwargs))
    x = load_file(folder / "expected.safetensors")["x"]
    plain = mia.SparseAutoencoder.load(folder)
    torch.testing.assert_close(centred.encode(x + 5.0), plain.encode(x - x.mean(-1, keepdim=True)), rtol=1e-4, atol=1e-4)
    assert centred.unexplained(x + 5.0) == pytest.approx(plain.unexplained(x - x.mean(-1, keepdim=True)), rel=1e-4)
    with pytest.raises(EditError, match="only the stream can be centred"):
        mia.SparseAutoencoder.load(changed(folder, tmp_path / "z", metadata=meta | kwargs | {"hook_name": "blocks.2.attn.hook_z"}))


@pytest.mark.parametrize(("config", "says"), [
    ({"normalize_activations": "expected_average_only_in"}, "normalises its input"),
    ({"normalize_activations": "layer_norm"}, "layer_norm"),
    ({"normalize_activations": True}, "normalises its input"), ({"architecture": "gated"}, "architecture is 'gated'"),
    ({"activation_fn": "tanh-relu"}, "activation is 'tanh-relu'"), ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor"),
    ({"rescale_acts_by_decoder_norm": True}, "decoder norms"), ({"hook_head_index": 3}, "reads one head, 3"),
    ({"metadata": {}}, "names no hook"), ({"architecture": "jumprelu"}, "lack threshold"), ({"architecture": "topk"}, "how many features")])
def test_an_autoencoder_that_would_be_read_wrongly_is_refused(tmp_path: Path, config: dict, says: str) -> None:
    with pytest.raises(EditError, match=says):
        mia.SparseAutoencoder.load(changed(FILES / "sae-lens-6.54.12-standard", tmp_path / "sae", **config))


def test_a_clamp_and_a_reduction_have_the_numbers_of_the_file_and_refuse_what_they_cannot_say(tmp_path: Path) -> None:
    plain, jump, top = (mia.SparseAutoencoder.load(FILES / f"sae-lens-6.54.12-{kind}") for kind in ("standard", "jumprelu", "topk"))
    assert plain.reduction(4).threshold == 0.0 and torch.equal(top.reduction(3).bias, top.bias)
    with pytest.raises(EditError, match="threshold of its own"):
        jump.reduction()
    with pytest.raises(EditError, match="keeps 3 features a row; 4"):
        top.reduction(4)
    with pytest.raises(EditError, match="no SAELens folder"):
        mia.SparseAutoencoder.load(tmp_path)


def make_sae(folder: Path, layer: int) -> Path:
    """A random JumpReLU autoencoder of the tiny models' width, in SAELens's files."""
    draw = torch.Generator().manual_seed(3)
    folder.mkdir()
    shapes = {"W_enc": (128, 24), "W_dec": (24, 128), "b_enc": (24,), "b_dec": (128,), "threshold": (24,)}
    save_file({name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"architecture": "jumprelu", "apply_b_dec_to_input": True, "metadata": {
        "hook_name": f"blocks.{layer}.hook_resid_post", "model_name": "tiny", "sae_lens_version": "6.0.0"}}))
    return folder


@pytest.mark.full
def test_in_a_session_a_clamp_and_a_reduction_do_what_the_autoencoder_says(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    s = open_tiny("gemma3", max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32, enforce_eager=True,
                  points=["resid_post", "attn_out", "attn_out_raw"])
    ids = [[1, 40, 50, 60, 70], [1, 9, 8, 7, 6, 5, 4]]
    sae = mia.SparseAutoencoder.load(make_sae(tmp_path / "sae", 2))
    rows, pairs = s.capture(ids, layers=2, at=-1).get(), []
    for j in range(24):  # a feature that is on in one row and off in another, so that its threshold counts
        on = sae.encode(rows)[:, j]
        edit = sae.clamp(j, 4.0, s)
        found = s.capture(ids, layers=2, at=-1, edits=[edit]).get()
        torch.testing.assert_close(found, rows + (4.0 - on)[:, None] * sae.decoder[j], rtol=0, atol=2e-5)
        pairs.append((on > 0).tolist())
    assert [True, False] in pairs or [False, True] in pairs
    even = mia.SparseAutoencoder(sae.hook, sae.encoder, sae.bias, sae.decoder, sae.decoder_bias, torch.zeros(24))
    values, places = s.capture(ids, layers=2, at=-1, reduce=even.reduction(5))
    top = even.encode(rows).topk(5)
    torch.testing.assert_close(values.get(), top.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(places.get().long(), top.indices)
    wide = mia.SparseAutoencoder.load(FILES / "sae-lens-6.54.12-standard")
    with pytest.raises(EditError, match="trained on tiny-llama: it reads 16 values"):
        wide.clamp(0, 1.0, s)
