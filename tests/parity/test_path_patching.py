"""Path patching and gradients: against Hugging Face, and against what the stream's sum says."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.errors import EditError, MiaError, PointError
from mia_lab.points import Point
from parity import reference
from parity.test_patching import CLEAN, CORRUPT, METRIC, OPTIONS, diff

pytestmark = pytest.mark.full
QUIET = dict(metric=METRIC, progress=False)
BRANCHES = ("attn_out", "mlp_out")


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    return open_tiny(family, **OPTIONS)


@pytest.fixture(scope="module")
def model(models: Path, family: str) -> Any:
    return tiny.load(tiny.build(family, models)).double()


def put(rows: torch.Tensor, point: Point, head: int | None = None) -> mia.Replace:
    size = rows.shape[1] if head is None else rows.shape[1] // 4
    part = rows if head is None else rows[:, head * size : (head + 1) * size]
    return mia.Replace(part, [point.layer], point.kind, mia.everywhere(), start=0, head=head)


def path(model: Any, shapes: Any, ids: list[list[int]], sender: tuple[Point, int | None], receivers: list[tuple[Point, int | None]],
         mlps: bool) -> float:
    """The metric of path patching by hooks, step by step: ids are the clean prompt's and the corrupt one's."""
    branches = [Point(kind, layer) for layer in range(4) for kind in BRANCHES]
    _, clean = reference.run(model, ids[0], [sender[0]], shapes=shapes)
    _, held = reference.run(model, ids[1], branches, shapes=shapes)
    place = branches.index(Point("attn_out" if sender[0].kind == "z" else sender[0].kind, sender[0].layer))
    frozen = [put(held[p], p) for p in branches[place + 1 :] if p.kind == "attn_out" or not mlps]
    wanted = [p for p, _ in receivers]
    logits, seen = reference.run(model, ids[1], wanted, [put(clean[sender[0]], *sender), *frozen], shapes=shapes, before=True)
    if receivers:
        logits, _ = reference.run(model, ids[1], (), [put(seen[p], p, head) for p, head in receivers], shapes=shapes)
    return diff(logits)


@pytest.mark.parametrize(("receiver", "mlps"), [("logits", True), ([("z", 3, 1), ("mlp_out", 2)], False), ([("z", 2, 0)], True)])
def test_paths_are_hugging_faces(session: mia.Session, model: Any, receiver: Any, mlps: bool) -> None:
    ids = [session.to_tokens(text)[0].tolist() for text in (CLEAN, CORRUPT)]
    shapes = session._submit.model.shapes
    ends = [] if receiver == "logits" else [(Point(*r[:2]), r[2] if len(r) > 2 else None) for r in receiver]
    heads = session.path_patch(CLEAN, CORRUPT, receiver, heads=[0, 3], layers=[0, 1], through_mlps=mlps, **QUIET)
    branch = session.path_patch(CLEAN, CORRUPT, receiver, "mlp_out", layers=[0, 1], through_mlps=mlps, **QUIET)
    gap = float((heads.clean - heads.corrupt).abs())
    for layer, k, head in ((0, 1, 3), (1, 0, 0)):
        want = path(model, shapes, ids, (Point("z", layer), head), ends, mlps)
        assert abs(float(heads.raw[0, layer, k]) - want) < 1e-4 * gap
    want = path(model, shapes, ids, (Point("mlp_out", 1), None), ends, mlps)
    assert abs(float(branch.raw[0, 1]) - want) < 1e-4 * gap
    print(f"{receiver}, through MLPs {mlps}: {[round(v, 3) for v in branch.scores.tolist()]}, heads "
          f"{[[round(v, 3) for v in row] for row in heads.scores.tolist()]}")
    assert float(branch.scores.abs().max()) > 1e-3


def test_the_direct_effect_is_what_the_branch_adds_to_the_stream(session: mia.Session) -> None:
    (_, clean), (_, corrupt) = (session.run_with_cache(text) for text in (CLEAN, CORRUPT))
    last = session.n_layers - 1
    for kind in BRANCHES:
        grid = session.path_patch(CLEAN, CORRUPT, "logits", kind, **QUIET)
        for layer in range(session.n_layers):
            moved = corrupt["resid_post", last][0, -1] + clean[kind, layer][0, -1] - corrupt[kind, layer][0, -1]
            logits = session.unembed(moved[None])[0]
            assert float(grid.raw[0, layer]) == pytest.approx(float(logits[40] - logits[77]), abs=1e-4)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_senders_behind_the_receiver_score_nothing(session: mia.Session) -> None:
    grid = session.path_patch(CLEAN, CORRUPT, [("z", 1, 0)], heads="all", **QUIET)
    assert not grid.scores[1:].any() and grid.scores[0].any() and grid.ran == 8
    with pytest.raises(PointError, match='a receiver is "logits" or a branch'):
        session.path_patch(CLEAN, CORRUPT, ("resid_post", 2), **QUIET)
    with pytest.raises(PointError, match="cannot be patched here"):
        session.path_patch(CLEAN, CORRUPT, "logits", "resid_post", **QUIET)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
@pytest.mark.parametrize("kind", ["z", *BRANCHES])
def test_a_scope_that_edits_a_receiver_is_refused(session: mia.Session, kind: str) -> None:
    """The receiver's value is recorded without that edit and put in after it, so that the score would be the edit's."""
    push = mia.Add(torch.ones(WIDTH), 3.0, layers=[2], point=kind, where=mia.everywhere())
    with session.steer(push):
        with pytest.raises(EditError, match=rf"{kind}\.2, which is a receiver"):
            session.path_patch(CLEAN, CORRUPT, [("z", 3), (kind, 2)], "mlp_out", layers=[0], **QUIET)
        nothing = session.path_patch(CLEAN, CORRUPT, [(kind, 3)], "mlp_out", layers=[0], positions=[0], **QUIET)
    assert float((nothing.raw - nothing.corrupt).abs().max()) < 1e-4  # what is sent from BOS is the same in both runs
    session.default([push])
    try:
        with pytest.raises(EditError, match="which is a receiver"):
            session.path_patch(CLEAN, CORRUPT, (kind, 2), "mlp_out", layers=[0], **QUIET)
    finally:
        session.default([])


def test_the_norm_behind_attention_is_found_by_its_own_name(open_tiny: Callable[..., Any], models: Path) -> None:
    """In GLM-4, `post_attention_layernorm` is the norm before the MLP."""
    session = open_tiny("glm4", **OPTIONS)
    grid = session.attribution_patch(CLEAN, CORRUPT, "attn_out", METRIC, positions=[-1], model=tiny.load(tiny.build("glm4", models)))
    true = session.patch(CLEAN, CORRUPT, "attn_out", positions=[-1], **QUIET)
    torch.testing.assert_close(grid.clean, true.clean, rtol=1e-4, atol=1e-4)
    assert grid.agreement(true)["correlation"] > 0.8


@pytest.mark.parametrize(("point", "heads"), [("resid_pre", None), ("resid_post", None), ("attn_out", None), ("mlp_out", None),
                                              ("z", "all")])
def test_attribution_is_the_slope_of_the_patched_metric(session: mia.Session, model: Any, point: str, heads: Any) -> None:
    """The estimate is the derivative of the metric as a cell's clean value is blended in."""
    grid = session.attribution_patch(CLEAN, CORRUPT, point, METRIC, heads=heads, positions=[-1, 4])
    true = session.patch(CLEAN, CORRUPT, point, heads=heads, positions=[-1, 4], **QUIET)
    assert "Hugging Face" in grid.method and "Hugging Face" in repr(grid)
    torch.testing.assert_close(grid.clean, true.clean, rtol=1e-4, atol=1e-4)
    ids = [session.to_tokens(text)[0].tolist() for text in (CLEAN, CORRUPT)]
    shapes, step = session._submit.model.shapes, 1e-3
    _, values = reference.run(model, ids[0], [Point(point, 1)], shapes=shapes)
    head, rows = (0, values[Point(point, 1)][:, : WIDTH // 4]) if heads else (None, values[Point(point, 1)])
    for m, t in ((0, len(ids[0]) - 1), (1, 4)):
        blended = [diff(reference.run(model, ids[1], (), [mia.Replace(rows[t], [1], point, mia.positions([t]), blend=b, head=head)],
                                      shapes=shapes)[0]) for b in (step, -step)]
        slope = (blended[0] - blended[1]) / (2 * step)
        found = grid.raw[(0, 1, 0, m) if heads else (0, 1, m)] - grid.corrupt[0]
        assert float(found) == pytest.approx(slope, rel=1e-2, abs=2e-3)
    print(f"{point}: {grid.agreement(true)}")


WIDTH = 128


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_attribution_refuses_another_model(session: mia.Session, models: Path) -> None:
    other = tiny.load(tiny.build("llama", models))
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    with pytest.raises(MiaError, match="differs from the engine's"):
        session.attribution_patch(CLEAN, CORRUPT, "resid_post", METRIC, model=other)
    with session.steer(torch.ones(128), layers=[1]), pytest.raises(EditError, match="unsteered"):
        session.attribution_patch(CLEAN, CORRUPT, "resid_post", METRIC)
    with pytest.raises(EditError, match="differ in point"):
        session.patch(CLEAN, CORRUPT, **QUIET).agreement(session.patch(CLEAN, CORRUPT, "mlp_out", **QUIET))
