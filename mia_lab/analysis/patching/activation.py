"""Activation patching: a value of one run put in the place of another run's, one place at a time.

Source: arXiv:2309.16042 (what to measure, and with which prompts), arXiv:2404.15255 (how to read it).
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...edits import Edit, Replace
from ...engine.wire import Take
from ...errors import EditError, MissingRowsError, PointError, PromptError
from ...points import Point, kind_of, select
from ...prompts import Prompts, resolve_at
from ...selectors import positions as at_positions
from ...shown import progress_bar
from .cells import Job, measure, top_point
from .grids import PatchGrid
from .metrics import Judge, Metric

if TYPE_CHECKING:
    from ...session import Session

Tensor = torch.Tensor
KINDS = ("embed", "resid_pre", "attn_out_raw", "attn_out", "z", "resid_mid", "mlp_act", "mlp_out_raw", "mlp_out", "resid_post")
Group = tuple[int, ...]  # positions that are patched together


@dataclass(frozen=True, slots=True)
class PromptPairs:
    """Clean and corrupt token ids, pair by pair, of equal length; `first`: where each pair first differs."""

    clean: list[list[int]]
    corrupt: list[list[int]]

    @property
    def first(self) -> list[int]:
        """The first position at which each pair differs."""
        return [next(i for i, (a, b) in enumerate(zip(*pair)) if a != b) for pair in zip(self.clean, self.corrupt)]

    def ends(self, direction: str) -> tuple[list[list[int]], list[list[int]]]:
        """The prompts that are patched, and those that the values come from."""
        if direction not in ("denoise", "noise"):
            raise EditError(f'direction is "denoise" (clean values into the corrupt run) or "noise" (the reverse), not {direction!r}')
        return (self.corrupt, self.clean) if direction == "denoise" else (self.clean, self.corrupt)


@dataclass(frozen=True, slots=True)
class Sources:
    """At each point, the values `[pos width]` float32 of each pair's source run (rows), and of the run that is patched (base); the
    metric of both runs without a patch, `[pair]`."""

    rows: dict[Point, list[Tensor]]
    base: dict[Point, list[Tensor]]
    clean: Tensor
    corrupt: Tensor


def patch(session: Session, clean: Any, corrupt: Any, point: str, metric: Metric, layers: int | Iterable[int] | None, positions: Any,
          heads: Any, direction: str, batch: int | None, progress: bool) -> PatchGrid:
    """Return what `Session.patch` promises."""
    pairs = read_pairs(session, clean, corrupt)
    base, _ = pairs.ends(direction)
    points = asked_points(session, point, layers)
    chosen = heads_of(session, points, heads)
    groups, names = groups_of(session, pairs, positions, heads)
    judge = Judge(session, metric, len(base), top_point(session)[1])
    found = sources(session, pairs, points, judge, direction)
    shape = (len(base), len(points), len(chosen), len(groups[0]))
    raw = (found.corrupt if direction == "denoise" else found.clean).view(-1, 1, 1, 1).repeat(1, *shape[1:])
    jobs, places = [], []
    same_rows = not any(session._scoped([[]]))  # an open scope's edits may depend on the text behind them
    for i in range(len(base)):
        for j, k, m in ((j, k, m) for j in range(shape[1]) for k in range(shape[2]) for m in range(shape[3])):
            group = groups[i][m]
            if same_rows and max(group) < pairs.first[i]:
                continue  # the two runs are one up to here
            jobs.append(Job(i, base[i], partial(replaced, found.rows[points[j]][i], points[j], group, chosen[k])))
            places.append((i, j, k, m))
    with progress_bar(progress and bool(jobs)) as bar:
        done = measure(session, jobs, judge, batch, bar)
    if jobs:
        raw[tuple(torch.tensor(places).T)] = done.values
    raw = raw.squeeze([axis for axis, labels in ((2, heads), (3, names)) if labels is None])
    return PatchGrid(points[0].kind, tuple(p.layer for p in points), None if heads is None else tuple(chosen), names, raw, found.clean,
                     found.corrupt, judge.name, direction, ran=len(jobs), cached=done.cached / max(done.tokens, 1), seconds=done.seconds)


def replaced(rows: Tensor, point: Point, group: Group, head: int | None) -> list[Edit]:
    """The edit that puts `rows [pos width]` at some positions of a point, or of one head there."""
    where, place = at_positions(group), dict(layers=[point.layer], point=point.kind, head=head)
    if len(group) == 1:
        return [Replace(rows[group[0]], where=where, **place)]
    return [Replace(rows[min(group) : max(group) + 1], where=where, start=min(group), **place)]


def read_pairs(session: Session, clean: Any, corrupt: Any) -> PromptPairs:
    """Read both sides; PromptError, with both tokenisations, unless each pair has as many tokens on either and differs."""
    read = [session._read(side) for side in (clean, corrupt)]
    if len(read[0].ids) != len(read[1].ids):
        raise PromptError(f"there are {len(read[0].ids)} clean and {len(read[1].ids)} corrupt prompts; give as many of each")
    for i, (a, b) in enumerate(zip(read[0].ids, read[1].ids)):
        if len(a) != len(b) or a == b:
            what = f"have {len(a)} and {len(b)} tokens; reword one until they have as many" if len(a) != len(b) else "are the same"
            shown = "\n".join(f"  {name}: {' | '.join(session.tokenizer.decode([t]) for t in ids)}" for name, ids in
                              (("clean", a), ("corrupt", b)))
            raise PromptError(f"the prompts of pair {i} {what}:\n{shown}")
    return PromptPairs(read[0].ids, read[1].ids)


def sources(session: Session, pairs: PromptPairs, points: Sequence[Point], judge: Judge, direction: str = "denoise",
            of_base: Sequence[Point] = ()) -> Sources:
    """Run both sides once; keep the source run's values at `points` (the other's at `of_base`), and the metric of both.

    PromptError where the metric does not tell the sides apart: then there is nothing to restore.
    """
    top, n = top_point(session)[0], len(pairs.clean)
    base, source = pairs.ends(direction)
    prompts = [*base, *source]
    takes = []
    for i, ids in enumerate(prompts):
        wanted = dict.fromkeys(points if i >= n else of_base, ((0, len(ids)),))
        wanted.setdefault(top, ((len(ids) - 1, len(ids)),))
        takes.append([Take(p.kind, p.layer, spans) for p, spans in sorted(wanted.items())])
    read = Prompts.of(prompts)
    _, rows = session._run(read, [[] for _ in prompts], dict(max_tokens=1, temperature=0.0), takes)
    last = torch.stack([_rows(rows, top, i, len(ids), last=True)[-1] for i, ids in enumerate(prompts)])
    judge.check(last, [*range(n), *range(n)])
    ends = judge(last, [*range(n), *range(n)])
    _check_gaps(judge.name, ends.view(2, n), torch.finfo(session.dtype).eps)
    kept = {p: [_rows(rows, p, n + i, len(base[i])) for i in range(n)] for p in points}
    held = {p: [_rows(rows, p, i, len(base[i])) for i in range(n)] for p in of_base}
    clean, corrupt = (ends[n:], ends[:n]) if direction == "denoise" else (ends[:n], ends[n:])
    return Sources(kept, held, clean, corrupt)


def _check_gaps(metric: str, ends: Tensor, eps: float) -> None:
    """PromptError where a metric `[base/source pair]` is the same on both sides of a pair, or its gaps cancel over the pairs."""
    gaps = ends[1] - ends[0]
    blind = (gaps.abs() <= 10 * eps * ends.abs().clamp(min=1.0).amax(0)).nonzero().flatten().tolist()
    if blind:
        raise PromptError(f"the metric ({metric}) is {float(ends[0, blind[0]]):.4g} for the clean and for the corrupt prompt of pair "
                          f"{blind[0]}, so no patch can move it from one to the other; choose tokens on which they differ")
    if gaps.mean().abs() < 0.1 * gaps.abs().mean():
        raise PromptError(f"the metric ({metric}) rises from clean to corrupt in some pairs and falls in others, by {gaps.tolist()}, so "
                          f"their mean is no scale; give each pair its own tokens, as mia.logit_diff([a, b], [c, d])")


def _rows(source: Any, point: Point, i: int, n: int, last: bool = False) -> Tensor:
    """The values `[pos width]` float32 of one run."""
    positions, values = source.rows(point, [i])[0]
    kept = positions < n
    if positions[kept].tolist()[-1:] != [n - 1] or not (last or positions[kept].tolist() == list(range(n))):
        raise MissingRowsError(f"{point} of prompt {i} has rows {positions.tolist()} of {n}")
    return values[kept].float().flatten(1)


def asked_points(session: Session, point: str, layers: int | Iterable[int] | None, kinds: Sequence[str] = KINDS) -> list[Point]:
    """The points of one kind to patch, at the layers named or at all that are tapped."""
    kind = kind_of(point)
    if kind not in kinds:
        raise PointError(f"{kind} cannot be patched here; patch one of {', '.join(kinds)}")
    listed = [layers] if isinstance(layers, int) else layers
    return select(kind if listed is None else [(kind, layer) for layer in listed], session.tapped, session.n_layers)


def heads_of(session: Session, points: Sequence[Point], heads: Any) -> list[int | None]:
    """The heads to patch apart, or [None] for whole rows."""
    if heads is None:
        return [None]
    shapes = [session._engine.shapes[p] for p in points]
    if any(len(shape) != 2 for shape in shapes):
        raise EditError(f'{points[0].kind} has no heads; type patch(..., point="z", heads="all")')
    fewest = min(shape[0] for shape in shapes)
    found = list(range(fewest)) if isinstance(heads, str) and heads == "all" else [heads] if isinstance(heads, int) else list(heads)
    named = all(isinstance(h, int) and not isinstance(h, bool) and 0 <= h < fewest for h in found)
    if (heads == "all" and len(set(shapes)) > 1) or not found or not named:
        raise EditError(f'heads={heads!r} does not fit layers with {sorted({s[0] for s in shapes})} heads; give "all" or a list of them')
    return found


def groups_of(session: Session, pairs: PromptPairs, positions: Any, heads: Any) -> tuple[list[list[Group]], tuple[str, ...] | None]:
    """Return for each pair the groups of positions that are patched together, and what to call them (None for all together)."""
    lengths = [len(ids) for ids in pairs.clean]
    if isinstance(positions, str) and positions not in ("all", "each"):
        raise EditError(f'positions={positions!r} is neither "each" nor "all", nor a list of positions, slices and lists of them')
    if positions == "all" or (positions is None and heads is not None):
        return [[tuple(range(n))] for n in lengths], None
    if positions is None or positions == "each":
        if len(set(lengths)) > 1:
            raise PromptError(f"the pairs have {sorted(set(lengths))} tokens, so position by position they share no grid; name what they "
                              f'share, as positions=[-1, slice(1, 4)], or type positions="all"')
        positions = range(lengths[0])
    listed = [positions] if isinstance(positions, (int, slice)) else list(positions)
    if not listed:
        raise EditError("positions names no position")
    groups = [[tuple(sorted(set(resolve_at(item, n)))) for item in listed] for n in lengths]
    return groups, tuple(_label(session, pairs, item, [row[m] for row in groups]) for m, item in enumerate(listed))


def _label(session: Session, pairs: PromptPairs, item: Any, groups: Sequence[Group]) -> str:
    """A position with its token in the clean and the corrupt prompt, where these are few; what was asked, for groups."""
    if isinstance(item, slice):
        step = "" if item.step in (None, 1) else f":{item.step}"
        return f"{item.start or 0}:{'' if item.stop is None else item.stop}{step}"
    if hasattr(item, "__iter__"):
        return str(list(item))
    texts = dict.fromkeys(repr(session.tokenizer.decode([ids[group[0]]])) for side in (pairs.clean, pairs.corrupt)
                          for ids, group in zip(side, groups))
    return f"{item} {'|'.join(texts)}" if len(texts) <= 2 else str(item)
