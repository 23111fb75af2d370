"""Points inside blocks and at the model's ends: heads, neurons, routers, branch outputs before their norm, embedding.

Heads and routers are found by vLLM's own interfaces, `Attention(query, key, value)` and a layer of experts called with
`router_logits`. The rest is found by value, in the probe's forward: an MLP's neurons enter the linear map whose output
is the MLP's, and a normed branch is the module whose output its norm is given.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import heads
from .taps import After, Arg, Before, Biased, Within
from .wire import ATTENTION

if TYPE_CHECKING:
    from .discover import Layout

Tensor = torch.Tensor


@dataclass(slots=True)
class Seen:
    """What one module was given first and gave first, cloned."""

    given: Tensor | None = None
    gave: Tensor | None = None
    is_tuple: bool = False


class Recorder:
    """Hooks on modules; after a forward, `seen` holds what passed."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.seen: dict[nn.Module, Seen] = {}
        self._hooks: list[Any] = []
        for module in modules:
            self._hooks += [module.register_forward_pre_hook(self._before, with_kwargs=True),
                            module.register_forward_hook(self._after)]

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.seen[module] = Seen(_first([*args, *kwargs.values()]))

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        seen = self.seen[module]
        seen.is_tuple = isinstance(output, tuple)
        seen.gave = _first(output if seen.is_tuple else (output,))

    def note(self, module: nn.Module, gave: Tensor) -> None:
        """Note what a module gave whose hooks its caller may pass by."""
        self.seen.setdefault(module, Seen()).gave = gave.clone()

    def remove(self) -> None:
        """Unhook."""
        for hook in self._hooks:
            hook.remove()


