"""One request: what it asks, what that means for its prompt, and running it with its edits and captures."""
from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..edits import Edit
from ..engine import turned_away
from ..engine.reservation import MAX_NOTE, ROOM, Reservation
from ..engine.reservation import encode as reserve
from ..engine.wire import KEY, Spec, Take, encode
from ..errors import EditError, MiaError
from ..running.compile import Compiled, compile_edits
from ..running.submit import has_bos
from ..selectors import Context
from .asking import Label, Resolved, needs, parse, resolve, takes
from .call import Call
from .noting import Noted, noted
from .policy import Key
from .refusing import Refused, refused, shown

if TYPE_CHECKING:
    from .service import Service

_COMPILED = 256  # edits on prompts of one length, kept compiled
_MAX_HANDLES = 128  # of one HTTP request
_UNREAD = ('"mia_lab" stands where vLLM does not read it, so nothing would come of it. Put it into vllm_xargs on /v1/chat/completions, '
           '/v1/completions or /v1/responses, or into sampling_params.extra_args on /inference/v1/generate')
_TENANT = "tenant:"  # how the prefix-cache keys of tenants that are kept apart begin


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the engine takes it. size: bytes that its capture may come to; end: tokens that it may have in all."""

    spec: Spec
    vectors: dict[str, torch.Tensor]
    labels: tuple[Label, ...]
    size: int
    end: int


def run(service: Service, call: Call, prompt: Any, params: Any, request_id: str, options: dict[str, Any]) -> AsyncGenerator:
    """Return the outputs of a request, as `AsyncLLM.generate` does; Refused at once for what is wrong whatever the prompt."""
    with refusing(call):
        text = (params.extra_args or {}).get(KEY)
        if text is None and call.asks:
            raise Refused(400, _UNREAD)
        if ROOM in (params.extra_args or {}):
            raise Refused(400, f'"{ROOM}" is this server\'s own word to its engine; leave it out, and ask for a capture in "{KEY}"')
        asked = None if text is None else parse(text, call.catalogue.policy.limits)
        resolved = resolve(asked, call.catalogue, call.key) if needs(asked, call.catalogue) else None
        prompt = salted(prompt, call.key)
        if text is not None:
            params = _without_ours(params)
        if resolved is None or resolved.idle:
            call.began = True
            return service.generate(prompt, params, request_id, **options)
        ids = _ids(prompt)
        if resolved.captures_anything:
            _check_capture(call, params.n)
    call.acted[:] = resolved.acted
    handle = ""
    if resolved.captures_anything:
        handle = secrets.token_urlsafe(24)
        call.handles.append(handle)
    return _running(service, call, _Request(resolved, prompt, ids, params, request_id, handle), options)


def _check_capture(call: Call, n: int) -> None:
    if n > 1:
        raise Refused(400, f"a capture follows one continuation a prompt, and n is {n}; use n=1 and repeat the request")
    if len(call.handles) == _MAX_HANDLES:
        raise Refused(400, f"a request captures from {_MAX_HANDLES} prompts at most, whose handles fit a header; send several requests")


@dataclass(frozen=True, slots=True)
class _Request:
    resolved: Resolved
    prompt: Any
    ids: Sequence[int]
    params: Any
    request_id: str
    handle: str  # of its capture, "" for none


async def _running(service: Service, call: Call, asked: _Request, options: dict[str, Any]) -> AsyncGenerator:
    with ExitStack() as stack:
        with refusing(call):
            prompt = await service.compiled.prompt(asked.resolved.edits, asked.ids, call.messages)
            prepared = prepare(service, asked, prompt)
            stack.enter_context(service.in_flight.held(prepared.spec, prepared.vectors, prepared.end))
            uid = uid_of(call.key.tenant, asked.handle) if asked.handle else secrets.token_urlsafe(24)
            ours = _ours(call, uid, prepared, len(asked.ids) if asked.handle else None)
        resolved, finished = asked.resolved, False
        try:
            await service.vectors.hold(prepared.vectors)
            stack.callback(lambda: service.later(service.vectors.release(prepared.vectors)))
            if asked.handle:
                call.running.add(uid)
            params = copy.copy(asked.params)
            params.extra_args = (params.extra_args or {}) | ours
            stack.enter_context(noted(call, asked.request_id, Noted(resolved.names, resolved.dose, resolved.captures_anything)))
            async with aclosing(service.generate(asked.prompt, params, asked.request_id, **options)) as outputs:
                async for output in outputs:
                    finished = output.finished
                    with refusing(call):
                        turned_away.check(output)
                    call.began = True
                    if finished and asked.handle:
                        call.ended.add(uid)
                    yield output
        finally:
            call.running.discard(uid)
            if asked.handle and not finished:
                service.later(service.rpc("drop", [uid]))


def _ours(call: Call, uid: str, prepared: Prepared, captured: int | None) -> dict[str, str]:
    """What we add to a request: its spec and, where rows are captured, room for them. captured: the prompt's tokens then.

    Refused 400 for what cannot be sent to the engine, 413 for a capture that never fits.
    """
    try:
        found = {KEY: encode(uid, prepared.spec)}
    except ValueError as error:
        raise Refused(400, f"these edits or positions cannot be sent to the engine: {error}") from None
    if captured is None:
        return found
    policy = call.catalogue.policy
    limits, most = policy.limits, min(policy.limits.capture_bytes_per_request, policy.share)
    note = json.dumps({"config": call.catalogue.digest, "prompt_tokens": captured,
                       "monitors": [asdict(label) for label in prepared.labels]})
    if prepared.size + len(note) > most:
        raise Refused(413, f"this capture could come to {prepared.size + len(note)} bytes; {most} a request are the most here. Ask for "
                           f"fewer points, layers or positions, or a smaller max_tokens")
    if len(note) > MAX_NOTE:
        raise Refused(400, f"a request monitors fewer readings than {len(prepared.labels)}")
    return found | {ROOM: reserve(Reservation(note, prepared.size, limits.capture_seconds, limits.capture_bytes, policy.share))}


def prepare(service: Service, asked: _Request, prompt: Context) -> Prepared:
    """What a request comes to for one prompt; MiaError where it cannot be."""
    ids, longest = asked.ids, service.settings.max_len
    compiled = service.compiled(asked.resolved.edits, prompt)
    read, reduce, matrices, labels = takes(asked.resolved, prompt)
    end = min(len(ids) + (asked.params.max_tokens or longest), longest)
    spec = Spec(tuple(compiled.terms), tuple(_ended(one, end - 1) for one in read), tuple(compiled.gates), reduce)
    return Prepared(spec, compiled.vectors | matrices, labels, bytes_of(service, spec, matrices, end), end)


def _ended(one: Take, last: int) -> Take:
    """A take up to the row of the last token but one: vLLM may compute that of the last, or not."""
    spans = tuple((start, last if stop is None else min(stop, last)) for start, stop in one.spans if start < last)
    if not spans:
        raise Refused(400, "this request computes none of the rows that it is to capture: a generated token has a row only once the next "
                           "one is generated; raise max_tokens, or capture at \"last\" or \"prompt\"")
    return replace(one, spans=spans)


def bytes_of(service: Service, spec: Spec, matrices: Mapping[str, torch.Tensor], end: int) -> int:
    """The most that the rows of a request of at most `end` tokens come to, with their positions."""
    shas = {} if spec.reduce is None else {(kind, layer): sha for kind, layer, sha in spec.reduce.matrices}
    size = 0
    for one in spec.takes:
        rows = sum(max(0, (end if stop is None else min(stop, end)) - start) for start, stop in one.spans)
        sha = shas.get(one.site)
        size += rows * (8 + (4 * len(matrices[sha]) if sha else service.row_bytes(one.site, reduced=spec.reduce is not None)))
    return size


class Compiler:
    """Compiles edits for prompts, and keeps what it compiled: what selectors do not read of a prompt, does not matter."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._kept: OrderedDict[tuple, tuple[Compiled, tuple[Edit, ...]]] = OrderedDict()  # with the edits, whose ids name them
        self._one = asyncio.Lock()  # chat at a time

    async def prompt(self, edits: tuple[Edit, ...], ids: Sequence[int], messages: Sequence[dict] | None) -> Context:
        """A prompt for edits to be compiled for. Where they act on the tokens of a role, these are found beside the event loop: with some
        tokenizers that takes seconds for a long chat."""
        tokenizer = self._service.tokenizer
        prompt = Context(ids, has_bos(tokenizer, ids), tokenizer, messages)
        by_role = messages and any(where.reads_messages for edit in edits for where in edit.selectors)
        if by_role and self._key(edits, prompt) not in self._kept:
            async with self._one:
                await asyncio.to_thread(_locate, prompt)
        return prompt

    def __call__(self, edits: tuple[Edit, ...], prompt: Context) -> Compiled:
        key = self._key(edits, prompt)
        if key not in self._kept:
            self._kept[key] = compile_edits(edits, prompt, self._service.model), edits
        self._kept.move_to_end(key)
        while len(self._kept) > _COMPILED:
            self._kept.popitem(last=False)
        return self._kept[key][0]

    @staticmethod
    def _key(edits: tuple[Edit, ...], prompt: Context) -> tuple:
        selectors = [one for edit in edits for one in edit.selectors]
        text = (tuple(prompt.ids), repr(prompt.messages)) if any(s.reads_text for s in selectors) else ()
        return tuple(map(id, edits)), prompt.n, prompt.has_bos, text


