"""Views of a comparison: both texts side by side, and what the edits changed in the stream of each layer."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from mia_lab.analysis.vectors import Vector
from mia_lab.show.parts import Bars, Beside, Part, Prose, Words
from mia_lab.show.words import words_between

from .comparing import Comparison


def parts_of(found: Comparison, head: str, vector: Vector, edited: Sequence[int], unit: torch.Tensor) -> list[Part]:
    """A heading, default and steered text, and the change of the stream by layer. unit `[layer]`: the mean centred norm at each."""
    whole = found.default.done and found.steered.done
    steered = words_between(found.default.text, found.steered.text) if whole else _plain(found.steered.text)
    texts = Beside(((Prose("default", 4), _plain(found.default.text)), (Prose("steered", 4), steered)))
    return [Prose(head), texts, *_effect(found, vector, edited, unit), Prose(_state(found))]


def _effect(found: Comparison, vector: Vector, edited: Sequence[int], unit: torch.Tensor) -> list[Part]:
    change = found.change
    if change is None:
        return []
    place = "the first generated position" if found.generated else "the prompt's last position"
    labels = tuple(f"{layer}{' (edited)' if layer in edited else ''}" for layer in found.layers)
    size = change.norm(dim=-1) / unit
    bars = [Bars(labels, tuple(size.tolist()), f"Change of the stream after each layer at {place}, in mean centred norms")]
    if vector.kind == "resid_post" and set(found.layers) <= set(vector.layers):
        rows = vector[list(found.layers)].rows
        along = (change * rows / rows.norm(dim=-1, keepdim=True)).sum(-1) / unit
        bars.append(Bars(labels, tuple(along.tolist()), "The part of it along the vector of that layer"))
    return bars


def _state(found: Comparison) -> str:
    counts = f"{len(found.default.tokens)} and {len(found.steered.tokens)} tokens"
    if found.stopped:
        return f"Stopped after {counts}."
    if not (found.default.done and found.steered.done):
        return f"{counts} so far"
    wait = "" if found.first_ms is None else f"; {found.first_ms:.0f} ms to the first steered token"
    same = " The texts are the same." if found.default.tokens == found.steered.tokens else ""
    return f"{counts}{wait}.{same}"


def _plain(text: str) -> Words:
    return Words((("same", text or "…"),))
