"""Values between two processes of one machine: small ones as bytes, large ones through a file in memory."""
from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

_FOLDER = Path("/dev/shm")
_SMALL = 1 << 20


def put(values: torch.Tensor) -> bytes | str:
    """Return a tensor's bytes, or, where they are many, the path of a file that only this user can read."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    if len(flat) <= _SMALL or not _FOLDER.is_dir():
        return flat.numpy().tobytes()
    handle, name = tempfile.mkstemp(prefix="mia_lab-", dir=_FOLDER)
    try:
        os.posix_fallocate(handle, 0, len(flat))  # or a full folder would end the process at the copy
    except OSError:
        os.unlink(name)
        return flat.numpy().tobytes()
    finally:
        os.close(handle)
    torch.from_file(name, shared=True, size=len(flat), dtype=torch.uint8).copy_(flat)
    return name


def take(given: bytes | str, dtype: torch.dtype) -> torch.Tensor:
    """Return what was `put`, flat; a file is mapped, not read, and has no name any more."""
    if isinstance(given, str):
        size = os.stat(given).st_size // dtype.itemsize
        values = torch.from_file(given, shared=True, size=size, dtype=dtype)
        os.unlink(given)
        return values
    return torch.frombuffer(bytearray(given), dtype=dtype) if given else torch.empty(0, dtype=dtype)
