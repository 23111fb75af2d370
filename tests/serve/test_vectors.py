"""Vectors are sent once, kept while a request uses them, and let go by age."""
from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from mia_lab.serve.vectors import Vectors

ROW = torch.ones(1, 4)  # 16 bytes


class Worker:
    """What a worker would hold, and how often it was told."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.calls: list[tuple[str, list[str]]] = []
        self.fails = False

    async def __call__(self, method: str, shas: Any, owner: str) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("the engine is gone")
        assert owner == "me"
        self.calls.append((method, sorted(shas)))
        self.held = self.held | set(shas) if method == "register" else self.held - set(shas)


def test_what_is_used_is_held_and_the_oldest_goes() -> None:
    async def main() -> None:
        worker = Worker()
        vectors = Vectors(worker, "me", room=32)
        await vectors.hold({"a": ROW})
        await vectors.hold({"a": ROW, "b": ROW})
        assert worker.calls == [("register", ["a"]), ("register", ["b"])]
        await vectors.release(["a", "b"])
        await vectors.hold({"c": ROW})
        await vectors.release(["c"])  # three take more than the room; "a" is still used, and "b" was used longest ago
        assert worker.held == {"a", "c"}
        await vectors.hold({"b": ROW})
        assert worker.held == {"a", "b", "c"}

    asyncio.run(main())


def test_requests_at_once_wait_for_one_another() -> None:
    """Nobody goes on before what it names is there, and nothing is sent twice."""
    async def main() -> None:
        worker = Worker()
        vectors = Vectors(worker, "me", room=0)

        async def request(name: str) -> None:
            await vectors.hold({name: ROW})
            assert name in worker.held
            await asyncio.sleep(0)
            assert name in worker.held
            await vectors.release([name])

        for _ in range(5):
            await asyncio.gather(*(request(name) for name in "aabbcab"))
            assert not worker.held  # there is no room for what nobody uses

    asyncio.run(main())


def test_what_was_sent_for_one_who_went_away_is_let_go_in_its_time() -> None:
    async def main() -> None:
        worker = Worker()
        vectors = Vectors(worker, "me", room=0)
        asked = asyncio.create_task(vectors.hold({"a": ROW}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        for _ in range(9):
            await asyncio.sleep(0)
        assert worker.held == {"a"}
        await vectors.release([])
        assert not worker.held and worker.calls == [("register", ["a"]), ("forget", ["a"])]

    asyncio.run(main())


def test_what_could_not_be_sent_is_not_believed_to_be_there() -> None:
    async def main() -> None:
        worker = Worker()
        vectors, worker.fails = Vectors(worker, "me"), True
        with pytest.raises(RuntimeError, match="gone"):
            await vectors.hold({"a": ROW})
        worker.fails = False
        await vectors.hold({"a": ROW})
        assert worker.held == {"a"}

    asyncio.run(main())
