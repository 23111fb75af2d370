"""The logit lens: what the model's own norm and unembedding make of the stream after each block.

Source: nostalgebraist, interpreting GPT: the logit lens (2020); tuned: arXiv 2303.08112. Early layers write in another basis:
a poor reading there does not show that something is not computed yet.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...engine.wire import Take
from ...errors import PointError, PromptError
from ...points import Point, parse, undeclared
from ...running.launch import EngineRows
from ...running.reading import positions_at
from ...running.submit import per_prompt
from ...selectors import merge
from .result import EMBED, LogitLens
from .tuned import TunedLens

if TYPE_CHECKING:
    from ...session import Session

Tensor = torch.Tensor
Layers = int | str | Iterable[int | str] | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that an engine holds: whose tokens they are, which positions to read, and the point that logits come from."""

    source: EngineRows
    ids: Sequence[Sequence[int]]
    at: Sequence[Sequence[int]]
    top: Point
    before: bool = False


def logit_lens(session: Session, prompts: Any, layers: Layers, top_k: int, tokens: Any, tuned: TunedLens | None, edits: Any,
               at: Any) -> LogitLens:
    """Return what `Session.logit_lens` promises."""
    read = session._read(prompts)
    points = chosen_points(layers, session.tapped, session.n_layers)
    if tuned is not None:
        tuned.check(session.n_layers, session.d_model)
    edits = per_prompt(edits, len(read.ids))
    top = session._top(edits)
    places = [positions_at(session, read, i, at) for i in range(len(read.ids))]
    takes = []
    for mine in places:
        rows = tuple(merge([(p, p + 1) for p in sorted(set(mine))]))
        takes.append([Take(p.kind, p.layer, rows) for p in dict.fromkeys([*points, top])])
    _, source = session._run(read, edits, {"max_tokens": 1, "temperature": 0.0}, takes)
    return read_lens(Rows(source, read.ids, places, top), points, top_k, tokens, tuned)


def chosen_points(layers: Layers, held: Sequence[Point], n_layers: int) -> list[Point]:
    """The points whose streams a lens reads, in the order of the layers; PointError for one that is not held."""
    embed = Point("resid_pre", 0)
    if layers is None:
        found = [p for p in held if p == embed or p.kind == "resid_post"]
    else:
        listed = [layers] if isinstance(layers, (int, str)) else list(layers)
        found = [embed if layer == EMBED else parse(("resid_post", layer), n_layers) for layer in listed]
        if not found:
            raise PointError(f'no layer was asked for; give layer numbers, or "{EMBED}" for what enters the first block')
    absent = [p for p in found if p not in held]
    if absent or not found:
        raise undeclared(str(absent[0]) if absent else "resid_post", held)
    return sorted(set(found), key=lambda p: (p.kind != "resid_pre", p.layer))


def read_lens(rows: Rows, points: Sequence[Point], top_k: int, tokens: Any, tuned: TunedLens | None) -> LogitLens:
    """Read streams that were captured; a tuned lens's maps go to the device one at a time."""
    source = rows.source
    asked = None if tokens is None else _ids(tokens, source)
    if tuned is None:
        values, places = source.lens(points, rows.at, rows.top, top_k, asked, rows.before)
    else:
        found = [source.lens([p], rows.at, rows.top, top_k, asked, rows.before,
                             [tuned.shift(-1 if p.kind == "resid_pre" else p.layer)]) for p in points]
        values, places = (torch.cat(parts) for parts in zip(*found))
    m = 1 if asked is None else len(asked)
    floats = _padded(values, rows.at, float("nan"))  # [prompt layer pos 2 + k + m]
    whole = _padded(places, rows.at, -1)  # [prompt layer pos k + 2 m]
    seen = {*places[..., : top_k + m].unique().tolist(), *(t for ids, at in zip(rows.ids, rows.at) for t in (ids[p] for p in at))}
    return LogitLens(layers=tuple(EMBED if p.kind == "resid_pre" else p.layer for p in points),
                     positions=tuple(map(tuple, rows.at)),
                     tokens=tuple(tuple(ids[p] for p in at) for ids, at in zip(rows.ids, rows.at)),
                     entropy=floats[..., 0], kl=floats[..., 1], top_log_probabilities=floats[..., 2 : 2 + top_k],
                     log_probabilities=floats[..., 2 + top_k :], top=whole[..., :top_k], followed=whole[:, 0, :, top_k : top_k + m],
                     ranks=whole[..., top_k + m :], texts={t: source.token_text(t) for t in seen},
                     tuned="" if tuned is None else tuned.base_model or "a tuned lens")


def _ids(tokens: Any, source: EngineRows) -> list[int]:
    listed = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    listed = [listed] if isinstance(listed, (int, str)) else list(listed)
    if not listed:
        raise PromptError("tokens names no token; leave it out to follow the model's own choice at each position")
    return [source.token_id(token) if isinstance(token, str) else int(token) for token in listed]


def _padded(flat: Tensor, at: Sequence[Sequence[int]], fill: float) -> Tensor:
    """`[layer row x]`, prompt after prompt, as `[prompt layer pos x]`, padded."""
    out = torch.full((len(at), len(flat), max(map(len, at)), flat.shape[2]), fill, dtype=flat.dtype)
    for i, part in enumerate(flat.split([len(places) for places in at], 1)):
        out[i, :, : part.shape[1]] = part
    return out
