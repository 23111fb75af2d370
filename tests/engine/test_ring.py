"""The ring: everything arrives, in order and unmixed, whatever the sizes and however slow the consumer."""
from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from mia_lab.engine.ring import Ring

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sent(device: str, size: int, sizes: list[int], pause: float = 0.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Send random values in one buffer that is used again as soon as its copy is done; return what was sent and what arrived."""
    ring, source = Ring(size, torch.float32, torch.device(device)), torch.empty(max(sizes), device=device)
    expected, found, left = [], [], None

    def deliver(values: torch.Tensor) -> None:
        time.sleep(pause)
        found.append(values.clone())

    for n in sizes:
        if isinstance(left, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(left)
        source.copy_(torch.randn(len(source), device=device))
        expected.append(source[:n].clone())
        left = ring.send(source[:n], deliver)
    ring.wait()
    return [values.cpu() for values in expected], found


@pytest.mark.parametrize("pause", [0.0, 0.002])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_arrives_in_order(device: str, seed: int, pause: float) -> None:
    rng = random.Random(seed)
    expected, found = sent(device, 1000, [rng.randint(1, 700) for _ in range(100)], pause)
    assert len(found) == 100
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_as_large_as_the_ring_or_larger_arrives_too(device: str) -> None:
    expected, found = sent(device, 1000, [1000, 1, 1000, 2500, 999, 1, 4000, 3])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_consumer_that_fails_is_heard_of(device: str) -> None:
    ring = Ring(10, torch.float32, torch.device(device))

    def deliver(values: torch.Tensor) -> None:
        raise OSError("the disk is full")

    ring.send(torch.zeros(5, device=device), deliver)
    with pytest.raises(RuntimeError, match="could not be delivered") as caught:
        ring.wait()
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("device", DEVICES)
def test_a_ring_without_room_says_so_and_is_congested_when_it_is_half_full(device: str) -> None:
    ring, gate, found = Ring(10, torch.float32, torch.device(device)), threading.Event(), []

    def deliver(values: torch.Tensor) -> None:
        gate.wait(10)
        found.append(values.tolist())

    source = torch.arange(30.0, device=device)
    assert ring.send(source[:5], deliver, wait=False) is not None and not ring.congested
    assert ring.send(source[5:9], deliver, wait=False) is not None and ring.congested
    assert ring.send(source[9:12], deliver, wait=False) is None
    assert ring.send(source, deliver, wait=False) is None  # larger than the ring, and the host is behind
    gate.set()
    ring.wait()
    assert not ring.congested and ring.send(source, deliver, wait=False) is not None
    ring.wait()
    assert found == [source[:5].tolist(), source[5:9].tolist(), source.tolist()]


@pytest.mark.parametrize("device", DEVICES)
def test_what_lands_past_the_ring_is_there_after_waiting_and_takes_no_room(device: str) -> None:
    ring, gate, found = Ring(10, torch.float32, torch.device(device)), threading.Event(), []

    def deliver(values: torch.Tensor) -> None:
        gate.wait(10)
        found.append(values.tolist())

    source, place = torch.arange(40.0, device=device), torch.empty(30)
    ring.send(source[:5], deliver, wait=False)
    ring.land(source[:30], place)
    assert not ring.congested
    assert ring.send(source[30:34], deliver, wait=False) is not None
    gate.set()
    ring.wait()
    assert found == [source[:5].tolist(), source[30:34].tolist()]
    assert torch.equal(place, torch.arange(30.0))


@pytest.mark.parametrize("device", DEVICES)
def test_a_ring_that_is_let_go_ends_its_thread(device: str) -> None:
    before = set(threading.enumerate())
    ring = Ring(10, torch.float32, torch.device(device))
    (thread,) = (thread for thread in threading.enumerate() if thread not in before and thread.name == "mia-courier")
    del ring
    thread.join(10)
    assert not thread.is_alive()
