"""Running a notebook client's batch: its requests side by side, as many as the engine's tables hold, and a line for all that comes."""
from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any

from ..engine.wire import KEY, Spec, encode
from ..errors import MiaError, RoomError
from . import said
from .batch import Batch, One, capture_bytes
from .refusing import Refused
from .running import salted, uid_of

if TYPE_CHECKING:
    from .call import Call
    from .calls import Engine

_BEAT_SECONDS = 5.0  # after which an empty line says that the batch still runs
_AHEAD = 256  # lines that wait for a slow client


class Run:
    """One batch, for one caller. Whatever ends it, none of its requests is left, and no rows of those that did not end."""

    def __init__(self, who: Call, batch: Batch, engine: Engine) -> None:
        self._who, self._service, self._batch, self._engine = who, who.service, batch, engine
        self._rows = who.service.vectors.sizes(batch.named)
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_AHEAD)
        self._seats = asyncio.Semaphore(2 * engine.settings.max_requests)
        self._under_way, self._ended = 0, asyncio.Event()
        limits, sizes = who.catalogue.policy.limits, [capture_bytes(one, engine, self._counts()) for one in batch.ones]
        largest = max(sizes)
        if largest > limits.capture_bytes_per_request or sum(sizes) > limits.capture_bytes:
            raise Refused(413, f"this capture could come to {largest} bytes for one request and {sum(sizes)} in all; the server keeps "
                               f"{limits.capture_bytes_per_request} and {limits.capture_bytes}. Ask for fewer points, layers or positions, "
                               f"or run it in parts")
        self._sizes = sizes

    def _counts(self) -> dict[str, int]:
        return {sha: len(rows) for sha, rows in self._rows.items()}

    async def lines(self) -> AsyncIterator[bytes]:
        """A line for each output; an empty one now and then. Refused where nothing came before; later it is the last line."""
        tasks = [asyncio.create_task(self._one(i)) for i in range(len(self._batch.ones))]
        left, told = len(tasks), False
        try:
            while left:
                found = await self._next()
                if found is None:
                    left -= 1
                elif isinstance(found, Exception):
                    refusal = self._refusal(found)
                    if not told:
                        raise refusal
                    yield said.as_line(refusal.body())
                    return
                else:
                    told = True
                    yield found
            yield said.as_line({"done": True})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self) -> bytes | Exception | None:
        with suppress(asyncio.QueueEmpty):
            return self._queue.get_nowait()
        waiting = asyncio.ensure_future(self._queue.get())
        try:
            done, _ = await asyncio.wait({waiting}, timeout=_BEAT_SECONDS)
        finally:
            waiting.cancel()
        return waiting.result() if done else b"\n"

    async def _one(self, i: int) -> None:
        one, service = self._batch.ones[i], self._service
        uid, finished = uid_of(self._who.key.tenant, f"n{one.uid}"), False
        async with self._seats:
            try:
                with ExitStack() as stack:
                    await self._enter(stack, one)
                    if one.spec.takes:
                        await self._admit(uid, self._sizes[i])
                    prompt, params = salted({"prompt_token_ids": one.ids}, self._who.key), self._params(one, uid)
                    outputs = service.generate(prompt, params, secrets.token_hex(16))
                    async with aclosing(outputs):
                        async for output in outputs:
                            finished = output.finished
                            await self._queue.put(said.line(i, output))
                await self._queue.put(None)
            except Exception as error:
                await self._queue.put(error)
            finally:
                if one.spec.takes and not finished:
                    service.later(service.rpc("drop", [uid]))

    async def _enter(self, stack: ExitStack, one: One) -> None:
        """Wait until the engine's tables have room beside what else of this batch runs; RoomError where only others fill them."""
        length = len(one.ids) + one.params.get("max_tokens", self._engine.settings.max_len)
        while True:
            try:
                stack.enter_context(self._service.in_flight.held(one.spec, self._rows, length))
            except RoomError:
                if not self._under_way:
                    raise
                self._ended.clear()
                await self._ended.wait()
                continue
            self._under_way += 1
            stack.callback(self._leave)
            return

    def _leave(self) -> None:
        self._under_way -= 1
        self._ended.set()

    async def _admit(self, uid: str, size: int) -> None:
        limits = self._who.catalogue.policy.limits
        if not await self._service.rpc("admit", uid, b"", size, limits.capture_seconds, limits.capture_bytes):
            raise Refused(429, f"captures may take {limits.capture_bytes} bytes together here, and these are taken; let some go, or wait")

    def _params(self, one: One, uid: str) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if self._batch.stream else RequestOutputKind.FINAL_ONLY
        extra = {KEY: encode(uid, one.spec)} if one.spec != Spec() else None
        try:
            return SamplingParams(**one.params, output_kind=kind, extra_args=extra)
        except Exception as error:  # vLLM has errors of its own for these, which differ between versions
            raise Refused(400, f"these sampling arguments do not work: {error}") from None

    def _refusal(self, error: Exception) -> Refused:
        """What stopped a request, as the client is told it."""
        if isinstance(error, Refused):
            return error
        if self._service.engine.errored:
            return Refused(503, "the server's engine died; its log says why")
        if isinstance(error, RoomError):
            return Refused(429, str(error))
        cause = error if str(error) or error.__cause__ is None else error.__cause__
        return Refused(400, str(cause) if isinstance(cause, MiaError) else f"the engine did not run this: {cause}")
