"""What a body says that may be gone where vLLM runs its requests: the messages of a chat, for edits that act on the tokens of a role,
and that edits or captures are asked for at all."""
from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from ..engine.wire import KEY
from ..selectors import Selector
from .call import Call
from .catalogue import Catalogue

_BYTES = 8 << 20  # of a body that is read along
_MOST = 128  # messages, since finding the tokens of each takes a pass over all before it
_NEEDLE = f'"{KEY}"'.encode()  # inside of a text, its quotes would be escaped

Receive = Callable[[], Awaitable[Any]]


@lru_cache(maxsize=4)
def wanted(catalogue: Catalogue) -> bool:
    """Whether any edit that is served acts on the tokens of a role."""
    edits = [edit for served in catalogue.bundles.values() for edit in served.bundle]
    return any(_of_role(where) for edit in edits for where in edit.selectors)


def overheard(receive: Receive, call: Call, chat: bool = True) -> Receive:
    """Pass a body on as it comes, and note in the call whether it speaks of mia_lab and, of a chat, the messages that it holds."""
    parts: list[bytes] = []
    size = 0

    async def next_part() -> Any:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            part = message.get("body", b"")
            size += len(part)
            if size <= _BYTES:
                parts.append(part)
            else:
                parts.clear()
            if not message.get("more_body"):
                body = b"".join(parts)
                call.asks = _asks(body)
                call.messages = _messages(body) if chat else None
        return message

    return next_part


def _asks(body: bytes) -> bool:
    """Whether a body has "mia_lab" beside its fields or in its vllm_xargs."""
    if _NEEDLE not in body:
        return False
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return False
    extra = said.get("vllm_xargs") if isinstance(said, dict) else None
    return isinstance(said, dict) and (KEY in said or (isinstance(extra, dict) and KEY in extra))


def _messages(body: bytes) -> list[dict[str, str]] | None:
    """A body's messages, where each is a role and a text; else None, and an edit that needs them is refused."""
    try:
        found = json.loads(body)["messages"]
        plain = [{"role": one["role"], "content": one["content"]} for one in found] if len(found) <= _MOST else []
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return plain if plain and all(isinstance(text, str) for one in plain for text in one.values()) else None


def _of_role(where: Selector) -> bool:
    return where.rule == "role" or any(_of_role(part) for part in where.args if isinstance(part, Selector))
