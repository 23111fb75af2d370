"""The same points in Hugging Face: read, and edited in place, by plain forward hooks on a teacher-forced pass."""
from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import nn
from transformers import PreTrainedModel

import mia_lab as mia
from mia_lab.points import Point

_LISTS = ("model.layers", "transformer.h", "model.decoder.layers", "gpt_neox.layers")
_ATTENTION = ("self_attn", "attn", "attention")
_MLP = ("mlp", "block_sparse_moe", "fc2")


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder blocks."""
    for path in _LISTS:
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    raise AttributeError(f"no block list in {type(model).__name__}")


def _child(block: nn.Module, names: Iterable[str]) -> nn.Module:
    return next(getattr(block, name) for name in names if hasattr(block, name))


def _site(block: nn.Module, kind: str) -> tuple[nn.Module, str]:
    """The module whose input or output is the point, by each family's documented structure."""
    sandwich = hasattr(block, "pre_feedforward_layernorm")
    match kind:
        case "resid_pre":
            return block, "in"
        case "resid_post":
            return block, "out"
        case "resid_mid":
            names = ("pre_feedforward_layernorm",) if sandwich else ("ln_2", "final_layer_norm", "post_attention_layernorm")
            return _child(block, names), "in"
        case "attn_out":
            return _child(block, ("post_attention_layernorm",) if sandwich else _ATTENTION), "out"
        case "mlp_out":
            return _child(block, ("post_feedforward_layernorm",) if sandwich else _MLP), "out"
    raise KeyError(kind)


@torch.no_grad()
def run(model: PreTrainedModel, ids: list[int], points: Iterable[Point], edits: Iterable[mia.Add] = (),
        n_prompt: int | None = None) -> tuple[torch.Tensor, dict[Point, torch.Tensor]]:
    """Return logits `[pos d_vocab]` and each point's values `[pos d_model]` after the edits there, in float32."""
    n_prompt = len(ids) if n_prompt is None else n_prompt
    values: dict[Point, torch.Tensor] = {}
    by_point: dict[Point, list[mia.Add]] = {}
    for edit in edits:
        for point in edit.rows:
            by_point.setdefault(point, []).append(edit)

    def touch(point: Point, tensor: torch.Tensor) -> None:
        flat = tensor.view(-1, tensor.shape[-1])
        for edit in by_point.get(point, ()):
            for start, stop in edit.where.spans(n_prompt, has_bos=ids[0] in (1, 2)):
                flat[start:stop] = (flat[start:stop].float() + edit.coeff * edit.rows[point].to(flat.device)).to(flat.dtype)
        values[point] = flat.float().clone()

    with ExitStack() as hooks:
        for point in sorted({*points, *by_point}):
            module, side = _site(blocks(model)[point.layer], point.kind)
            if side == "in":
                hook = module.register_forward_pre_hook(
                    lambda m, args, kwargs, p=point: touch(p, args[0] if args else kwargs["hidden_states"]), with_kwargs=True)
            else:
                hook = module.register_forward_hook(
                    lambda m, args, out, p=point: touch(p, out[0] if isinstance(out, tuple) else out))
            hooks.callback(hook.remove)
        logits = model(torch.tensor([ids], device=model.device)).logits[0].float()
    return logits, values


def row_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return `[pos]`: each row's L2 error over its centred L2 (token mean without BOS removed); row 0 over its own norm."""
    ours, theirs = ours.double(), theirs.double().to(ours.device)
    scale = (theirs - theirs[1:].mean(0)).norm(dim=-1)
    scale[0] = theirs[0].norm()
    return (ours - theirs).norm(dim=-1) / scale
