"""How a request that captures ends, by itself: what is noted of its room, and what is let go of."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mia_lab.points import Point
from mia_lab.running.compile import Model
from mia_lab.serve.asking import Resolved, Rows
from mia_lab.serve.call import Call
from mia_lab.serve.policy import EVERYONE, Policy
from mia_lab.serve.refusing import Refused
from mia_lab.serve.running import Compiler, _Request, _running, uid_of

POINT = Point("resid_post", 0)
ASKED = Resolved((), (), {}, (Rows(POINT, "last", False),), None, "all")


def output(finished: bool, reason: str | None = None, stop: str | None = None) -> Any:
    return SimpleNamespace(finished=finished, outputs=[SimpleNamespace(finish_reason=reason, stop_reason=stop)])


def run(outputs: list[Any], read: int) -> tuple[set[str], set[str], list[Any]]:
    """What a call knows of captures that ended and that run, and what the engine was asked, after so many outputs were read."""
    asked: list[Any] = []

    async def nothing(*args: Any) -> None:
        pass

    async def generate(*args: Any) -> AsyncIterator[Any]:
        for one in outputs:
            yield one

    service = SimpleNamespace(
        model=Model(1, {POINT: (4,)}, frozenset([POINT])), tokenizer=SimpleNamespace(bos_token_id=None),
        settings=SimpleNamespace(max_len=16), row_bytes=lambda site, reduced: 16, generate=generate,
        in_flight=SimpleNamespace(held=lambda *args: nullcontext()), vectors=SimpleNamespace(hold=nothing, release=nothing),
        metrics=SimpleNamespace(began=lambda what: None, ended=lambda what: None),
        rpc=lambda *args: args, later=lambda work: asked.append(work) if isinstance(work, tuple) else work.close())
    service.compiled = Compiler(service)
    call = Call(EVERYONE, SimpleNamespace(policy=Policy.open(), digest="d"), service)

    async def main() -> None:
        request = _Request(ASKED, {}, [1, 2], SimpleNamespace(max_tokens=2, extra_args=None), "r", "handle")
        running = _running(service, call, request, {})
        for _ in range(read):
            await anext(running)
        await running.aclose()

    try:
        asyncio.run(main())
    except Refused as refusal:
        asked.append(refusal.status)
    return call.ended, call.running, asked


@pytest.mark.parametrize(("outputs", "read", "ended", "asked"), [
    ([output(False), output(True, "length")], 2, True, []),
    ([output(False), output(True, "length")], 1, False, ["drop"]),
    ([output(True, "error", "mia_lab RoomError there is no room")], 1, False, [429]),  # the engine holds nothing of it
])
def test_what_is_left_of_a_capture(outputs: list[Any], read: int, ended: bool, asked: list[Any]) -> None:
    uid = uid_of(EVERYONE.tenant, "handle")
    assert run(outputs, read) == ({uid} if ended else set(), set(), [("drop", [uid]) if one == "drop" else one for one in asked])
