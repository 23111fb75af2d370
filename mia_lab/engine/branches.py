"""Where one block keeps its branches, from the values that a probe recorded: mid = pre + attention, post = mid + MLP.

Every place is accepted only for an identity that it satisfies. Where no module returns what is added to the stream (a
block that scales its branches, say), the point is absent and the reason is kept.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import nn

from .taps import After, Arg, Before, Side

Tensor = torch.Tensor
_BRANCHES = ("resid_mid", "attn_out", "mlp_out")
PARALLEL = "attention and MLP run in parallel, there is no stream between them"
NO_ATTENTION = "this block has no attention"
UNKNOWN = "the block adds its branches in an unknown way"


@dataclass(frozen=True, slots=True)
class Place:
    """A module and the side of it where a point is read and edited; `shape` of one row, where it is not the stream's."""

    module: nn.Module
    at: Side
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class Call:
    """One module call, tensors cloned: the stream-shaped inputs with where they were passed, and the outputs."""

    module: nn.Module
    inputs: list[tuple[Arg, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    is_tuple: bool = False
    times: int = 1

    def out(self) -> Tensor:
        """The first output, in float64."""
        return self.outputs[0].double()

    def readings(self) -> Iterator[tuple[Before, Tensor]]:
        """What this call may have read the stream from: its first two inputs as a pending pair, or any one of them."""
        if len(self.inputs) > 1:
            (a, x), (b, r) = self.inputs[:2]
            yield Before(a, b), x.double() + r.double()
        for arg, value in self.inputs:
            yield Before(arg, None), value.double()


@dataclass(slots=True)
class Branches:
    """What was found in one block, and why it lacks the rest."""

    places: dict[str, Place] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def find(children: Sequence[Call], pre: Tensor, post: Tensor, attention: set[nn.Module], mixers: set[nn.Module]) -> Branches:
    """Find resid_mid, attn_out and mlp_out among the calls of one block's children.

    pre and post: the stream before and after the block. attention: the model's attention modules; mixers: these and
    the other modules that move values between tokens (state-space models, convolutions).
    """
    mixing = [c for c in children if mixers & set(c.module.modules())]
    attending = [c for c in mixing if attention & set(c.module.modules())]
    found = _serial(children, pre, post, mixing, attending) or _single(children, pre, post, mixing, attending)
    found = found or _parallel(children, pre, post, attending) or Branches(absent=dict.fromkeys(_BRANCHES, UNKNOWN))
    if not attending:
        found.places.pop("attn_out", None)
        found.absent["attn_out"] = NO_ATTENTION
    for kind, place in list(found.places.items()):
        if any(c.module is place.module and c.times > 1 for c in children):
            del found.places[kind]
            found.absent[kind] = "its module is called several times in one pass"
    return found


def _serial(children: Sequence[Call], pre: Tensor, post: Tensor, mixing: Sequence[Call], attending: Sequence[Call]) -> Branches | None:
    """A mixer, then an MLP on the sum. What is read as resid_mid must explain the block's result."""
    if not mixing:
        return None
    first = children.index((attending or mixing)[0])
    best, found = -1, None
    for i in range(first + 1, len(children)):
        for before, mid in children[i].readings():
            branch, why_attn = _added(children[first:i], pre, mid)
            mlp, why_mlp = _added(children[:i - 1:-1], mid, post)  # the last one: a post-norm comes after its MLP
            certain = 2 * (branch is not None) + (mlp is not None)
            if (mlp is None and why_mlp is None) or (branch is None and _same(mid, pre)) or certain <= best:
                continue
            best, found = certain, Branches({"resid_mid": Place(children[i].module, before)})
            for kind, call, why in (("attn_out", branch, why_attn), ("mlp_out", mlp, why_mlp)):
                if call is not None:
                    found.places[kind] = output(call)
                else:
                    found.absent[kind] = why or "no module returns what the block adds here"
    return found


def _added(candidates: Sequence[Call], base: Tensor, total: Tensor) -> tuple[Call | None, str | None]:
    """Return the first call whose output is total - base; else, where a scaled output or a sum of two is, that reason."""
    for call in candidates:
        if adds_up(base, call, total):
            return call, None
    added = (total - base).reshape(-1)
    usable = [c for c in candidates if c.outputs and c.out().norm() > 0]
    for calls in [*((c,) for c in usable), *combinations(usable, 2)]:
        value = sum(c.out() for c in calls)
        scale = float(added @ value.reshape(-1) / value.norm() ** 2) if value.norm() > 0 else 0.0
        if scale and _fits(base, scale * value, total, calls[0].outputs[0].dtype):
            factor = "" if abs(scale - 1) < 1e-4 else f"{scale:.3g} times "
            what = "the sum of two modules' outputs" if len(calls) > 1 else "a module's output"
            return None, f"the block adds {factor}{what}, so no module returns what is added"
    return None, None


def _single(children: Sequence[Call], pre: Tensor, post: Tensor, mixing: Sequence[Call], attending: Sequence[Call]) -> Branches | None:
    """A block of one branch: only a mixer, or only an MLP."""
    branch = next((c for c in [*attending, *mixing, *children] if adds_up(pre, c, post)), None)
    if branch is None:
        return None
    kind, other = ("attn_out", "mlp_out") if mixing else ("mlp_out", "attn_out")
    alone = "the block has one branch only"
    return Branches({kind: output(branch)}, {"resid_mid": f"{alone}, there is no stream between two", other: alone})


def _parallel(children: Sequence[Call], pre: Tensor, post: Tensor, attending: Sequence[Call]) -> Branches | None:
    if not attending:
        return None
    for attn in children[children.index(attending[0]):]:
        if attn.outputs:
            mlp = next((c for c in reversed(children) if c is not attn and adds_up(pre + attn.out(), c, post)), None)
            if mlp is not None:
                return Branches({"attn_out": output(attn), "mlp_out": output(mlp)}, {"resid_mid": PARALLEL})
    return None


def output(call: Call) -> Place:
    """The place of what a call returns first."""
    return Place(call.module, After(call.is_tuple))


def adds_up(base: Tensor, branch: Call, total: Tensor) -> bool:
    """Whether base + the branch's output is `total`, row by row, up to the rounding of the model's dtype."""
    return bool(branch.outputs) and _fits(base, branch.out(), total, branch.outputs[0].dtype)


def _fits(base: Tensor, branch: Tensor, total: Tensor, dtype: torch.dtype) -> bool:
    """The first row is left out: there a pretrained model may hold values so large that rounding hides the branch."""
    base, branch, total = (t.reshape(-1, t.shape[-1])[1:] for t in (base, branch, total))
    eps = torch.finfo(dtype).eps
    tolerance = min(0.02, max(4 * eps, 1e-4))
    error = (base + branch - total).norm(dim=1)
    return bool((error <= tolerance * branch.norm(dim=1) + eps * base.norm(dim=1)).all() and branch.norm() > 0)


def _same(a: Tensor, b: Tensor) -> bool:
    return distance(a.reshape(-1, a.shape[-1])[1:], b.reshape(-1, b.shape[-1])[1:]) < 1e-5


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance."""
    return float((a.reshape(-1) - b.reshape(-1)).norm() / b.norm().clamp(min=1e-30))


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two values are the same up to rounding."""
    return a.numel() == b.numel() and distance(a, b) < 0.02
