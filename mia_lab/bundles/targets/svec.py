"""`.svec` of AISteer360: JSON with directions `[1 d]` by 0-based layer, read at the layer's output. Where, and how strongly, they
are added is said by the control that loads the file, so a file holds neither."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...edits import Edit
from ...errors import BundleError
from ...selectors import everywhere
from . import files
from .plain import Says, addition, plain, summed

SAYS = Says()
_KEYS = ("model_type", "directions", "num_heads", "head_dim", "explained_variances", "probe_accuracies", "meta")


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write the sum of additions: CAA with this vector, multiplier 1 and token_scope "all" does there what the edits do here.

    model: the architecture's name in transformers, as "llama", which the format asks for.
    """
    if not model:
        raise BundleError("a .svec names the model's architecture: give model=, such as 'llama'")
    rows = summed(plain(edits, "a .svec file", SAYS, bos))
    return files.write_json(path, {"model_type": model, "directions": {str(at): [row.tolist()] for at, row in rows.items()}})


def import_from(path: Path) -> list[Edit]:
    """One Add of what multiplier 1 adds; BundleError for vectors by head or by token, which are for other controls."""
    found = files.mapping(files.read_json(path), str(path), _KEYS)
    if found.get("num_heads") is not None or found.get("head_dim") is not None:
        raise BundleError(f"{path} holds directions by head, which are added before the output projection; that cannot be read here")
    listed = files.mapping(found.get("directions"), f"{path}: directions")
    rows = {files.layer(at, f"{path}: directions"): _row(value, f"{path}: the direction at layer {at}") for at, value in listed.items()}
    layers, stacked = files.by_layer(rows, str(path))
    return [addition(dict(zip(layers, stacked)), where=everywhere())]


def _row(value: Any, what: str) -> torch.Tensor:
    """A direction `[d]`, given as such or as `[[d]]`."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        if len(value) != 1:
            raise BundleError(f"{what} has {len(value)} rows, by token or by basis vector; a single one is read here")
        value = value[0]
    return files.direction(value, what)