def _first(values: Iterable[Any]) -> Tensor | None:
    return next((v.clone() for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


def watched(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The modules to record: blocks' children, every linear map in them, and token embeddings."""
    found = dict.fromkeys(child for block in blocks for child in block.children())
    found |= dict.fromkeys(m for block in blocks for m in block.modules() if _is_linear(m))
    found |= dict.fromkeys(m for m in model.modules() if _is_embedding(m))
    return list(found)


def add(layout: Layout, blocks: list[nn.Module], attention: set[nn.Module], seen: dict[nn.Module, Seen], pre: Tensor) -> None:
    """Add the interior points to a layout, or why a block lacks them. pre `[tokens d_model]`: what enters the first block."""
    for layer, block in enumerate(blocks):
        inside = list(block.modules())
        _heads(layout, layer, [m for m in attention if m in inside])
        _router(layout, layer, inside, seen)
        sources = {kind: _source(layout, layer, kind, block, seen) for kind in ("attn_out", "mlp_out")}
        for kind, source in sources.items():
            if source is None or source is layout.places[kind, layer].module:
                layout.lack(f"{kind}_raw", layer, f"the branch has no norm of its own, so {kind} is its output")
            else:
                layout.put(f"{kind}_raw", layer, source, After(seen[source].is_tuple))
        _neurons(layout, layer, sources["mlp_out"], seen)
        _projection(layout, layer, sources["attn_out"], seen)
    _ends(layout, seen, pre)


def _heads(layout: Layout, layer: int, attention: list[nn.Module]) -> None:
    names = ["query", "key", "value"]
    plain = [m for m in attention if list(inspect.signature(type(m).forward).parameters)[1:4] == names]
    if len(plain) != 1:
        reason = "its attention hands vLLM no separate heads" if not plain else "the block has more than one attention"
        for kind in ("q", "k", "v", "z", ATTENTION):
            layout.lack(kind, layer, reason)
        return
    module = plain[0]
    keys, value_size = module.num_kv_heads, getattr(module, "head_size_v", module.head_size)
    shapes = ((module.num_heads, module.head_size), (keys, module.head_size), (keys, value_size))
    borrowed = getattr(module, "kv_sharing_target_layer_name", None) is not None
    for index, (kind, shape) in enumerate(zip(("q", "k", "v"), shapes)):
        if borrowed and kind != "q":
            layout.lack(kind, layer, "the layer uses the keys and values of another")
        else:
            layout.put(kind, layer, module, Before(Arg(index, names[index]), edits=False), shape)
    layout.put("z", layer, module, Within(), (module.num_heads, value_size))
    reason = heads.unknown_mask(module) or ("the layer uses the keys of another" if borrowed else "")
    reason = reason or ("its kernel is given quantised queries" if getattr(module, "query_quant", None) is not None else "")
    if reason:
        layout.lack(ATTENTION, layer, reason)
    else:
        layout.put(ATTENTION, layer, module, Biased(), (module.num_heads,))


def _router(layout: Layout, layer: int, inside: list[nn.Module], seen: dict[nn.Module, Seen]) -> None:
    for module in inside:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        if "router_logits" not in names or not hasattr(getattr(module, "router", None), "select_experts"):
            continue
        experts, gate = module.moe_config.num_experts, getattr(module, "gate", None)
        gates = [m for m in inside if m in seen and seen[m].gave is not None and seen[m].gave.shape[-1] == experts]
        if gate in gates:  # the layer of experts runs it, and is given something else in place of logits
            layout.put("router", layer, gate, After(seen[gate].is_tuple, edits=False, wide=True), (experts,))
        elif gate is None and gates:
            place = Before(Arg(names.index("router_logits"), "router_logits"), edits=False, wide=True)
            layout.put("router", layer, module, place, (experts,))
        else:
            layout.lack("router", layer, "its logits are computed together with something else")
        return
    layout.lack("router", layer, "the block routes to no experts")


def _source(layout: Layout, layer: int, kind: str, block: nn.Module, seen: dict[nn.Module, Seen]) -> nn.Module | None:
    """The branch itself: the module at the point, or, where that is a norm, the one whose output the norm is given."""
    place = layout.places.get((kind, layer))
    if place is None or any(map(_is_linear, place.module.modules())):
        return place and place.module
    given = seen[place.module].given
    return next((m for m in block.children() if m in seen and m is not place.module and _same(seen[m].gave, given)), None)


def _neurons(layout: Layout, layer: int, branch: nn.Module | None, seen: dict[nn.Module, Seen]) -> None:
    for module in () if branch is None else branch.modules():
        if _is_linear(module) and module in seen and _same(seen[module].gave, seen[branch].gave):
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            layout.put("mlp_act", layer, module, Before(Arg(0, names[0])), (seen[module].given.shape[-1],))
            layout.maps["mlp_act", layer] = module
            return
    layout.lack("mlp_act", layer, "no single linear map gives the MLP's output")


def _projection(layout: Layout, layer: int, branch: nn.Module | None, seen: dict[nn.Module, Seen]) -> None:
    """Note the linear map that is given just what the heads gave, and whose output is the branch's."""
    place = layout.places.get(("z", layer))
    if branch is None or place is None or place.module not in seen:
        return
    for module in branch.modules():
        if _is_linear(module) and module in seen and _same(seen[module].given, seen[place.module].gave) \
                and _same(seen[module].gave, seen[branch].gave):
            layout.maps["z", layer] = module
            return


def _ends(layout: Layout, seen: dict[nn.Module, Seen], pre: Tensor) -> None:
    embedding = next((m for m in seen if _is_embedding(m)), None)
    given = None if embedding is None else seen[embedding].gave
    if given is None or given.shape[-1] != pre.shape[-1]:
        layout.lack("embed", 0, "no token embedding of the stream's width was called")
    elif torch.nn.functional.cosine_similarity(given.double(), pre.reshape(given.shape).double(), dim=-1).min() > 0.999:
        layout.put("embed", 0, layout.places["resid_pre", 0].module, layout.places["resid_pre", 0].at)  # the same, scaled
    else:
        layout.put("embed", 0, embedding, After())
    if layout.final_norm is None:
        layout.lack("final_norm", layout.n_layers - 1, "the model has no final norm")
    else:
        layout.put("final_norm", layout.n_layers - 1, layout.final_norm, After(layout.final_is_tuple))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.numel() == b.numel() and torch.equal(a.reshape(-1), b.reshape(-1))


def _is_linear(module: nn.Module) -> bool:
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(getattr(module, "base_layer", module), (LinearBase, nn.Linear))  # a LoRA wraps its layer


def _is_embedding(module: nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return isinstance(module, (VocabParallelEmbedding, nn.Embedding)) and not isinstance(module, ParallelLMHead)

