"""Find a model's blocks and learn, by running it once, where each point lives. Names decide nothing; values do.

Blocks hand their stream on in different ways: as one tensor, as a pending pair (h, r) whose sum is the stream, or as
a pair whose second half is stale. Neither signatures nor tuple shapes tell these apart, so a short eager forward on
dummy tokens records every value inside every block, and each point is found by an identity that it must satisfy:
mid = pre + attention, post = mid + MLP, final norm(stream) = what the final norm returned.
"""
from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UnsupportedError
from . import interior
from .taps import After, Arg, Before, Side
from .wire import Site

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Tensor = torch.Tensor
_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """A module and the side of it where a point is read and edited."""

    module: nn.Module
    at: Side
    shape: tuple[int, ...]  # of one row


@dataclass(slots=True)
class Layout:
    """Where a model keeps its points. `absent` says, for a point that a block lacks, why."""

    n_layers: int
    width: int
    final_norm: nn.Module | None
    final_is_tuple: bool
    has_unembedding: bool
    places: dict[Site, Place] = field(default_factory=dict)
    absent: dict[Site, str] = field(default_factory=dict)

    def put(self, kind: str, layer: int, module: nn.Module, at: Side, shape: tuple[int, ...] = ()) -> None:
        """Note where a point is, and the shape of one row there, by default the stream's."""
        self.places[kind, layer] = Place(module, at, shape or (self.width,))

    def lack(self, kind: str, layer: int, reason: str) -> None:
        """Note that a block has no such point."""
        self.absent[kind, layer] = reason

    @property
    def sandwich(self) -> bool:
        """Whether blocks norm what their branches add."""
        return any(kind in ("attn_out_raw", "mlp_out_raw") for kind, _ in self.places)

    def describe(self, sites: Sequence[Site]) -> str:
        """Where the sites are, as text that changes whenever the traced code would."""
        return repr([(site, type(self.places[site].module).__qualname__, self.places[site].at) for site in sites])


