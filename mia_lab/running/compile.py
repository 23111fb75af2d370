"""From edits and captures to the wire: one request's terms, gates and vectors."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from ..edits import Edit, Step, digest
from ..engine.wire import MAX_GATES, MAX_TERMS, Span, Spec, Term, busiest, depth, segments
from ..engine.wire import Gate as WireGate
from ..errors import EditError
from ..gates import After, Gate, Probe
from ..points import Point
from ..selectors import CONTENT, ENDLESS, Context, Selector, intersect, merge

_OPEN = (CONTENT, Selector("everywhere"))


@dataclass(frozen=True)
class Model:
    """What edits are checked against: the shape of a row at each editable point, and the number of layers."""

    n_layers: int
    shapes: Mapping[Point, tuple[int, ...]]
    editable: frozenset[Point]
    read_only: frozenset[str] = frozenset()
    edit_kinds: tuple[str, ...] = ()


@dataclass
class Compiled:
    """The terms and gates of one request, and the vectors they name, `[n d]` by content address."""

    terms: list[Term] = field(default_factory=list)
    gates: list[WireGate] = field(default_factory=list)
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)

    def vector(self, rows: torch.Tensor | None, known: dict[int, str] | None = None) -> str:
        """Note vectors and return their address, "" for none. known: addresses by id of tensors that outlive it."""
        if rows is None:
            return ""
        sha = (known or {}).get(id(rows)) or digest(rows)
        if known is not None:
            known[id(rows)] = sha
        self.vectors[sha] = rows.reshape(-1, rows.shape[-1])
        return sha


def compile_edits(edits: Iterable[Edit], prompt: Context, model: Model) -> Compiled:
    """Return what `edits` mean for one prompt; EditError for a width, point, position or gate that does not fit."""
    out = Compiled()
    gated: dict[object, tuple[int, list[Span]]] = {}  # gate -> its index and the rows it governs
    measures: list[Term] = []
    for edit in edits:
        if not isinstance(edit, Edit):
            raise EditError(f"{type(edit).__name__} is not an edit; type for example mia.Add(vector, 0.2)")
        check(edit, model)
        spans = _spans(edit, prompt)
        steps = {p: s for p, s in edit.steps.items() if any(step.coeff for step in s if step.op != "renorm")}
        if not spans or not steps:
            continue
        gate = -1
        if edit.when is not None:
            if edit.when not in gated:
                gated[edit.when] = len(gated), []
            gate = gated[edit.when][0]
            gated[edit.when] = gate, merge(sorted([*gated[edit.when][1], *spans], key=lambda s: s[0]))
        for point, listed in sorted(steps.items()):
            out.terms += [_term(step, point, edit, spans, gate, model, out, prompt) for step in listed]
    for when, (index, rows) in gated.items():
        wire, read = _gate(when, index, rows, prompt, model, out)
        out.gates.append(wire)
        measures += read
    _check_order(measures, out)
    out.terms = measures + out.terms
    if len(out.gates) > MAX_GATES:
        raise EditError(f"these edits have {len(out.gates)} different gates; one request has {MAX_GATES} at most")
    for segment in segments(Spec(tuple(out.terms))):
        biased = [t.layer for t in segment.terms if t.op == "bias"]
        if len(biased) > len(set(biased)):
            raise EditError(f"two attention biases meet at one layer from position {segment.start} on; only one can act there")
        if len(segment.terms) > MAX_TERMS and (crowd := busiest(segment))[1] > MAX_TERMS:
            raise EditError(f"{crowd[1]} edit terms meet at {Point(*crowd[0])} from position {segment.start} on; at most {MAX_TERMS} can")
    return out


def check(edit: Edit, model: Model) -> None:
    """EditError when an edit's kind, points or widths, or its gate's, do not fit the model, whatever the prompt."""
    kind = type(edit).__name__.lower()
    if kind not in model.edit_kinds:
        raise EditError(f"{type(edit).__name__} edits were not declared; declared: {', '.join(model.edit_kinds) or 'none'}. "
                        f"Load with Session(..., edits=[{kind!r}, ...])")
    for point, steps in edit.steps.items():
        _check_point(point, model)
        for step in steps:
            if step.op != "bias":
                _placed(step, point, edit, model)
    for probe in edit.when.probes if isinstance(edit.when, Gate) else ():
        _check_probe(probe, model)


def _spans(edit: Edit, prompt: Context) -> list[Span]:
    spans = edit.where.spans(prompt)
    if edit.first is not None:
        rows = next(iter(edit.steps.values()))[-1].write
        spans = intersect(spans, [(edit.first, edit.first + len(rows))])
        if not spans:
            raise EditError(f"none of the {len(rows)} rows from position {edit.first} on is selected by where={edit.where}")
    if edit.schedule is not None and (isinstance(edit.when, After) or getattr(edit.when, "over", "") == "since"):
        raise EditError("a schedule counts from the first position of an edit, which a gate that opens later would not wait for; "
                        "use one of them")
    if edit.when is not None and not (isinstance(edit.when, Gate) and edit.when.over == "row"):
        later = intersect(spans, [(prompt.n, ENDLESS)])
        if edit.where not in _OPEN and later != intersect(spans, [(0, ENDLESS)]):
            raise EditError(f"this gate is decided after the prompt, so its edit cannot act on prompt positions (where={edit.where})")
        spans = [(a, None if b >= ENDLESS else b) for a, b in later]
    return spans


def _term(step: Step, point: Point, edit: Edit, spans: list[Span], gate: int, model: Model, out: Compiled, prompt: Context) -> Term:
    if step.op == "bias":
        return _bias(step, point, spans, gate, model.shapes[point][0], prompt)
    columns, read, write = _placed(step, point, edit, model)
    rate = edit.schedule.rate if edit.schedule is not None else 0.0
    shas = [out.vector(rows, edit._addresses if rows is own else None) for rows, own in ((read, step.read), (write, step.write))]
    return Term(step.op, point.kind, point.layer, tuple(spans), *shas, step.coeff, step.slope, step.offset, step.low, step.high, rate,
                step.threshold, gate, columns, spans[0][0] if rate else edit.first or 0, len(write) if step.aligned else 0, step.fresh)


def _placed(step: Step, point: Point, edit: Edit,
            model: Model) -> tuple[tuple[int, int], torch.Tensor | None, torch.Tensor | None]:
    """Return a step's columns at a point, and what it reads and writes, as wide as the point."""
    shape = model.shapes[point]
    width = prod(shape)
    columns = (0, width)
    if step.head is not None:
        if len(shape) != 2 or not 0 <= step.head < shape[0]:
            have = f"{shape[0]} heads" if len(shape) == 2 else "no heads"
            raise EditError(f"head {step.head} was named at {point}, which has {have}")
        columns = (step.head * shape[1], (step.head + 1) * shape[1])
    read, write = (_widen(rows, columns, width, point) for rows in (step.read, step.write))
    if step.aligned and edit.schedule is not None and edit.schedule.rate:
        raise EditError("rows by position take no schedule; scale them beforehand")
    return columns, read, write


