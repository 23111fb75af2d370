"""Every point, prompt and decode, equals Hugging Face in float32, with each request edited differently."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from parity import scenario

pytestmark = pytest.mark.full

ROW_ERROR, LOGPROB_ERROR = 1e-5, 1e-4
# Two kinds of attention layer need blocks each, so memory gets tight only with more of them.
BLOCKS = {"gemma3": 18}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_points_and_edits_equal_hugging_face(family: str, open_tiny: Callable[..., Any], models: Path) -> None:
    absent = ("resid_mid",) if family == "cohere" else ()
    options = scenario.TIGHT | ({"num_gpu_blocks_override": BLOCKS[family]} if family in BLOCKS else {})
    session = open_tiny(family, points=scenario.all_kinds(absent), **options)
    reference = tiny.load(tiny.build(family, models)).double()
    outcomes = scenario.run(session, scenario.requests(session))
    row, logprob = scenario.compare(outcomes, reference, session.tapped)
    print(f"{family}: worst row error {row:.2e}, worst log-probability difference {logprob:.2e}, "
          f"{scenario.preemptions(session)} preemptions")
    assert row <= ROW_ERROR
    assert logprob <= LOGPROB_ERROR
    assert scenario.preemptions(session) > 0, "memory was not tight enough to force a preemption"


def test_edits_move_what_the_clean_twin_gives(open_tiny: Callable[..., Any]) -> None:
    """Guards the scenario itself: were its edits too small to see, the comparison above would prove nothing."""
    session = open_tiny("llama", points=scenario.all_kinds(), **scenario.TIGHT)
    batch = scenario.requests(session)
    steered, clean = scenario.run(session, batch)[:2]
    top = session.tapped[-1]
    gap = (steered.rows[top][1:140] - clean.rows[top][1:140]).norm(dim=-1) / clean.rows[top][1:140].norm(dim=-1)
    assert gap.min() > 0.05
