"""Running a notebook client's batch: its requests side by side, as many as the engine's tables hold, and a line for all that comes."""
from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any

from ..engine import turned_away
from ..engine.reservation import ROOM, Reservation
from ..engine.reservation import encode as reserve
from ..engine.wire import KEY, NOTHING, Spec, encode
from ..errors import MiaError, RoomError
from . import said
from .batch import Batch, One, capture_bytes
from .noting import INLINE, Noted, noted
from .refusing import Refused, refused
from .running import salted, uid_of

if TYPE_CHECKING:
    from .call import Call
    from .calls import Engine

_BEAT_SECONDS = 5.0  # after which an empty line says that the batch still runs
_AHEAD = 256  # lines that wait for a slow client


class Run:
    """One batch, for one caller. Whatever ends it, none of its requests is left, and no rows of those that did not end.

    trace: the headers that say which span the caller's is, for vLLM's spans to lie under.
    """

    def __init__(self, who: Call, batch: Batch, engine: Engine, trace: Mapping[str, str] | None = None) -> None:
        self._who, self._service, self._batch, self._engine, self._trace = who, who.service, batch, engine, trace
        self._rows = who.service.vectors.sizes(batch.named)
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_AHEAD)
        self._seats = asyncio.Semaphore(2 * engine.settings.max_requests)
        self._under_way, self._ended = 0, asyncio.Event()
        policy, sizes = who.catalogue.policy, [capture_bytes(one, engine, self._counts()) for one in batch.ones]
        limits, largest = policy.limits, max(sizes)
        if largest > limits.capture_bytes_per_request or sum(sizes) > policy.share:
            raise Refused(413, f"this capture could come to {largest} bytes for one request and {sum(sizes)} in all; the server keeps "
                               f"{limits.capture_bytes_per_request} and {policy.share}. Ask for fewer points, layers or positions, "
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
                    prompt, params = salted({"prompt_token_ids": one.ids}, self._who.key), self._params(one, self._asked(i, uid))
                    request_id = secrets.token_hex(16)
                    self._note(stack, one.spec, request_id)
                    outputs = service.generate(prompt, params, request_id, trace_headers=self._trace)
                    async with aclosing(outputs):
                        async for output in outputs:
                            finished = output.finished
                            turned_away.check(output)
                            await self._queue.put(said.line(i, output))
                await self._queue.put(None)
            except Exception as error:
                await self._queue.put(error)
            finally:
                if one.spec.takes and not finished:
                    service.later(service.rpc("drop", [uid]))

    def _note(self, stack: ExitStack, spec: Spec, request_id: str) -> None:
        if spec != NOTHING:
            stack.enter_context(noted(self._who, request_id, Noted((INLINE,) if spec.terms else (), None, bool(spec.takes))))

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

    def _asked(self, i: int, uid: str) -> dict[str, str] | None:
        """What the engine is asked beside generating: a spec, and room for what it captures."""
        spec, policy = self._batch.ones[i].spec, self._who.catalogue.policy
        if spec == NOTHING:
            return None
        found = {KEY: encode(uid, spec)}
        if spec.takes:
            limits = policy.limits
            found[ROOM] = reserve(Reservation("", self._sizes[i], limits.capture_seconds, limits.capture_bytes, policy.share))
        return found

    def _params(self, one: One, extra: dict[str, str] | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if self._batch.stream else RequestOutputKind.FINAL_ONLY
        try:
            return SamplingParams(**one.params, output_kind=kind, extra_args=extra)
        except Exception as error:  # vLLM has errors of its own for these, which differ between versions
            raise Refused(400, f"these sampling arguments do not work: {error}") from None

    def _refusal(self, error: Exception) -> Refused:
        """What stopped a request, as the client is told it."""
        if self._service.engine.errored and not isinstance(error, Refused):
            return Refused(503, "the server's engine died; its log says why")
        cause = error if str(error) or error.__cause__ is None else error.__cause__
        return refused(cause) if isinstance(cause, MiaError) else Refused(400, f"the engine did not run this: {cause}")
