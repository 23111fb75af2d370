"""Values between a server and its notebook clients: JSON, and the bytes that it names behind it. Nothing in them can be executed.

A frame is the length of the JSON (8 bytes, little-endian), the JSON `{"value": ..., "blobs": [sizes]}`, and the blobs. In the value,
`{"blob": i}` stands for blob i.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LENGTH = 8
_BLOB = "blob"


def pack(value: Any) -> bytes:
    """The frame of plain values: None, bools, numbers, texts, bytes, lists or tuples, and dicts with texts as names."""
    blobs: list[bytes] = []
    text = json.dumps({"value": _out(value, blobs), "blobs": list(map(len, blobs))}, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *blobs])


def unpack(data: bytes, most: int = 1 << 28) -> Any:
    """The value of a frame, with lists for tuples. ValueError for what is none, or has a JSON of more than `most` bytes: what is read
    from JSON can take many times its room, blobs take theirs."""
    view = memoryview(data)
    end = _LENGTH + int.from_bytes(view[:_LENGTH], "little")
    if len(view) < _LENGTH or end > len(view):
        raise ValueError("the frame ends before its JSON does")
    if end - _LENGTH > most:
        raise ValueError(f"the frame's JSON has {end - _LENGTH} bytes; {most} are the most")
    try:
        found = json.loads(bytes(view[_LENGTH:end]), parse_constant=_no_constant)
        sizes = found["blobs"]
        if len(found) != 2 or not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("its blobs are not a list of sizes")
        if end + sum(sizes) != len(view):
            raise ValueError(f"its blobs add up to {sum(sizes)} bytes, and {len(view) - end} follow")
        blobs = []
        for size in sizes:
            blobs.append(bytes(view[end : end + size]))
            end += size
        return _in(found["value"], blobs)
    except (KeyError, TypeError, IndexError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"the frame is malformed: {type(error).__name__}") from None


def _out(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, bytes):
        blobs.append(value)
        return {_BLOB: len(blobs) - 1}
    if isinstance(value, Mapping):
        if _BLOB in value or not all(isinstance(name, str) for name in value):
            raise ValueError(f"a frame's names are texts, and not {_BLOB!r}")
        return {name: _out(item, blobs) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_out(item, blobs) for item in value]
    return value


def _in(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_in(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BLOB}:
        if type(value[_BLOB]) is not int or value[_BLOB] < 0:
            raise ValueError("a blob is named by its index")
        return blobs[value[_BLOB]]
    return {name: _in(item, blobs) for name, item in value.items()}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
