"""The unit of a coefficient: the mean centred norm of the stream over the shipped neutral text."""
from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from ..errors import MiaError
from ..models import cache_dir
from .vectors import centred_norm

if TYPE_CHECKING:
    from ..session import Session

_PARAGRAPHS = 60


def neutral_text() -> list[str]:
    """Return the shipped neutral paragraphs."""
    return files("mia_lab").joinpath("data/neutral.txt").read_text(encoding="utf-8").splitlines()


def measure_unit(session: Session, point: str) -> torch.Tensor:
    """Return E|h - mean h| over neutral text without BOS at each tapped layer of a kind, `[layer]`.

    About 4,000 tokens through the model the first time; kept by a hash of the weights afterwards.
    """
    layers = [p.layer for p in session.tapped if p.kind == point]
    dtype = str(session.dtype).removeprefix("torch.")
    path = cache_dir() / "units" / f"{session._engine.rpc('sample_weights')}-{dtype}-{point}.safetensors"
    known = load_file(path) if path.exists() else {}
    if not all(str(layer) in known for layer in layers):
        known = {str(layer): norm.clone() for layer, norm in zip(layers, _measure(session, point))}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{id(known):x}.tmp")
        save_file(known, scratch)
        scratch.replace(path)
    return torch.stack([known[str(layer)] for layer in layers])


def _measure(session: Session, point: str) -> torch.Tensor:
    text = neutral_text()[:_PARAGRAPHS]
    ids = [session.tokenizer.encode(line)[: session.max_len - 1] for line in text]
    ids = [row for row in ids if len(row) > 1]
    if not ids:
        raise MiaError("the tokenizer makes no tokens of the neutral text; is it this model's?")
    start = int(session._has_bos(ids[0]))
    rows = session.capture(ids, point, at=slice(start, None)).float()  # [prompt layer pos d_model]
    flat = rows.transpose(1, 2).flatten(0, 1)  # [row layer d_model]
    unit = centred_norm(flat[~flat[:, 0, 0].isnan()])
    if not (unit > 0).all():
        raise MiaError(f"the stream at {point} is the same for every token of the neutral text, so it has no unit; "
                       f"is the tokenizer this model's?")
    return unit
