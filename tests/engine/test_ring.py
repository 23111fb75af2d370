"""The pinned ring: everything arrives, in order and unmixed, whatever the sizes and however slow the consumer."""
from __future__ import annotations

import random
import threading
import time

import pytest
import torch

pytestmark = pytest.mark.gpu


def sent(size: int, sizes: list[int], pause: float = 0.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Send random values in one buffer that is used again as soon as its copy is done; return what was sent and what arrived."""
    from mia_lab.engine.ring import Ring

    ring, source = Ring(size, torch.float32, torch.device("cuda")), torch.empty(max(sizes), device="cuda")
    expected, found, left = [], [], None

    def deliver(values: torch.Tensor) -> None:
        time.sleep(pause)
        found.append(values.clone())

    for n in sizes:
        if left is not None:
            torch.cuda.current_stream().wait_event(left)
        source.copy_(torch.randn(len(source), device="cuda"))
        expected.append(source[:n].clone())
        left = ring.send(source[:n], deliver)
    ring.wait()
    return [values.cpu() for values in expected], found


@pytest.mark.parametrize("pause", [0.0, 0.002])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_sent_arrives_in_order(seed: int, pause: float) -> None:
    rng = random.Random(seed)
    expected, found = sent(1000, [rng.randint(1, 700) for _ in range(100)], pause)
    assert len(found) == 100
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_what_is_as_large_as_the_ring_or_larger_arrives_too() -> None:
    expected, found = sent(1000, [1000, 1, 1000, 2500, 999, 1, 4000, 3])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_consumer_that_fails_is_heard_of() -> None:
    from mia_lab.engine.ring import Ring

    ring = Ring(10, torch.float32, torch.device("cuda"))

    def deliver(values: torch.Tensor) -> None:
        raise OSError("the disk is full")

    ring.send(torch.zeros(5, device="cuda"), deliver)
    with pytest.raises(RuntimeError, match="could not be delivered") as caught:
        ring.wait()
    assert isinstance(caught.value.__cause__, OSError)


def test_a_ring_that_is_let_go_ends_its_thread() -> None:
    from mia_lab.engine.ring import Ring

    running = lambda: sum(thread.name == "mia-courier" for thread in threading.enumerate())  # noqa: E731
    before = running()
    ring = Ring(10, torch.float32, torch.device("cuda"))
    assert running() == before + 1
    del ring
    deadline = time.monotonic() + 5
    while running() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running() == before
