"""Attribution patching: a patched grid estimated from one gradient, (source - base) . d metric / d value.

Source: arXiv:2310.10348. vLLM keeps no gradients, so both runs and the gradient are those of Hugging Face's model in float32.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import EditError, MiaError, PointError
from ...points import Point
from ..gradients import blocks_of, reference_model
from .activation import asked_points, groups_of, heads_of, read_pairs, sources
from .cells import top_point
from .grids import PatchGrid
from .metrics import Judge, Metric

if TYPE_CHECKING:
    from torch import nn

    from ...session import Session

Tensor = torch.Tensor
# Per kind of point: the names that modules have inside a block, first found first, and whether it is their input or output.
_MODULES: dict[str, tuple[tuple[str, ...], str]] = {
    "resid_pre": (("",), "in"),
    "resid_post": (("",), "out"),
    "attn_out": (("self_attn", "attn", "attention", "self_attention"), "out"),
    "mlp_out": (("mlp", "block_sparse_moe", "feed_forward"), "out"),
    "z": (("self_attn.o_proj", "attn.c_proj", "self_attn.dense", "self_attn.out_proj", "attn.out_proj", "attention.dense"), "in"),
}
_NORMED = {"attn_out": ("post_self_attn_layernorm", "post_attention_layernorm"),
           "mlp_out": ("post_feedforward_layernorm", "post_mlp_layernorm")}


def attribution_patch(session: Session, clean: Any, corrupt: Any, point: str, metric: Metric, layers: int | Iterable[int] | None,
                      positions: Any, heads: Any, direction: str, model: Any) -> PatchGrid:
    """Return what `Session.attribution_patch` promises."""
    if any(session._scoped([[]])):
        raise EditError("Hugging Face's model runs without the edits of open scopes and defaults; type with session.unsteered(): ...")
    pairs = read_pairs(session, clean, corrupt)
    base, source = pairs.ends(direction)
    points = asked_points(session, point, layers, tuple(_MODULES))
    chosen = heads_of(session, points, heads)
    groups, names = groups_of(session, pairs, positions, heads)
    judge = Judge(session, metric, len(base), top_point(session)[1])
    found = sources(session, pairs, points, judge, direction)
    model = reference_model(session) if model is None else model
    sites = [_site(model, session, p) for p in points]
    ends, estimates = [], []
    for i in range(len(base)):
        there, values, _ = _run(model, sites, source[i], judge, i, backward=False)
        here, held, slopes = _run(model, sites, base[i], judge, i, backward=True)
        _compare(session, points, values, [found.rows[p][i] for p in points])
        moved = torch.stack([((a - b) * g) for a, b, g in zip(values, held, slopes)])  # [layer pos width]
        split = [[moved[..., _columns(session, points[0], head)].sum(-1)[:, list(group)].sum(-1) for group in groups[i]] for head in chosen]
        estimates.append(torch.stack([torch.stack(row, -1) for row in split], 1).double())  # [layer head position]
        ends.append((here, there))
    here, there = torch.tensor(ends, dtype=torch.float64).T
    corrupt_end, clean_end = (here, there) if direction == "denoise" else (there, here)
    _agree(session, judge, torch.cat([corrupt_end, clean_end]), torch.cat([found.corrupt, found.clean]))
    raw = here.view(-1, 1, 1, 1) + torch.stack(estimates)
    raw = raw.squeeze([axis for axis, labels in ((2, heads), (3, names)) if labels is None])
    return PatchGrid(points[0].kind, tuple(p.layer for p in points), None if heads is None else tuple(chosen), names, raw, clean_end,
                     corrupt_end, judge.name, direction, f"estimated by a gradient of Hugging Face's {_dtype(model)} model")


def _dtype(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _site(model: nn.Module, session: Session, point: Point) -> tuple[nn.Module, str]:
    """The module whose input or output is a point; PointError where none of the known names is there."""
    block = dict(blocks_of(model, session)[point.layer].named_modules())
    names, side = _MODULES[point.kind]
    if session.sandwich:
        names = _NORMED.get(point.kind, names)
    name = next((name for name in names if name in block), None)
    if name is None:
        raise PointError(f"Hugging Face's {type(model).__name__} has none of {', '.join(names)} in its block; {point} has no gradient here")
    return block[name], side


def _run(model: nn.Module, sites: Sequence[tuple[nn.Module, str]], ids: list[int], judge: Judge, pair: int,
         backward: bool) -> tuple[float, list[Tensor], list[Tensor]]:
    """Return the metric, the values `[pos width]` at the sites, and the metric's gradient there (none without `backward`)."""
    seen: dict[int, Tensor] = {}
    with torch.enable_grad(), _hooked(model, sites, seen):
        logits = model(torch.tensor([ids], device=next(model.parameters()).device)).logits[0, -1:]
        value = judge.of_logits(logits, [pair])[0]
        slopes = torch.autograd.grad(value, [seen[i] for i in range(len(sites))]) if backward else ()
    return float(value.detach()), [seen[i].detach().cpu()[0] for i in range(len(sites))], [g.cpu()[0] for g in slopes]


@contextmanager
def _hooked(model: nn.Module, sites: Sequence[tuple[nn.Module, str]], seen: dict[int, Tensor]) -> Iterator[None]:
    """Note the value at each site, in the graph of a model whose embedding is the first that a gradient is kept for."""
    handles = [model.get_input_embeddings().register_forward_hook(lambda m, args, out: out.detach().requires_grad_())]

    def output(i: int) -> Callable:
        return lambda m, args, out: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out)

    def entry(i: int) -> Callable:
        return lambda m, args, kwargs: seen.__setitem__(i, args[0] if args else kwargs["hidden_states"])

    for i, (module, side) in enumerate(sites):
        handles.append(module.register_forward_hook(output(i)) if side == "out" else
                       module.register_forward_pre_hook(entry(i), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _columns(session: Session, point: Point, head: int | None) -> slice:
    size = session._engine.shapes[point][-1]
    return slice(None) if head is None else slice(head * size, (head + 1) * size)


def _compare(session: Session, points: Sequence[Point], ours: Sequence[Tensor], engine: Sequence[Tensor]) -> None:
    """MiaError unless the module found is the point: the engine's values there, BOS aside, are its values."""
    tolerance = 1e-3 if session.dtype == torch.float32 else 0.2
    for point, theirs, rows in zip(points, ours, engine):
        spread = (theirs[1:] - theirs[1:].mean(0)).norm() if len(theirs) > 2 else theirs.norm()
        off = (theirs[1:] - rows[1:]).norm() / spread
        if theirs.shape != rows.shape or not off < tolerance:
            raise MiaError(f"{point} of Hugging Face's model differs from the engine's by {float(off):.2g} of its spread; its gradient "
                           f"would be of another value (another model, or quantised weights?)")


def _agree(session: Session, judge: Judge, ours: Tensor, engine: Tensor) -> None:
    tolerance = (1e-3 if session.dtype == torch.float32 else 0.1) * (1 + engine.abs().max())
    if not (ours - engine).abs().max() <= tolerance:
        raise MiaError(f"{judge.name} is {ours.tolist()} in Hugging Face's model and {engine.tolist()} in the engine (corrupt, then clean)")
