"""Folders as a server reads them, and what it knows of a model, made up: no engine."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mia_lab as mia
from mia_lab.analysis.vectors import Vector
from mia_lab.bundles import folder
from mia_lab.bundles.codec import encode
from mia_lab.bundles.model import ModelFacts
from mia_lab.points import Point
from mia_lab.running.compile import Model
from mia_lab.running.declare import EDIT_KINDS

D, LAYERS = 16, 4
SAID = {"tokens": [1], "log_probabilities": [-0.5]}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vector(*layers: int, dose: float = 1.0) -> Vector:
    """A vector that adds `dose` units at each of its layers."""
    rows, unit = draw(len(layers), D, seed=1), torch.full((len(layers),), 8.0)
    return Vector("resid_post", layers, dose * rows * (unit / rows.norm(dim=1))[:, None], unit, unit)


def facts(kinds: Sequence[str] = ("resid_post", "attn_out"), edits: Sequence[str] = EDIT_KINDS, **changed: Any) -> ModelFacts:
    """A model of 4 blocks, of which some kinds of point are tapped, and z, which has two heads."""
    shapes = {Point(kind, layer): (D,) for kind in kinds for layer in range(LAYERS)} | {Point("z", n): (2, D // 2) for n in range(LAYERS)}
    model = Model(LAYERS, shapes, frozenset(shapes), frozenset(), tuple(edits))
    said = dict(name="org/model", n_layers=LAYERS, d_model=D, dtype="bfloat16", weights="w", configuration="c", tokenizer_hash="t",
                check=model, points=tuple(sorted(shapes)), max_len=64)
    return ModelFacts(**said | changed)


def about(**changed: Any) -> dict[str, Any]:
    """What a bundle says of itself."""
    model = {"name": "org/model", "weights": "w", "configuration": "c", "n_layers": LAYERS, "d_model": D}
    return {"model": model, "tokenizer": "t", "golden": {"environment": {"dtype": "bfloat16"}, "outputs": [
        {"prompt": [1, 2], "steered": SAID, "plain": SAID}]}} | changed


def bundle(path: Path, *edits: mia.Edit, **changed: Any) -> Path:
    """Write a bundle of edits, by default one that adds half a unit at layers 1 and 2."""
    tensors: dict[str, torch.Tensor] = {}
    listed = list(edits) or [mia.Add(vector(1, 2), 0.5)]
    return folder.write(path, about(**changed) | {"edits": encode(listed, tensors, "edits")}, tensors)
