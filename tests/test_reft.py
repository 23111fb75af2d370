"""LoReFT: what is trained in Hugging Face's model acts in the engine as it did there."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.errors import EditError, MiaError

pytestmark = pytest.mark.full
EXAMPLES = [([1, 40, 50, 60 + i], [90 + i, 17]) for i in range(4)] + [([1, 33, 21, 77, 45, 12, 9], [30, 31, 32])]


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    return open_tiny(family, max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32, enforce_eager=True)


@pytest.fixture
def model(models: Path, family: str) -> Any:
    return tiny.load(tiny.build(family, models)).requires_grad_(False)


@pytest.mark.parametrize(("family", "where"), [("llama", mia.everywhere()), ("llama", mia.last()), ("gemma3", None)], indirect=["family"])
def test_a_fit_is_learnt_and_acts_in_the_engine_as_where_it_was_trained(session: mia.Session, model: Any, where: Any) -> None:
    fit = session.reft(EXAMPLES, layer=1, rank=2, where=where, steps=20, batch=5, learning_rate=0.05, model=model)
    print(fit)
    assert fit.after < fit.before - 0.5 and len(fit.data) == 20
    assert fit.engine == pytest.approx(fit.after, abs=1e-4)
    assert fit.losses[0] == pytest.approx(fit.before, abs=1e-5)  # it starts from the model as it is
    rotation = fit.edit.write
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_after_a_fit_prompts_are_answered_as_they_were_taught(session: mia.Session, model: Any) -> None:
    fit, again = (session.reft(EXAMPLES, layer=3, rank=4, steps=60, batch=5, learning_rate=0.05, model=model) for _ in range(2))
    assert again.losses == fit.losses and again.edit == fit.edit
    prompts = [ids for ids, _ in EXAMPLES]
    outputs = session.completions(prompts, max_tokens=1, edits=[fit.edit])
    taught = [list(o.outputs[0].token_ids) == answer[:1] for o, (_, answer) in zip(outputs, EXAMPLES)]
    clean = [list(o.outputs[0].token_ids) == answer[:1] for o, (_, answer) in zip(session.completions(prompts, max_tokens=1), EXAMPLES)]
    print(f"taught {sum(taught)} of 5, without the edit {sum(clean)}")
    assert all(taught) and not any(clean)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_what_cannot_be_fitted_says_so(session: mia.Session, model: Any) -> None:
    for arguments, says in (
        (dict(examples=[]), "there is none"), (dict(examples=[([1, 2], [])]), "has 0 tokens"), (dict(layer=9), "tapped layer"),
        (dict(rank=0), "rank 1 to 128"), (dict(steps=0), "one or more steps"),
        (dict(where=mia.window(20, 30) & mia.prompt()), "selects no")):
        with pytest.raises(EditError, match=says):
            session.reft(**dict(examples=EXAMPLES, layer=1, model=model) | arguments)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight *= 3.0
    with pytest.raises(MiaError, match="in the engine; are the weights there the same"):
        session.reft(EXAMPLES, layer=1, steps=2, model=model)
