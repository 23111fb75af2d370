"""The support card: every verdict comes from a run, and the README shows what it prints."""
from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from mia_lab.bench.card import card

pytestmark = pytest.mark.full
README = Path(__file__).parents[1] / "README.md"


def test_a_card_of_a_tiny_model_and_the_one_in_the_readme(models: Path) -> None:
    lines = card(str(tiny.build("gemma3", models)), tokenizer=str(tiny.tokenizer(models)), dtype="float32", max_model_len=512,
                 enforce_eager=True)
    assert {line.verdict for line in lines} == {"ok", "absent"}, [line for line in lines if line.verdict not in ("ok", "absent")]
    assert [line.name for line in lines if line.verdict == "absent"] == ["router"]
    if README.exists():  # not beside a copy of the tests alone
        for line in lines:
            assert f"| {line.what} | {line.name} | {line.verdict} |" in README.read_text()


def test_a_model_that_is_refused_has_a_card_that_says_so(models: Path) -> None:
    (line,) = card(str(tiny.build("gemma3n", models)), tokenizer=str(tiny.tokenizer(models)), dtype="float32", enforce_eager=True)
    assert line.verdict == "refused"
    assert "return no [tokens, d_model] tensor" in line.seen
