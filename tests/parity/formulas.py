"""What each edit, selector, gate and schedule means, from its formula, in float64 and without the library's own steps."""
from __future__ import annotations

import torch
from torch import Tensor

import mia_lab as mia
from mia_lab.points import Point
from mia_lab.selectors import Context


def directions(vectors: object, point: Point, layers: object) -> Tensor:
    """The unit directions `[k d]` of an edit that takes one or several."""
    rows = []
    for item in vectors if isinstance(vectors, (list, tuple)) else [vectors]:
        if isinstance(item, Tensor) and item.ndim == 2:
            item = item[list(layers).index(point.layer)]
        elif not isinstance(item, Tensor):
            item = item.rows[item.layers.index(point.layer)]
        rows.append(item.double() / item.double().norm())
    return torch.stack(rows)


def edited(edit: mia.Edit, point: Point, h: Tensor, factor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return h `[pos d]` after an edit whose strength at each position is `factor [pos]`."""
    f = factor[:, None]
    columns = slice(None) if getattr(edit, "head", None) is None else slice(edit.head * shape[-1], (edit.head + 1) * shape[-1])
    match edit:
        case mia.Add():
            out = h.clone()
            row = edit.rows[point].double()
            out[:, columns if len(row) < h.shape[1] else slice(None)] += f * edit.coeff * row
            return torch.where(f != 0, out * h.norm(dim=1, keepdim=True) / out.norm(dim=1, keepdim=True), h) if edit.keep_norm else out
        case mia.Ablate():
            v = directions(edit.vectors, point, edit.layers)
            return h - f * edit.strength * (h @ torch.linalg.pinv(v) @ v)
        case mia.Clamp():
            v = directions(edit.vectors, point, edit.layers)
            p = h @ v.T
            low, high = (edit.value, edit.value) if edit.value is not None else (edit.low, edit.high)
            target = p.clone()
            if low is not None:
                target = torch.maximum(target, torch.as_tensor(low, dtype=p.dtype).expand_as(p))
            if high is not None:
                target = torch.minimum(target, torch.as_tensor(high, dtype=p.dtype).expand_as(p))
            return h + f * (target - p) @ torch.linalg.pinv(v).T
        case mia.Scale():
            out = h.clone().view(len(h), *shape)
            heads = slice(None) if edit.heads is None else [edit.heads] if isinstance(edit.heads, int) else list(edit.heads)
            out[:, heads] *= (1 + (edit.factor - 1) * factor).view(-1, *[1] * len(shape))
            return out.view_as(h)
        case mia.Replace():
            one = edit.source.ndim == (1 if edit.start is None else 2)
            source = edit.source if one else edit.source[list(edit.layers).index(point.layer)]
            wanted = source.double().expand(len(h), -1) if edit.start is None else torch.zeros(len(h), source.shape[-1]).double()
            if edit.start is not None:
                n = min(len(source), len(h) - edit.start)
                wanted[edit.start : edit.start + n] = source[:n].double()
            out = h.clone()
            out[:, columns] += f * edit.blend * (wanted - h[:, columns])
            return out
        case mia.Affine():
            bias = 0.0 if edit.bias is None else edit.bias.double()
            return h + f * edit.coeff * (h @ edit.read.double().T + bias) @ edit.write.double()
        case mia.ClampFeature():
            unit = h @ edit.encoder.double() + edit.bias
            return h + f * (edit.value - torch.where(unit > edit.threshold, unit, 0.0))[:, None] * edit.decoder.double()
    raise TypeError(type(edit).__name__)


def bias(edit: mia.AttentionBias, context: Context, weights: Tensor) -> Tensor:
    """What an attention bias adds to the scores `[head pos key]` whose softmax is `weights`."""
    inside = torch.zeros(weights.shape[-1], dtype=weights.dtype)
    for a, b in edit.span.spans(context):
        inside[a : context.n if b is None else b] = 1
    if edit.bias is not None:
        amount = torch.full(weights.shape[:2], edit.bias, dtype=weights.dtype)
    else:
        share = (weights * inside).sum(-1)
        target = torch.full_like(share, edit.share)
        amount = torch.where((share > 0) & (share < target), torch.logit(target) - torch.logit(share), 0.0)
    if edit.heads is not None:
        chosen = torch.zeros(len(weights), 1, dtype=weights.dtype)
        chosen[[edit.heads] if isinstance(edit.heads, int) else list(edit.heads)] = 1
        amount = amount * chosen
    return amount[..., None] * inside


def mask(edit: mia.Edit, context: Context, total: int) -> Tensor:
    """Where an edit acts, and how strongly by its schedule, `[pos]`; gates aside."""
    factor = torch.zeros(total, dtype=torch.float64)
    spans = edit.where.spans(context)
    if getattr(edit, "start", None) is not None:
        n = edit.source.shape[-2]
        spans = [(max(a, edit.start), min(total if b is None else b, edit.start + n)) for a, b in spans]
    if edit.when is not None and getattr(edit.when, "over", "") != "row":
        spans = [(max(a, context.n), b) for a, b in spans]
    spans = [(a, total if b is None else b) for a, b in spans if b is None or a < b]
    for a, b in spans:
        factor[a:b] = 1.0
    if edit.schedule is not None and spans:
        steps = torch.arange(total, dtype=torch.float64) - spans[0][0]
        factor *= torch.where(factor > 0, 0.5 ** (steps / edit.schedule.half_life), 0.0)
    return factor


def readings(gate: mia.Gate, values: dict[Point, Tensor]) -> Tensor:
    """The readings of a gate's probes on values `[pos d]` at their points, `[probe pos]`."""
    found = []
    for probe in gate.probes:
        x = values[probe.at].double()
        if probe.mean is not None:
            x = x - probe.mean.double()
        r = x @ probe.direction.double() + probe.bias
        found.append(r / x.norm(dim=-1) if probe.cosine else r)
    return torch.stack(found)


def is_open(gate: mia.Gate | mia.After, found: Tensor | None, ids: list[int], context: Context) -> Tensor:
    """Return bool `[pos]`: whether a gate is open at each position, given its readings `[probe pos]`."""
    total = len(ids)
    at = torch.arange(total)
    if isinstance(gate, mia.After):
        hits = [i for i in range(context.n, total) if ids[i] in gate.tokens]
        return at >= (hits[0] if hits else total)
    passes = lambda value: value > gate.above if gate.above is not None else value < gate.below  # noqa: E731
    per_row = passes(found.sum(0)) if gate.rule == "sum" else passes(found).any(0) if gate.rule == "any" else passes(found).all(0)
    first = int(context.has_bos)
    match gate.over:
        case "row":
            return per_row
        case "prompt_last":
            return (at >= context.n) & per_row[context.n - 1]
        case "prompt_max":
            return (at >= context.n) & per_row[first : context.n].any()
        case "prompt_mean":
            return (at >= context.n) & passes(found.sum(0)[first : context.n].mean())
    hits = [i for i in range(context.n - 1, total) if per_row[i]]
    return at > (hits[0] if hits else total)