def _locate(prompt: Context) -> None:
    """Find the tokens of each message; EditError for whatever a chat template, which is a program, does not expect of messages."""
    try:
        prompt.turns  # noqa: B018  which it keeps
    except MiaError:
        raise
    except Exception as error:
        raise EditError(f"where the messages' tokens lie cannot be told: {error}") from None


def uid_of(tenant: str, handle: str) -> str:
    """The engine's name for a tenant's capture. Whoever has the handle but is of another tenant, names another capture."""
    return f"{hashlib.sha256(tenant.encode()).hexdigest()[:16]}.{handle}"


@contextmanager
def refusing(call: Call) -> Iterator[None]:
    """Refused, noted in the call, for every MiaError within."""
    try:
        yield
    except MiaError as error:
        raise call.refuse(refused(error)) from None


def _without_ours(params: Any) -> Any:
    """Sampling parameters that do not carry our own; those of other prompts of the same request are left as they are."""
    params = copy.copy(params)
    params.extra_args = {name: value for name, value in params.extra_args.items() if name != KEY} or None
    return params


def _ids(prompt: Any) -> Sequence[int]:
    """A prompt's tokens; Refused where positions would not be those of tokens."""
    found = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not found or prompt.get("prompt_embeds") is not None:
        kind = prompt.get("type", "text") if isinstance(prompt, dict) else type(prompt).__name__
        raise Refused(400, f"edits and captures need a prompt of tokens, and this one is {shown(kind)}, where positions are not those of "
                           f"tokens")
    return found


def salted(prompt: Any, key: Key) -> Any:
    """The prompt with the tenant in its prefix-cache key, where the policy keeps tenants apart; Refused for a salt that would be one's."""
    if not key.isolate_cache:
        if isinstance(prompt, dict) and str(prompt.get("cache_salt") or "").startswith(_TENANT):
            raise Refused(400, f"cache_salt begins with {_TENANT!r}, as those of tenants that are kept apart do; send another")
        return prompt
    if not isinstance(prompt, dict):
        raise Refused(400, f"prompts of tenants are kept apart in the cache, which {type(prompt).__name__} cannot be; send text or tokens")
    return {**prompt, "cache_salt": f"{_TENANT}{key.tenant}:{prompt.get('cache_salt') or ''}"}
