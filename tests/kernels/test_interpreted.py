"""The Triton bodies of taps, without a GPU."""
from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="without Triton, or with a GPU on which they run")
def test_the_kernels_do_what_their_references_do() -> None:
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("interpreted"), done.stderr[-3000:]
