"""Patching on the embedded model: the France/Italy grid, against Hugging Face in the cells that matter, its gradient, and its cost."""
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity import reference

import mia_lab as mia
from mia_lab.analysis.patching.grids import PatchGrid
from mia_lab.models import demo_model
from mia_lab.points import Point

pytestmark = pytest.mark.full
CLEAN, CORRUPT = (f"The capital of {country} is the city of" for country in ("France", "Italy"))
METRIC = mia.logit_diff(" Paris", " Rome")
COUNTRY, LAST = 4, 8


@pytest.fixture(scope="module")
def session() -> Iterator[mia.Session]:
    with mia.Session("demo", dtype="float32", max_model_len=256, max_num_seqs=64, enforce_eager=True,
                     points=["resid_post", "attn_out", "mlp_out", "z"]) as session:
        yield session


@pytest.fixture(scope="module")
def grid(session: mia.Session) -> PatchGrid:
    return session.patch(CLEAN, CORRUPT, metric=METRIC)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32, attn_implementation="eager").eval()


def test_the_country_is_carried_to_the_last_token(grid: PatchGrid) -> None:
    """Reference values of the same prompts in Hugging Face, measured apart: see the design's methods, 3.4."""
    assert float(grid.clean) == pytest.approx(5.95, abs=0.03)
    assert float(grid.corrupt) == pytest.approx(-7.62, abs=0.03)
    assert (grid.scores[:9, COUNTRY] - 1).abs().max() < 0.03
    assert float(grid.scores[12, LAST]) == pytest.approx(0.85, abs=0.03)
    assert (grid.scores[16:, LAST] - 1).abs().max() < 0.03
    assert not grid.scores[:, :COUNTRY].any() and grid.ran == 18 * 5
    assert grid.positions[COUNTRY] == "4 ' France'|' Italy'" and "logit ' Paris' - logit ' Rome'" in repr(grid)
    assert grid.top(1)[0]["position"] == grid.positions[COUNTRY]


def test_cells_are_hugging_faces(session: mia.Session, grid: PatchGrid, model: Any) -> None:
    ids = [session.to_tokens(text)[0].tolist() for text in (CLEAN, CORRUPT)]
    answers = [session.tokenizer.encode(text, add_special_tokens=False)[0] for text in (" Paris", " Rome")]
    _, values = reference.run(model, ids[0], [Point("resid_post", layer) for layer in range(18)])
    worst = 0.0
    for layer, t in [(0, 4), (8, 4), (11, 4), (12, 4), (12, 5), (12, 8), (13, 6), (15, 8), (17, 8), (17, 5)]:
        edit = mia.Replace(values[Point("resid_post", layer)][t], [layer], where=mia.positions([t]))
        logits = reference.run(model, ids[1], (), [edit])[0][-1]
        worst = max(worst, abs(float(logits[answers[0]] - logits[answers[1]]) - float(grid.raw[0, layer, t])))
    print(f"worst of ten cells against Hugging Face: {worst:.1e}")
    assert worst < 2e-3  # float32 logits of up to 30 on both sides


def test_the_gradient_agrees_where_it_should(session: mia.Session, grid: PatchGrid, model: Any) -> None:
    estimate = session.attribution_patch(CLEAN, CORRUPT, metric=METRIC, model=model.requires_grad_(False))
    found = estimate.agreement(grid)
    print(f"gradient and grid: {found}, at block 8 and the country {float(estimate.scores[8, COUNTRY]):.2f}")
    assert found["correlation"] == pytest.approx(0.95, abs=0.03)
    assert float(estimate.scores[8, COUNTRY]) == pytest.approx(0.61, abs=0.03)


def test_the_head_that_moves_the_country_is_found_by_its_direct_path(session: mia.Session) -> None:
    heads = session.patch(CLEAN, CORRUPT, "z", METRIC, heads="all")
    assert (heads.top(1)[0]["layer"], heads.top(1)[0]["head"]) == (12, 2)
    direct = session.path_patch(CLEAN, CORRUPT, heads="all", metric=METRIC)
    print(f"layer 12 head 2: {float(heads.scores[12, 2]):.2f} in all, {float(direct.scores[12, 2]):.2f} directly")
    assert (direct.top(1)[0]["layer"], direct.top(1)[0]["head"]) == (12, 2)


def test_a_grid_is_faster_than_a_run_a_cell(session: mia.Session, grid: PatchGrid, model: Any) -> None:
    ids = session.to_tokens(CORRUPT)
    session.patch(CLEAN, CORRUPT, metric=METRIC, progress=False)
    times = {}
    for name, run, n in (("grid", lambda: session.patch(CLEAN, CORRUPT, metric=METRIC, progress=False), 1),
                         ("one request", lambda: session.generate(CORRUPT, max_tokens=1), 6), ("one forward", lambda: model(ids), 6)):
        with torch.no_grad():
            taken = []
            for _ in range(n + 1):
                start = time.perf_counter()
                run()
                taken.append(time.perf_counter() - start)
        times[name] = sorted(taken)[len(taken) // 2]
    cells = grid.raw.numel()
    gain = {name: times[name] * cells / times["grid"] for name in ("one request", "one forward")}
    print(f"{cells} cells in {times['grid']:.2f} s; one at a time: " + ", ".join(
        f"{name} {times[name] * 1e3:.0f} ms a cell, {gain[name]:.1f} times as long" for name in gain))
    assert gain["one forward"] > 5 and gain["one request"] > 2.5
