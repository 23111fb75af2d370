"""Edits on the tokens of a role: the messages are read along, and decide which tokens an edit acts on."""
from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers

import mia_lab as mia
from mia_lab.errors import EditError
from mia_lab.points import Point
from mia_lab.running.compile import Model
from mia_lab.selectors import Context
from mia_lab.serve.call import Call
from mia_lab.serve.messages import overheard, wanted
from mia_lab.serve.policy import EVERYONE, Key, Policy
from mia_lab.serve.refusing import Refused
from mia_lab.serve.running import Compiler, run, salted
from serve.test_front import Bare

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ raise_exception('so it goes') if m.role == 'x' }}[{{ m.role }}]{{ m.content }}"
            "{% endfor %}")
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


def heard(*parts: bytes) -> Any:
    """The messages that a call knows after a body came in parts; these pass unchanged."""
    call, left = Call(EVERYONE, None, None), [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left[-1]["more_body"] = False
    sent = list(left)

    async def receive() -> Any:
        return left.pop(0)

    async def main() -> None:
        read = overheard(receive, call)
        assert [await read() for _ in parts] == sent

    asyncio.run(main())
    return call.messages


def asks(body: bytes) -> bool:
    """Whether a call knows, after a body came in two parts, that it speaks of mia_lab."""
    call, left = Call(EVERYONE, None, None), [body[:20], body[20:]]

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0), "more_body": len(left) > 0}

    async def main() -> None:
        read = overheard(receive, call, chat=False)
        await read(), await read()

    asyncio.run(main())
    assert call.messages is None
    return call.asks


@pytest.mark.parametrize(("body", "expected"), [
    ({"vllm_xargs": {"mia_lab": "{}"}}, True), ({"mia_lab": {"edits": []}}, True), ({"prompt": '"mia_lab"', "model": "m"}, False),
    ({"sampling_params": {"extra_args": {"mia_lab": "{}"}}}, False), ({"vllm_xargs": "mia_lab", "model": "mia_lab"}, False)])
def test_a_body_is_heard_to_speak_of_mia_lab(body: dict[str, Any], expected: bool) -> None:
    assert asks(json.dumps(body).encode()) is expected


def test_a_long_body_or_no_json_asks_nothing() -> None:
    assert not asks(b'["mia_lab"]') and not asks(b'{"mia_lab"') and not asks(b'{"mia_lab": "' + b"x" * (9 << 20) + b'"}')


def test_what_was_asked_and_is_lost_on_the_way_is_refused() -> None:
    """vLLM drops vllm_xargs on some paths: on /inference/v1/generate, and before 0.32 on /v1/messages."""
    ran: list[str] = []
    service = SimpleNamespace(generate=lambda prompt, params, request_id: ran.append(request_id))
    call = Call(EVERYONE, SimpleNamespace(policy=Policy.open()), service)
    run(service, call, {"prompt_token_ids": [1]}, SimpleNamespace(extra_args=None), "before", {})
    call.asks = True
    with pytest.raises(Refused, match="stands where vLLM does not read it") as refused:
        run(service, call, {"prompt_token_ids": [1]}, SimpleNamespace(extra_args={"other": 1}), "after", {})
    assert refused.value.status == 400 and call.refusal is refused.value and ran == ["before"]


def test_no_cache_is_shared_with_a_tenant_that_is_kept_apart() -> None:
    acme, other = (Key(name, frozenset({"generate"}), isolate_cache=name == "acme") for name in ("acme", "other"))
    prompt = {"prompt_token_ids": [1]}
    for mine in (salted(prompt, acme)["cache_salt"], salted({**prompt, "cache_salt": "x"}, acme)["cache_salt"]):
        with pytest.raises(Refused, match="cache_salt begins with 'tenant:'"):
            salted({**prompt, "cache_salt": mine}, other)
    assert salted({**prompt, "cache_salt": "x"}, other) == {**prompt, "cache_salt": "x"} and salted(prompt, other) == prompt


def test_messages_are_heard_however_a_body_comes() -> None:
    body = json.dumps({"model": "demo", "messages": [one | {"name": "n"} for one in MESSAGES]}).encode()
    assert heard(body) == heard(body[:9], body[9:30], body[30:]) == MESSAGES


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": []}', b'{"messages": [{"role": "user"}]}', b"[" * 9999, b"\xff",
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', json.dumps({"messages": MESSAGES * 999}).encode()])
def test_what_is_no_plain_chat_has_no_messages(body: bytes) -> None:
    assert heard(body) is None


def test_bodies_are_read_along_only_where_an_edit_needs_them() -> None:
    def catalogue(where: mia.Selector) -> Any:
        bundle = [mia.Add(torch.ones(4), 1.0, layers=[0], where=where)]
        return Bare(bundles={"a": SimpleNamespace(bundle=bundle)})

    assert wanted(catalogue(mia.role("user"))) and wanted(catalogue(mia.prompt() & ~mia.role("user")))
    assert not wanted(catalogue(mia.prompt()))


def test_an_edit_acts_on_the_tokens_of_its_role(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.tokenizer(tmp_path))
    tokenizer.chat_template = TEMPLATE
    point = Point("resid_post", 0)
    compiled = Compiler(SimpleNamespace(model=Model(1, {point: (4,)}, frozenset([point]), edit_kinds=("add",))))
    edits = (mia.Add(torch.ones(4), 1.0, layers=[0], where=mia.role("user")),)

    def spans(messages: list[dict[str, str]]) -> Any:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        return [term.spans for term in compiled(edits, Context(ids, True, tokenizer, messages)).terms]

    assert spans(MESSAGES) == [((16, 27),)]  # BOS, then 15 characters of the system's message
    assert spans([{"role": "user", "content": "be kind[user]hello"}]) == [((0, 25),)]
    assert spans([{"role": "user", "content": "be kind"}, {"role": "user", "content": "hello"}]) == [((0, 25),)]  # the same tokens
    with pytest.raises(EditError, match="so it goes"):
        compiled(edits, Context([1, 2, 3], True, tokenizer, [{"role": "x", "content": "a"}]))
    with pytest.raises(EditError, match="needs a prompt of chat messages"):
        compiled(edits, Context([1, 2, 3], True, tokenizer, None))
