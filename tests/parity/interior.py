"""Points inside attention, MLP and router in Hugging Face: what its own attention function sees and gives, and the inputs of
its last MLP projection."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mia_lab.points import Point

HEADS = ("q", "k", "v", "z", "pattern")
_DOWN = ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "fc_out", "w2", "fc_2")
_NORMS = ("model.norm", "transformer.ln_f", "model.decoder.final_layer_norm", "model.final_layernorm", "gpt_neox.final_layer_norm",
          "backbone.norm_f", "model.language_model.norm", "transformer.norm_f", "model.final_layer_norm", "model.norm_f")
_EMBEDDINGS = ("transformer.wte", "model.decoder.embed_tokens")  # whose models add learned positions

Touch = Callable[[Point, Tensor], None]
Bias = Callable[[int, Tensor | None, Tensor], Tensor | None]  # layer, mask, attention [head pos key] -> mask


@contextmanager
def spied(model: PreTrainedModel, wanted: set[Point], touch: Touch, bias: Bias) -> Iterator[None]:
    """Call `touch(point, value [.. width])`, which may edit in place, for each wanted point inside attention."""
    layers = {p.layer for p in wanted if p.kind in (*HEADS, "attention")}

    def spy(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        inner = sys.modules[type(module).__module__].eager_attention_forward
        layer = module.layer_idx
        out, weights = inner(module, query, key, value, mask, **kwargs)
        if Point("attention", layer) in wanted:
            out, weights = inner(module, query, key, value, bias(layer, mask, weights[0]), **kwargs)
        if layer in layers:
            for kind, tensor in (("q", query), ("k", key), ("v", value)):
                touch(Point(kind, layer), tensor.transpose(1, 2).flatten(2).clone())
            flat = out.flatten(2).contiguous()
            touch(Point("z", layer), flat)
            out = flat.view(out.shape)
            if Point("pattern", layer) in wanted:
                touch(Point("pattern", layer), weights[0, :, :, : key.shape[2]].transpose(0, 1).flatten(1).clone())
        return out, weights

    if not layers:
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    ALL_MASK_ATTENTION_FUNCTIONS.register("spy", eager_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = "spy"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def module_of(model: PreTrainedModel, block: nn.Module, kind: str) -> tuple[nn.Module, str]:
    """The module whose input or output is another interior point."""
    match kind:
        case "final_norm":
            return _first(model, _NORMS), "out"
        case "embed":
            whole = [path for path in _EMBEDDINGS if has(model, path)]
            return (_first(model, whole), "out") if whole else (block, "in")
        case "attn_out_raw":
            return block.self_attn, "out"
        case "mlp_out_raw":
            return block.mlp, "out"
        case "mlp_act":
            return next(m for name, m in block.named_modules() if name.rpartition(".")[2] in _DOWN and "attn" not in name), "in"
        case "router":
            return next(m for name, m in block.named_modules() if name.endswith(("gate", "router")) and hasattr(m, "weight")), "gate"
    raise KeyError(kind)


def nameable(model: PreTrainedModel, points: tuple[Point, ...], blocks: nn.ModuleList) -> tuple[Point, ...]:
    """The points that can be found on the Hugging Face side: its attention may not call a function that can be spied on, and
    experts have no one projection."""
    heads = type(model)._supports_attention_backend if hasattr(type(model), "_supports_attention_backend") else False
    found = []
    for point in points:
        if point.kind in HEADS:
            found += [point] if heads else []
        elif point.kind in ("embed", "final_norm", "mlp_act", "router", "attn_out_raw", "mlp_out_raw"):
            try:
                module_of(model, blocks[point.layer], point.kind)
            except (StopIteration, AttributeError):
                continue
            found.append(point)
        else:
            found.append(point)
    return tuple(found)


def has(model: nn.Module, path: str) -> bool:
    """Whether a module has a submodule of that path."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _first(model: nn.Module, paths: list[str] | tuple[str, ...]) -> nn.Module:
    return next(model.get_submodule(path) for path in paths if has(model, path))


def router_logits(module: nn.Module, hidden: Tensor) -> Tensor:
    """What a linear router gives for its input `[.. d]`."""
    return torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), module.weight, getattr(module, "bias", None))
