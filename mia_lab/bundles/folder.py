"""A bundle on disk: `NAME.steer/` with `steer.json` and `vector.safetensors`, or the same two in a zip. Equal contents give equal bytes."""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors

from ..errors import BundleError

FORMAT, VERSION = "mia_lab steer", 1
ABOUT, TENSORS = "steer.json", "vector.safetensors"
LIMITS = {ABOUT: 8 << 20, TENSORS: 2 << 30}  # bytes
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
    files = {ABOUT: (json.dumps(said, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode(), TENSORS: data}
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(scratch, "w", zipfile.ZIP_STORED) as archive:
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), content)
        scratch.replace(path)
        return path
    if path.exists() and not (path / ABOUT).exists():
        raise BundleError(f"{path} is there and is no bundle; choose another name, such as {path.with_suffix('.steer').name}")
    scratch.mkdir()
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.exists():
        path.replace(old)
    scratch.replace(path)
    shutil.rmtree(old, ignore_errors=True)
    return path


def read(path: str | Path) -> Contents:
    """Read a bundle. Raises BundleError, before anything large is read, for what is none, is too large or was changed."""
    path = Path(path)
    text, data = (_read_zip if path.is_file() else _read_folder)(path)
    try:
        about = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: {ABOUT} is no JSON: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise BundleError(f"{path}: {ABOUT} does not say format {FORMAT!r}; other tools' files: mia.import_vector(path)")
    if about.get("version") != VERSION:
        raise BundleError(f"{path} has version {about.get('version')!r}; this mia_lab reads version {VERSION}")
    if about.get("tensors_sha256") != hashlib.sha256(data).hexdigest():
        raise BundleError(f"{path}: {TENSORS} is not the file that {ABOUT} was written with")
    try:
        return Contents(about, read_tensors(data))
    except SafetensorError as error:
        raise BundleError(f"{path}: {TENSORS}: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _read_folder(path: Path) -> tuple[bytes, bytes]:
    found = []
    for name, limit in LIMITS.items():
        file = path / name
        if not file.is_file():
            raise BundleError(f"{path} has no {name}; a bundle is a folder with {' and '.join(LIMITS)}, or a zip of these")
        _within(path, name, file.stat().st_size, limit)
        found.append(file.read_bytes())
    return found[0], found[1]


def _read_zip(path: Path) -> tuple[bytes, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            if sorted(archive.namelist()) != sorted(LIMITS):
                raise BundleError(f"{path} holds {archive.namelist()[:4]}; a bundle's zip holds {' and '.join(LIMITS)} and nothing else")
            found = []
            for name, limit in LIMITS.items():
                _within(path, name, archive.getinfo(name).file_size, limit)
                with archive.open(name) as file:  # a header may lie about the size
                    found.append(file.read(limit + 1))
                _within(path, name, len(found[-1]), limit)
            return found[0], found[1]
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise BundleError(f"{path} cannot be read as a zip: {error}") from None


def _within(path: Path, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise BundleError(f"{path}: {name} has {size} bytes; {limit} are the most")
