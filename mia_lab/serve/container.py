"""A safetensors file of values that are bytes already: the library takes tensors, at 20 us each, and a capture has hundreds of small ones.

The format: the header's length in 8 bytes, the header in JSON, then the tensors one behind the other.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_TYPES = {"int64": ("I64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor: the name of its type, its shape, and its little-endian bytes."""

    dtype: str
    shape: Sequence[int]
    data: bytes


def pack(tensors: Iterable[tuple[str, Values]], metadata: Mapping[str, str]) -> bytes:
    """Return the file. The widest types come first, so that each tensor begins at a multiple of its type's size."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place, parts = 0, []
    for name, values in sorted(tensors, key=lambda one: -_TYPES[one[1].dtype][1]):
        header[name] = {"dtype": _TYPES[values.dtype][0], "shape": list(values.shape), "data_offsets": [place, place + len(values.data)]}
        place += len(values.data)
        parts.append(values.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])
