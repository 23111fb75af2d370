"""Sampling by a Session: seeds, and parameters of one's own for each request."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mia_lab as mia
from mia_lab.engine.wire import KEY
from mia_lab.errors import PromptError

pytestmark = pytest.mark.full

PROMPT = "steer me"


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", points=["resid_post"], max_model_len=64, enforce_eager=True)


def test_sampling_is_seeded(session: mia.Session) -> None:
    first = session.generate(PROMPT, max_tokens=12, temperature=1.0, seed=1)
    assert session.generate(PROMPT, max_tokens=12, temperature=1.0, seed=1) == first
    other = session.generate(PROMPT, max_tokens=12, temperature=1.0, seed=2)
    assert other != first
    assert session.generate([PROMPT] * 3, max_tokens=12, temperature=1.0, seed=[2, 1, 2]) == [other, first, other]
    with pytest.raises(PromptError, match="one for each of the 2 prompts; these are 3"):
        session.generate([PROMPT] * 2, max_tokens=12, temperature=1.0, seed=[2, 1, 2])


def test_sampling_arguments_are_checked_once_and_each_request_has_its_own_parameters(session: mia.Session) -> None:
    given = {"max_tokens": 2, "extra_args": {"other": 1}}
    one, two, plain = session._engine.sampling(given, ["a", "b", ""])
    assert [p.extra_args for p in (one, two, plain)] == [{"other": 1, KEY: "a"}, {"other": 1, KEY: "b"}, {"other": 1}]
    one.max_tokens, plain.extra_args["more"] = 9, 2
    assert (two.max_tokens, two.extra_args) == (2, {"other": 1, KEY: "b"})
    assert given == {"max_tokens": 2, "extra_args": {"other": 1}}
    with pytest.raises(PromptError, match="these sampling arguments do not work"):
        session._engine.sampling({"temperature": -1.0}, ["a", "b"])
