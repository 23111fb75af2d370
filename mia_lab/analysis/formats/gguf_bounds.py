"""A GGUF file's own counts, held against its size before its reader believes them: it would fill memory with what is not there."""
from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from ...errors import EditError

MAX_BYTES = 2 << 30
MAX_TENSORS = 1 << 14
MAX_DEPTH = 4
MAX_FIELDS = 1 << 20  # bytes; the reader makes an object of each value
_STRING, _ARRAY = 8, 9
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def refuse_bombs(path: Path) -> None:
    """EditError where a count, a length or the shapes in the file are more than it has bytes, or its fields are too large."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise EditError(f"{path} has {size} bytes; {MAX_BYTES} are the most")
        with path.open("rb") as file:
            _walk(file, size)
    except (OSError, struct.error, ValueError) as error:
        raise EditError(f"{path} cannot be read as GGUF: {error}") from None


def _walk(file: BinaryIO, size: int) -> None:
    magic, _, tensors, fields = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or tensors > MAX_TENSORS or fields > MAX_TENSORS:
        raise ValueError(f"it begins with {magic!r} and names {tensors} tensors and {fields} fields")
    for _ in range(fields):
        _skip_string(file, size)
        _skip_value(file, size, _number(file, "<I"), 0)
        if file.tell() > MAX_FIELDS:
            raise ValueError(f"its fields take more than {MAX_FIELDS} bytes")
    held = 0
    for _ in range(tensors):
        _skip_string(file, size)
        axes = _number(file, "<I")
        shape = [_number(file, "<Q") for _ in range(min(axes, 5))]
        held += math.prod(shape)
        if axes > 4 or held > size:
            raise ValueError(f"it names a tensor of shape {shape}; with those before it, that is more than its {size} bytes hold")
        file.seek(12, 1)


def _skip_value(file: BinaryIO, size: int, kind: int, depth: int) -> None:
    if kind == _STRING:
        _skip_string(file, size)
    elif kind == _ARRAY and depth < MAX_DEPTH:
        inner, count = struct.unpack("<IQ", file.read(12))
        if count > min(size - file.tell(), MAX_FIELDS):
            raise ValueError(f"it names {count} values, more than its {size} bytes hold")
        for _ in range(count if inner in (_STRING, _ARRAY) else 0):
            _skip_value(file, size, inner, depth + 1)
        file.seek(count * _WIDTHS.get(inner, 0), 1)
    else:
        file.seek(_WIDTHS[kind] if kind in _WIDTHS else _refuse(kind), 1)


def _skip_string(file: BinaryIO, size: int) -> None:
    length = _number(file, "<Q")
    if length > size - file.tell():
        raise ValueError(f"it names a text of {length} bytes, more than it has")
    file.seek(length, 1)


def _number(file: BinaryIO, form: str) -> int:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _refuse(kind: int) -> int:
    raise ValueError(f"it has a field of type {kind}")
