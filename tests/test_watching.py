"""Watching a generation: each row comes with its token, while the engine is still at work, and is the right one."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.errors import MiaError, PointError

pytestmark = pytest.mark.full
OPTIONS = dict(points=["resid_post", "mlp_out"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32,
               enforce_eager=True)
PROMPTS = ["one prompt", "and another, which is longer than it"]


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **OPTIONS)


def test_moments_are_the_rows_of_the_generation(session: mia.Session) -> None:
    push = [[mia.Add(torch.full((session.d_model,), 0.2), 1.0, [1])], None]
    seen = list(session.watch(PROMPTS, layers=[0, 2], max_tokens=9, edits=push))
    outputs = session.completions(PROMPTS, max_tokens=9, edits=push)
    _, cache = session.run_with_cache(PROMPTS, "resid_post", max_tokens=9, edits=push)
    for i, output in enumerate(outputs):
        mine = [moment for moment in seen if moment.prompt == i]
        ids = session.to_tokens(PROMPTS[i])[0].tolist()
        tokens = [*ids, *output.outputs[0].token_ids]
        assert [moment.position for moment in mine] == list(range(len(ids) - 1, len(tokens) - 1))
        assert [(m.token, m.next_token) for m in mine] == [(tokens[m.position], tokens[m.position + 1]) for m in mine]
        for k, layer in enumerate((0, 2)):
            rows = cache["resid_post", layer].get()[i, len(ids) - 1 : len(tokens) - 1]
            torch.testing.assert_close(torch.stack([moment.rows[k] for moment in mine]), rows, rtol=1e-5, atol=1e-5)


def test_moments_come_while_the_engine_is_at_work(session: mia.Session) -> None:
    engine, open_requests = session._engine.llm.llm_engine, []
    for _ in session.watch(PROMPTS[0], max_tokens=6):
        open_requests.append(engine.has_unfinished_requests())
    assert open_requests == [True] * 5 + [False]


def test_breaking_off_ends_the_generation(session: mia.Session) -> None:
    for moment in session.watch(PROMPTS, max_tokens=50):
        assert moment.rows.shape == (session.n_layers, session.d_model)
        break
    assert not session._engine.llm.llm_engine.has_unfinished_requests()
    expected = session.completions(PROMPTS[0], max_tokens=4).outputs[0].token_ids
    assert [m.next_token for m in session.watch(PROMPTS[0], max_tokens=4)] == list(expected)


def test_what_is_rebuilt_cannot_be_watched(session: mia.Session) -> None:
    with pytest.raises(PointError, match="watch q or k"):
        next(session.watch(PROMPTS[0], "pattern"))


def test_the_edits_in_force_are_those_of_the_call(session: mia.Session) -> None:
    push = torch.full((session.d_model,), 0.5)
    with session.steer(push, layers=[1]):
        inside = session.watch(PROMPTS[0], layers=2, max_tokens=3)
        expected = session.capture(PROMPTS[0], layers=2).get()
    plain = session.watch(PROMPTS[0], layers=2, max_tokens=3)
    rows = next(inside).rows[0]
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    inside.close()
    with session.steer(push, layers=[1]):
        assert not torch.allclose(next(plain).rows[0], expected)
    plain.close()


def test_wrong_arguments_are_refused_before_the_first_step(session: mia.Session) -> None:
    with pytest.raises(PointError):
        session.watch(PROMPTS[0], layers=99)
    with pytest.raises(PointError, match="not tapped"):
        session.watch(PROMPTS[0], "resid_pre", layers=1)
    with pytest.raises(MiaError):
        session.watch(PROMPTS[0], top_p=-3.0)


def test_nothing_else_runs_in_the_midst_of_a_generation(session: mia.Session) -> None:
    watched = session.watch(PROMPTS[0], max_tokens=6)
    first = next(watched)
    for other in (lambda: session.generate("x", max_tokens=1), lambda: next(session.watch("x", max_tokens=2))):
        with pytest.raises(MiaError, match="in the midst of a generation that is being watched"):
            other()
    assert [first.position, *(moment.position for moment in watched)] == [first.position + i for i in range(6)]
    assert session.generate("x", max_tokens=1)
