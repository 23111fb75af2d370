"""A bundle on disk: `NAME.steer/` with `steer.json` and `vector.safetensors`, or the same in a zip. Equal contents give equal bytes.

A bundle that was signed has `signature.json` beside them.
"""
from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors

from ..errors import BundleError

FORMAT, VERSION = "mia_lab steer", 1
ABOUT, TENSORS, SIGNATURE = "steer.json", "vector.safetensors", "signature.json"
LIMITS = {ABOUT: 8 << 20, TENSORS: 2 << 30}  # bytes
MAX_SIGNATURE = 64 << 10
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a bundle that a server takes, before .steer
_EXPANSION = 100  # of vectors, which hardly pack at all
_ELSE = ". Is it another tool's? mia.load(path, format=...), or mia-lab convert --from FORMAT"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # a zip's entries have dates, and equal contents are to give equal bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """What a bundle holds: `steer.json` as it was read, and its tensors."""

    about: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def write(path: str | Path, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a bundle; a path that ends in .zip gives a zip. What was there is replaced once the new one is whole."""
    path = Path(path)
    data = write_tensors({name: tensors[name].contiguous() for name in sorted(tensors)})
    said = {"format": FORMAT, "version": VERSION, **about, "tensors_sha256": hashlib.sha256(data).hexdigest()}
    return put(path, {ABOUT: as_text(said), TENSORS: data})


def as_text(about: Mapping[str, Any]) -> bytes:
    """The bytes of a `steer.json`."""
    return (json.dumps(about, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def name_of(path: str | Path) -> str:
    """The name by which a server would know the bundle at a path; BundleError for one that no server takes."""
    name = Path(path).name.removesuffix(".zip").removesuffix(".steer")
    if not NAME.fullmatch(name):
        raise BundleError(f"{path} has no name that a server takes; rename it to NAME.steer, NAME being up to 64 letters, digits, dots, "
                          f"dashes and underscores that begin with a letter or digit")
    return name


def put(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a bundle's files as they are; what was there is replaced once the new ones are whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path.resolve()  # a link stays one
    scratch = place.with_name(f".{place.name}.{os.getpid()}")
    if path.suffix == ".zip":
        scratch.write_bytes(zipped(files))
        scratch.replace(place)
        return path
    if path.exists() and not (path / ABOUT).exists():
        raise BundleError(f"{path} is there and is no bundle; choose another name, such as {path.with_suffix('.steer').name}")
    strange = sorted({file.name for file in place.iterdir()} - {ABOUT, TENSORS, SIGNATURE}) if path.exists() else []
    if strange:
        raise BundleError(f"{path} holds {strange[0]!r} beside its bundle, which would be lost; move it away, or choose another name")
    old = place.with_name(f"{scratch.name}.old")
    try:
        scratch.mkdir()
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        if place.exists():
            place.replace(old)
        scratch.replace(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return path


def zipped(files: Mapping[str, bytes]) -> bytes:
    """The bytes of a zip of a bundle's files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), content)
    return buffer.getvalue()


def as_zip(path: str | Path) -> bytes:
    """The bytes of a bundle's zip, whichever form it has."""
    return zipped(get(path))


def get(path: str | Path, strict: bool = False) -> dict[str, bytes]:
    """A bundle's files by name. Raises BundleError, before anything large is read, for what is none or is too large.

    strict: also where a folder holds any other file, as a zip never may.
    """
    path = Path(path)
    if not path.exists():
        raise BundleError(f"there is no {path}")
    if not path.is_file():
        return _read_folder(path, strict)
    try:
        with path.open("rb") as file:
            return unzip(file, path)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}") from None


def read(path: str | Path) -> Contents:
    """Read a bundle. Raises BundleError, before anything large is read, for what is none, is too large or was changed."""
    return parse(get(path), path)


