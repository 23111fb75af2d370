"""Patched grids against Hugging Face, cell by cell, and what must hold of any of them."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.analysis.patching.cells import Job, measure
from mia_lab.analysis.patching.metrics import Judge
from mia_lab.errors import EditError, PointError, PromptError
from mia_lab.points import Point
from mia_lab.show.progress import Bar
from parity import reference

pytestmark = pytest.mark.full
OPTIONS = dict(points=["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z"], max_model_len=192, max_num_batched_tokens=64,
               max_num_seqs=8, block_size=32, enforce_eager=True)
CLEAN, CORRUPT, FIRST = "a Xav.", "a Yaa.", 3  # BOS stands at 0
METRIC = mia.logit_diff(40, 77)
QUIET = dict(metric=METRIC, progress=False)


@pytest.fixture(scope="module", params=["gpt2", "gemma3", "llama"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    return open_tiny(family, **OPTIONS)


@pytest.fixture(scope="module")
def model(models: Path, family: str) -> Any:
    """The same model in Hugging Face, in float64."""
    return tiny.load(tiny.build(family, models)).double()


def diff(logits: torch.Tensor) -> float:
    """The metric of Hugging Face's logits `[pos d_vocab]`."""
    return float(logits[-1, 40] - logits[-1, 77])


class Theirs:
    """Both prompts in Hugging Face, and the corrupt one with edits."""

    def __init__(self, session: mia.Session, model: Any, points: list[Point]) -> None:
        self.model, self.shapes = model, session._submit.model.shapes
        self.clean, self.corrupt = (session.to_tokens(text)[0].tolist() for text in (CLEAN, CORRUPT))
        logits, self.values = reference.run(model, self.clean, points, shapes=self.shapes)
        self.ends = diff(logits), diff(reference.run(model, self.corrupt, ())[0])

    def patched(self, *edits: mia.Edit) -> float:
        return diff(reference.run(self.model, self.corrupt, (), edits, shapes=self.shapes)[0])

    def cell(self, point: Point, t: int) -> float:
        return self.patched(mia.Replace(self.values[point][t], [point.layer], point.kind, mia.positions([t])))


