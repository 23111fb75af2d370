"""What tests of kernels share."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from mia_lab.kernels import tap


@pytest.fixture
def noting() -> Iterator[Callable[[Sequence[torch.Tensor]], None]]:
    """Note sites, by their index tables, as unedited until the test ends."""
    noted: list[int] = []

    def note(index: Sequence[torch.Tensor]) -> None:
        noted.extend(table.data_ptr() for table in index)
        tap.unedited.update(noted)

    yield note
    tap.unedited.difference_update(noted)
