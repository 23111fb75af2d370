"""A tap costs its own launch and nothing else: under vLLM's compile pipeline the generated code holds no clone or copy for it."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from families import LAYERS

pytestmark = [pytest.mark.full, pytest.mark.skipif(torch.cuda.is_available(), reason="forces the GPU's pipeline on the CPU build")]


def test_no_kernel_is_added_for_a_tap(models: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("compiled_run.py")), str(tiny.build("llama", models)),
               str(tiny.tokenizer(models))]
    env = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_DISABLE_COMPILE_CACHE": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

    def counts(kind: str) -> tuple[int, int, int]:
        done = subprocess.run([*command, kind], env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return tuple(map(int, re.search(r"kernels (\d+) taps (\d+) copies (\d+)", done.stdout).groups()))

    bare, stream, every = counts("bare-kernels"), counts("stream-kernels"), counts("kernels")
    print(f"(kernels, taps, copies): bare {bare}, stream and MLP tapped {stream}, every point tapped {every}")
    assert bare[1] == 0 and bare[2] == 0
    assert stream[1] == 3 * LAYERS + 1  # in each block two norms in which taps ride, and the MLP's; one before the first block
    assert every[1] == 4 * LAYERS + 3  # and one for q, k and v; embed and final_norm
    assert stream[2] == every[2] == 0
    # Norms ride in taps, so that Inductor has fewer to write. Reading q keeps it from rotating q and k in one loop of a block.
    assert stream[0] < bare[0]
    assert every[0] <= stream[0] + 4
