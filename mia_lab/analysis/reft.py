"""LoReFT fits: a low-rank edit of the stream, h + R^T (W h + b - R h), trained so that prompts are answered as in examples.

Source: arXiv:2404.03592. vLLM keeps no gradients, so the edit is trained in Hugging Face's float32 model of the session's own
folder, and then measured in the engine, which must find the same loss.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..edits import Affine
from ..errors import EditError, MiaError
from ..points import Point
from ..prompts import following
from ..selectors import Selector, positions, prompt, window
from ..shown import Shown, progress_bar
from .gradients import blocks_of, reference_model

if TYPE_CHECKING:
    from ..session import Session

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReftFit(Shown):
    """A trained edit, and what it does to the examples' loss, the mean negative log-probability of an answer's token in nats.

    before, after: without the edit and with it, in Hugging Face's model; engine: with it, in the engine. losses: of each step's
    batch. The loss on the examples themselves says little about other prompts: judge the edit on some that it was not fitted on.
    """

    edit: Affine
    layer: int
    rank: int
    n_examples: int
    losses: tuple[float, ...]
    before: float
    after: float
    engine: float

    @property
    def data(self) -> list[dict[str, float]]:
        """One record a step."""
        return [{"step": step, "loss": loss} for step, loss in enumerate(self.losses)]

    def _parts(self) -> list[Any]:
        return [*self._brief(), *self._plots()]

    def _brief(self) -> list[Any]:
        from ..show.parts import Table

        losses = {"without the edit": self.before, "with it": self.after, "with it, in the engine": self.engine}
        rows = tuple((name, f"{loss:.4f}") for name, loss in losses.items())
        return [Table(("loss, nats a token", ""), rows, f"LoReFT of rank {self.rank} at resid_post {self.layer}, {len(self.losses)} steps "
                                                        f"over {self.n_examples} examples")]

    def _plots(self) -> list[Any]:
        from ..show.parts import Curve, Series

        losses = Series("loss", tuple(map(float, range(len(self.losses)))), self.losses)
        return [Curve((losses,), "step", "nats a token", f"Loss of each step's batch; on all examples {self.before:.3g} before and "
                                                     f"{self.after:.3g} after", zero=False)]


@dataclass(frozen=True, slots=True)
class _Example:
    """Token ids of a prompt and its answer, and the positions `[pos]` that are edited."""

    ids: list[int]
    n_prompt: int
    edited: list[int]

    @property
    def answer(self) -> Tensor:
        return torch.tensor(self.ids[self.n_prompt :])


class _LoReft(nn.Module):
    """The trained parts. W - R and b start at zero, so that training starts from the model as it is; b counts in units."""

    def __init__(self, d: int, rank: int, unit: float) -> None:
        super().__init__()
        self.rotation = nn.utils.parametrizations.orthogonal(nn.Linear(d, rank, bias=False))
        self.delta, self.shift, self.unit = nn.Parameter(torch.zeros(rank, d)), nn.Parameter(torch.zeros(rank)), unit

    def forward(self, h: Tensor) -> Tensor:
        """What is added to rows h `[pos d]`."""
        return (h @ self.delta.T + self.shift * self.unit) @ self.rotation.weight

    def edit(self, layer: int, where: Selector) -> Affine:
        """The edit, as the engine runs it."""
        rotation = self.rotation.weight.detach().clone()
        return Affine.loreft(rotation, rotation + self.delta.detach(), self.shift.detach() * self.unit, layers=[layer], where=where)


def fit_reft(session: Session, examples: Iterable[tuple[Any, Any]], layer: int, rank: int, where: Selector | None, steps: int,
             batch: int, learning_rate: float, seed: int, model: Any, progress: bool) -> ReftFit:
    """Return what `Session.reft` promises."""
    where = prompt() if where is None else where
    if Point("resid_post", layer) not in session.tapped or not 0 < rank <= session.d_model:
        raise EditError(f"reft edits resid_post at a tapped layer, with rank 1 to {session.d_model}; got layer {layer}, rank {rank}")
    if steps < 1 or batch < 1 or not learning_rate > 0:
        raise EditError(f"reft takes one or more steps of one or more examples, at a positive rate; got {steps}, {batch}, {learning_rate}")
    listed = _read(session, examples, where)
    model = reference_model(session) if model is None else model
    taps = [p.layer for p in session.tapped if p.kind == "resid_post"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        part = _LoReft(session.d_model, rank, float(session.unit()[taps.index(layer)]))
    draw, losses = torch.Generator().manual_seed(seed), []
    optimiser = torch.optim.Adam(part.parameters(), learning_rate)
    with progress_bar(progress) as bar:
        bar.stage(steps, "steps")
        try:
            for _ in range(steps):
                chosen = torch.randperm(len(listed), generator=draw)[:batch].tolist()
                loss = torch.stack([_loss(model, session, layer, listed[i], part) for i in chosen]).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(float(loss.detach()))
                bar.add()
        except KeyboardInterrupt:
            bar.broken_off("the edit is as far trained as that")
    edit = part.edit(layer, where)
    with torch.no_grad():
        before, after = (float(torch.stack([_loss(model, session, layer, e, p) for e in listed]).mean()) for p in (None, part))
    found = engine_loss(session, listed, edit)
    if not abs(found - after) <= (1e-3 if session.dtype == torch.float32 else 0.05) * (1 + after):
        raise MiaError(f"the edit gives a loss of {after:.4f} where it was trained and {found:.4f} in the engine; are the weights there "
                       f"the same (quantised, LoRA)?")
    return ReftFit(edit, layer, rank, len(listed), tuple(losses), before, after, found)


def engine_loss(session: Session, examples: Sequence[_Example], edit: Affine) -> float:
    """The mean loss of examples in the engine, each with the edit at its own positions."""
    total, top = 0.0, session.n_layers - 1
    for example in examples:
        mine = Affine(edit.read, edit.write, edit.bias, edit.layers, where=positions(example.edited))
        with session.unsteered():
            at = window(example.n_prompt - 1, len(example.ids) - 1)
            rows = session.capture([example.ids], layers=top, at=at, edits=[mine]).get()[0]  # [pos d_model]
        total -= float(session.unembed(rows).double().log_softmax(-1).gather(1, example.answer[:, None]).mean())
    return total / len(examples)


def _read(session: Session, examples: Iterable[tuple[Any, Any]], where: Selector) -> list[_Example]:
    listed = [tuple(pair) for pair in examples]
    if not listed or any(len(pair) != 2 for pair in listed):
        raise EditError("reft is fitted on (prompt, answer) pairs; there is none" if not listed else "an example is (prompt, answer)")
    found, read = [], session._read([one for one, _ in listed])
    for i, (ids, (_, answer)) in enumerate(zip(read.ids, listed)):
        tail = following(session.tokenizer, answer) if isinstance(answer, str) else [int(t) for t in answer]
        if not tail or len(ids) + len(tail) >= session.max_len:
            raise EditError(f"the answer of example {i} has {len(tail)} tokens after {len(ids)}; the context holds {session.max_len}")
        n = len(ids) + len(tail)
        places = [p for a, b in where.spans(session._context(read, i)) for p in range(a, n if b is None else min(b, n))]
        if not places:
            raise EditError(f"{where} selects no position of example {i}")
        found.append(_Example([*ids, *tail], len(ids), places))
    return found


def _loss(model: nn.Module, session: Session, layer: int, example: _Example, part: _LoReft | None) -> Tensor:
    """The mean negative log-probability of an answer's tokens, with an edit or without."""
    mask = torch.zeros(len(example.ids), 1)
    mask[example.edited] = 1.0

    def hook(module: nn.Module, args: tuple, out: Any) -> Any:
        h = out[0] if isinstance(out, tuple) else out
        h = h if part is None else h + (part(h[0]) * mask)[None]
        return (h, *out[1:]) if isinstance(out, tuple) else h

    handle = blocks_of(model, session)[layer].register_forward_hook(hook)
    try:
        logits = model(torch.tensor([example.ids])).logits[0, example.n_prompt - 1 : -1]
    finally:
        handle.remove()
    return -logits.float().log_softmax(-1).gather(1, example.answer[:, None]).mean()
