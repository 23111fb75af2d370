"""vLLM's compile cache: the graph without taps is never taken for the one with them, cold or warm."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

pytestmark = [pytest.mark.full, pytest.mark.skipif(torch.cuda.is_available(), reason="forces the GPU's pipeline on the CPU build")]


def test_taps_have_their_own_artefact_and_it_reloads(models: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("compiled_run.py")), str(tiny.build("llama", models)),
               str(tiny.tokenizer(models))]
    env = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_LOGGING_LEVEL": "INFO"}

    def run(kind: str) -> str:
        done = subprocess.run([*command, kind], env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    assert "saved AOT compiled function" in run("bare")
    for expected in ("saved AOT compiled function", "Directly load AOT compilation"):
        log = run("tapped")
        assert expected in log
        row, logprob = map(float, re.search(r"errors (\S+) (\S+)", log).groups())
        assert row <= 1e-5
        assert logprob <= 1e-4
