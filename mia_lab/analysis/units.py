"""The unit of a coefficient: the mean centred norm of the stream over the shipped neutral text."""
from __future__ import annotations

import hashlib
import os
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from ..errors import MiaError
from ..models import cache_dir
from ..points import select
from .vectors import centred_norm

if TYPE_CHECKING:
    from ..session import Session

_PARAGRAPHS = 60


def neutral_text() -> list[str]:
    """Return the shipped neutral paragraphs."""
    return files("mia_lab").joinpath("data/neutral.txt").read_text(encoding="utf-8").splitlines()


def measure_unit(session: Session, point: str) -> torch.Tensor:
    """Return E|h - mean h| over neutral text without BOS at each tapped layer of a kind, `[layer]`.

    Some thousand tokens through the model the first time; kept by a hash of weights, configuration and tokens
    afterwards. PointError when the session taps no layer of that kind.
    """
    ids = _neutral_ids(session)
    layers = [p.layer for p in select(point, session.tapped, session.n_layers)]
    name = hashlib.sha256(repr((session.fingerprint, session.configuration, str(session.dtype), ids)).encode()).hexdigest()[:32]
    path = cache_dir() / "units" / f"{name}-{point}.safetensors"
    known = load_file(path) if path.exists() else {}
    if not all(str(layer) in known for layer in layers):
        known = {str(layer): norm.clone() for layer, norm in zip(layers, _measure(session, point))}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        save_file(known, scratch)
        scratch.replace(path)
    return torch.stack([known[str(layer)] for layer in layers])


def _neutral_ids(session: Session) -> list[list[int]]:
    encoded = [session.tokenizer.encode(line)[: session.max_len - 1] for line in neutral_text()[:_PARAGRAPHS]]
    found = [ids for ids in encoded if len(ids) > 1]
    if not found:
        raise MiaError("the tokenizer makes no tokens of the neutral text; is it this model's?")
    return found


def neutral_rows(session: Session, point: str) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the tapped layers of a kind, and the stream there over the neutral text without BOS, `[row layer d_model]`."""
    ids = _neutral_ids(session)
    layers = tuple(p.layer for p in select(point, session.tapped, session.n_layers))
    with session.unsteered():
        rows = session.capture(ids, point, at=slice(int(session._has_bos(ids[0])), None)).float()  # [prompt layer pos d_model]
    flat = rows.flatten(3).transpose(1, 2).flatten(0, 1)  # heads side by side
    return layers, flat[~flat[:, 0, 0].isnan()]


def _measure(session: Session, point: str) -> torch.Tensor:
    unit = centred_norm(neutral_rows(session, point)[1])
    if not (unit > 0).all():
        raise MiaError(f"the stream at {point} is the same for every token of the neutral text, so it has no unit; "
                       f"is the tokenizer this model's?")
    return unit
