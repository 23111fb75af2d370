"""The same points in Hugging Face: read, and edited in place, by plain forward hooks on a teacher-forced pass."""
from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import nn
from transformers import PreTrainedModel

import mia_lab as mia
from mia_lab.points import Point

_LISTS = ("model.layers", "transformer.h", "model.decoder.layers", "gpt_neox.layers", "backbone.layers", "model.language_model.layers")
# Children that a block must have, and then: who reads resid_mid, who returns attn_out, who returns mlp_out.
_STRUCTURES: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("pre_feedforward_layernorm", "post_feedforward_layernorm"), "pre_feedforward_layernorm", "post_attention_layernorm",
     "post_feedforward_layernorm"),
    (("post_self_attn_layernorm", "post_mlp_layernorm"), "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    (("pre_mlp_layernorm", "post_mlp_layernorm"), "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    (("post_attention_layernorm", "post_feedforward_layernorm"), "mlp", "post_attention_layernorm", "post_feedforward_layernorm"),
    (("pre_feedforward_layernorm",), "pre_feedforward_layernorm", "self_attn", "mlp"),
    (("feedforward_layernorm",), "feedforward_layernorm", "self_attn", "mlp"),
    (("pre_ff_layernorm", "feed_forward"), "pre_ff_layernorm", "self_attn", "feed_forward"),
    (("ffn_norm", "feed_forward"), "ffn_norm", "self_attn", "feed_forward"),
    (("post_attention_layernorm", "feed_forward"), "post_attention_layernorm", "self_attn", "feed_forward"),
    (("post_attention_layernorm", "shared_mlp"), "post_attention_layernorm", "self_attn", "shared_mlp"),
    (("post_attention_layernorm", "block_sparse_moe"), "post_attention_layernorm", "self_attn", "block_sparse_moe"),
    (("post_attention_layernorm", "self_attn", "mlp"), "post_attention_layernorm", "self_attn", "mlp"),
    (("post_attention_layernorm", "linear_attn", "mlp"), "post_attention_layernorm", "linear_attn", "mlp"),
    (("final_layer_norm", "fc2"), "final_layer_norm", "self_attn", "fc2"),
    (("ln_2", "attn", "mlp"), "ln_2", "attn", "mlp"),
    (("post_attention_layernorm", "attention", "mlp"), "post_attention_layernorm", "attention", "mlp"),
    # Bloom's attention and MLP return the sum with the stream, their last projections what is added to it.
    (("post_attention_layernorm", "self_attention.query_key_value", "mlp.gelu_impl"), "post_attention_layernorm",
     "self_attention.dense", "mlp.dense_4h_to_h"),
    (("post_attention_layernorm", "self_attention"), "post_attention_layernorm", "self_attention", "mlp"),
    (("self_attention", "mlp"), "", "self_attention", "mlp"),
    (("self_attn", "mlp"), "", "self_attn", "mlp"),
    (("attn", "mlp"), "", "attn", "mlp"),
    (("norm", "mixer"), "", "mixer", "mixer"),
)


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder blocks."""
    for path in _LISTS:
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    raise AttributeError(f"no block list in {type(model).__name__}")


def _has(block: nn.Module, path: str) -> bool:
    try:
        block.get_submodule(path)
    except AttributeError:
        return False
    return True


def _site(block: nn.Module, kind: str) -> tuple[nn.Module, str]:
    """The module whose input or output is the point, by each family's documented structure."""
    if kind in ("resid_pre", "resid_post"):
        return block, "in" if kind == "resid_pre" else "out"
    mid, attn, mlp = next(row[1:] for row in _STRUCTURES if all(_has(block, child) for child in row[0]))
    name, side = {"resid_mid": (mid, "in"), "attn_out": (attn, "out"), "mlp_out": (mlp, "out")}[kind]
    return block.get_submodule(name), side


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
