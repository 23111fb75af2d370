"""A bias on a span of keys: log-probabilities and every row against Hugging Face with the same scores biased."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.errors import EditError
from mia_lab.points import Point
from parity import scenario, zoo

pytestmark = pytest.mark.full


@pytest.fixture(params=["llama", "gemma3", "gptoss", "gemma2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    return open_tiny(family, **scenario.EVERYTHING | dict(max_biased_tokens=1024, num_gpu_blocks_override=24))


def test_shares_and_biases(session: mia.Session, model: Any) -> None:
    """Window, softcap and sinks among the families; prompts longer than a step, prefix cache on, some preempted."""
    animals = zoo.Zoo(session)
    layers = list(range(session.n_layers))
    probe, readings = animals.probe(Point("resid_post", 0))
    gate = mia.Gate(probe, above=float(readings.median()))
    span = mia.window(3, 9)
    edits = [
        [mia.AttentionBias(span, share=0.6, layers=layers)],
        [mia.AttentionBias(span, bias=2.0, layers=layers, heads=[1, 3])],
        [mia.AttentionBias(mia.window(5, 30), share=0.3, layers=[1], where=mia.generated()), animals.edits(Point("resid_post", 1))["add"]],
        [mia.AttentionBias(span, bias=-3.0, layers=[0, 2], where=mia.last())],
        [mia.AttentionBias(span, share=0.5, layers=[1, 2], when=gate), animals.edits(Point("z", 1))["scale heads"]],
        [mia.AttentionBias(span, share=0.9, layers=layers, when=mia.After(list(range(100, 160))))],
        [],
    ]
    batch = [scenario.Request(ids, mine) for ids, mine in zip(scenario.prompts(len(edits), 4), edits)]
    scenario.check(session, model, batch)


def test_a_share_is_reached_exactly(session: mia.Session) -> None:
    ids = scenario.prompts(2, 5)
    edit = mia.AttentionBias(mia.window(2, 6), share=0.4, layers=[1])
    before = session.capture(ids, "pattern", layers=1, at=-1, reduce=mia.Mass(mia.window(2, 6)))
    z = session.capture(ids, "z", layers=1, at=-1, edits=[edit])
    plain = session.capture(ids, "z", layers=1, at=-1)
    raised = (before > 0) & (before < 0.4)
    assert raised.any()
    assert ((z.get() - plain.get()).norm(dim=-1) > 1e-4).equal(raised)


def test_what_cannot_be_biased_says_so(session: mia.Session, open_tiny: Callable[..., Any], family: str) -> None:
    ids = scenario.prompts(1, 6)
    inside = mia.AttentionBias(mia.window(2, 5), share=0.5, layers=[1])
    with pytest.raises(EditError, match="without the AttentionBias that acts at layer 1"):
        session.capture(ids, "pattern", edits=[inside])
    _, cache = session.run_with_cache(ids, ["q", "k"], edits=[inside])
    assert torch.isfinite(cache["pattern", 0].get()).all()
    with pytest.raises(EditError, match="without the AttentionBias"):
        cache["pattern", 1]
    with pytest.raises(EditError, match="one run"):
        session.generate(ids, edits=[mia.AttentionBias(mia.positions([2, 5]), share=0.5, layers=[1])])
    with pytest.raises(EditError, match="head 9"):
        session.generate(ids, edits=[mia.AttentionBias(mia.window(2, 5), share=0.5, layers=[1], heads=[9])])
    with pytest.raises(EditError, match="two attention biases"):
        session.generate(ids, edits=[mia.AttentionBias(mia.window(2, 5), share=0.5, layers=[1])] * 2)
    with pytest.raises(EditError, match="max_biased_tokens"):
        session.generate(ids * 40, max_tokens=150, edits=[mia.AttentionBias(mia.window(2, 5), share=0.5, layers=[1])])
    assert torch.isfinite(session.capture(ids, at=-1).get()).all()
