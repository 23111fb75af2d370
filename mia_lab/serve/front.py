"""The door of a server: who comes in, what an answer's headers say, and refusals as clean JSON. A plain ASGI middleware."""
from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from . import messages
from .call import CALL, Call
from .refusing import Refused

if TYPE_CHECKING:
    from .service import Service

Message = MutableMapping[str, Any]
Receive, Send = Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
GENERATE = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
                      "/inference/v1/generate", "/tokenize", "/detokenize"})
HEADERS = CONFIG, EDITS, CAPTURE = "x-mia-lab-config", "x-mia-lab-edits", "x-mia-lab-capture"
CHAT, RESPONSES, OURS = "/v1/chat/completions", "/v1/responses", "/mia/"
_RETRY_SECONDS = 1


def role_of(method: str, path: str) -> str | None:
    """The role that a path of vLLM's needs, None for none. What is not known needs the highest."""
    if method in ("GET", "HEAD") and path in OPEN:
        return None
    if (method == "POST" and path in GENERATE) or (method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/"))):
        return "generate"
    return "administer"


class Front:
    """Stands before a server's app. Holds an answer's start back until its first bytes are there, so that a refusal at the
    first step of a stream still has its own status."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, self._started(receive, send), send)
        elif scope["type"] in ("http", "websocket"):
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _started(self, receive: Receive, send: Send) -> Receive:
        """Start the service before the app starts; where it cannot, say why and end the process with a status of its own."""
        async def first() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._service.start()
                except Exception as error:
                    print(f"mia_lab: the server does not start: {error}", file=sys.stderr, flush=True)
                    asyncio.get_running_loop().call_soon(sys.exit, 1)  # vLLM itself would end with 0
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    raise
            return message

        return first

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        path, answer = _path(scope), Answer(self._service, send, scope["type"])
        token = None
        try:
            call = self._call(scope, path)
            answer.call, token = call, CALL.set(call)
            answer.waits = path == RESPONSES
            if scope["type"] == "http" and scope["method"] == "POST" and not path.startswith(OURS):
                chat, form = path == CHAT and messages.wanted(call.catalogue), messages.is_form(scope["headers"])
                receive = messages.overheard(receive, call, chat, form)
            app = self._service.routes if path.startswith(OURS) and scope["type"] == "http" else self._app
            await app(scope, receive, answer.send)
        except Exception as error:
            refusal = error if isinstance(error, Refused) else answer.call.refusal if answer.call is not None else None
            if refusal is None or not await answer.refuse(refusal):  # vLLM's handler of last resort raises once more, behind its answer
                raise
        finally:
            if token is not None:
                CALL.reset(token)
                lost = _lost(call, answer)
                if lost:
                    self._service.later(self._service.rpc("drop", sorted(lost)))

    def _call(self, scope: Message, path: str) -> Call:
        """Let a request in; Refused 401 or 403 for whoever may not."""
        catalogue, method = self._service.catalogue, scope.get("method", "GET")
        role = role_of(method, path) if scope["type"] == "http" else "administer"
        if role is None:
            return Call(self._service.nobody, catalogue, self._service)
        key = catalogue.policy.key_of(_header(scope, b"authorization"))
        if catalogue.policy.keys and not path.startswith(OURS):
            key.must(role)
        return Call(key, catalogue, self._service)


class Answer:
    """What goes back for one request: its start waits for its first bytes, and a refusal takes the place of both. waits: whether the
    first bytes of a stream come before anything runs, and wait for that in turn. told: whether its headers said where captures are."""

    def __init__(self, service: Service, send: Send, kind: str) -> None:
        self._service, self._send, self._kind = service, send, kind
        self._start: Message | None = None
        self._early: list[Message] = []
        self._sent = self._refused = self.over = self.waits = self.told = False
        self.call: Call | None = None

    async def send(self, message: Message) -> None:
        """Pass a message of the app on."""
        if self._refused:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            if self.call is not None and self.call.refusal is not None:
                await self.refuse(self.call.refusal)
                return
            if self.waits and self.call is not None and not self.call.began and message.get("more_body"):
                self._early.append(message)
                return
            start, self._start, self._sent = self._start, None, True
            ran = start["status"] < 400
            await self._send({**start, "headers": [*start.get("headers", ()), *_told(self.call, ran)]})
            self.told = ran
            while self._early:
                await self._send(self._early.pop(0))
        self._sent = True
        await self._send(message)
        self.over = not message.get("more_body", False)

    async def refuse(self, refusal: Refused) -> bool:
        """Answer with a refusal, where no answer has begun; return whether that is what was answered."""
        if self._sent or self._refused:
            return self._refused
        self._refused = True
        self._service.metrics.refused(refusal)
        if self._kind == "websocket":
            await self._send({"type": "websocket.close", "code": 1008, "reason": refusal.message[:100]})
            return True
        body = json.dumps(refusal.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(b"www-authenticate", b"Bearer")] if refusal.status == 401 else []
        headers += [(b"retry-after", str(_RETRY_SECONDS).encode())] if refusal.status in (429, 503) else []
        await self._send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
        return True


def _lost(call: Call, answer: Answer) -> set[str]:
    """The engine's names of captures that nobody will fetch: whose handles nobody was told, as of an answer that came to be a refusal, or
    who asked went away, since what they began may end much later."""
    if not answer.told:
        return call.running | call.ended
    return set() if answer.over else call.running


def _told(call: Call | None, ran: bool) -> Iterable[tuple[bytes, bytes]]:
    """The headers that say which catalogue answered and, of a request that ran, what acted, and where captures are."""
    if call is None:
        return
    yield CONFIG.encode(), call.catalogue.digest.encode()
    if not ran:
        return
    if call.acted:
        yield EDITS.encode(), ", ".join(f"{name};coeff={coeff:g}" for name, coeff in call.acted).encode("ascii", "backslashreplace")
    if call.handles:
        yield CAPTURE.encode(), ", ".join(call.handles).encode()


def _path(scope: Message) -> str:
    """The path that routes are matched with: without the prefix under which a proxy serves it."""
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    return path[len(root):] if root and path.startswith(root + "/") else path


def _header(scope: Message, name: bytes) -> str | None:
    """A header's text; None where it is missing or given twice."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None
