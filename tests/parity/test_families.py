"""Every point, prompt and decode, equals Hugging Face in float32, with each request edited differently.

Architectures that are not in these tests, and why (vLLM 0.32 on a CPU; transformers 5):

refused by mia_lab, see `REFUSED`
    gemma3n: several streams side by side, mixed by learned predictions, so a block returns no one stream.

not run by this vLLM's CPU build, whatever is tapped
    jamba, mamba: the CPU build lacks `selective_scan_fwd`, Mamba 1's kernel.
    qwen3_next: "CPU GDN attention requires BF16", and parity is checked in float32.
    deepseek_v2, deepseek_v3: "Head dimension is not supported by MLA" for any size but DeepSeek's own 576.
    zamba2: an index error inside Mamba 2's chunked prefill.
    gpt_neox: the CPU attention kernel crashes, or returns other values for the same row; the start-up proof refuses the latter.

run by this vLLM, but not as Hugging Face computes it, with no tap in place either
    bloom: exact GELU in place of Hugging Face's approximation (1e-3 of mlp_out).
    falcon with ALiBi, lfm2: log-probabilities differ by 0.1 and more.

no longer in vLLM 0.32
    persimmon, mpt, baichuan, internlm (1), bamba, plamo2, arctic, minimax.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny

from mia_lab.errors import UnsupportedError
from mia_lab.points import KINDS
from parity import scenario

pytestmark = pytest.mark.full

ROW_ERROR, LOGPROB_ERROR = 1e-5, 1e-4
# Two kinds of attention layer need blocks each, so memory gets tight only with more of them.
BLOCKS = {"gemma3": 18} | dict.fromkeys(("gemma2", "gptoss", "olmo3", "cohere2", "exaone4"), 18)
REFUSED = {"gemma3n": r"the blocks of Gemma3nForCausalLM return no \[tokens, d_model\] tensor"}


def check(family: str, points: Any, open_tiny: Callable[..., Any], models: Path, **options: Any) -> Any:
    """Run the scenario on one family and compare it with Hugging Face; return the session."""
    options |= {"num_gpu_blocks_override": BLOCKS[family]} if family in BLOCKS else {}
    session = open_tiny(family, points=points, **scenario.TIGHT | options)
    reference = tiny.load(tiny.build(family, models)).double()
    outcomes = scenario.run(session, scenario.requests(session))
    row, logprob = scenario.compare(outcomes, reference, session.tapped)
    print(f"{family}: worst row error {row:.2e}, worst log-probability difference {logprob:.2e}, "
          f"{scenario.preemptions(session)} preemptions")
    assert row <= ROW_ERROR
    assert logprob <= LOGPROB_ERROR
    return session


@pytest.mark.parametrize("family", families.FAMILIES)
def test_points_and_edits_equal_hugging_face(family: str, open_tiny: Callable[..., Any], models: Path) -> None:
    session = check(family, scenario.all_kinds(("resid_mid",) if family == "cohere" else ()), open_tiny, models)
    assert scenario.preemptions(session) > 0, "memory was not tight enough to force a preemption"


@pytest.mark.parametrize("family", families.WIDE)
def test_more_families_equal_hugging_face(family: str, open_tiny: Callable[..., Any], models: Path) -> None:
    """Eagerly, and at every point that the family has: the probe must find these, no more and no fewer."""
    layers = range(tiny.config(family).num_hidden_layers)
    lacking = families.LACKS.get(family, {})
    points = [(kind, layer) for kind in KINDS for layer in layers if layer not in lacking.get(kind, ())]
    session = check(family, points, open_tiny, models, enforce_eager=True)
    assert sorted(map(tuple, session._engine.facts["available"])) == sorted(points)


@pytest.mark.parametrize("family", REFUSED)
def test_others_are_refused_with_the_reason(family: str, open_tiny: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[family]):
        open_tiny(family, enforce_eager=True, **scenario.TIGHT)


def test_a_scaled_branch_says_why_it_is_absent(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("granite", enforce_eager=True, points=("resid_mid", "resid_post"), **scenario.TIGHT)
    table = {row["point"]: row["tapped"] for row in session.points().data}
    assert table["attn_out"] == "absent: the block adds 0.4 times a module's output, so no module returns what is added"
    assert table["resid_mid"] == "layers 0 to 2"


def test_a_hybrid_says_which_layers_lack_attention(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("nemotron_h", enforce_eager=True, **scenario.TIGHT)
    table = {row["point"]: row["tapped"] for row in session.points().data}
    assert table["attn_out"] == "not tapped; absent at 0, 2: this block has no attention"


def test_edits_move_what_the_clean_twin_gives(open_tiny: Callable[..., Any]) -> None:
    """Guards the scenario itself: were its edits too small to see, the comparison above would prove nothing."""
    session = open_tiny("llama", points=scenario.all_kinds(), **scenario.TIGHT)
    batch = scenario.requests(session)
    steered, clean = scenario.run(session, batch)[:2]
    top = session.tapped[-1]
    gap = (steered.rows[top][1:140] - clean.rows[top][1:140]).norm(dim=-1) / clean.rows[top][1:140].norm(dim=-1)
    assert gap.min() > 0.05
