"""Tensors under the sha256 of their safetensors bytes, as vLLM-Hook's registry and the steerability toolkit's `.spipe` keep them."""
from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ...errors import BundleError
from . import files

MAX_BYTES = 512 << 20  # what the registry takes by default
_ID = re.compile(r"sha256:[0-9a-f]{64}")


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[str, bytes]:
    """The id and the bytes of tensors, as float32 under sorted names."""
    data = save({name: tensors[name].detach().cpu().float().contiguous().clone() for name in sorted(tensors)})
    return f"sha256:{hashlib.sha256(data).hexdigest()}", data


def hex_of(artifact: object, what: str) -> str:
    """The 64 digits of an id; BundleError for what is none, which could otherwise name any file."""
    if not isinstance(artifact, str) or not _ID.fullmatch(artifact):
        raise BundleError(f"{what} is {str(artifact)[:80]!r}; an id is 'sha256:' and 64 digits")
    return artifact.removeprefix("sha256:")


def unpack(data: bytes, artifact: str, what: str) -> dict[str, torch.Tensor]:
    """Tensors by name, float32 and finite; BundleError where the bytes are not those of the id."""
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != artifact:
        raise BundleError(f"{what} is not the file of its id {artifact[:23]}...")
    try:
        found = load(data)
    except (SafetensorError, KeyError) as error:  # a type that torch lacks is a KeyError
        raise BundleError(f"{what} cannot be read: {error}") from None
    if not all(held.is_floating_point() for held in found.values()):
        raise BundleError(f"{what} holds values that are no real numbers")
    return {name: files.finite(held.float(), f"{what}: {name[:40]}") for name, held in found.items()}


def read(path: Path, artifact: str) -> dict[str, torch.Tensor]:
    """The tensors of a file."""
    return unpack(files.read_bytes(path, MAX_BYTES), artifact, str(path))
