"""The parity checks fail when the engine is wrong: each fault is planted, and must be seen."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import mia_lab as mia
from mia_lab.engine import cachekey, router, worker
from mia_lab.errors import ProofError
from mia_lab.running import proof
from parity import scenario
from parity.test_prefix_cache import cached_and_checked, edit, fresh_prompt

pytestmark = pytest.mark.full

EAGER = scenario.TIGHT | dict(enforce_eager=True, num_gpu_blocks_override=64)


@pytest.fixture
def model(models: Path) -> Any:
    return tiny.load(tiny.build("llama", models)).double()


def errors(session: mia.Session, model: Any) -> tuple[float, float]:
    return scenario.compare(scenario.run(session, scenario.requests(session)), model, session.tapped)


def test_without_a_cache_fork_the_prefix_check_fails(open_tiny: Callable[..., Any], model: Any,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_tiny("llama", points=["resid_post", "attn_out"], **EAGER)
    monkeypatch.setattr(cachekey, "block_key", lambda spec, start, end: None)
    ids = fresh_prompt(11)
    cached_and_checked(session, model, ids, [edit(session, 1)])
    with pytest.raises(AssertionError, match="differs from Hugging Face"):
        cached_and_checked(session, model, ids, [])


def test_a_row_shifted_by_one_is_seen(open_tiny: Callable[..., Any], model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_tiny("llama", points=scenario.all_kinds(), **EAGER)
    assert errors(session, model)[0] <= 1e-5
    route = router.Router.route
    monkeypatch.setattr(router.Router, "route", lambda self, ids, counts, starts, tokens: route(self, ids, counts, starts + 1, tokens))
    with pytest.raises(AssertionError, match="has rows"):
        errors(session, model)


def test_values_of_the_neighbouring_row_are_seen(open_tiny: Callable[..., Any], model: Any,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_tiny("llama", points=scenario.all_kinds(), **EAGER)
    capture = router.Router._capture

    def rolled(self: router.Router, table: Any, *args: Any) -> Any:
        step = capture(self, table, *args)
        if step is not None:
            taken = table[:, 1] >= 0
            table[taken, 2] = table[taken, 2][[*range(1, taken.sum()), 0]]
        return step

    monkeypatch.setattr(router.Router, "_capture", rolled)
    assert errors(session, model)[0] > 1e-2


def test_steering_lost_on_decode_is_seen(open_tiny: Callable[..., Any], model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_tiny("llama", points=scenario.all_kinds(), **EAGER)
    capture = router.Router._capture

    def forgetful(self: router.Router, table: Any, batch: Any, *rest: Any) -> Any:
        table[batch.rows[np.bincount(batch.owner)[batch.owner] == 1], 0] = router.NEUTRAL
        return capture(self, table, batch, *rest)

    monkeypatch.setattr(router.Router, "_capture", forgetful)
    row, logprob = errors(session, model)
    assert row > 1e-2
    assert logprob > 1e-2
    with pytest.raises(ProofError, match="decode"):
        proof.prove(session)


def test_half_a_residual_is_seen(models: Path, open_tiny: Callable[..., Any], model: Any,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    original = worker.discover

    def without_pair(*args: Any) -> Any:
        layout = original(*args)
        layout.places = {key: replace(place, at=replace(place.at, pair=False)) if key[0] == "resid_post" else place
                         for key, place in layout.places.items()}
        layout.carriers = {}
        return layout

    monkeypatch.setattr(worker, "discover", without_pair)
    session = open_tiny("llama", points=scenario.all_kinds(), **EAGER, seed=1)
    assert errors(session, model)[0] > 1e-2
