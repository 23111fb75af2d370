"""Requests of vllm-lens: `vllm_xargs.apply_steering_vectors`, a JSON list of activations with the blocks at whose output they are added.

Its hooks are pickled code, which is neither written nor read. Its `norm_match` makes a vector as long as each row that it is added to,
which is no keep_norm, and is refused. Tensors are written as plain float32, which its reader takes beside
the compressed form.
"""
from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...edits import Add, Edit
from ...errors import BundleError, MiaError
from . import files
from .plain import Plain, Says, plain
from .scopes import Scope, selector_of

SAYS = Says(scopes=("all", "positions"))
_KEYS = ("activations", "layer_indices", "scale", "norm_match", "position_indices")
_TENSOR = ("data", "dtype", "original_dtype", "shape", "compression")
_STORED = {"float32": "float32", "float64": "float64", "float16": "float16", "int16": "bfloat16"}  # which travels as int16


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write the part of a request that carries the edits."""
    listed = [_entry(edit) for edit in plain(edits, "vllm-lens", SAYS, bos)]
    return files.write_json(path, {"vllm_xargs": {"apply_steering_vectors": json.dumps(listed)}})


def import_from(path: Path) -> list[Edit]:
    """An Add for each entry of a request; BundleError where it carries hooks."""
    found = files.read_json(path)
    found = files.mapping(found.get("vllm_xargs", found), "vllm_xargs")
    if "apply_hooks" in found:
        raise BundleError(f"{path} has apply_hooks, which are pickled code; they are not read. Edits: apply_steering_vectors")
    listed = found.get("apply_steering_vectors")
    listed = files.parse_json(listed, "apply_steering_vectors") if isinstance(listed, str) else listed
    return [edit for entry in files.items(listed, "apply_steering_vectors") for edit in _edits(entry)]


def _entry(edit: Plain) -> dict[str, Any]:
    layers, rows = files.by_layer(edit.rows, "the edit")
    entry = {"layer_indices": layers, "scale": edit.factor, "norm_match": False}
    if edit.scope.word == "positions":  # [layer position d]
        entry["position_indices"] = list(dict.fromkeys(edit.scope.args))  # one listed twice would be added to twice
        rows = rows[:, None].expand(-1, len(entry["position_indices"]), -1)
    tensor = {"data": files.packed(rows), "dtype": "float32", "original_dtype": "torch.float32", "shape": list(rows.shape)}
    return entry | {"activations": tensor}


def _edits(entry: Any) -> list[Edit]:
    entry = files.mapping(entry, "a steering vector", _KEYS)
    layers = [files.layer(at, "layer_indices") for at in files.items(entry.get("layer_indices"), "layer_indices")]
    rows = _tensor(entry.get("activations"))
    scale = files.number(entry.get("scale", 1.0), "scale")
    if files.flag(entry.get("norm_match", False), "norm_match"):
        raise BundleError("a steering vector has norm_match, which makes it as long as each row that it is added to; no edit does that")
    places = entry.get("position_indices")
    if rows.ndim == 2 and len(rows) == len(layers) and places is None:
        return [Add(rows, scale, layers, where=selector_of(Scope("all")))]
    if rows.ndim != 3 or len(rows) != len(layers):
        raise BundleError(f"the activations have shape {list(rows.shape)}; {len(layers)} layers need [layer d] or [layer position d], and "
                          f"only the latter has position_indices")
    places = list(range(rows.shape[1])) if places is None else [_place(one) for one in files.items(places, "position_indices")]
    if len(set(places)) != rows.shape[1] or len(places) != rows.shape[1]:
        raise BundleError(f"there are {rows.shape[1]} rows by position and position_indices {str(places)[:60]}")
    alike = bool((rows == rows[:, :1]).all())
    groups = [tuple(places)] if alike else [(place,) for place in places]
    return [Add(rows[:, i], scale, layers, where=selector_of(Scope("positions", group))) for i, group in enumerate(groups)]


def _place(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
        raise BundleError(f"position_indices has {str(value)[:40]!r}; positions are counted from 0")
    return value


def _tensor(value: Any) -> torch.Tensor:
    value = files.mapping(value, "activations", _TENSOR)
    stored, original = value.get("dtype"), value.get("original_dtype", "")
    if stored not in list(_STORED) or (stored == "int16") != (original == "torch.bfloat16"):
        raise BundleError(f"the activations have the type {str(stored)[:40]!r}; known are {', '.join(_STORED)}")
    if value.get("compression") is None:
        return files.unpacked(value.get("data"), value.get("shape"), _STORED[stored], "activations")
    if value["compression"] != "zstd":
        raise BundleError(f"the activations are compressed by {str(value['compression'])[:40]!r}; zstd is known")
    shape = files.checked_shape(value.get("shape"), "activations")
    size = math.prod(shape) * torch.empty(0, dtype=getattr(torch, _STORED[stored])).element_size()
    return files.of_bytes(_decompressed(value.get("data"), size), shape, _STORED[stored], "activations")


def _decompressed(data: Any, size: int) -> bytes:
    """Bytes of a zstd frame, and never more than `size` and one."""
    try:
        import zstandard
    except ImportError:
        raise MiaError("compressed activations need the zstandard package: pip install 'mia_lab[export]'") from None
    try:
        raw = base64.b64decode(data if isinstance(data, str) else "", validate=True)
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            return reader.read(size + 1)
    except (zstandard.ZstdError, binascii.Error, ValueError) as error:
        raise BundleError(f"the activations cannot be decompressed: {error}") from None
