"""Tuned lenses: an affine map a layer, trained elsewhere, that brings the stream into the last layer's basis before it is read.

Source: Eliciting Latent Predictions from Transformers with the Tuned Lens, arXiv 2303.08112.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import MiaError

Tensor = torch.Tensor
_KEY = re.compile(r"^(?:layer_translators\.)?(\d+)\.(weight|bias)$")
_FILES = ("params.safetensors", "params.pt")


@dataclass(frozen=True, eq=False, slots=True)
class TunedLens:
    """Translators of a tuned lens: the stream h that enters block i is read as h + weights[i] h + biases[i].

    weights `[d_model d_model]` and biases `[d_model]`, one a block, in the order and dtype of the file. What leaves the last
    block needs none. base_model: the model that they were trained on, by the file's own word.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    base_model: str = ""

    @classmethod
    def load(cls, path: str | Path) -> TunedLens:
        """Read a folder with `config.json` and `params.pt` (or `.safetensors`), as the tuned-lens library saves it, or such a file.

        No code in the file is run. MiaError where it holds anything but one translator a layer, or not what its config says.
        """
        path = Path(path)
        file = next((path / name for name in _FILES if (path / name).exists()), None) if path.is_dir() else path
        if file is None or not file.exists():
            raise MiaError(f"there is no tuned lens at {path}; it is a folder with config.json and {' or '.join(_FILES)}, or such a file")
        config_file = file.with_name("config.json")
        config = json.loads(config_file.read_text()) if config_file.exists() else {}
        if config.get("lens_type", "linear_tuned_lens") != "linear_tuned_lens":
            raise MiaError(f"{config_file} describes a {config['lens_type']!r}; only linear_tuned_lens, an affine map a layer, is read")
        weights, biases = _translators(_state(file), file)
        said = {key: config[key] for key in ("d_model", "num_hidden_layers") if key in config}
        held = {"d_model": len(weights[0]), "num_hidden_layers": len(weights)}
        wrong = [key for key in said if said[key] != held[key]]
        if wrong:
            raise MiaError(f"{config_file} says {wrong[0]} = {said[wrong[0]]}; {file.name} holds {held[wrong[0]]}")
        return cls(weights, biases, str(config.get("base_model_name_or_path") or ""))

    def shift(self, layer: int) -> Tensor | None:
        """Return the map beside its bias, `[d_model d_model + 1]` float32, for the stream after a block, or before the first
        one where `layer` is -1; None after the last block."""
        i = layer + 1  # a translator reads what enters its block
        return None if i == len(self.weights) else torch.cat([self.weights[i].float(), self.biases[i].float()[:, None]], 1).contiguous()

    def check(self, n_layers: int, d_model: int) -> None:
        """MiaError where the lens is of another model's size."""
        size = len(self.weights), len(self.weights[0])
        if size != (n_layers, d_model):
            raise MiaError(f"this tuned lens is of {size[0]} layers and width {size[1]}"
                           f"{f', of {self.base_model}' if self.base_model else ''}; the model has {n_layers} layers and width {d_model}")

    def __repr__(self) -> str:
        return f"TunedLens: {len(self.weights)} layers, d_model {len(self.weights[0])}, trained on {self.base_model or 'an unnamed model'}"


def _state(file: Path) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, of torch or of zip files
        raise MiaError(f"{file} is no file of tensors: {error}") from None
    if not isinstance(found, dict):
        raise MiaError(f"{file} holds a {type(found).__name__}; a tuned lens is a state dict of '0.weight', '0.bias' and so on")
    return found


def _translators(state: dict[str, Any], file: Path) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    named = {key: _KEY.match(key) for key in state}
    odd = [key for key, match in named.items() if match is None or not isinstance(state[key], torch.Tensor)]
    if odd or not named:
        raise MiaError(f"{file} holds {odd[0]!r}, which is no translator" if odd else f"{file} is empty")
    found = {(int(match[1]), match[2]): state[key].detach() for key, match in named.items()}
    layers = sorted({i for i, _ in found})
    if layers != list(range(len(layers))) or any((i, "weight") not in found for i in layers):
        raise MiaError(f"{file} lacks the weight of some layer between 0 and {layers[-1]}")
    weights = tuple(found[i, "weight"] for i in layers)
    biases = tuple(found.get((i, "bias"), torch.zeros(len(w))) for i, w in enumerate(weights))
    width = len(weights[0])
    for i, (weight, bias) in enumerate(zip(weights, biases)):
        if weight.shape != (width, width) or bias.shape != (width,):
            raise MiaError(f"translator {i} of {file} is {list(weight.shape)} with a bias {list(bias.shape)}; "
                           f"that of layer 0 has width {width}")
        if not (weight.isfinite().all() and bias.isfinite().all()):
            raise MiaError(f"translator {i} of {file} holds values that are not finite")
    return weights, biases
