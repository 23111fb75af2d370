"""The same points in Hugging Face: read, and edited in place, by plain forward hooks on a teacher-forced pass."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import mia_lab as mia
from mia_lab.points import Point
from mia_lab.selectors import Context
from parity import formulas, interior

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


def _site(block: nn.Module, kind: str) -> tuple[nn.Module, str]:
    """The module whose input or output is the point, by each family's documented structure."""
    if kind in ("resid_pre", "resid_post"):
        return block, "in" if kind == "resid_pre" else "out"
    mid, attn, mlp = next(row[1:] for row in _STRUCTURES if all(interior.has(block, child) for child in row[0]))
    name, side = {"resid_mid": (mid, "in"), "attn_out": (attn, "out"), "mlp_out": (mlp, "out")}[kind]
    return block.get_submodule(name), side


@dataclass
class _Pass:
    """One forward: the edits by point, what was seen of each point before its edits and after, and what gates decided."""

    ids: list[int]
    context: Context
    shapes: Mapping[Point, tuple[int, ...]]
    by_point: dict[Point, list[mia.Edit]]
    held: dict[int, Tensor] = field(default_factory=dict)  # gate -> bool [pos], for gates that are decided once
    before: dict[Point, Tensor] = field(default_factory=dict)
    after: dict[Point, Tensor] = field(default_factory=dict)

    def touch(self, point: Point, tensor: Tensor) -> None:
        """Note a value, and edit it in place."""
        flat = tensor.view(-1, tensor.shape[-1])
        self.before[point] = flat.clone()
        for edit in self.by_point.get(point, ()):
            factor = formulas.mask(edit, self.context, len(flat))
            if edit.when is not None:
                factor = factor * self._open(edit.when)
            shape = self.shapes.get(point, (flat.shape[1],))
            flat.copy_(formulas.edited(edit, point, flat.double(), factor.to(flat.device), shape).to(flat.dtype))
        self.after[point] = flat.clone()

    def bias(self, layer: int, mask: Tensor, weights: Tensor) -> Tensor:
        """Add the biases of a layer to its mask; weights `[head pos key]` are its attention without them."""
        for edit in self.by_point.get(Point("attention", layer), ()):
            acts = formulas.mask(edit, self.context, len(self.ids))
            if edit.when is not None:
                acts = acts * self._open(edit.when)
            mask = mask + formulas.bias(edit, self.context, weights) * acts[:, None]
        return mask

    def _open(self, gate: mia.Gate | mia.After) -> Tensor:
        if id(gate) in self.held:
            return self.held[id(gate)]
        if isinstance(gate, mia.After):
            return formulas.is_open(gate, None, self.ids, self.context)
        if gate.over == "row":
            return formulas.is_open(gate, formulas.readings(gate, self.before), self.ids, self.context)
        return torch.zeros(len(self.ids), dtype=torch.bool)


@torch.no_grad()
def run(model: PreTrainedModel, ids: list[int], points: Iterable[Point], edits: Iterable[mia.Edit] = (), n_prompt: int | None = None,
        shapes: Mapping[Point, tuple[int, ...]] | None = None, before: bool = False) -> tuple[Tensor, dict[Point, Tensor]]:
    """Return logits `[pos d_vocab]` and each point's values `[pos width]` after the edits there, or before them.

    A gate that is decided once is first left closed: the rows that decide it do not depend on it.
    """
    edits = list(edits)
    prompt = ids if n_prompt is None else ids[:n_prompt]
    context = Context(prompt, has_bos=prompt[0] in (1, 2))
    by_point: dict[Point, list[mia.Edit]] = {}
    for edit in edits:
        for point in edit.steps:
            by_point.setdefault(point, []).append(edit)
    gates = {id(e.when): e.when for e in edits if isinstance(e.when, mia.Gate)}
    wanted = {*points, *by_point, *(probe.at for gate in gates.values() for probe in gate.probes)}
    held: dict[int, Tensor] = {}
    late = {key: gate for key, gate in gates.items() if gate.over != "row"}
    if late:
        _, first = _forward(model, wanted, _Pass(ids, context, shapes or {}, by_point))
        held = {key: formulas.is_open(gate, formulas.readings(gate, first.before), ids, context) for key, gate in late.items()}
    logits, done = _forward(model, wanted, _Pass(ids, context, shapes or {}, by_point, held))
    return logits, {p: (done.before if before else done.after)[p].float() for p in points}


def _forward(model: PreTrainedModel, wanted: set[Point], state: _Pass) -> tuple[Tensor, _Pass]:
    with ExitStack() as hooks:
        hooks.enter_context(interior.spied(model, wanted, state.touch, state.bias))
        for point in sorted(wanted):
            if point.kind in (*interior.HEADS, "attention"):
                continue
            block = blocks(model)[point.layer]
            stream = point.kind in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
            module, side = _site(block, point.kind) if stream else interior.module_of(model, block, point.kind)
            if side == "out":
                hook = module.register_forward_hook(lambda m, a, out, p=point: state.touch(p, out[0] if isinstance(out, tuple) else out))
            else:
                def note(m: nn.Module, args: tuple, kwargs: dict, p: Point = point, side: str = side) -> None:
                    value = args[0] if args else kwargs["hidden_states"]
                    state.touch(p, interior.router_logits(m, value) if side == "gate" else value)
                hook = module.register_forward_pre_hook(note, with_kwargs=True, prepend=point.kind == "embed")
            hooks.callback(hook.remove)
        logits = model(torch.tensor([state.ids], device=model.device)).logits[0].float()
    return logits, state


def row_errors(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> Tensor:
    """Return `[pos]`: each row's L2 error over its centred L2 (token mean without BOS removed); row 0 over its own norm.

    floor: a centred L2 to use where an edit has left less, because it made rows alike.
    """
    ours, theirs = ours.double(), theirs.double().to(ours.device)
    scale = centred(theirs).clamp(min=floor)
    scale[0] = theirs[0].norm()
    return (ours - theirs).norm(dim=-1) / scale


def centred(values: Tensor) -> Tensor:
    """Return each row's L2 `[pos]` without the token mean, BOS left out of it."""
    return (values - values[1:].mean(0)).norm(dim=-1)
