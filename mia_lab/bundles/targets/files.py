"""Files of other tools, read within bounds and written whole: JSON, YAML, tensors as lists or base64, and what may name a file."""
from __future__ import annotations

import base64
import binascii
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import BundleError, MiaError

MAX_TEXT = 32 << 20  # bytes of a JSON file
MAX_YAML = 4 << 20
MAX_NODES = 4096  # of a YAML file, whose reader is slow
MAX_DEPTH = 32
MAX_WIDTH = 1 << 18  # values of one direction
MAX_LAYER = 1 << 12
MAX_VALUES = 1 << 28  # of one tensor
_TYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def write(path: Path, content: bytes) -> Path:
    """Write a file; one that was there is replaced once the new one is whole."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write JSON, the same bytes for the same contents."""
    return write(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_pair(path: Path, tensors: Any, value: Any) -> Path:
    """Write NAME.json and, by `torch.save`, NAME.pt beside it; return the first. BundleError for a .pt there that has no such JSON."""
    request, vectors = path.with_suffix(".json"), path.with_suffix(".pt")
    if vectors.exists() and not request.exists():
        raise BundleError(f"{vectors} is there, and was not written with {request.name}; choose another name")
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    write(vectors, buffer.getvalue())
    return write_json(request, value)


def read_bytes(path: Path, limit: int) -> bytes:
    """A file's bytes; BundleError, before it is read, where it is too large or no file."""
    if not path.is_file():
        raise BundleError(f"there is no file {path}")
    if path.stat().st_size > limit:
        raise BundleError(f"{path} has {path.stat().st_size} bytes; {limit} are the most for this format")
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, as `parse_json`."""
    return mapping(parse_json(read_bytes(path, MAX_TEXT), path), str(path))


def parse_json(text: bytes | str, source: object) -> Any:
    """The value of a JSON text; BundleError for NaN, a key given twice, or too deep a nesting."""
    try:
        found = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source} is no JSON: {str(error)[:200]}") from None
    bounded(found, source)
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """The YAML mapping in a file, its values as text; BundleError for aliases and tags, which could stand for more than it holds."""
    text = read_bytes(path, MAX_YAML)
    library = yaml()

    class Loader(library.BaseLoader):
        """No aliases: one short file could otherwise unfold to any size. No numbers or dates: some take long to read."""

        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event, self.nodes = self.peek_event(), self.nodes + 1
            if isinstance(event, library.events.AliasEvent) or event.tag is not None or self.nodes > MAX_NODES:
                raise library.YAMLError(f"it has an alias, a tag or more than {MAX_NODES} values")
            return super().compose_node(parent, index)

    try:
        found = library.load(text, Loader)
    except (library.YAMLError, RecursionError, ValueError) as error:
        raise BundleError(f"{path} is no plain YAML: {str(error)[:200]}") from None
    bounded(found, path)
    return mapping(found, str(path))


def yaml() -> Any:
    """The YAML library; MiaError where it is not installed."""
    try:
        import yaml as library
    except ImportError:
        raise MiaError("YAML needs the pyyaml package: pip install 'mia_lab[export]'") from None
    return library


def bounded(value: Any, source: object, depth: int = 0) -> None:
    """BundleError where a parsed value nests too deep."""
    if depth > MAX_DEPTH:
        raise BundleError(f"{source} nests deeper than {MAX_DEPTH}")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        if isinstance(item, (dict, list)):
            bounded(item, source, depth + 1)


def mapping(value: Any, what: str, known: Iterable[str] | None = None) -> dict[str, Any]:
    """A JSON object, with no key but the `known` ones."""
    if not isinstance(value, dict):
        raise BundleError(f"{what} is a {type(value).__name__}; an object was expected")
    strange = [] if known is None else sorted(set(map(str, value)) - set(known))
    if strange:
        raise BundleError(f"{what} has {strange[0]!r}, which cannot be read here; it may have {', '.join(sorted(known))}")
    return value


def items(value: Any, what: str) -> list[Any]:
    """A JSON list that is not empty."""
    if not isinstance(value, list) or not value:
        raise BundleError(f"{what} is {str(value)[:60]!r}; a list with something in it was expected")
    return value


def number(value: Any, what: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or abs(value) > 3e38:
        raise BundleError(f"{what} is {str(value)[:60]!r}; a finite number was expected")
    return float(value)


def flag(value: Any, what: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise BundleError(f"{what} is {str(value)[:60]!r}; true or false was expected")
    return value


def layer(value: Any, what: str = "a layer") -> int:
    """A 0-based block, given as an integer or in decimal digits."""
    text = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 6
    if isinstance(value, bool) or not (isinstance(value, int) or text) or not 0 <= int(value) < MAX_LAYER:
        raise BundleError(f"{what} is {str(value)[:60]!r}; blocks are counted from 0 to {MAX_LAYER - 1}")
    return int(value)


def direction(value: Any, what: str) -> torch.Tensor:
    """A list of numbers as `[d]`, float32."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_WIDTH:
        raise BundleError(f"{what} is no list of 1 to {MAX_WIDTH} numbers")
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value):
        raise BundleError(f"{what} holds something that is no number")
    try:
        return finite(torch.tensor(value, dtype=torch.float64).float(), what)
    except (RuntimeError, OverflowError):
        raise BundleError(f"{what} holds a number that float32 does not") from None


