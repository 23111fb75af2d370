"""Direct logit attribution: what each part of the last stream adds to a logit, or to the difference of two.

Source: Elhage et al., A Mathematical Framework for Transformer Circuits (2021). The final norm's scale is that of the whole
stream, and logits are those before a soft cap. It says nothing of what a part does by way of later blocks.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...engine.wire import Take
from ...errors import EditError, MiaError, MissingRowsError, PointError, PromptError
from ...points import Point, undeclared
from ...prompts import resolve_at
from ...running.launch import EngineRows
from ...running.submit import per_prompt
from ...shown import Shown

if TYPE_CHECKING:
    from ...session import Session
    from ...show.parts import Heat, Part

Tensor = torch.Tensor
_SHOWN = 12
_OF_LAYER = re.compile(r"L(\d+)(H\d+)|(\d+)_(\w+)")


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class LogitAttribution(Shown):
    """What each of `labels` adds to the logit of `answer`, less that of `wrong` where there is one, after one token of a prompt.

    values `[component]` float32; logit_difference: what the model's own stream gives, which they sum to but for `rest`, the
    rounding of the model's type. A logit alone counts from an arbitrary zero: a difference says more.
    """

    tokens: tuple[str, ...]
    position: int
    answer: str
    wrong: str | None
    labels: tuple[str, ...]
    values: Tensor
    logit_difference: float

    @property
    def net(self) -> float:
        """The sum of all values."""
        return float(self.values.double().sum())

    @property
    def total(self) -> float:
        """The sum of their sizes: far above the net one, parts cancel each other, and none of them alone explains the answer."""
        return float(self.values.double().abs().sum())

    @property
    def rest(self) -> float:
        """What the values leave of the model's own difference."""
        return self.logit_difference - self.net

    @property
    def data(self) -> list[dict[str, Any]]:
        """One row for each component."""
        return [dict(component=label, contribution=value) for label, value in zip(self.labels, self.values.tolist())]

    def _plots(self) -> tuple[Part, ...]:
        """All components in the order of the forward pass, and those of the layers as a grid."""
        from ...show.parts import Bars

        return Bars(self.labels, tuple(self.values.tolist()), f"what each part adds to the {self._title()}"), self._heat()

    def _title(self) -> str:
        less = "" if self.wrong is None else f" less {self.wrong!r}"
        return f"logit of {self.answer!r}{less} after {self.tokens[self.position]!r}"

    def _heat(self) -> Heat:
        """What each layer's parts add, the last layer on top; what belongs to no layer is not among them."""
        from ...show.parts import Heat

        found: dict[int, dict[str, float]] = {}
        for label, value in zip(self.labels, self.values.tolist()):
            if place := _OF_LAYER.fullmatch(label):
                found.setdefault(int(place[1] or place[3]), {})[place[2] or place[4]] = value
        columns = tuple(dict.fromkeys(part for parts in found.values() for part in parts))
        end = max((abs(value) for parts in found.values() for value in parts.values()), default=1.0)
        rows = sorted(found, reverse=True)
        values = tuple(tuple(found[layer].get(part, float("nan")) for part in columns) for layer in rows)
        return Heat(tuple(map(str, rows)), columns, values, f"by layer, to the {self._title()}", low=-end, high=end,
                    axes=("layer", "part"), unit="logits")

    def _parts(self) -> tuple[Part, ...]:
        return *self._brief(), self._heat()

    def _brief(self) -> tuple[Part, ...]:
        from ...show.parts import Bars, Prose

        order = self.values.abs().argsort(descending=True)[:_SHOWN].tolist()
        shown = Bars(tuple(self.labels[i] for i in order), tuple(self.values[i].item() for i in order),
                     f"the {len(order)} largest of {len(self.labels)} parts")
        return (Prose(f"Direct attribution of the {self._title()}: {self.logit_difference:+.4g}"),
                Prose(f"net {self.net:+.4g}, sum of sizes {self.total:.4g}, left by rounding {self.rest:+.2g}"), shown)