def _bias(step: Step, point: Point, spans: list[Span], gate: int, heads: int, prompt: Context) -> Term:
    keys = [(a, min(prompt.n, ENDLESS if b is None else b)) for a, b in step.keys.spans(prompt) if a < prompt.n]
    if len(keys) != 1:
        raise EditError(f"the span of an AttentionBias is one run of the prompt's positions; {step.keys} gives {keys}")
    if step.heads and heads > 64:
        raise EditError(f"{point} has {heads} heads; a bias names heads only where there are 64 at most, else it acts on all")
    if max(step.heads, default=0) >= heads:
        raise EditError(f"head {max(step.heads)} was named at {point}; there are heads 0 to {heads - 1}")
    return Term("bias", point.kind, point.layer, tuple(spans), coeff=step.coeff, slope=step.slope, gate=gate, columns=keys[0],
                heads=step.heads)


def _widen(rows: torch.Tensor | None, columns: tuple[int, int], width: int, point: Point) -> torch.Tensor | None:
    """Put rows as wide as the columns there, zero elsewhere."""
    if rows is None:
        return None
    if rows.shape[-1] == width:
        return rows
    if rows.shape[-1] != columns[1] - columns[0]:
        raise EditError(f"the vector for {point} has width {rows.shape[-1]}; the model's is {width}")
    out = torch.zeros(*rows.shape[:-1], width)
    out[..., columns[0] : columns[1]] = rows
    return out


def _gate(when: Gate | After, index: int, rows: list[Span], prompt: Context, model: Model,
          out: Compiled) -> tuple[WireGate, list[Term]]:
    if isinstance(when, After):
        ids = [t if isinstance(t, int) else prompt.tokenizer.encode(t, add_special_tokens=False) for t in when.tokens]
        wrong = [t for t, found in zip(when.tokens, ids) if isinstance(found, list) and len(found) != 1]
        if wrong:
            raise EditError(f"{wrong[0]!r} is not one token of this model, so no generated token can be it")
        return WireGate("token", 0.0, prompt.n, 0, tuple(t if isinstance(t, int) else t[0] for t in ids)), []
    first = int(prompt.has_bos) if prompt.n > int(prompt.has_bos) else 0
    rule, start, stop = {"row": ("row", 0, 0), "prompt_mean": ("mean", first, prompt.n), "prompt_max": ("max", first, prompt.n),
                         "prompt_last": ("last", prompt.n - 1, prompt.n), "since": ("since", prompt.n - 1, 0)}[when.over]
    spans = tuple(rows) if rule == "row" else ((start, stop or None),)
    measures = []
    for probe in when.probes:
        _check_probe(probe, model)
        measures.append(Term("measure", probe.at.kind, probe.at.layer, spans, out.vector(probe.direction),
                             out.vector(probe.mean if probe.cosine else None), when.sign, offset=probe.offset,
                             threshold=when.level if when.votes else 0.0, gate=index, cosine=probe.cosine, vote=when.votes))
    return WireGate(rule, when.threshold, start, stop), measures


def _check_order(measures: list[Term], out: Compiled) -> None:
    for term in out.terms:
        gate = out.gates[term.gate] if term.gate >= 0 else None
        late = [m for m in measures if gate is not None and gate.rule == "row" and m.gate == term.gate and depth(m) >= depth(term)]
        if late:
            raise EditError(f"the gate of an edit at {Point(*term.site)} reads at {Point(*late[0].site)}, which comes after it or beside "
                            f"it; read at an earlier layer, or over='prompt_last' or 'since'")


def _check_probe(probe: Probe, model: Model) -> None:
    _check_point(probe.at, model)
    if probe.direction.shape != (prod(model.shapes[probe.at]),):
        raise EditError(f"the probe at {probe.at} has width {len(probe.direction)}; the model's is {prod(model.shapes[probe.at])}")


def _check_point(point: Point, model: Model) -> None:
    if not 0 <= point.layer < model.n_layers:
        raise EditError(f"the edit names layer {point.layer}; the model has layers 0 to {model.n_layers - 1}")
    if point.kind in model.read_only:
        raise EditError(f"{point.kind} can be captured but not edited")
    if point not in model.editable:
        kinds = sorted({p.kind for p in model.editable})
        raise EditError(f"edits at {point} were not declared; declared: {', '.join(kinds) or 'none'}. "
                        f"Load with Session(..., points=[{point.kind!r}, ...], edits=True)")
