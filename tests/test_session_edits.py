"""What a Session makes of edits and points: their order, the side on which rows are read, what was declared, axes per head."""
from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.errors import EditError

pytestmark = pytest.mark.full

PROMPT = "steer me"


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", points=["resid_post"], max_model_len=64, enforce_eager=True)


def vector(session: mia.Session) -> torch.Tensor:
    """A direction as long as the stream after block 1 varies."""
    draw = torch.randn(session.d_model, generator=torch.Generator().manual_seed(0))
    return draw / draw.norm() * session.unit()[1]


def test_rows_are_read_before_the_edits_at_their_point_or_after_them(session: mia.Session) -> None:
    v = vector(session)
    edits = [mia.Add(v, 0.5, [1]), mia.Scale(2.0, [1])]
    after, before = (session.capture(PROMPT, layers=1, edits=edits, before=before) for before in (False, True))
    assert torch.allclose(before, session.capture(PROMPT, layers=1), atol=1e-5)
    assert torch.allclose(after, 2 * (before + 0.5 * v), atol=1e-4)
    logits, cache = session.run_with_cache(PROMPT, "resid_post", edits=edits, before=True)
    expected, plain = session.run_with_cache(PROMPT, "resid_post", edits=edits)
    assert torch.allclose(cache["resid_post", 1][0, -1], before, atol=1e-5)
    assert torch.allclose(plain["resid_post", 1][0, -1], after, atol=1e-5)
    assert torch.allclose(logits, expected, atol=1e-4)


def test_default_edits_act_before_scopes_and_these_before_those_of_a_call(session: mia.Session) -> None:
    v, base = vector(session), session.capture(PROMPT, layers=1)
    double, add = mia.Scale(2.0, [1]), mia.Add(v, 1.0, [1])
    session.default([add])
    try:
        with session.steer([double]):
            assert torch.allclose(session.capture(PROMPT, layers=1, edits=add), 2 * (base + v) + v, atol=1e-4)
            with session.unsteered():
                assert torch.allclose(session.capture(PROMPT, layers=1), base.get(), atol=1e-5)
                assert torch.allclose(session.capture(PROMPT, layers=1, edits=add), base + v, atol=1e-4)
        assert torch.allclose(session.capture(PROMPT, layers=1), base + v, atol=1e-4)
    finally:
        session.default([])
    assert torch.allclose(session.capture(PROMPT, layers=1), base.get(), atol=1e-5)


def test_a_scope_acts_in_the_thread_that_opened_it_and_another_is_told_so(session: mia.Session) -> None:
    v = torch.randn(128, generator=torch.Generator().manual_seed(5))
    base = session.capture(PROMPT, layers=1).get()

    def scoped() -> torch.Tensor:
        with session.steer(mia.Add(2 * v, 1.0, [1])):
            return session.capture(PROMPT, layers=1).get()

    def unsteered() -> torch.Tensor:
        with session.unsteered():
            return session.capture(PROMPT, layers=1).get()

    with ThreadPoolExecutor(1) as pool, session.steer(mia.Add(v, 1.0, [1])):
        with pytest.raises(EditError, match="open in another thread"):
            pool.submit(session.generate, PROMPT, max_tokens=1).result()
        assert torch.allclose(pool.submit(scoped).result(), base + 2 * v, atol=1e-4)
        assert torch.allclose(pool.submit(unsteered).result(), base, atol=1e-5)
        assert torch.allclose(session.capture(PROMPT, layers=1), base + v, atol=1e-4)


def test_the_card_of_a_session_says_what_its_text_says_and_what_acts(session: mia.Session) -> None:
    html = session._repr_html_()
    for fact in re.split(r"; taps |; KV room for |\n  tables |\n  |Session: ", repr(session)):
        assert escape(fact) in html
    assert "none acting" in html and "s.points()" in html
    with session.steer(torch.ones(session.d_model), 1.0, layers=[1]):
        assert "1 acting" in session._repr_html_()
    assert session._repr_html_() == html


def test_edit_kinds_that_were_not_declared_are_refused_when_they_are_used(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", edits=["ablate"], max_model_len=64, enforce_eager=True)
    v = torch.randn(128, generator=torch.Generator().manual_seed(0))
    row = session.capture(PROMPT, layers=1, edits=mia.Ablate(v, layers=[1]))
    assert abs(float(row @ v / v.norm())) < 1e-4
    with pytest.raises(EditError, match="Add edits were not declared; declared: ablate"):
        session.generate(PROMPT, edits=mia.Add(v, 1.0, [1]))


def test_heads_and_patterns_have_their_axes(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", points=["z", "pattern"], max_model_len=64, enforce_eager=True)
    assert {p.kind for p in session.tapped} == {"z", "q", "k", "resid_post"}
    _, cache = session.run_with_cache([PROMPT, "abc"])
    assert cache["blocks.1.attn.hook_z"].shape == (2, 9, 4, 32)
    assert cache["blocks.1.attn.hook_rot_k"].shape == (2, 9, 2, 32)
    pattern = session.capture([PROMPT, "abc"], "pattern", layers=1, at=None)
    assert pattern.shape == (2, 9, 4, 9)
    for i, n in enumerate((9, 4)):
        assert torch.allclose(pattern[i, :n, :, :n].sum(-1), torch.ones(n, 4), atol=1e-5)
        assert not pattern[i, :n, :, :n].transpose(0, 1).triu(1).any()
    off = session.capture(PROMPT, "z", layers=1, edits=mia.Scale(0.0, [1], "z", heads=2))
    assert [bool(head.any()) for head in off] == [True, True, False, True]
    with pytest.raises(EditError, match="q can be captured but not edited"):
        session.generate(PROMPT, edits=mia.Scale(0.0, [1], "q"))
