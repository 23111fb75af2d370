"""The attention view on a tiny model with windows: it is the cache's pattern, named and cut as asked."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.analysis import attention_view
from mia_lab.errors import EditError, PointError, PromptError

pytestmark = pytest.mark.full
PROMPT = "a prompt that is longer than the window of the local layers"


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("gemma3", points=["resid_post", "q", "k"], max_model_len=128, max_num_seqs=8, block_size=32, enforce_eager=True)


def test_it_is_the_pattern_of_the_cache(session: mia.Session) -> None:
    view = session.attention(PROMPT)
    _, cache = session.run_with_cache(PROMPT, ["q", "k"])
    for layer, weights in zip(view.layers, view.weights, strict=True):
        torch.testing.assert_close(weights, cache["pattern", layer][0], rtol=0, atol=1e-6)
    assert view.layers == tuple(range(session.n_layers)) and list(view.tokens) == session.to_str_tokens(PROMPT)
    assert view.bos and view.group == session._engine.shapes[mia.Point("q", 0)][0] // session._engine.shapes[mia.Point("k", 0)][0]


def test_a_layer_named_with_a_window_sees_no_further(session: mia.Session) -> None:
    view = session.attention(PROMPT)
    assert view.windows == (32, None, 32, None) and len(view.tokens) > 40
    far = torch.ones(len(view.tokens), len(view.tokens)).tril(-32).bool()
    for window, weights in zip(view.windows, view.weights):
        assert bool((weights[:, far] == 0).all()) == (window is not None)
    assert "layer 0 head 0" in view.names[0] and "window 32" in view.names[0] and "window" not in view.names[len(view.heads)]


def test_layers_heads_and_positions_are_those_that_were_asked_for(session: mia.Session) -> None:
    whole, part = session.attention(PROMPT), session.attention(PROMPT, layers=[2, 1], heads=1, at=[5, -1])
    assert (part.layers, part.heads, part.positions) == ((2, 1), (1,), (5, len(whole.tokens) - 1))
    torch.testing.assert_close(part.weights, whole.weights[[2, 1]][:, [1]][:, :, list(part.positions)], rtol=0, atol=1e-6)
    few = session.attention(PROMPT, layers=1, at=4)
    assert few.tokens == whole.tokens[:5] and few.weights.shape == (1, len(whole.heads), 1, 5)


def test_edits_change_what_heads_attend_to(session: mia.Session) -> None:
    push = mia.Add(torch.randn(session.d_model, generator=torch.Generator().manual_seed(0)), 3.0, [0])
    plain, pushed = session.attention(PROMPT, layers=[0, 1]), session.attention(PROMPT, layers=[0, 1], edits=push)
    torch.testing.assert_close(pushed.weights[0], plain.weights[0])
    assert not torch.allclose(pushed.weights[1], plain.weights[1], atol=1e-3)


@pytest.mark.parametrize(("prompt", "options", "error", "says"), [
    (["one", "two"], {}, PromptError, "attention is shown of one prompt, not of 2"),
    ("one", dict(heads=[0, 99]), PointError, "heads [0, 99] were asked for; each layer here has heads 0 to"),
    ("one", dict(layers=[77]), PointError, "layer 77 was asked for"),
    ("one", dict(layers=[1, 1]), EditError, "not distinct"),
    ("one", dict(at=400), PromptError, "at=400 does not fit"),
])
def test_what_is_not_there_is_named(session: mia.Session, prompt: Any, options: dict, error: type, says: str) -> None:
    with pytest.raises(error) as caught:
        session.attention(prompt, **options)
    assert says in str(caught.value)


def test_too_long_a_prompt_is_refused_with_what_to_type(session: mia.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_view, "_MOST_TOKENS", 3)
    with pytest.raises(PromptError, match=r"s\.capture\(prompt, 'pattern'"):
        session.attention(PROMPT)


def test_without_queries_and_keys_it_says_what_to_load(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", points=["resid_post"], max_model_len=128, max_num_seqs=8, block_size=32, enforce_eager=True)
    with pytest.raises(PointError, match=r"points=\[") as caught:
        session.attention("abc")
    assert "is not tapped" in str(caught.value)
