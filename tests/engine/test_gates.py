"""Gates that hold: each rule decides what a plain search over all rows says, however they are cut into steps."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mia_lab.engine.config import Sizes
from mia_lab.engine.gates import NEVER, Gates
from mia_lab.engine.tables import Tables
from mia_lab.engine.wire import MAX_GATES, Gate, Spec

TOKENS = 24
POOLED = ("mean", "max", "last")


class Device:
    """Forwards that measure what they are told to, a number for each gate at each position of a request."""

    def __init__(self, requests: int = 4) -> None:
        sizes = Sizes(TOKENS, requests, programs=1, plans=1, terms=1, bank_bytes=8, captured_tokens=1)
        self.tables = Tables([2], [False], sizes, torch.float32, torch.device("cpu"))
        self.gates = Gates(self.tables)

    def step(self, *batch: tuple[str, int, int], measured: torch.Tensor | None = None, ids: list[int] | None = None) -> None:
        """Run rows (request, count, start). measured, ids: by position, the same for every request."""
        names, counts, first = ([part[i] for part in batch] for i in range(3))
        counts, first = np.array(counts), np.array(first)
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(first, counts)])
        tokens = torch.zeros(TOKENS, dtype=torch.int64)
        if ids is not None:
            tokens[: len(positions)] = torch.tensor(ids)[positions]
        self.gates.before_forward(names, counts, first, tokens)
        self.tables.measures.fill_(99.0)  # rows of no request, and of those without gates
        if measured is not None:
            self.tables.measures[: len(positions)] = measured[positions]
        self.gates.after_forward()

    def opens(self, req_id: str, gate: int = 0) -> int:
        return self.tables.opens[self.gates.slots([req_id])[0], gate].item()


def everywhere(values: list[float]) -> torch.Tensor:
    """Measures `[position gate]`, for the first gate; the others measure nothing that could open them."""
    out = torch.full((len(values), MAX_GATES), -9.0)
    out[:, 0] = torch.tensor(values)
    return out


def decided(gate: Gate, values: list[float], ids: list[int]) -> int:
    """The position from which a gate is open, after all rows."""
    rows = values[gate.start : gate.stop]
    passed = [i for i in range(gate.start, len(values)) if values[i] > gate.threshold]
    fed = [i for i in range(gate.start, len(ids)) if ids[i] in gate.tokens]
    return {"mean": lambda: gate.stop if sum(rows) / len(rows) > gate.threshold else NEVER,
            "max": lambda: gate.stop if max(rows) > gate.threshold else NEVER,
            "last": lambda: gate.stop if rows[-1] > gate.threshold else NEVER,
            "since": lambda: passed[0] + 1 if passed else NEVER,
            "token": lambda: fed[0] if fed else NEVER}[gate.rule]()


@pytest.mark.parametrize(("gate", "values", "opens"), [
    (Gate("mean", 0.5, 1, 4), [9.0, 0.0, 0.0, 2.0, 9.0], 4), (Gate("mean", 1.0, 1, 4), [9.0, 0.0, 0.0, 2.0, 9.0], NEVER),
    (Gate("max", 1.5, 1, 4), [9.0, 0.0, 2.0, -3.0, 9.0], 4), (Gate("max", 2.0, 1, 4), [9.0, 0.0, 2.0, -3.0, 9.0], NEVER),
    (Gate("max", -2.0, 1, 4), [9.0, -3.0, -1.0, -3.0, 9.0], 4), (Gate("last", 0.5, 3, 4), [9.0, 9.0, 9.0, 0.0, 9.0], NEVER),
    (Gate("last", -0.5, 3, 4), [-9.0, -9.0, -9.0, 0.0, -9.0], 4), (Gate("since", 0.5, 2), [9.0, 9.0, 0.0, 1.0, 2.0], 4),
    (Gate("since", 0.5, 2), [9.0, 9.0, 1.0, 0.0, 0.0], 3), (Gate("since", 2.5, 2), [9.0, 9.0, 1.0, 0.0, 2.0], NEVER),
])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_gate_is_decided_by_its_rule_whatever_the_chunks(gate: Gate, values: list[float], opens: int, size: int) -> None:
    assert decided(gate, values, []) == opens
    device = Device()
    device.gates.take("r", Spec((), (), (gate,)))
    assert device.opens("r") == NEVER
    for start in range(0, 5, size):
        device.step(("r", min(size, 5 - start), start), measured=everywhere(values))
    assert device.opens("r") == opens


@pytest.mark.parametrize("rule", POOLED)
def test_a_gate_stays_shut_until_its_last_row_is_there(rule: str) -> None:
    device = Device()
    device.gates.take("r", Spec((), (), (Gate(rule, 0.5, 1 if rule != "last" else 5, 6),)))
    device.step(("r", 5, 0), measured=everywhere([1.0] * 8))
    assert device.opens("r") == NEVER
    device.step(("r", 1, 5), measured=everywhere([1.0] * 8))
    assert device.opens("r") == 6
    device.step(("r", 2, 6), measured=everywhere([-50.0] * 8))
    assert device.opens("r") == 6


def test_a_token_opens_its_gate_before_the_forward_of_its_row() -> None:
    device = Device()
    device.gates.take("r", Spec((), (), (Gate("token", 0.0, 2, 0, (7, 8)),)))
    ids = [7, 7, 3, 8, 7]
    for batch, opens in [(("r", 3, 0), NEVER), (("r", 1, 3), 3), (("r", 1, 4), 3)]:
        device.step(batch, ids=ids)
        assert device.opens("r") == opens
    at_once = Device()
    at_once.gates.take("r", Spec((), (), (Gate("token", 0.0, 2, 0, (7, 8)),)))
    at_once.step(("x", 3, 0), ("r", 5, 0), ids=ids)
    assert at_once.opens("r") == 3


def test_a_mean_over_rows_that_were_missed_is_an_error() -> None:
    device = Device()
    device.gates.take("r", Spec((), (), (Gate("mean", 0.5, 1, 6),)))
    device.step(("r", 3, 0), measured=everywhere([1.0] * 8))
    with pytest.raises(RuntimeError, match="a gate over rows 1 to 6 missed those before 4"):
        device.step(("r", 2, 4), measured=everywhere([1.0] * 8))


@pytest.mark.parametrize("gate", [Gate("mean", 0.5, 1, 6), Gate("max", 0.5, 1, 6), Gate("last", 0.5, 5, 6), Gate("since", 0.5, 5)])
def test_a_request_that_is_computed_again_keeps_what_was_decided(gate: Gate) -> None:
    device = Device()
    device.gates.take("r", Spec((), (), (gate,)))
    device.step(("r", 6, 0), measured=everywhere([1.0] * 8))
    assert device.opens("r") == 6
    for batch in [("r", 3, 0), ("r", 4, 3)]:  # rounding may differ the second time
        device.step(batch, measured=everywhere([0.0] * 8))
    assert device.opens("r") == 6


@pytest.mark.parametrize("rule", ["mean", "max"])
def test_a_request_that_is_preempted_in_the_middle_pools_from_the_start(rule: str) -> None:
    device = Device()
    device.gates.take("r", Spec((), (), (Gate(rule, 0.5, 1, 6),)))
    device.step(("r", 4, 0), measured=everywhere([50.0] * 8))
    for batch in [("r", 2, 0), ("r", 4, 2)]:
        device.step(batch, measured=everywhere([0.0] * 8))
    assert device.opens("r") == NEVER


def test_a_step_that_was_broken_off_decides_nothing() -> None:
    device = Device()
    device.gates.take("r", Spec((), (), (Gate("since", 0.5, 0),)))
    device.gates.before_forward(["r"], np.array([3]), np.array([0]), torch.zeros(TOKENS, dtype=torch.int64))
    device.gates.recover()
    device.tables.measures.fill_(1.0)
    device.gates.after_forward()
    assert device.opens("r") == NEVER


def test_each_gate_of_a_request_is_decided_by_its_own_measures() -> None:
    device = Device()
    gates = (Gate("row", 0.5), Gate("max", 0.5, 0, 3), Gate("since", 0.5, 1), Gate("token", 0.0, 2, 0, (4,)))
    device.gates.take("r", Spec((), (), gates))
    measured = torch.zeros(5, MAX_GATES)
    measured[:, 0], measured[1, 1], measured[3, 2] = 9.0, 1.0, 1.0
    device.step(("r", 5, 0), measured=measured, ids=[4, 4, 0, 0, 4])
    assert [device.opens("r", gate) for gate in range(4)] == [NEVER, 3, 4, 4]


def test_slots_are_given_to_requests_with_gates_that_hold_and_freed_with_them() -> None:
    device = Device(requests=2)
    held, per_row = Spec((), (), (Gate("since", 0.5, 0),)), Spec((), (), (Gate("row", 0.5),))
    for name, spec in (("a", held), ("b", held), ("c", per_row), ("d", Spec())):
        device.gates.take(name, spec)
    a, b, c, d, e = device.gates.slots(["a", "b", "c", "d", "unknown"]).tolist()
    assert {a, b} == {0, 1}
    assert c == d == e == 0
    with pytest.raises(RuntimeError, match="all 2 places for gated requests are in use"):
        device.gates.take("f", held)
    device.step(("a", 2, 0), ("b", 2, 0), measured=everywhere([1.0] * 2))
    assert device.opens("a") == 1
    for name in ("a", "c", "d", "unknown"):
        device.gates.release(name)
    device.gates.take("f", held)
    assert device.gates.slots(["f"]).tolist() == [a]
    assert device.opens("f") == NEVER
    assert device.opens("b") == 1


@pytest.mark.parametrize("seed", range(10))
def test_random_steps_decide_what_a_search_over_all_rows_says(seed: int) -> None:
    rng, device = random.Random(seed), Device(requests=6)
    length = 16
    ids, requests, done = [rng.randrange(6) for _ in range(length)], {}, {}
    values = [[rng.uniform(-1, 1) for _ in range(length)] for _ in range(MAX_GATES)]
    for i in range(6):
        gates = []
        for rule in rng.choices(["mean", "max", "last", "since", "token"], k=rng.randint(1, MAX_GATES)):
            stop = rng.randint(2, length)
            start = stop - 1 if rule == "last" else rng.randrange(stop)
            gates.append(Gate(rule, rng.uniform(-0.3, 0.6), start, stop if rule in POOLED else 0, (1, 5) if rule == "token" else ()))
        requests[f"r{i}"], done[f"r{i}"] = gates, 0
        device.gates.take(f"r{i}", Spec((), (), tuple(gates)))
    measured = torch.tensor(values).T.contiguous()
    while any(n < length for n in done.values()):
        batch, room = [], TOKENS
        for name in rng.sample(list(done), rng.randint(1, 6)):
            if rng.random() < 0.1:
                done[name] = 0  # preempted: it starts again
            count = min(room, length - done[name], rng.choice([1, 2, 5]))
            if count:
                batch.append((name, count, done[name]))
                done[name] += count
                room -= count
        if batch:
            device.step(*batch, measured=measured, ids=ids)
    for name, gates in requests.items():
        for i, gate in enumerate(gates):
            assert device.opens(name, i) == decided(gate, values[i], ids), (name, gate)


def test_decisions_are_counted_once_their_request_has_ended() -> None:
    device, spec = Device(), Spec((), (), (Gate("mean", 0.5, 0, 3), Gate("row"), Gate("token", 0.0, 0, 0, (7,))))
    for name in "abc":
        device.gates.take(name, spec)
    device.step(("a", 3, 0), measured=everywhere([1.0] * 3), ids=[7, 0, 0])  # both open
    device.step(("b", 3, 0), measured=everywhere([0.0] * 3), ids=[0, 0, 0])  # neither
    device.step(("c", 2, 0), measured=everywhere([1.0] * 2), ids=[0, 7])  # the second; the first is not decided yet
    assert device.gates.decisions() == (0, 0)
    for name, found in zip("abc", [(2, 0), (2, 2), (3, 2)]):
        device.gates.release(name)
        device.gates.release(name)
        assert device.gates.decisions() == found
    device.gates.take("d", spec)  # in a slot that was used
    device.gates.release("d")
    assert device.gates.decisions() == (3, 3)