@pytest.mark.parametrize("kind", ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"])
def test_each_cell_is_hugging_faces(session: mia.Session, model: Any, kind: str) -> None:
    grid = session.patch(CLEAN, CORRUPT, kind, **QUIET)
    theirs = Theirs(session, model, [Point(kind, layer) for layer in grid.layers])
    torch.testing.assert_close(torch.cat([grid.clean, grid.corrupt]), torch.tensor(theirs.ends).double(), rtol=1e-5, atol=1e-5)
    want = torch.tensor([[theirs.cell(Point(kind, layer), t) for t in range(FIRST, len(theirs.clean))] for layer in grid.layers])
    worst = float((grid.raw[0, :, FIRST:] - want).abs().max() / abs(theirs.ends[0] - theirs.ends[1]))
    print(f"{kind}: worst cell {worst:.1e} of the whole effect, {grid.ran} runs")
    assert grid.raw.shape == (1, session.n_layers, len(theirs.clean)) and worst < 1e-4
    assert torch.equal(grid.scores[:, :FIRST], torch.zeros(session.n_layers, FIRST))
    assert theirs.cell(Point(kind, 1), FIRST - 1) == pytest.approx(theirs.ends[1], abs=1e-6)  # which the engine need not run
    assert float(grid.scores[:, FIRST:].abs().max()) > 0.1


def test_each_head_is_hugging_faces(session: mia.Session, model: Any) -> None:
    heads, size = session._engine.shapes[Point("z", 0)]
    whole, each = (session.patch(CLEAN, CORRUPT, "z", heads="all", positions=p, **QUIET) for p in ("all", [-1, slice(FIRST, 5), [4, 6]]))
    theirs = Theirs(session, model, [Point("z", layer) for layer in whole.layers])
    n = len(theirs.clean)
    groups = [[n - 1], list(range(FIRST, 5)), [4, 6]]
    assert whole.raw.shape == (1, session.n_layers, heads) and each.raw.shape == (1, session.n_layers, heads, 3)
    assert each.positions == ("-1 '.'", "3:5", "[4, 6]")
    gap = abs(theirs.ends[0] - theirs.ends[1])
    for layer in (0, session.n_layers - 2):
        for head in (0, heads - 1):
            rows = theirs.values[Point("z", layer)][:, head * size : (head + 1) * size]
            place = dict(layers=[layer], point="z", head=head)
            all_ = theirs.patched(mia.Replace(rows, start=0, where=mia.everywhere(), **place))
            assert abs(float(whole.raw[0, layer, head]) - all_) < 1e-4 * gap
            for m, group in enumerate(groups):
                one = theirs.patched(mia.Replace(rows, start=0, where=mia.positions(group), **place))
                assert abs(float(each.raw[0, layer, head, m]) - one) < 1e-4 * gap


def test_what_holds_of_every_grid(session: mia.Session) -> None:
    whole = session.patch(CLEAN, CORRUPT, positions="all", **QUIET)
    torch.testing.assert_close(whole.scores, torch.ones(session.n_layers), rtol=1e-3, atol=1e-3)
    grid = session.patch(CLEAN, CORRUPT, **QUIET)
    last = torch.zeros(grid.scores.shape[1])
    last[-1] = 1.0
    torch.testing.assert_close(grid.scores[-1], last, rtol=1e-3, atol=1e-3)
    noise = session.patch(CLEAN, CORRUPT, direction="noise", **QUIET)
    swapped = session.patch(CORRUPT, CLEAN, **QUIET)
    torch.testing.assert_close(noise.scores, swapped.scores, rtol=1e-3, atol=1e-3)
    assert torch.equal(noise.clean, swapped.corrupt)
    three = [session.patch(CLEAN, CORRUPT, metric=m, layers=[1, 2], positions=[-1, 4], progress=False)
             for m in (METRIC, lambda logits: logits[40] - logits[77])]
    torch.testing.assert_close(three[0].raw, three[1].raw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_heads_are_numbers(session: mia.Session) -> None:
    for wrong in (True, [False], [-1], [99]):
        with pytest.raises(EditError, match="does not fit layers with"):
            session.patch(CLEAN, CORRUPT, "z", heads=wrong, **QUIET)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_group_is_named_with_its_step(session: mia.Session) -> None:
    groups = [slice(None), slice(None, None, 2), slice(1, 5, 3)]
    assert session.patch(CLEAN, CORRUPT, positions=groups, layers=[1], **QUIET).positions == ("0:", "0::2", "1:5:3")
    with pytest.raises(PromptError, match="does not fit a prompt"):
        session.patch(CLEAN, CORRUPT, positions=[[True, False, True]], layers=[1], **QUIET)


def test_a_run_patched_with_its_own_values_is_that_run(session: mia.Session) -> None:
    ids = session.to_tokens(CORRUPT)[0].tolist()
    rows = session.capture([ids], at=None)[0]  # [layer pos d_model]
    jobs = [Job(0, ids, lambda layer=layer, t=t: [mia.Replace(rows[layer][t], [layer], where=mia.positions([t]))])
            for layer in range(session.n_layers) for t in range(len(ids))]
    found = measure(session, [Job(0, ids, list), *jobs], Judge(session, METRIC, 1), None, Bar(None))
    torch.testing.assert_close(found.values[1:], found.values[:1].expand(len(jobs)), rtol=1e-4, atol=1e-5)
    assert found.done == len(jobs) + 1


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_several_pairs_are_averaged_and_each_is_what_it_is_alone(session: mia.Session) -> None:
    pairs = [(CLEAN, CORRUPT), ("it is a dog", "it is a cat")]
    both = session.patch([a for a, _ in pairs], [b for _, b in pairs], positions=[-1, slice(1, 5)],
                         metric=mia.logit_diff([40, 50], [77, 60]), progress=False)
    alone = [session.patch(a, b, positions=[-1, slice(1, 5)], metric=mia.logit_diff(*tokens), progress=False)
             for (a, b), tokens in zip(pairs, [(40, 77), (50, 60)])]
    for i, grid in enumerate(alone):
        torch.testing.assert_close(both.raw[i], grid.raw[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(both.per_pair[i], grid.scores, rtol=1e-2, atol=1e-3)
    moved = sum(grid.raw[0] - grid.corrupt for grid in alone) / sum(grid.clean - grid.corrupt for grid in alone)
    torch.testing.assert_close(both.scores, moved.float(), rtol=1e-3, atol=1e-3)
    assert len(both.data) == both.raw.numel() and both.data[-1]["pair"] == 1
    with pytest.raises(PromptError, match=r"the pairs have \[7, 12\] tokens"):
        session.patch([a for a, _ in pairs], [b for _, b in pairs], **QUIET)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_cells_share_the_prefix_before_them(session: mia.Session) -> None:
    """With blocks of 32, a cell at position t reads every whole block before t from the cache, and no other."""
    text = "".join(chr(97 + i % 26) for i in range(140))
    session.reset_prefix_cache()
    places = [36, 70, 100, 139]
    grid = session.patch(text, text[:35] + "Z" + text[36:], positions=places, **QUIET)
    shared = sum(t // 32 * 32 for t in places) / (len(places) * 141)
    assert grid.ran == len(places) * session.n_layers and grid.cached == pytest.approx(shared)
    session.reset_prefix_cache()
    alone = session.patch(text, text[:35] + "Z" + text[36:], positions=places[::-1], batch=1, **QUIET)
    torch.testing.assert_close(grid.raw, alone.raw.flip(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_grid_that_the_tables_cannot_hold_at_once_runs_in_parts(session: mia.Session) -> None:
    texts = ["".join(chr(97 + (i * k) % 26) for i in range(140)) for k in (1, 3)]
    clean, corrupt = texts, [text[:90] + "Z" + text[91:] for text in texts]
    assert 2 * session.n_layers * 141 > session._engine.facts["bank_rows"] // 2
    both = session.patch(clean, corrupt, positions="all", **QUIET)
    for i in range(2):
        alone = session.patch(clean[i], corrupt[i], positions="all", layers=[0, 2], **QUIET)
        torch.testing.assert_close(both.raw[i, [0, 2]], alone.raw[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.per_pair, torch.ones(2, session.n_layers), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_open_scopes_act_in_every_run(session: mia.Session) -> None:
    push = mia.Add(torch.randn(session.d_model, generator=torch.Generator().manual_seed(1)), 2.0, layers=[1])
    with session.steer(push):
        grid = session.patch(CLEAN, CORRUPT, **QUIET)
        whole = session.patch(CLEAN, CORRUPT, positions="all", **QUIET)
    plain = session.patch(CLEAN, CORRUPT, **QUIET)
    assert (grid.clean - plain.clean).abs() > 1e-2
    torch.testing.assert_close(whole.scores, torch.ones(session.n_layers), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(grid.scores[:, :FIRST], torch.zeros(session.n_layers, FIRST), rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_an_interrupt_keeps_what_is_done(session: mia.Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    steps, seen = session._engine.steps, []

    def until(*args: Any) -> Any:
        for moved in steps(*args):
            yield moved
            seen.extend(moved)
            if len(seen) > 4:
                raise KeyboardInterrupt

    whole = session.patch(CLEAN, CORRUPT, **QUIET)
    monkeypatch.setattr(session._engine, "steps", until)
    part = session.patch(CLEAN, CORRUPT, **QUIET)
    monkeypatch.undo()
    there = ~part.raw.isnan()
    assert not part.complete and "NaN" in repr(part) and 4 < int(there[..., FIRST:].sum()) < whole.ran
    torch.testing.assert_close(part.raw[there], whole.raw[there], rtol=1e-4, atol=1e-5)
    assert "interrupted; what is done is kept" in capsys.readouterr().err
    assert session.generate(CLEAN, max_tokens=2)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_what_cannot_be_patched_is_said(session: mia.Session) -> None:
    with pytest.raises(PromptError, match=r"have 7 and 8 tokens(.|\n)*clean: <s> \| a \|  (.|\n)*corrupt: <s>"):
        session.patch(CLEAN, CORRUPT + "!", **QUIET)
    with pytest.raises(PromptError, match="are the same"):
        session.patch(CLEAN, CLEAN, **QUIET)
    with pytest.raises(PromptError, match="no patch can move it"):
        session.patch(CLEAN, CORRUPT, metric=mia.logit_diff(40, 40), progress=False)
    with pytest.raises(PromptError, match="their mean is no scale"):
        session.patch([CLEAN, CORRUPT], [CORRUPT, CLEAN], **QUIET)
    with pytest.raises(EditError, match="is no metric"):
        session.patch(CLEAN, CORRUPT)
    with pytest.raises(EditError, match="one number"):
        session.patch(CLEAN, CORRUPT, metric=lambda logits: logits[:2], progress=False)
    with pytest.raises(EditError, match="is NaN"):
        session.patch(CLEAN, CORRUPT, metric=lambda logits: logits[0] * float("nan"), progress=False)
    with pytest.raises(PromptError, match="'ab' is 2 tokens"):
        session.patch(CLEAN, CORRUPT, metric=mia.logit_diff("ab", "c"), progress=False)
    with pytest.raises(PointError, match="final_norm cannot be patched"):
        session.patch(CLEAN, CORRUPT, "final_norm", **QUIET)
    with pytest.raises(PointError, match=r"mlp_act is not tapped"):
        session.patch(CLEAN, CORRUPT, "mlp_act", **QUIET)
    with pytest.raises(EditError, match="resid_post has no heads"):
        session.patch(CLEAN, CORRUPT, heads="all", **QUIET)
    with pytest.raises(EditError, match="direction is"):
        session.patch(CLEAN, CORRUPT, direction="back", **QUIET)
    with pytest.raises(PromptError, match="1 clean and 2 corrupt"):
        session.patch(CLEAN, [CORRUPT, CORRUPT], **QUIET)
