"""Memory for delivered rows: pieces that live never overlap, and what is let go is used again."""
from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from mia_lab.engine import store
from mia_lab.engine.store import Store

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SLAB_BYTES", 4096)


def test_pieces_hold_what_was_put_into_them_however_they_come_and_go() -> None:
    rng, memory = random.Random(0), Store(CPU)
    held: list[tuple[float, torch.Tensor]] = []
    for i in range(400):
        piece = memory.take(rng.choice([1, 7, 100, 900, 3000]), rng.choice([torch.float32, torch.bfloat16]))
        piece.fill_(i % 251)
        held.append((i % 251, piece[len(piece) // 2 :]))  # a view keeps the piece
        while len(held) > rng.randint(0, 12):
            held.pop(rng.randrange(len(held)))
        assert all((piece == value).all() for value, piece in held)


def test_a_slab_is_used_again_once_nothing_of_it_is_left() -> None:
    memory = Store(CPU)
    first = memory.take(1024, torch.float32)
    address, view = first.data_ptr(), first[:3].view(torch.int32)
    del first
    gc.collect()
    other = memory.take(1024, torch.float32)
    assert other.data_ptr() != address  # the view still lives
    del view
    gc.collect()
    assert memory.take(1024, torch.float32).data_ptr() == address


def test_what_is_larger_than_a_slab_gets_one_of_its_own() -> None:
    memory = Store(CPU)
    large = memory.take(100_000, torch.float32)
    assert len(large) == 100_000
    large.fill_(1.0)
    address = large.data_ptr()
    del large
    gc.collect()
    assert memory.take(90_000, torch.float32).data_ptr() == address


def test_memory_that_nobody_uses_is_kept_only_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_KEPT_BYTES", 3 * 4096)
    memory = Store(CPU)
    held = [memory.take(1024, torch.float32) for _ in range(10)]
    held.clear()
    gc.collect()
    assert sum(len(slab.memory) for slab in memory._free) == 3 * 4096


def test_threads_may_take_at_once() -> None:
    memory, wrong = Store(CPU), []

    def work(value: int) -> None:
        for _ in range(200):
            piece = memory.take(100, torch.float32)
            piece.fill_(value)
            if not (piece == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_land_in_memory_that_was_used_before_and_only_there() -> None:
    memory = Store(CPU)
    assert memory.take_again(10, torch.float32) is None
    first = memory.take(1024, torch.float32)
    address = first.data_ptr()
    del first
    gc.collect()
    again = memory.take_again(512, torch.float32)
    assert again.data_ptr() == address
    assert memory.take_again(512, torch.float32).data_ptr() == address + 2048
    assert memory.take_again(2000, torch.float32) is None  # no slab is as large


@pytest.mark.gpu
def test_memory_that_comes_back_is_pinned() -> None:
    torch.zeros(1, device="cuda")
    memory = Store(torch.device("cuda"))
    piece = memory.take(1024, torch.float32)
    assert not piece.is_pinned()
    del piece
    gc.collect()
    again = memory.take_again(1024, torch.float32)
    assert again.is_pinned()
    again.copy_(torch.arange(1024.0, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(again, torch.arange(1024.0))


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 40_001])
def test_several_threads_copy_what_one_would(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(store, "_COPIERS", 4)
    source, target = torch.randn(size), torch.empty(size)
    store.copy(target, source)
    assert torch.equal(source, target)
