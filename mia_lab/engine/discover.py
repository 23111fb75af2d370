"""Find a model's blocks and learn, by running it once, where each point lives. Names decide nothing; values do.

Blocks hand their stream on in different ways: as one tensor, as a pending pair (h, r) whose sum is the stream, or as
a pair whose second half is stale. Neither signatures nor tuple shapes tell these apart, so a short eager forward on
dummy tokens records every value inside every block, and each point is found by an identity that it must satisfy:
mid = pre + attention, post = mid + MLP, final norm(stream) = what the final norm returned.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UnsupportedError
from . import branches, interior, norms
from .branches import Call, Place, close, distance
from .taps import After, Arg, Before, Side
from .wire import Site

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Tensor = torch.Tensor
PROBE_TOKENS = 8
_IN_TURN = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


@dataclass(slots=True)
class Layout:
    """Where a model keeps its points. `absent` says, for each point that a block lacks, why; `carriers` gives, for points
    that a norm reads next and can carry, that norm; `maps`, for heads and neurons, the linear map that makes their branch's
    output of them."""

    n_layers: int
    width: int
    final_norm: nn.Module | None
    final_is_tuple: bool
    has_unembedding: bool
    places: dict[Site, Place] = field(default_factory=dict)
    absent: dict[Site, str] = field(default_factory=dict)
    carriers: dict[Site, Place] = field(default_factory=dict)
    maps: dict[Site, nn.Module] = field(default_factory=dict)

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

    def chosen(self, sites: Sequence[Site]) -> list[Place]:
        """Where to tap each of these sites: in a norm where one can carry it."""
        return [self.carriers.get(site, self.places[site]) for site in sites]

    def spare(self, sites: Sequence[Site]) -> list[Place]:
        """The norms that could carry a tap and carry none."""
        used = {place.module for place in self.chosen(sites)}
        return list({place.module: place for place in self.carriers.values() if place.module not in used}.values())

    def describe(self, sites: Sequence[Site]) -> str:
        """Where the sites are, as text that changes whenever the traced code would."""
        return repr([(site, type(place.module).__qualname__, place.at) for site, place in zip(sites, self.chosen(sites))])


def in_turn(site: Site) -> tuple[int, int]:
    """A key by which sites that share a module are in the order in which the forward pass comes to them."""
    kind, layer = site
    return layer, _IN_TURN.index(kind) if kind in _IN_TURN else len(_IN_TURN)


@dataclass(slots=True)
class _Model:
    """The parts of a loaded model that the probe looks at."""

    name: str
    parent: nn.Module
    blocks: list[nn.Module]
    attention: set[nn.Module]
    mixers: set[nn.Module]


def discover(model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> Layout:
    """Return the Layout of a loaded model; UnsupportedError with a reason when its stream cannot be identified."""
    parts = _parts(model, vllm_config)
    recorder = interior.Recorder(interior.watched(model, parts.blocks))
    try:
        calls, result = _record(model, parts, vllm_config, device, recorder.note)
    finally:
        recorder.remove()
    final, pair = _convention(calls, parts)
    unembeds = bool(calls[final].outputs) and close(result.double(), calls[final].out()) if final else True
    layout = Layout(len(parts.blocks), vllm_config.model_config.get_hidden_size(), final, bool(final and calls[final].is_tuple), unembeds)
    entries = _entries(calls, parts, pair)
    for layer, block in enumerate(parts.blocks):
        call, (before, pre) = calls[block], entries[layer]
        own = set(block.children())
        found = branches.find([calls[m] for m in calls if m in own], pre, _post(call, pair), parts.attention, parts.mixers)
        layout.put("resid_pre", layer, block, before)
        layout.put("resid_post", layer, block, After(call.is_tuple, pair))
        for kind, place in found.places.items():
            layout.put(kind, layer, place.module, place.at)
        for kind, reason in found.absent.items():
            layout.lack(kind, layer, reason)
    interior.add(layout, parts.blocks, parts.attention, recorder.seen, entries[0][1])
    layout.carriers = norms.carriers(calls, parts.blocks, final, layout.places, vllm_config.quant_config is not None)
    return layout


def _parts(model: nn.Module, vllm_config: VllmConfig) -> _Model:
    """Find the list of blocks: the longest one whose items mix tokens. Some blocks may lack attention, or any mixer."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    name = type(model).__name__
    registered = vllm_config.compilation_config.static_forward_context.values()
    mixers = {m for m in registered if isinstance(m, nn.Module) and isinstance(m, AttentionLayerBase)}
    attention = {m for m in mixers if not isinstance(m, MambaBase)}
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)
             and any(mixers & set(item.modules()) for item in module)]
    if not lists:
        raise UnsupportedError(f"{name} has no list of blocks that own attention, so it has no layers to tap")
    path, found = max(lists, key=lambda item: len(item[1]))
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    if len(found) != layers:
        raise UnsupportedError(f"{name} has {len(found)} blocks where its configuration says {layers} layers")
    return _Model(name, model.get_submodule(path.rpartition(".")[0]), list(found), attention, mixers)


