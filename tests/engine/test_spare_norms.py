"""Norms that carry no tap run our kernel too, where it is launched early: the model says what it said before."""
from __future__ import annotations

import pytest
import torch

from mia_lab.engine import taps
from mia_lab.kernels import launch

pytestmark = pytest.mark.full
IDS = [[1, *range(20, 40)], [1, 7, 9]]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_model_stays_the_same(family: str, open_tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "EARLY", False)
    logits = open_tiny(family, enforce_eager=True, max_num_seqs=6).run_with_cache(IDS)[0].get()
    monkeypatch.setattr(taps, "_SWAPPED", {})
    monkeypatch.setattr(launch, "EARLY", True)
    early = open_tiny(family, enforce_eager=True, max_num_seqs=7)
    assert any(isinstance(side, taps.Early) for key in taps._SWAPPED for side in key[2])
    found = early.run_with_cache(IDS)[0].get()
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5, equal_nan=True)
