"""A batch of streamed completions over HTTP, as a client meets them, and when what came.

What is timed is what production sees: sockets, HTTP, the server's reading of JSON, its scheduling, and an event of JSON a token. What
the client itself does is kept apart: bodies are encoded before the clock starts, and events are read after it stops; while it runs,
this process only notes which bytes came when.
"""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from ..errors import ServerError
from ..serve.front import CAPTURE
from .cases import Work
from .drive import Run
from .servers import Server

if TYPE_CHECKING:
    from aiohttp import ClientSession

_SILENCE_SECONDS = 600
_BUFFER = 1 << 20

Block = tuple[float, bytes]  # when bytes came, and which


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer. headers: by names in small letters; tokens: all that were said; times: when tokens came, in seconds, and how
    many; captured: the safetensors file of its capture, b"" where it has none."""

    headers: Mapping[str, str]
    tokens: tuple[int, ...]
    times: tuple[tuple[float, int], ...]
    captured: bytes = b""


@dataclass(frozen=True, slots=True)
class Load:
    """Answers to prompts that were sent at once, in their order; when that was, and when the last answer and capture was there."""

    answers: tuple[Answer, ...]
    start: float
    end: float

    def times(self) -> Run:
        """What a client measures; step_ms is the median time from token to token in a stream once every stream has begun. ServerError
        where every stream came as a whole."""
        firsts, tpot, steps = [], [], []
        everyone = max(answer.times[0][0] for answer in self.answers)
        if all(len(answer.times) == 1 for answer in self.answers):
            raise ServerError(f"{len(self.answers[0].tokens)} tokens came at once, so the time from one to the next is not known; ask for "
                              f"more tokens, or take a larger model")
        for answer in self.answers:
            (first, _), (last, _) = answer.times[0], answer.times[-1]
            firsts.append(first - self.start)
            tpot.append((last - first) / (len(answer.tokens) - 1))
            gaps = [(before, (now - before) / n) for (before, _), (now, n) in pairwise(answer.times)]
            steps += [gap for before, gap in gaps if before >= everyone] or [gap for _, gap in gaps]
        return Run([], 1e3 * median(steps), 1e3 * mean(tpot), 1e3 * mean(firsts), self.end - self.start)


def load(server: Server, work: Work, prompts: Sequence[list[int]], asks: Sequence[Mapping[str, Any]] = ()) -> Load:
    """Send all prompts at once, each with what it asks of mia_lab, and wait for all answers, and for what they captured.

    A capture is fetched as soon as its answer ended, before the load's end, and let go of after it. ServerError where the server refuses
    or breaks off.
    """
    fields = work.sampling | {"model": server.name, "stream": True, "return_token_ids": True}
    said = [{"vllm_xargs": {"mia_lab": json.dumps(ask)}} if ask else {} for ask in asks] or [{}] * len(prompts)
    bodies = [json.dumps({"prompt": prompt, **fields, **ask}).encode() for prompt, ask in zip(prompts, said, strict=True)]
    return asyncio.run(_all(server, bodies))


def read(blocks: Sequence[Block], headers: Mapping[str, str], captured: bytes = b"") -> Answer:
    """The answer that a stream's bytes are; ServerError for one that breaks off or says an error."""
    tokens: list[int] = []
    times: list[tuple[float, int]] = []
    rest, done = b"", False
    for now, block in blocks:
        *events, rest = (rest + block).split(b"\n\n")
        before = len(tokens)
        for event in events:
            done = done or event == b"data: [DONE]"
            if event.startswith(b"data: {"):
                tokens += _tokens(json.loads(event[6:]))
        if len(tokens) > before:
            times.append((now, len(tokens) - before))
    if not done or not times:
        raise ServerError(f"a stream broke off after {len(tokens)} tokens")
    return Answer(headers, tuple(tokens), tuple(times), captured)


def _tokens(event: dict[str, Any]) -> list[int]:
    if "error" in event:
        raise ServerError(f"a stream broke off: {str(event['error'])[:1000]}")
    return [token for choice in event["choices"] for token in choice["token_ids"] or ()]


async def _all(server: Server, bodies: Sequence[bytes]) -> Load:
    from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    try:
        async with ClientSession(server.url, connector=TCPConnector(limit=0), headers=headers, read_bufsize=_BUFFER,
                                 timeout=ClientTimeout(total=None, sock_read=_SILENCE_SECONDS)) as session:
            start = time.perf_counter()
            found = await asyncio.gather(*(_one(session, body) for body in bodies))
            end = time.perf_counter()
            for _, told, _ in found:
                for handle in handles(told):
                    async with session.delete(f"/mia/captures/{handle}") as answer:
                        await answer.read()
    except (ClientError, OSError) as error:
        raise ServerError(f"the server at {server.url} broke off ({error!r}): {server.said}") from None
    return Load(tuple(read(*one) for one in found), start, end)


async def _one(session: ClientSession, body: bytes) -> tuple[list[Block], dict[str, str], bytes]:
    blocks: list[Block] = []
    async with session.post("/v1/completions", data=body) as answer:
        told = {name.lower(): value for name, value in answer.headers.items()}
        if answer.status != 200:
            raise ServerError(f"the server answers {answer.status}: {(await answer.text())[:1000]}", answer.status)
        async for block in answer.content.iter_any():
            blocks.append((time.perf_counter(), block))
    captured = b""
    for handle in handles(told):
        async with session.get(f"/mia/captures/{handle}") as answer:
            captured = await answer.read()
            if answer.status != 200:
                raise ServerError(f"the server answers {answer.status} to a capture's handle: {captured[:1000]!r}", answer.status)
    return blocks, told, captured


def handles(headers: Mapping[str, str]) -> list[str]:
    """The captures that an answer's headers name."""
    return [handle for handle in headers.get(CAPTURE, "").split(", ") if handle]
