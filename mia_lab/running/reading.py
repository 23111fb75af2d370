"""Captures: asking for rows at a point, reducing them on the device, and assembling what came back."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..engine.wire import ATTENTION, Reduce, Take
from ..errors import EditError, MissingRowsError, PointError, PromptError
from ..lazy import LazyTensor
from ..points import DERIVED, Point, kind_of, parse, select
from ..prompts import Prompts, resolve_at
from ..reductions import Mass, Mean, Norm, Reduction, lower
from ..selectors import Selector, merge
from .launch import EngineRows
from .submit import per_prompt

if TYPE_CHECKING:
    from ..session import Session

Form = tuple[tuple[int, ...], torch.dtype]  # shape and type of one row


def capture(session: Session, prompts: Any, point: str, layers: int | Iterable[int] | None, at: Any, edits: Any, before: bool,
            reduce: Reduction | Mass | None) -> LazyTensor | tuple[LazyTensor, LazyTensor]:
    """Run prompts and return what `Session.capture` promises."""
    kind, read = kind_of(point), session._read(prompts)
    asked = asked_points(session, kind, layers)
    at_rows = [positions_at(session, read, i, at) for i in range(len(read.ids))]
    axes = () if read.one else (len(read.ids),)
    axes += () if isinstance(layers, int) else (len(asked),)
    if not (isinstance(at, int) and not isinstance(at, bool)) and not isinstance(reduce, Mean):
        axes += (max(map(len, at_rows)),)
    if kind in DERIVED:
        load, (shape, dtype) = _patterns(session, read, asked, at_rows, edits, before, reduce)
        return _lazy(load, axes, shape, dtype, point)
    shape, dtype = session._engine.shapes[asked[0]], session._engine.dtype_of(kind)
    if reduce is None:
        source = _run(session, read, asked, at_rows, edits, before)
        return _lazy(_stacked(source, asked, at_rows, before, (shape, dtype)), axes, shape, dtype, point)
    if isinstance(reduce, Mass):
        raise EditError(f"Mass is of attention patterns, not of {kind}")
    wire, matrices, size, pairs = lower(reduce, asked, prod(shape))
    source = _run(session, read, asked, at_rows, edits, before, wire, matrices)
    bare = isinstance(reduce, Norm) or (isinstance(reduce, Mean) and isinstance(reduce.of, Norm))
    row = () if bare else shape if isinstance(reduce, Mean) and reduce.of is None else (size,)
    assemble = _averaged if wire.mean else _stacked
    packed = _lazy(assemble(source, asked, at_rows, before, (row, torch.float32)), axes, row, torch.float32, point)
    return _pair(packed, size // 2, point) if pairs else packed


def positions_at(session: Session, read: Prompts, i: int, at: Any) -> list[int]:
    """The prompt positions that `at` names in one prompt."""
    n = len(read.ids[i])
    if not isinstance(at, Selector):
        return resolve_at(at, n)
    found = [q for a, b in at.spans(session._context(read, i)) for q in range(a, n if b is None else min(b, n))]
    if not found:
        raise PromptError(f"{at} selects no position of prompt {i}, which has {n} tokens")
    return found


def asked_points(session: Session, kind: str, layers: int | Iterable[int] | None) -> list[Point]:
    """The points of one kind at some layers, by default at all that are tapped; PointError for those that cannot be captured."""
    instead = {"logits": "logits are the first value that run_with_cache returns", ATTENTION: "attention is captured as 'pattern'"}
    if kind in instead:
        raise PointError(instead[kind])
    if layers is None:
        asked = [Point(kind, p.layer) for p in select(DERIVED.get(kind, (kind,))[-1], session.tapped, session.n_layers)]
    else:
        asked = [parse((kind, layer), session.n_layers) for layer in ([layers] if isinstance(layers, int) else layers)]
    if not asked:
        raise PointError("capture was asked for no layer")
    shapes = {session._engine.shapes.get(Point(source, p.layer)) for p in asked for source in DERIVED.get(kind, (kind,))[:1]}
    if len(shapes - {None}) > 1:
        raise PointError(f"{kind} has rows of different shapes, {sorted(shapes - {None})}; capture its layers apart: layers=...")
    return asked


def _run(session: Session, read: Prompts, asked: Sequence[Point], at: Sequence[Sequence[int]], edits: Any, before: bool,
         reduce: Reduce | None = None, matrices: dict[str, torch.Tensor] | None = None) -> EngineRows:
    """Run prompts, capturing the asked points at positions `at`; queries' points bring all keys with them."""
    sources = DERIVED.get(asked[0].kind, (asked[0].kind,))
    tapped = select([Point(s, p.layer) for p in asked for s in sources], session.tapped, session.n_layers)
    takes = []
    for places in at:
        rows = tuple(merge([(p, p + 1) for p in sorted(set(places))]))
        keys = ((0, max(places) + 1),)
        takes.append([Take(p.kind, p.layer, keys if len(sources) > 1 and p.kind == "k" else rows, before) for p in tapped])
    params = {"max_tokens": 1, "temperature": 0.0}
    return session._run(read, per_prompt(edits, len(read.ids)), params, takes, reduce, matrices)[1]


