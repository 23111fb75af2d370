"""TunedLens: the published folder is read as it is meant, and what is not one is refused."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mia_lab as mia
from mia_lab.errors import MiaError

LAYERS, WIDTH = 3, 4
CONFIG = {"base_model_name_or_path": "some/model", "d_model": WIDTH, "num_hidden_layers": LAYERS, "bias": True,
          "lens_type": "linear_tuned_lens"}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    return {f"{i}.{name}": torch.randn(shape, generator=draw) for i in range(LAYERS) for name, shape in shapes.items()}


def folder(path: Path, params: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    torch.save(params, path / "params.pt")
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return path


def test_a_translator_reads_what_enters_its_block(tmp_path: Path) -> None:
    params = state()
    lens = mia.TunedLens.load(folder(tmp_path, params))
    assert lens.base_model == "some/model"
    for layer in range(-1, LAYERS - 1):  # -1: before the first block
        shift = lens.shift(layer)
        assert torch.equal(shift[:, :-1], params[f"{layer + 1}.weight"])
        assert torch.equal(shift[:, -1], params[f"{layer + 1}.bias"])
    assert lens.shift(LAYERS - 1) is None


def test_files_and_folders_and_safetensors_are_the_same(tmp_path: Path) -> None:
    params = state()
    whole = mia.TunedLens.load(folder(tmp_path, {f"layer_translators.{key}": value for key, value in params.items()}))
    alone = mia.TunedLens.load(tmp_path / "params.pt")
    (tmp_path / "other").mkdir()
    save_file(params, tmp_path / "other" / "params.safetensors")
    other = mia.TunedLens.load(tmp_path / "other")
    for lens in (alone, other):
        assert torch.equal(torch.stack(lens.weights), torch.stack(whole.weights))
        assert torch.equal(torch.stack(lens.biases), torch.stack(whole.biases))


def test_a_lens_without_biases_has_none(tmp_path: Path) -> None:
    lens = mia.TunedLens.load(folder(tmp_path, {key: value for key, value in state().items() if "bias" not in key}))
    assert not torch.stack(lens.biases).any()


@pytest.mark.parametrize(("change", "said"), [
    (dict(d_model=5), "says d_model = 5; params.pt holds 4"),
    (dict(num_hidden_layers=4), "says num_hidden_layers = 4; params.pt holds 3"),
    (dict(lens_type="other"), "describes a 'other'"),
])
def test_a_config_that_says_otherwise_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(MiaError, match=said):
        mia.TunedLens.load(folder(tmp_path, state(), CONFIG | change))


@pytest.mark.parametrize(("change", "said"), [
    ({"1.weight": torch.zeros(WIDTH, 2)}, r"translator 1 of .* is \[4, 2\]"),
    ({"2.bias": torch.full((WIDTH,), float("nan"))}, "translator 2 of .* not finite"),
    ({"unembed.weight": torch.zeros(2)}, "'unembed.weight', which is no translator"),
    ({"4.weight": torch.zeros(WIDTH, WIDTH)}, "lacks the weight of some layer"),
])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, change: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(MiaError, match=said):
        mia.TunedLens.load(folder(tmp_path, state() | change))


class Intruder:
    """What a pickle could run."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.made,)


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    with pytest.raises(MiaError, match="no file of tensors"):
        mia.TunedLens.load(folder(tmp_path, {"0.weight": Intruder(tmp_path / "made")}))
    assert not (tmp_path / "made").exists()
    with pytest.raises(MiaError, match="there is no tuned lens at"):
        mia.TunedLens.load(tmp_path / "absent")


def test_another_model_s_size_is_refused(tmp_path: Path) -> None:
    lens = mia.TunedLens.load(folder(tmp_path, state()))
    lens.check(LAYERS, WIDTH)
    with pytest.raises(MiaError, match="of 3 layers and width 4, of some/model; the model has 12 layers and width 4"):
        lens.check(12, WIDTH)
