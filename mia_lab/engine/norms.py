"""Norms in which taps can ride: those that add up the pair that a block passes on, and compute what our kernel does.

Where such a norm reads the stream first, taps of the stream cost no launch of their own; nor do taps of the branch whose
output is a half of the pair, if nothing else was given it. As everywhere, values decide: the norm is replaced only if it
returned, in the probe's forward, what the kernel's formula says.
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from mia_lab.kernels.norm import rms_norm

from .branches import Call, Place, distance
from .taps import Normed
from .wire import Site


@torch.inference_mode()
def carriers(calls: Mapping[nn.Module, Call], blocks: Sequence[nn.Module], final: nn.Module | None, places: Mapping[Site, Place],
             quantised: bool) -> dict[Site, Place]:
    """Return, for points of the stream and for the branches, the norm that reads them next and can carry the tap.

    places: where each of these is found. None where weights are quantised, whose norms vLLM fuses with what follows.
    """
    if quantised or os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
        return {}
    found: dict[Site, Place] = {}
    for layer, (block, following) in enumerate(pairwise([*blocks, None])):
        own = set(following.children()) if following is not None else {final}
        reader = next((call for module, call in calls.items() if module in own and call.inputs), None)
        alone = reader is not None and _reads(reader, calls[block]) and not any(
            _shares(call, reader) for module, call in calls.items() if module in own and call is not reader)
        place = _carrier(reader) if alone else None
        if place is not None:
            found["resid_post", layer] = place
            if following is not None:
                found["resid_pre", layer + 1] = place
    for (kind, layer), mid in places.items():
        place = _carrier(calls[mid.module]) if kind == "resid_mid" and mid.module in calls else None
        if place is not None and (place.at.x, place.at.residual) == (mid.at.x, mid.at.residual):
            found["resid_mid", layer] = place
    return found | _branches(calls, blocks, places, found)


def _branches(calls: Mapping[nn.Module, Call], blocks: Sequence[nn.Module], places: Mapping[Site, Place],
              found: Mapping[Site, Place]) -> dict[Site, Place]:
    """The same for what attention and MLP add: the norm whose first half is just that, and which alone is given it."""
    carried: dict[Site, Place] = {}
    for kind, layer in places:
        call = calls.get(places[kind, layer].module) if kind in ("attn_out", "mlp_out") else None
        if call is None:
            continue
        own = set(blocks[layer].children())
        for place in filter(None, (found.get(("resid_mid", layer)), found.get(("resid_post", layer)))):
            reader = calls[place.module]
            others = [c for module, c in calls.items() if module in own and c is not reader]
            if torch.equal(reader.inputs[0][1], call.outputs[0]) and not any(_given(c, call.outputs[0]) for c in others):
                carried[kind, layer] = replace(place, at=replace(place.at, alone=True))
    return carried


def _given(call: Call, value: torch.Tensor) -> bool:
    return any(torch.equal(value, given) for _, given in call.inputs)


def _reads(reader: Call, block: Call) -> bool:
    """Whether a call is given just the pair that a block returned."""
    if len(block.outputs) != 2 or len(reader.inputs) != 2:
        return False
    return all(torch.equal(given, returned) for (_, given), returned in zip(reader.inputs, block.outputs))


def _shares(call: Call, reader: Call) -> bool:
    """Whether another call of the block is given a half of the pair too: what it made of it would lack the reader's edits."""
    return any(_given(call, given) for _, given in reader.inputs)


def _carrier(call: Call) -> Place | None:
    weight, eps = (getattr(call.module, name, None) for name in ("weight", "variance_epsilon"))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None:
        return None
    if call.times > 1 or len(call.inputs) != 2 or len(call.outputs) != 2:
        return None
    (x_at, x), (residual_at, residual) = call.inputs
    info = torch.finfo(x.dtype)
    for shifted in (False, True):
        values = rms_norm(x.float() + residual.float(), weight, eps, shifted, x.dtype)
        if all(distance(ours.double(), theirs.double()) <= (info.eps / 2 if info.bits == 16 else 8 * info.eps)
               for ours, theirs in zip(values, call.outputs)):
            return Place(call.module, Normed(x_at, residual_at, shifted), (x.shape[-1],))
    return None