def _patterns(session: Session, read: Prompts, asked: Sequence[Point], at: Sequence[Sequence[int]], edits: Any, before: bool,
              reduce: Mass | None) -> tuple[Callable[[], torch.Tensor], Form]:
    """Attention of positions `at`, `[head key]` each, or its mass on a span, `[head]`."""
    if reduce is not None and not isinstance(reduce, Mass):
        raise EditError("patterns reduce to the attention mass on a span: reduce=mia.Mass(mia.span(...))")
    biased = session._biased(per_prompt(edits, len(read.ids))) & {p.layer for p in asked}
    if biased:
        raise EditError(f"attention is rebuilt from queries and keys, without the AttentionBias that acts at layer {min(biased)}; "
                        f"capture it without the bias, or z with it")
    heads = session._engine.shapes[Point("q", asked[0].layer)][0]
    spans = None if reduce is None else [reduce.where.spans(session._context(read, i)) for i in range(len(read.ids))]
    keys = max(max(places) + 1 for places in at)
    shape = (heads, keys) if reduce is None else (heads,)
    source = _run(session, read, asked, at, edits, before)

    def load() -> torch.Tensor:
        out = torch.full((len(at), len(asked), max(map(len, at)), *shape), float("nan"))
        for j, p in enumerate(asked):
            for i, values in enumerate(source.pattern(p, range(len(at)), at, spans)):  # [pos head key] or [pos head]
                out[i, j][tuple(slice(n) for n in values.shape)] = values
        return out

    return load, (shape, torch.float32)


def _stacked(source: EngineRows, asked: Sequence[Point], at: Sequence[Sequence[int]], before: bool,
             form: Form) -> Callable[[], torch.Tensor]:
    """A loader of `[prompt layer pos *shape]`, right-padded with NaN, for positions `at` of each prompt."""
    shape, dtype = form

    def load() -> torch.Tensor:
        out = torch.full((len(at), len(asked), max(map(len, at)), *shape), float("nan"), dtype=dtype)
        for j, p in enumerate(asked):
            for i, (positions, values) in enumerate(source.rows(p, range(len(at)), before, form)):
                found = dict(zip(positions.tolist(), values))
                out[i, j, : len(at[i])] = torch.stack([_present(found, q, p, i) for q in at[i]])
        return out

    return load


def _averaged(source: EngineRows, asked: Sequence[Point], at: Sequence[Sequence[int]], before: bool,
              form: Form) -> Callable[[], torch.Tensor]:
    """A loader of `[prompt layer *shape]`, the mean over the positions `at` of each prompt, from sums over them."""
    shape, dtype = form

    def load() -> torch.Tensor:
        out = torch.empty(len(at), len(asked), *shape, dtype=dtype)
        for j, p in enumerate(asked):
            for i, (positions, total) in enumerate(source.rows(p, range(len(at)), before, form)):
                found = dict.fromkeys(positions.tolist())
                for q in at[i]:
                    _present(found, q, p, i)
                out[i, j] = total[0] / len(found)
        return out

    return load


def _lazy(load: Callable[[], torch.Tensor], axes: tuple[int, ...], row: tuple[int, ...], dtype: torch.dtype, name: str) -> LazyTensor:
    shape = axes + row
    return LazyTensor(lambda: load().reshape(shape), shape, dtype, name)


def _pair(packed: LazyTensor, k: int, name: str) -> tuple[LazyTensor, LazyTensor]:
    """Split rows of `k` values followed by their places; a padded place is -1."""
    shape = (*packed.shape[:-1], k)
    values = LazyTensor(lambda: packed.get()[..., :k], shape, torch.float32, f"{name} values")
    places = LazyTensor(lambda: packed.get()[..., k:].nan_to_num(-1.0).long(), shape, torch.int64, f"{name} places")
    return values, places


def _present(found: dict[int, Any], position: int, point: Point, prompt: int) -> Any:
    if position not in found:
        raise MissingRowsError(f"{point} of prompt {prompt} lacks position {position}: it was never computed")
    return found[position]

