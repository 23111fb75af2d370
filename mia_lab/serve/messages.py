"""What a body says that may be gone where vLLM runs its requests: the messages of a chat, for edits that act on the tokens of a role,
and that edits or captures are asked for at all."""
from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Any

from ..engine.wire import KEY
from .call import Call
from .catalogue import Catalogue

_BYTES = 8 << 20  # of a body that is kept, to be read along
_MOST = 128  # messages, since the template of each is applied to all before it, too
_NEEDLE = KEY.encode()
_NAME = re.compile(rb'"%s"\s{0,200}:' % _NEEDLE)  # inside of a text, its quotes would be escaped
_FIELD = re.compile(rb'%s|%%22%b%%22|vllm_xargs(?:\[|%%5[Bb]|\.)%b|&%b=|;\s?name="?%b["\s;]' % (_NAME.pattern, *4 * [_NEEDLE]))
_REACH = 256  # bytes that these look at together
_HOLDERS = ("vllm_xargs", "extra_body", "sampling_params", "extra_args")  # where it belongs, or is put by mistake, one in another
_DEPTH = 4  # objects, the body being one

Receive = Callable[[], Awaitable[Any]]


@lru_cache(maxsize=4)
def wanted(catalogue: Catalogue) -> bool:
    """Whether any edit that is served acts on the tokens of a role."""
    edits = [edit for served in catalogue.bundles.values() for edit in served.bundle]
    return any(where.reads_messages for edit in edits for where in edit.selectors)


def overheard(receive: Receive, call: Call, chat: bool = True, form: bool = False) -> Receive:
    """Pass a body on as it comes, and note in the call whether it speaks of mia_lab and, of a chat, the messages that it holds.

    A body that is too long to be kept, or a form, speaks of mia_lab where that is the name of anything in it.
    """
    parts: list[bytes] = []
    size, named, tail = 0, False, b"&"
    pattern = _FIELD if form else _NAME

    async def next_part() -> Any:
        nonlocal size, named, tail
        message = await receive()
        if message["type"] == "http.request":
            part = message.get("body", b"")
            size += len(part)
            window = tail + part
            named, tail = named or (_NEEDLE in window and pattern.search(window) is not None), window[-_REACH:]
            if size <= _BYTES:
                parts.append(part)
            else:
                parts.clear()
            if not message.get("more_body"):
                whole = size <= _BYTES and not form
                call.asks = named and (not whole or _asks(b"".join(parts)))
                call.messages = _messages(b"".join(parts)) if chat else None
        return message

    return next_part


def is_form(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether headers say that a body is a form, with or without files."""
    return any(name == b"content-type" and b"form" in value.lower() for name, value in headers)


def _asks(body: bytes) -> bool:
    """Whether a JSON body has "mia_lab" beside its fields, or in what holds such things elsewhere: vllm_xargs, extra_body, ..."""
    try:
        level = [json.loads(body)]
    except (ValueError, RecursionError):
        return False
    for _ in range(_DEPTH):
        level = [one for one in level if isinstance(one, dict)]
        if any(KEY in one for one in level):
            return True
        level = [one.get(name) for one in level for name in _HOLDERS]
    return False


def _messages(body: bytes) -> list[dict[str, str]] | None:
    """A body's messages, where each is a role and a text; else None, and an edit that needs them is refused."""
    try:
        found = json.loads(body)["messages"]
        plain = [{"role": one["role"], "content": one["content"]} for one in found] if len(found) <= _MOST else []
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return plain if plain and all(isinstance(text, str) for one in plain for text in one.values()) else None