@dataclass(slots=True)
class _Call:
    """One module call, tensors cloned: the stream-shaped inputs with where they were passed, and the outputs."""

    module: nn.Module
    inputs: list[tuple[Arg, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    is_tuple: bool = False

    def stream_in(self) -> Tensor:
        return sum(tensor.double() for _, tensor in self.inputs)

    def out(self) -> Tensor:
        return self.outputs[0].double()


def discover(model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> Layout:
    """Return the Layout of a loaded model; UnsupportedError with a reason when its stream cannot be identified."""
    attention = [m for m in vllm_config.compilation_config.static_forward_context.values() if isinstance(m, nn.Module)]
    parent, blocks = _blocks(model, attention)
    recorder = interior.Recorder(interior.watched(model, blocks))
    try:
        calls, result = _record(model, vllm_config, device, parent, blocks, attention)
    finally:
        recorder.remove()
    final, pair = _convention(calls, parent, blocks, model)
    _check_chain(calls, blocks, pair)
    unembeds = bool(calls[final].outputs) and _close(result.double(), calls[final].out()) if final else True
    layout = Layout(len(blocks), vllm_config.model_config.get_hidden_size(), final, bool(final and calls[final].is_tuple), unembeds)
    for layer, block in enumerate(blocks):
        branches, why = _branches(calls, block, attention, pair)
        call = calls[block]
        args = [arg for arg, _ in calls[blocks[-1]].inputs] if len(blocks) > 1 else [arg for arg, _ in call.inputs]
        layout.put("resid_pre", layer, block, Before(args[0], args[1] if pair and len(args) > 1 else None))
        layout.put("resid_post", layer, block, After(call.is_tuple, pair))
        for kind, (module, at) in branches.items():
            layout.put(kind, layer, module, at)
        for kind, reason in why.items():
            layout.lack(kind, layer, reason)
    first = calls[blocks[0]]
    interior.add(layout, blocks, attention, recorder.seen, first.stream_in() if pair else first.inputs[0][1].double())
    return layout


def _blocks(model: nn.Module, attention: list[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    owners = set(attention)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
             and any(owners & set(item.modules()) for item in module)]
    if not lists:
        raise UnsupportedError(f"{type(model).__name__} has no list of blocks that own attention, so it has no layers to tap")
    name, found = max(lists, key=lambda item: len(item[1]))
    blocks = list(found)
    if not all(owners & set(block.modules()) for block in blocks):
        raise UnsupportedError(f"{type(model).__name__} mixes attention blocks with others (a hybrid model), which is untested")
    return model.get_submodule(name.rpartition(".")[0]), blocks


def _record(model: nn.Module, vllm_config: VllmConfig, device: torch.device, parent: nn.Module,
            blocks: list[nn.Module], attention: list[nn.Module]) -> tuple[dict[nn.Module, _Call], Tensor]:
    """Run dummy tokens once, eagerly, with random attention results; return the calls in order, and the model's output."""
    from vllm.forward_context import set_forward_context

    width = vllm_config.model_config.get_hidden_size()
    calls: dict[nn.Module, _Call] = {}
    ids = torch.randint(0, vllm_config.model_config.get_vocab_size(), (_TOKENS,), device=device)
    positions = torch.arange(_TOKENS, device=device)
    if getattr(vllm_config.model_config, "uses_mrope", False):
        positions = positions.expand(3, -1)
    watched = [child for child in parent.children() if not isinstance(child, nn.ModuleList)]
    for block in blocks:
        watched += [block, *block.children()]

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        call = calls[module] = _Call(module)
        names = _parameters(module)
        for index, value in enumerate(args):
            if _is_stream(value, width):
                call.inputs.append((Arg(index, names[index] if index < len(names) else None), value.clone()))
        for name, value in kwargs.items():
            if _is_stream(value, width):
                call.inputs.append((Arg(names.index(name) if name in names else None, name), value.clone()))

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        call = calls[module]
        call.is_tuple = isinstance(output, tuple)
        call.outputs = [v.clone() for v in (output if call.is_tuple else (output,)) if _is_stream(v, width)]

    def randomise(module: nn.Module, args: tuple, output: Any) -> Any:
        return torch.randn_like(output) if isinstance(output, Tensor) else output

    with ExitStack() as hooks, torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=_TOKENS,
                                                                           skip_compiled=True):
        for module in watched:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        for module in attention:
            hooks.callback(module.register_forward_hook(randomise).remove)
        result = model(ids, positions)
    if not isinstance(result, Tensor):
        raise UnsupportedError(f"{type(model).__name__} returns {type(result).__name__}, not its hidden states")
    return calls, result


def _parameters(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(type(module).forward).parameters.values() if p.kind in kinds][1:]


def _is_stream(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == width and value.numel() == _TOKENS * width


def _convention(calls: dict[nn.Module, _Call], parent: nn.Module, blocks: list[nn.Module],
                model: nn.Module) -> tuple[nn.Module | None, bool]:
    """Return the final norm and whether the blocks hand on a pending pair."""
    order = list(calls)
    last = calls[blocks[-1]]
    if not last.outputs:
        raise UnsupportedError(f"the blocks of {type(model).__name__} return no [tokens, d_model] tensor")
    after = [m for m in order[order.index(blocks[-1]) + 1:] if m in set(parent.children()) and calls[m].inputs]
    if not after:
        if len(last.outputs) > 1:
            raise UnsupportedError(f"{type(model).__name__} has no final norm that would tell whether the stream is h or h + r")
        return None, False
    final = after[0]
    candidates = {False: last.outputs[0]}
    if len(last.outputs) > 1:
        candidates[True] = last.outputs[0] + last.outputs[1]
    with torch.inference_mode():
        errors = {pair: _distance(_first(final(stream.clone())).double(), calls[final].out()) for pair, stream in candidates.items()}
    pair = min(errors, key=errors.get)
    if errors[pair] > 0.02 or (len(errors) > 1 and errors[not pair] < 10 * errors[pair] + 1e-6):
        raise UnsupportedError(f"{type(model).__name__}: neither h nor h + r is what its final norm reads "
                               f"(relative errors {errors}), so the stream is unknown")
    return final, pair


def _check_chain(calls: dict[nn.Module, _Call], blocks: list[nn.Module], pair: bool) -> None:
    for before, block in pairwise(blocks):
        inputs = calls[block].inputs
        given = inputs and (calls[block].stream_in() if pair else inputs[0][1].double())
        if not inputs or not _close(_post(calls[before], pair), given):
            raise UnsupportedError(f"{type(block).__name__} does not read what the block before it returned")


def _post(call: _Call, pair: bool) -> Tensor:
    return call.out() + call.outputs[1].double() if pair else call.out()


def _branches(calls: dict[nn.Module, _Call], block: nn.Module, attention: list[nn.Module],
              pair: bool) -> tuple[dict[str, tuple[nn.Module, Before | After]], dict[str, str]]:
    """Find resid_mid, attn_out and mlp_out in one block by their identities; say why for those it lacks."""
    pre = calls[block].stream_in() if pair else calls[block].inputs[0][1].double()
    post = _post(calls[block], pair)
    children = [calls[m] for m in calls if m in set(block.children()) and calls[m].outputs]
    own = [c for c in children if set(attention) & set(c.module.modules())]
    if not own:
        return {}, dict.fromkeys(("resid_mid", "attn_out", "mlp_out"), "attention is not a direct child of the block")
    attn = own[0]
    after_attn = children[children.index(attn):]
    for branch in after_attn:
        for norm in children[children.index(branch) + 1:]:
            if norm.inputs and _adds_up(pre, branch, norm.stream_in()):
                mlp = _last(c for c in children[children.index(norm):] if _adds_up(norm.stream_in(), c, post))
                args = [arg for arg, _ in norm.inputs]
                found = {"resid_mid": (norm.module, Before(args[0], args[1] if len(args) > 1 else None)),
                         "attn_out": _output(branch)}
                why = {}
                if mlp is None:
                    why["mlp_out"] = "no module's output is what the block adds after attention"
                else:
                    found["mlp_out"] = _output(mlp)
                return found, why
    mlp = _last(c for c in children if c is not attn and _adds_up(pre + attn.out(), c, post))
    if mlp is None:
        return {}, dict.fromkeys(("resid_mid", "attn_out", "mlp_out"), "the block adds its branches in an unknown way")
    return ({"attn_out": _output(attn), "mlp_out": _output(mlp)},
            {"resid_mid": "attention and MLP run in parallel, there is no stream between them"})


def _output(call: _Call) -> tuple[nn.Module, After]:
    return call.module, After(call.is_tuple)


def _last(items: Any) -> Any:
    found = list(items)
    return found[-1] if found else None


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _adds_up(base: Tensor, branch: _Call, total: Tensor) -> bool:
    """Whether base + the branch's output is `total`, row by row, up to the rounding of the model's dtype.

    The first row is left out: there a pretrained model may hold values so large that rounding hides the branch.
    """
    rows = [t.reshape(_TOKENS, -1)[1:] for t in (base, branch.out(), total)]
    eps = torch.finfo(branch.outputs[0].dtype).eps
    error = (rows[0] + rows[1] - rows[2]).norm(dim=1)
    return bool((error <= 0.02 * rows[1].norm(dim=1) + eps * rows[0].norm(dim=1)).all() and rows[1].norm() > 0)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.reshape(-1) - b.reshape(-1)).norm() / b.norm().clamp(min=1e-30))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and _distance(a, b) < 0.02
