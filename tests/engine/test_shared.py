"""Values between processes: whole, in their type, and leaving no file behind."""
from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mia_lab.engine import shared


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared, "_FOLDER", tmp_path)
    monkeypatch.setattr(shared, "_SMALL", 100)
    return tmp_path


@pytest.mark.parametrize("n", [0, 1, 12, 13, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_put_is_taken(folder: Path, dtype: torch.dtype, n: int) -> None:
    values = torch.arange(2 * n).to(dtype).view(-1, 2)[:, :1]  # part of wider rows
    given = shared.put(values)
    assert isinstance(given, str) == (values.numel() * dtype.itemsize > 100) == bool(list(folder.iterdir()))
    assert torch.equal(shared.take(given, dtype), values.flatten())
    assert not list(folder.iterdir())


def test_only_this_user_can_read_the_file(folder: Path) -> None:
    assert os.stat(shared.put(torch.zeros(1000))).st_mode & 0o777 == 0o600


def test_a_full_folder_sends_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    values = torch.randn(1000)
    given = shared.put(values)
    assert isinstance(given, bytes) and not list(folder.iterdir())
    assert torch.equal(shared.take(given, torch.float32), values)
