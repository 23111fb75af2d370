"""Sparse autoencoders as SAELens keeps them: a folder with cfg.json and sae_weights.safetensors, of any of its versions.

What can be folded exactly into encoder and bias is: the input bias, and the centring of the stream that TransformerLens does
where `center_writing_weights` is set. What cannot be is refused: norms of the input, gates, and scales that the file leaves out.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...errors import EditError
from ..autoencoder import SparseAutoencoder

_OLD = {"hook_point": "hook_name", "hook_point_head_index": "hook_head_index", "activation_fn_str": "activation_fn"}
_KNOWN = ("standard", "jumprelu", "topk")


def load(folder: str | Path) -> SparseAutoencoder:
    """Read a folder; EditError with the reason for what would not give the published features exactly."""
    folder = Path(folder)
    config, weights = _read(folder)
    _refuse(config, weights)
    encoder, decoder = weights["W_enc"], weights["W_dec"]
    if encoder.ndim != 2 or encoder.shape != decoder.T.shape:
        raise EditError(f"{folder} has an encoder of shape {list(encoder.shape)} and a decoder of shape {list(decoder.shape)}")
    width, features = encoder.shape
    for name, size in (("b_enc", features), ("b_dec", width), ("threshold", features)):
        if name in weights and weights[name].shape != (size,):
            raise EditError(f"{folder} has {name} of shape {list(weights[name].shape)}; its encoder needs [{size}]")
    bias = weights["b_enc"]
    if config["apply_b_dec_to_input"]:
        bias = bias - (weights["b_dec"].double() @ encoder.double()).float()
    if _centred(config):
        encoder = encoder - encoder.mean(0)  # x less its mean, read by e, is x read by e less its mean
    none = torch.zeros_like(bias)
    threshold = weights["threshold"].clamp(min=0.0) if config["architecture"] == "jumprelu" else none  # a ReLU comes before it
    k = int(config["k"]) if config["architecture"] == "topk" else None
    return SparseAutoencoder(config["hook_name"], encoder, bias, decoder, weights["b_dec"], threshold, k, config.get("model_name") or "",
                             _centred(config))


def _centred(config: dict[str, Any]) -> bool:
    return bool((config.get("model_from_pretrained_kwargs") or {}).get("center_writing_weights"))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration, with the names that it has today, and the weights in float32."""
    try:
        found = json.loads((folder / "cfg.json").read_text(encoding="utf-8"))
        weights = {name: tensor.float() for name, tensor in load_file(folder / "sae_weights.safetensors").items()}
        inner = [found, *(found.get(name) or {} for name in ("metadata", "activation_fn_kwargs", "model_from_pretrained_kwargs"))]
        if not all(isinstance(value, dict) for value in inner):
            raise ValueError("cfg.json holds a list where it has to hold fields")
    except (OSError, ValueError, KeyError, AttributeError, RecursionError, SafetensorError) as error:
        raise EditError(f"{folder} is no SAELens folder (cfg.json and sae_weights.safetensors): {error}") from None
    config = {_OLD.get(key, key): value for key, value in (found | (found.get("metadata") or {})).items()}
    kwargs = config.get("activation_fn_kwargs") or {}
    if config.get("activation_fn") == "topk":
        config |= {"architecture": "topk", "k": kwargs.get("k"), "activation_fn": "relu"}
    return {"architecture": "standard", "apply_b_dec_to_input": True} | config, weights


def _refuse(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    norm, activation = config.get("normalize_activations"), config.get("activation_fn") or "relu"
    scaled = bool(config.get("finetuning_scaling_factor"))
    absent = {"W_enc", "b_enc", "W_dec", "b_dec", *(["threshold"] if config["architecture"] == "jumprelu" else [])} - set(weights)
    for is_so, reason in (
        (config["architecture"] not in _KNOWN, f"its architecture is {config['architecture']!r}; known are {', '.join(_KNOWN)}"),
        (norm not in (None, False, "none"), f"it normalises its input ({norm}), with a factor that depends on each row or is not in the "
                                            f"file; fold it in SAELens first (fold_activation_norm_scaling_factor)"),
        (activation not in ("relu", "jumprelu"), f"its activation is {activation!r}"),
        (scaled, "it has a finetuning_scaling_factor"),
        (bool(config.get("rescale_acts_by_decoder_norm")), "it scales features by decoder norms; fold them in SAELens first"),
        (config.get("hook_head_index") is not None, f"it reads one head, {config.get('hook_head_index')}"),
        (not config.get("hook_name"), "cfg.json names no hook"),
        (_centred(config) and "resid" not in str(config.get("hook_name")),
         f"it was trained on centred weights at {config.get('hook_name')}; only the stream can be centred afterwards"),
        (config.get("hook_name_out") not in (None, config.get("hook_name")), "it is a transcoder, which writes elsewhere than it reads"),
        (config["architecture"] == "topk" and (type(config.get("k")) is not int or config["k"] < 1),
         "cfg.json does not say how many features are kept"),
        (bool(absent), f"the weights lack {', '.join(sorted(absent))}"),
    ):
        if is_so:
            raise EditError(f"this autoencoder cannot be read exactly: {reason}")
