"""Recordings: what a data set's prompts gave, row by row, across shards, interruptions and resumed runs."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab import recording
from mia_lab.errors import EditError, MiaError, PointError, PromptError

pytestmark = pytest.mark.full
OPTIONS = dict(points=["resid_post", "mlp_out"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32,
               enforce_eager=True)
PROMPTS = [f"prompt {i} " + "and so on " * (i % 4) for i in range(40)]
ROW = 2 * 128 * 4  # bytes of a row at two layers of the tiny model


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **OPTIONS)


def check(session: mia.Session, found: mia.Recording, prompts: list[str], layers: list[int], edits: Any = None) -> None:
    """Every row is what capture gives for its prompt alone."""
    keys = list(zip(found["request"].tolist(), found["position"].tolist()))
    ids = [session.to_tokens(prompt)[0].tolist() for prompt in prompts]
    assert keys == [(i, q) for i, tokens in enumerate(ids) for q in range(len(tokens))]
    assert found["token"].tolist() == [token for tokens in ids for token in tokens]
    for layer in layers:
        rows = torch.cat([session.capture(prompt, layers=layer, at=None, edits=edits).get() for prompt in prompts])
        torch.testing.assert_close(found[f"resid_post.{layer}"], rows, rtol=1e-5, atol=1e-5)


def test_every_row_of_every_prompt_is_there_in_order(session: mia.Session, tmp_path: Path) -> None:
    found = session.record(PROMPTS, tmp_path / "all", layers=[0, 2], shard_bytes=100 * ROW)
    assert found.complete and found.n_requests == len(PROMPTS) and found.points == ["resid_post.0", "resid_post.2"]
    assert len(list(found.shards())) > 3
    assert len(found) == len(found["token"])
    check(session, found, PROMPTS, [0, 2])


def test_edits_act_and_prompts_may_come_one_by_one(session: mia.Session, tmp_path: Path) -> None:
    push = [mia.Add(torch.full((session.d_model,), 0.3), 1.0, [1])]
    found = session.record(iter(PROMPTS), tmp_path, layers=2, edits=iter(push), shard_bytes=60 * ROW)
    assert len(list(found.shards("request"))) > 1
    check(session, found, PROMPTS, [2], push)


def test_only_the_asked_positions_are_written(session: mia.Session, tmp_path: Path) -> None:
    found = session.record(PROMPTS[:6], tmp_path, "mlp_out", layers=1, at=[-1, 0])
    ids = [session.to_tokens(prompt)[0] for prompt in PROMPTS[:6]]
    assert found["position"].tolist() == [q for tokens in ids for q in (0, len(tokens) - 1)]
    last = session.capture(PROMPTS[:6], "mlp_out", layers=1).get()
    torch.testing.assert_close(found["mlp_out.1"][1::2], last, rtol=1e-5, atol=1e-5)


def test_a_run_that_was_broken_off_goes_on_behind_its_last_whole_shard(session: mia.Session, tmp_path: Path) -> None:
    ran: list[int] = []

    def breaking() -> Iterator[str]:
        for i, prompt in enumerate(PROMPTS):
            if i == 26:
                raise KeyboardInterrupt
            yield prompt

    with pytest.raises(KeyboardInterrupt):
        session.record(breaking(), tmp_path, layers=[0, 2], shard_bytes=60 * ROW)
    part = mia.Recording(tmp_path)
    assert not part.complete and 0 < part.n_requests < 26
    assert "not complete" in repr(part)
    before = [shard["request"].tolist() for shard in part.shards("request")]
    original = recording._Batch.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording._Batch, "run", lambda self: ran.append(self.first) or original(self))
        found = session.record(PROMPTS, tmp_path, layers=[0, 2], shard_bytes=60 * ROW)
    assert ran[0] == part.n_requests
    assert [shard["request"].tolist() for shard in found.shards("request")][: len(before)] == before
    check(session, found, PROMPTS, [0, 2])


def test_a_complete_recording_runs_nothing_again(session: mia.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session.record(PROMPTS[:8], tmp_path, layers=0)
    monkeypatch.setattr(recording._Batch, "run", lambda self: pytest.fail("it ran again"))
    assert session.record(PROMPTS[:8], tmp_path, layers=0).complete


def test_a_recording_that_is_extended_is_complete_when_it_is_done(session: mia.Session, tmp_path: Path) -> None:
    def breaking() -> Iterator[str]:
        yield from PROMPTS[:24]
        raise KeyboardInterrupt

    session.record(PROMPTS[:8], tmp_path, layers=0)
    with pytest.raises(KeyboardInterrupt):
        session.record(breaking(), tmp_path, layers=0, shard_bytes=30 * ROW)
    part = mia.Recording(tmp_path)
    assert part.n_requests > 8 and not part.complete
    found = session.record(PROMPTS[:24], tmp_path, layers=0)
    assert found.complete
    check(session, found, PROMPTS[:24], [0])


@pytest.mark.parametrize("change", [dict(prompts=["other", *PROMPTS[1:8]]), dict(at=-1), dict(edits=[mia.Scale(0.5, layers=[1])]),
                                    dict(layers=1), dict(point="mlp_out"), dict(before=True)])
def test_other_work_is_not_mixed_into_a_recording(session: mia.Session, tmp_path: Path, change: dict[str, Any]) -> None:
    asked = dict(prompts=PROMPTS[:8], layers=0)
    session.record(**asked, folder=tmp_path)
    with pytest.raises(MiaError, match="record into another folder"):
        session.record(**asked | change, folder=tmp_path)
    assert mia.Recording(tmp_path).points == ["resid_post.0"]


def test_what_is_half_written_is_not_named(session: mia.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(recording, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        session.record(PROMPTS[:8], tmp_path, layers=0)
    assert not (tmp_path / "index.json").exists()
    monkeypatch.undo()
    assert session.record(PROMPTS[:8], tmp_path, layers=0).complete


def test_wrong_folders_points_and_names_are_refused(session: mia.Session, tmp_path: Path) -> None:
    with pytest.raises(MiaError, match=r"no index\.json"):
        mia.Recording(tmp_path)
    with pytest.raises(PromptError, match="put a single one into a list"):
        session.record("one prompt", tmp_path)
    with pytest.raises(EditError, match="one list of edits for all"):
        session.record(PROMPTS[:2], tmp_path, edits=[[mia.Scale(0.5, layers=[1])], None])
    with pytest.raises(PointError, match="pattern is rebuilt"):
        session.record(PROMPTS[:2], tmp_path, "pattern")
    found = session.record(PROMPTS[:2], tmp_path, layers=0)
    with pytest.raises(KeyError, match=r"resid_post\.0"):
        found["resid_post.1"]
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"version": 99}))
    with pytest.raises(MiaError, match="version 99"):
        mia.Recording(tmp_path)