def packed(value: torch.Tensor) -> str:
    """A tensor's values as base64, float32, little endian, the last axis fastest."""
    return base64.b64encode(value.detach().float().contiguous().numpy().astype("<f4").tobytes()).decode()


def unpacked(data: Any, shape: Any, dtype: Any, what: str) -> torch.Tensor:
    """Base64 as a float32 tensor of a stated shape; BundleError, before anything is decoded, where the two do not agree."""
    held = checked_shape(shape, what)
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise BundleError(f"{what} has the type {str(dtype)[:40]!r}; known are {', '.join(_TYPES)}")
    size = math.prod(held) * _TYPES[dtype].itemsize
    if not isinstance(data, str) or len(data) != 4 * -(-size // 3):
        raise BundleError(f"{what} says shape {held} of {dtype}, which is {size} bytes; its data are not")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise BundleError(f"{what} is no base64") from None
    return of_bytes(raw, held, dtype, what)


def of_bytes(raw: bytes, shape: Sequence[int], dtype: str, what: str) -> torch.Tensor:
    """Bytes as a float32 tensor; BundleError where they are not as many as the shape says."""
    if len(raw) != math.prod(shape) * _TYPES[dtype].itemsize:
        raise BundleError(f"{what} says shape {list(shape)} of {dtype}, and has {len(raw)} bytes")
    return finite(torch.frombuffer(bytearray(raw), dtype=_TYPES[dtype]).reshape(tuple(shape)).float(), what)


def checked_shape(shape: Any, what: str) -> list[int]:
    """A shape of 1 to 3 axes whose values may be held."""
    whole = isinstance(shape, list) and 0 < len(shape) <= 3 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape)
    if not whole or math.prod(shape) > MAX_VALUES or shape[-1] > MAX_WIDTH:
        raise BundleError(f"{what} has the shape {str(shape)[:60]}; up to 3 axes and {MAX_VALUES} values can be read")
    return shape


def finite(value: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor, where no value of it is NaN or infinite."""
    if not torch.isfinite(value).all():
        raise BundleError(f"{what} holds NaN or infinite values")
    return value


def by_layer(rows: Mapping[int, torch.Tensor], what: str) -> tuple[list[int], torch.Tensor]:
    """Layers in order, and their rows stacked `[layer d]`; BundleError where rows have different widths."""
    if not rows or len({row.shape for row in rows.values()}) != 1:
        raise BundleError(f"{what} holds no direction" if not rows else f"{what} holds directions of different widths")
    layers = sorted(rows)
    return layers, torch.stack([rows[at] for at in layers])


def beside(path: Path, name: Any, what: str) -> Path:
    """A file that another names, in the same folder or below; BundleError where it is elsewhere."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise BundleError(f"{what} is {str(name)[:60]!r}; the name of a file was expected")
    folder = path.parent.resolve()
    found = (folder / name).resolve()
    if Path(name).is_absolute() or not found.is_relative_to(folder):
        raise BundleError(f"{what} is {name!r}, outside the folder of {path.name}; put the file beside it")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found