def _record(model: nn.Module, parts: _Model, vllm_config: VllmConfig, device: torch.device,
            note: Callable[[nn.Module, Tensor], None]) -> tuple[dict[nn.Module, Call], Tensor]:
    """Run dummy tokens once, eagerly, with mixers giving random values, which are noted; return the calls in order, and the
    model's output."""
    from vllm.forward_context import set_forward_context

    width = vllm_config.model_config.get_hidden_size()
    calls: dict[nn.Module, Call] = {}
    ids = torch.randint(0, vllm_config.model_config.get_vocab_size(), (PROBE_TOKENS,), device=device)
    positions = torch.arange(PROBE_TOKENS, device=device)
    if getattr(vllm_config.model_config, "uses_mrope", False):
        positions = positions.expand(3, -1)
    watched = dict.fromkeys(child for child in parts.parent.children() if not isinstance(child, nn.ModuleList))
    for block in parts.blocks:
        watched |= dict.fromkeys([block, *block.children()])

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        call = Call(module, times=calls[module].times + 1 if module in calls else 1)
        calls[module] = call
        names = _parameters(module)
        for index, value in enumerate(args):
            if _is_stream(value, width):
                call.inputs.append((Arg(index, names[index] if index < len(names) else None), value.clone()))
        for name, value in kwargs.items():
            if _is_stream(value, width):
                call.inputs.append((Arg(names.index(name) if name in names else None, name), value.clone()))

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        call = calls[module]
        call.is_tuple = isinstance(output, tuple)
        call.outputs = [v.clone() for v in (output if call.is_tuple else (output,)) if _is_stream(v, width)]

    with ExitStack() as hooks, torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=PROBE_TOKENS,
                                                                           skip_compiled=True):
        for module in watched:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        for module in parts.mixers:
            hooks.enter_context(_random_output(module, note))
        try:
            result = model(ids, positions)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            raise UnsupportedError(f"{parts.name} cannot be run on dummy tokens by this vLLM: {error}") from error
    if not isinstance(result, Tensor):
        raise UnsupportedError(f"{parts.name} returns {type(result).__name__}, not its hidden states")
    looped = next((block for block in parts.blocks if block not in calls or calls[block].times > 1), None)
    if looped is not None:
        raise UnsupportedError(f"{parts.name} does not run each of its blocks exactly once in one pass")
    return calls, result


@contextmanager
def _random_output(module: nn.Module, note: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """Let a mixer give random values: without blocks of the KV cache it leaves its output as it was allocated."""
    forward, own = module.forward, vars(module).get("forward")

    def randomised(*args: Any, **kwargs: Any) -> Any:
        given = [(v, v.clone()) for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        output = forward(*args, **kwargs)
        if output is None:  # it wrote into one of its arguments
            for value, old in given:
                if not torch.equal(value.nan_to_num(), old.nan_to_num()):
                    value.copy_(torch.randn_like(value))
        if not isinstance(output, Tensor):
            return output
        random = torch.randn_like(output)
        note(module, random)
        return random

    module.forward = randomised  # not a hook: vLLM's Transformers backend calls `forward` itself
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _parameters(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]


def _is_stream(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == width and value.numel() == PROBE_TOKENS * width


def _convention(calls: dict[nn.Module, Call], parts: _Model) -> tuple[nn.Module | None, bool]:
    """Return the final norm and whether the blocks hand on a pending pair."""
    order = list(calls)
    last = calls[parts.blocks[-1]]
    if not last.outputs:
        raise UnsupportedError(f"the blocks of {parts.name} return no [tokens, d_model] tensor")
    after = [m for m in order[order.index(parts.blocks[-1]) + 1:] if m in set(parts.parent.children()) and calls[m].inputs]
    if not after:
        if len(last.outputs) > 1:
            raise UnsupportedError(f"{parts.name} has no final norm that would tell whether the stream is h or h + r")
        return None, False
    final = after[0]
    candidates = {False: last.outputs[0]}
    if len(last.outputs) > 1:
        candidates[True] = last.outputs[0] + last.outputs[1]
    with torch.inference_mode():
        errors = {pair: distance(_first(final(stream.clone())).double(), calls[final].out()) for pair, stream in candidates.items()}
    pair = min(errors, key=errors.get)
    if errors[pair] > 0.02 or (len(errors) > 1 and errors[not pair] < 10 * errors[pair] + 1e-6):
        raise UnsupportedError(f"{parts.name}: neither h nor h + r is what its final norm reads "
                               f"(relative errors {errors}), so the stream is unknown")
    return final, pair


def _entries(calls: dict[nn.Module, Call], parts: _Model, pair: bool) -> list[tuple[Before, Tensor]]:
    """Where each block is given the stream that the block before it returned, and that stream."""
    entries: list[tuple[Before, Tensor]] = []
    for before, block in pairwise(parts.blocks):
        given = _post(calls[before], pair)
        found = next((r for r in calls[block].readings() if (pair or r[0].residual is None) and close(given, r[1])), None)
        if found is None:
            raise UnsupportedError(f"{type(block).__name__} does not read what the block before it returned")
        entries.append(found)
    readings = [r for r in calls[parts.blocks[0]].readings() if pair or r[0].residual is None]
    if not readings:
        raise UnsupportedError(f"{type(parts.blocks[0]).__name__} is given no [tokens, d_model] tensor")
    alike = [r for r in readings if entries and r[0].x == entries[0][0].x]
    return [(alike or readings)[0], *entries]


def _post(call: Call, pair: bool) -> Tensor:
    return call.out() + call.outputs[1].double() if pair else call.out()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