def attribute(session: Session, prompt: Any, answer: Any, wrong: Any, heads: bool, at: int, edits: Any) -> LogitAttribution:
    """Return what `Session.direct_logit_attribution` promises."""
    read = session._read(prompt)
    if len(read.ids) != 1:
        raise PromptError(f"an attribution is of one prompt, not of {len(read.ids)}")
    if isinstance(at, bool) or not hasattr(at, "__index__"):
        raise PromptError(f"an attribution is of one position; at={at!r} is no int")
    ids, acting = read.ids[0], session._scoped(per_prompt(edits, 1))[0]
    if any(p.kind == "final_norm" for edit in acting for p in edit.steps):
        raise EditError("an edit acts on the final norm's output, after which no part of the stream has a share of a logit")
    place = resolve_at(at, len(ids))[0]
    points = _points(session, heads)
    takes = [Take(p.kind, p.layer, ((place, place + 1),)) for p in points]
    _, source = session._run(read, per_prompt(edits, 1), {"max_tokens": 1, "temperature": 0.0}, [takes])
    asked = [source.token_id(t) if isinstance(t, str) else int(t) for t in (answer, wrong) if t is not None]
    labels, parts = _components(source, points, place)
    values, difference = _along(source, labels, parts, _row(source, points[-1], place), asked)
    rest = difference - float(values.sum())
    if acting:
        labels, values = [*labels, "edits"], torch.cat([values, torch.tensor([rest], dtype=values.dtype)])
    elif abs(rest) > _tolerance(session.dtype) * float(values.abs().sum()):
        raise MiaError(f"the parts sum to {float(values.sum()):.5g} and the stream gives {difference:.5g}: they do not explain it")
    named = [source.token_text(t) for t in asked]
    return LogitAttribution(tuple(map(source.token_text, ids)), place, named[0], named[1] if len(named) > 1 else None, tuple(labels),
                            values.float(), difference)


def _tolerance(dtype: torch.dtype) -> float:
    """How much of the sum of sizes rounding may leave: many values are added up, each rounded."""
    return 4 * torch.finfo(dtype).eps if torch.finfo(dtype).bits == 16 else 1e-4


def _points(session: Session, heads: bool) -> list[Point]:
    """What to capture, in the order of the forward pass; PointError naming all that is not tapped."""
    attention, last = "z" if heads else "attn_out", session.n_layers - 1
    wanted = [Point("resid_pre", 0), *(Point(kind, layer) for layer in range(session.n_layers) for kind in (attention, "mlp_out")),
              Point("resid_post", last)]
    absent = [p for p in wanted if p not in session.tapped]
    if absent:
        raise PointError(f"{undeclared(str(absent[0]), session.tapped)}; an attribution needs "
                         f"points=[('resid_pre', 0), {attention!r}, 'mlp_out', 'resid_post']")
    return wanted


def _components(source: EngineRows, points: list[Point], place: int) -> tuple[list[str], Tensor]:
    """Labels, and what each adds to the stream, float64 `[component d_model]`, in the order of the forward pass; "bias" last."""
    labels, found, bias = ["embed"], [_row(source, points[0], place)[None]], 0.0
    for p in points[1:-1]:
        if p.kind == "z":
            each = source.split(p, [0], [[place]])[0][0].double()  # [head + 1 d_model]
            labels += [f"L{p.layer}H{head}" for head in range(len(each) - 1)]
            found.append(each[:-1])
            bias = bias + each[-1]
        else:
            labels.append(f"{p.layer}_{p.kind}")
            found.append(_row(source, p, place)[None])
    stack = torch.cat(found)
    return [*labels, "bias"], torch.cat([stack, (torch.zeros_like(stack[0]) + bias)[None]])


def _along(source: EngineRows, labels: list[str], parts: Tensor, stream: Tensor, asked: list[int]) -> tuple[Tensor, float]:
    """What parts add along a token's readout, less another's, float64 `[component]`, and what the whole stream gives."""
    read = source.readout(asked)
    vectors, biases = read.vectors.double(), read.bias.double()
    direction = vectors[0] if len(asked) == 1 else vectors[0] - vectors[1]
    bias = biases[0] if len(asked) == 1 else biases[0] - biases[1]
    scale = read.scale(stream)
    values = (read.centre(parts) / scale) @ direction
    values[labels.index("bias")] += bias
    return values, float((read.centre(stream) / scale) @ direction + bias)


def _row(source: EngineRows, point: Point, place: int) -> Tensor:
    positions, values = source.rows(point, [0])[0]
    if positions.tolist() != [place]:
        raise MissingRowsError(f"{point} lacks position {place}: it was never computed")
    return values[0].double()