def parse(files: Mapping[str, bytes], path: str | Path) -> Contents:
    """What a bundle's files hold; BundleError where they are not of one another, or no bundle."""
    text, data = files[ABOUT], files[TENSORS]
    try:
        about = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: {ABOUT} is no JSON: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise BundleError(f"{path}: {ABOUT} does not say format {FORMAT!r}; other tools' files: mia.load(path, format=...)")
    if about.get("version") != VERSION:
        raise BundleError(f"{path} has version {about.get('version')!r}; this mia_lab reads version {VERSION}")
    if about.get("tensors_sha256") != hashlib.sha256(data).hexdigest():
        raise BundleError(f"{path}: {TENSORS} is not the file that {ABOUT} was written with")
    try:
        tensors = read_tensors(data)
    except (SafetensorError, KeyError) as error:  # a type that torch lacks is a KeyError
        raise BundleError(f"{path}: {TENSORS}: {error}") from None
    other = sorted(name for name, held in tensors.items() if held.dtype != torch.float32)
    if other:
        raise BundleError(f"{path}: {TENSORS} holds {other[0]!r} as {tensors[other[0]].dtype}; a bundle's tensors are float32")
    return Contents(about, tensors)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _read_folder(path: Path, strict: bool) -> dict[str, bytes]:
    found = {}
    for name, limit in LIMITS.items():
        if not (path / name).is_file():
            raise BundleError(f"{path} has no {name}; a bundle is a folder with {' and '.join(LIMITS)}, or a zip of these")
        found[name] = _read_file(path, name, limit)
    if (path / SIGNATURE).is_file():
        found[SIGNATURE] = _read_file(path, SIGNATURE, MAX_SIGNATURE)
    strange = sorted({file.name for file in path.iterdir()} - set(found)) if strict else []
    if strange:
        raise BundleError(f"{path} holds {strange[0]!r} beside its bundle, which no signature covers")
    return found


def _read_file(path: Path, name: str, limit: int) -> bytes:
    _within(path, name, (path / name).stat().st_size, limit)
    with (path / name).open("rb") as file:  # which may grow meanwhile
        found = file.read(limit + 1)
    _within(path, name, len(found), limit)
    return found


def unzip(file: BinaryIO, path: str | Path) -> dict[str, bytes]:
    """The files in a bundle's zip, which `path` names in errors. Raises BundleError, before anything large is read, as `get`."""
    limits = LIMITS | {SIGNATURE: MAX_SIGNATURE}
    size = _few_entries(file, path)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if sorted(names) not in (sorted(LIMITS), sorted(limits)):
                raise BundleError(f"{path} holds {names[:4]}; a bundle's zip holds {' and '.join(LIMITS)} and nothing else")
            found = {}
            for name in sorted(names, key=list(limits).index):
                info = archive.getinfo(name)
                _within(path, name, info.file_size, limits[name])
                if info.file_size > _EXPANSION * min(info.compress_size, size) + (1 << 20):
                    raise BundleError(f"{path}: {name} would grow {_EXPANSION} times and more when it is unpacked")
                with archive.open(info) as packed:  # a header may lie about the size
                    found[name] = packed.read(limits[name] + 1)
                _within(path, name, len(found[name]), limits[name])
            return found
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError, zlib.error) as error:
        raise BundleError(f"{path} cannot be read as a zip: {error}{_ELSE}") from None


def _few_entries(file: BinaryIO, path: str | Path) -> int:
    """The size of a file that ends as a small zip does; BundleError for others, whose listing could be of any length."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 42))
    end = file.read(42)
    plain = end[-22:-18] == b"PK\5\6" and end[-2:] == b"\0\0" and end[:4] != b"PK\6\7"
    if not plain or int.from_bytes(end[-12:-10], "little") > 8 or int.from_bytes(end[-10:-6], "little") > MAX_SIGNATURE:
        raise BundleError(f"{path} cannot be read as a zip of a bundle{_ELSE}")
    return size


def _within(path: str | Path, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise BundleError(f"{path}: {name} has {size} bytes; {limit} are the most")
