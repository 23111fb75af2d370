"""The server's side of a notebook client: batches of requests with any edits and captures, and what computes on captured rows.

The client's names of requests get their tenant before they reach the engine, so no tenant's rows have a name for another.
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..engine.shared import take
from . import batch, calls, frames, vocabulary
from .call import CALL, Call
from .many import Run
from .refusing import Refused
from .running import uid_of

if TYPE_CHECKING:
    from .service import Service

_ROLES = ("generate", "steer", "capture")
_TRACE = ("traceparent", "tracestate")  # W3C's headers
_ANYONES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")  # types that a page sends without asking first


def routes() -> list[Route]:
    """What a service answers to a notebook client."""
    return [Route("/mia/run", run, methods=["POST"]), Route("/mia/call/{method}", call, methods=["POST"]),
            Route("/mia/tokenizer", tokenizer, methods=["GET"])]


async def run(request: Request) -> Response:
    """Run a batch; a line of JSON for each output."""
    who = caller(request)
    service, body = who.service, await request.body()
    engine = engine_of(service)
    asked = await asyncio.to_thread(batch.read, body, engine, service.engine.vllm_config.model_config.max_logprobs)
    if who.key.max_dose is not None and any(one.spec.terms for one in asked.ones):
        raise Refused(403, "this key has a greatest dose, and edits that come with a request have none that is known")
    absent = service.vectors.missing(asked.named - asked.vectors.keys())
    if absent:
        return _absent(absent)
    shas = {sha: asked.vectors.get(sha) for sha in asked.named}
    await service.vectors.hold(shas)
    try:
        lines = Run(who, asked, engine, traced(request)).lines()
        first = await anext(lines)  # what is refused at once has a status of its own
    except BaseException:
        service.later(service.vectors.release(shas))
        raise
    return _Lines(_after(first, lines, service, shas), media_type="application/x-ndjson")


async def call(request: Request) -> Response:
    """Call one of the worker's methods."""
    who, method = caller(request), request.path_params["method"]
    service = who.service
    args, vectors = await asyncio.to_thread(batch.call_of, await request.body())
    asked = calls.checked(method, args, engine_of(service))
    names = [name_of(who, uid) for uid in asked.uids]
    service.metrics.called(method)
    if method == "drop":
        await service.rpc("drop", names)
        return _frame(None)
    if method in ("describe", "sample_weights"):
        return _frame(_described(who) if method == "describe" else service.model_facts.weights)
    gone = await service.rpc("renew", names, who.catalogue.policy.limits.capture_seconds) if names else []
    if gone:
        seconds = who.catalogue.policy.limits.capture_seconds
        raise _Told("MissingRowsError", f"the rows of {len(gone)} of {len(names)} requests are gone from the server: it keeps them for "
                    f"{seconds:g} seconds after they were last asked for. Run it again, and fetch sooner")
    absent = service.vectors.missing(asked.shas - vectors.keys())
    if absent:
        return _absent(absent)
    shas = {sha: vectors.get(sha) for sha in asked.shas}
    await service.vectors.hold(shas)
    try:
        found = await _computed(service, method, [names, *asked.args[1:]] if names else asked.args)
    finally:
        service.later(service.vectors.release(shas))
    return Response(await asyncio.to_thread(lambda: frames.pack(_here(method, found))), media_type="application/octet-stream")


async def tokenizer(request: Request) -> Response:
    """The tokenizer's files, as a zip."""
    return Response(await vocabulary.zipped(caller().service.tokenizer), media_type="application/zip")


def caller(sends: Request | None = None) -> Call:
    """Who asks; Refused (403) for a key that may not work on the model from a notebook, and (400) for a body as any page in a browser
    could send one to a server without keys. sends: a request with a body."""
    who = CALL.get()
    for role in _ROLES:
        who.key.must(role)
    if not who.key.inline:
        raise Refused(403, "this key may use the edits of the server's folder alone; a notebook client needs inline = true beside its "
                           "sha256 in serve.toml")
    if sends is not None and sends.headers.get("content-type", "").partition(";")[0].strip().lower() in _ANYONES:
        raise Refused(400, "what a notebook client sends has the header Content-Type: application/octet-stream")
    return who


def traced(request: Request) -> dict[str, str] | None:
    """The headers that say which span a request belongs to; None where there are none, as vLLM has it."""
    return {name: request.headers[name] for name in _TRACE if name in request.headers} or None


def name_of(who: Call, uid: str) -> str:
    """The engine's name for what a client's request captures."""
    return uid_of(who.key.tenant, f"n{uid}")


def engine_of(service: Service) -> calls.Engine:
    """What arguments are held against."""
    return calls.Engine(service.settings, service.shapes, frozenset((p.kind, p.layer) for p in service.sites))


async def _computed(service: Service, method: str, args: list[Any]) -> Any:
    """What the worker gives; its own errors go to the client under their name."""
    try:
        name, found = await service.rpc("call", method, args)
    except Exception as error:
        if service.engine.errored:
            raise Refused(503, "the server's engine died; its log says why") from None
        raise Refused(400, f"the engine could not do this ({method}): {error}") from None
    if name:
        raise _Told(name, found)
    return found


class _Told(Refused):
    """An error of the worker's, which a client raises as what it was."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(400, message)
        self.name = name

    def body(self) -> dict[str, Any]:
        return {"error": super().body()["error"] | {"name": self.name}}


class _Lines(StreamingResponse):
    """A stream that is closed whatever ends it, and with it the requests behind it."""

    async def __call__(self, *args: Any) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(*args)


async def _after(first: bytes, lines: AsyncIterator[bytes], service: Service, shas: dict[str, Any]) -> AsyncIterator[bytes]:
    try:
        async with aclosing(lines):
            yield first
            async for line in lines:
                yield line
    finally:
        service.later(service.vectors.release(shas))


def _described(who: Call) -> dict[str, Any]:
    """What the worker says of itself, and the server of how it serves this caller."""
    service, policy = who.service, who.catalogue.policy
    limits = policy.limits
    return service.facts | {"served": {
        "model": service.model_facts.name, "mia_lab": version("mia_lab"), "tokenizer": service.model_facts.tokenizer_hash,
        "max_logprobs": service.engine.vllm_config.model_config.max_logprobs, "body_bytes": limits.body_bytes,
        "capture_bytes": policy.share, "capture_bytes_per_request": limits.capture_bytes_per_request,
        "capture_seconds": limits.capture_seconds}}


def _here(method: str, found: Any) -> Any:
    """A worker's answer with the bytes that it left in a file of this machine's memory."""
    here = lambda data: data if isinstance(data, bytes) else take(data, torch.uint8).numpy().tobytes()  # noqa: E731
    if method == "fetch":
        return [[positions, here(values)] for positions, values in found]
    if method == "lens":
        return [here(data) for data in found]
    return [found[0], here(found[1])] if method == "split" else found


def _frame(value: Any) -> Response:
    return Response(frames.pack(value), media_type="application/octet-stream")


def _absent(shas: list[str]) -> Response:
    said = Refused(409, f"{len(shas)} vectors that this names are not held here any more; send them along").body()["error"]
    return JSONResponse({"error": said | {"missing": sorted(shas)}}, 409)
