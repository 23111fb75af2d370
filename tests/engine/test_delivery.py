"""Delivery when the host is slow: nobody new is admitted and nothing is lost, or, where asked for, rows are dropped and missed."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.engine.courier import Courier
from mia_lab.errors import MiaError, MissingRowsError

pytestmark = pytest.mark.full
OPTIONS = dict(points=["resid_post"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32, enforce_eager=True)
PROMPTS = [f"prompt number {i}" for i in range(4)]


class SlowRing:
    """A ring on the CPU that has room for every other step only, and hands over what it takes when it is waited for."""

    congested = False

    def __init__(self) -> None:
        self.asked = 0
        self.waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []

    def send(self, source: torch.Tensor, deliver: Callable[[torch.Tensor], None], wait: bool = True) -> object | None:
        self.asked += 1
        if not wait and self.asked % 2 == 0:
            return None
        self.waiting.append((source.clone(), deliver))
        return object()

    def wait(self) -> None:
        for values, deliver in self.waiting:
            deliver(values)
        self.waiting.clear()


def courier_of(session: mia.Session) -> Courier:
    return session._engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.mia_fetch.__self__._courier


def scheduler_of(session: mia.Session) -> Any:
    return session._engine.llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture
def congestion(open_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> tuple[mia.Session, dict[str, bool]]:
    state = {"congested": False}
    monkeypatch.setattr(Courier, "congested", property(lambda self: state["congested"]))
    return open_tiny("llama", **OPTIONS), state


def test_while_the_host_is_behind_those_who_run_go_on_and_nobody_else_begins(congestion: tuple) -> None:
    session, state = congestion
    engine, scheduler, read = session._engine.llm.llm_engine, scheduler_of(session), session._read(PROMPTS)
    takes = [[mia_take(layer, len(ids)) for layer in range(session.n_layers)] for ids in read.ids]
    params, uids = session._submit.prepare(read, [[]] * 4, {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}, takes)
    engine.add_request("first", {"prompt_token_ids": read.ids[0]}, params[0])
    engine.step()
    for i in (1, 2, 3):
        engine.add_request(f"late-{i}", {"prompt_token_ids": read.ids[i]}, params[i])
    state["congested"] = True
    said = [len(engine.step()[0].outputs[0].token_ids) for _ in range(4)]
    assert said == [said[0] + i for i in range(4)]  # the first goes on, a token a step
    assert [request.request_id.split("-")[0] for request in scheduler.running] == ["first"]
    state["congested"] = False
    engine.step()
    assert len(scheduler.running) == 4
    while engine.has_unfinished_requests():
        engine.step()
    courier = courier_of(session)
    for uid, ids in zip(uids, read.ids):
        assert courier.rows(uid, 0)[0].tolist() == list(range(len(ids)))
        courier.drop(uid)


def mia_take(layer: int, n: int) -> Any:
    from mia_lab.engine.wire import Take

    return Take("resid_post", layer, ((0, n),))


@pytest.mark.parametrize("delivery", ["complete", "best_effort"])
def test_a_ring_without_room_loses_nothing_unless_that_was_asked_for(open_tiny: Callable[..., Any], delivery: str,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_tiny("llama", **OPTIONS, delivery=delivery)
    expected = session.capture(PROMPTS, layers=1, at=None).get()
    courier, ring = courier_of(session), SlowRing()
    monkeypatch.setattr(courier, "_ring", ring)
    monkeypatch.setattr(courier._store, "take_again", lambda size, dtype: None)  # all go through the ring
    monkeypatch.setattr(courier, "before_forward", lambda step: None)  # it waits for events of a device
    before = session.dropped
    kept = session.capture(PROMPTS, layers=1, at=None)
    ring.wait()
    if delivery == "complete":
        torch.testing.assert_close(kept.get(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert session.dropped == before == 0
        return
    again = session.capture(PROMPTS, layers=1, at=None)
    ring.wait()
    lost = [missing(found) for found in (kept, again)]  # a step in two was dropped
    assert any(lost)
    assert session.dropped > before
    for found, gone in zip((kept, again), lost):
        assert gone or torch.allclose(found.get(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def missing(found: Any) -> bool:
    try:
        found.get()
    except MissingRowsError:
        return True
    return False


def test_another_policy_is_refused() -> None:
    with pytest.raises(MiaError, match='"complete" or "best_effort", not \'lossy\''):
        mia.Session("demo", delivery="lossy")
