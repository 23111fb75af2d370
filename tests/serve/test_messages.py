"""Edits on the tokens of a role: the messages are read along, and decide which tokens an edit acts on."""
from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
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
from mia_lab.serve.messages import is_form, overheard, wanted
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


def asks(body: bytes, form: bool = False, size: int = 20) -> bool:
    """Whether a call knows, after a body came in parts of a size, that it speaks of mia_lab."""
    call, left = Call(EVERYONE, None, None), [body[i: i + size] for i in range(0, len(body), size)]

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0), "more_body": len(left) > 0}

    async def main() -> None:
        read = overheard(receive, call, chat=False, form=form)
        while left:
            await read()

    asyncio.run(main())
    assert call.messages is None
    return call.asks


@pytest.mark.parametrize(("body", "expected"), [
    ({"vllm_xargs": {"mia_lab": "{}"}}, True), ({"mia_lab": {"edits": []}}, True), ({"prompt": '"mia_lab"', "model": "m"}, False),
    ({"sampling_params": {"extra_args": {"mia_lab": "{}"}}}, True), ({"vllm_xargs": "mia_lab", "model": "mia_lab"}, False),
    ({"extra_body": {"vllm_xargs": {"mia_lab": "{}"}}}, True), ({"extra_body": {"sampling_params": {"extra_args": {"mia_lab": 1}}}}, True),
    ({"tools": [{"parameters": {"mia_lab": {}}}], "extra_body": [{"mia_lab": 1}]}, False)])
def test_a_body_is_heard_to_speak_of_mia_lab(body: dict[str, Any], expected: bool) -> None:
    assert asks(json.dumps(body).encode()) is expected


def test_what_is_no_json_asks_nothing() -> None:
    assert not asks(b'["mia_lab"]') and not asks(b'{"mia_lab"') and not asks(b'{"mia_lab": ')


@pytest.mark.parametrize(("said", "expected"), [
    ({"mia_lab": {}}, True), ({"vllm_xargs": {"mia_lab": "{}"}}, True), ({"stop": ["mia_lab"], "user": "mia_lab"}, False),
    ({"prompt": 'so {"mia_lab": 1} it says'}, False)])
@pytest.mark.parametrize("first", [True, False])
def test_a_body_that_is_too_long_to_be_kept_is_searched(said: dict[str, Any], expected: bool, first: bool) -> None:
    long = {"messages": "x" * (9 << 20)}
    assert asks(json.dumps(said | long if first else long | said, indent=1).encode(), size=65_536) is expected


PART = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="mia_lab.wav"\r\n\r\n' + bytes(range(256)) * 200 + b"\r\n"


@pytest.mark.parametrize(("body", "expected"), [
    (FILE + PART % (b"vllm_xargs", b'{"mia_lab": "{}"}') + b"--b--", True), (FILE + PART % (b"vllm_xargs[mia_lab]", b"{}"), True),
    (PART % (b"mia_lab", b"{}") + FILE, True), (FILE + PART % (b"prompt", b"of mia_lab and \"mia_lab\""), False),
    (b"vllm_xargs=%7B%22mia_lab%22%3A%22%7B%7D%22%7D", True), (b"vllm_xargs%5bmia_lab%5d=%7B%7D", True), (b"mia_lab=%7B%7D&a=b", True),
    (b"a=b&mia_lab=1", True), (b"prompt=mia_lab", False)])
@pytest.mark.parametrize("size", [1, 19, 1 << 16])
def test_a_form_is_heard_to_speak_of_mia_lab(body: bytes, expected: bool, size: int) -> None:
    assert asks(body, form=True, size=size) is expected


@pytest.mark.parametrize(("kind", "expected"), [(b"multipart/form-data; boundary=b", True), (b"Application/X-WWW-Form-Urlencoded", True),
                                                (b"application/json", False), (None, False)])
def test_what_is_a_form(kind: bytes | None, expected: bool) -> None:
    assert is_form([(b"a", b"form"), *([] if kind is None else [(b"content-type", kind)])]) is expected


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
    model = Model(1, {point: (4,)}, frozenset([point]), edit_kinds=("add",))
    compiled = Compiler(SimpleNamespace(model=model, tokenizer=tokenizer))
    edits = (mia.Add(torch.ones(4), 1.0, layers=[0], where=mia.role("user")),)

    def spans(messages: list[dict[str, str]]) -> Any:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        prompt = asyncio.run(compiled.prompt(edits, ids, messages))
        return [term.spans for term in compiled(edits, prompt).terms]

    assert spans(MESSAGES) == [((16, 27),)]  # BOS, then 15 characters of the system's message
    assert spans([{"role": "user", "content": "be kind[user]hello"}]) == [((0, 25),)]
    assert spans([{"role": "user", "content": "be kind"}, {"role": "user", "content": "hello"}]) == [((0, 25),)]  # the same tokens
    with pytest.raises(EditError, match="so it goes"):
        asyncio.run(compiled.prompt(edits, [1, 2, 3], [{"role": "x", "content": "a"}]))
    with pytest.raises(EditError, match="needs a prompt of chat messages"):
        compiled(edits, Context([1, 2, 3], True, tokenizer, None))


def test_where_messages_lie_is_found_beside_the_event_loop_and_once(tmp_path: Path) -> None:
    """Whatever other requests do meanwhile; edits that read no role wait for nothing."""
    places: list[int] = []

    class Slow:
        bos_token_id = None

        def apply_chat_template(self, messages: Any, tokenize: bool) -> str:
            places.append(threading.get_ident())
            time.sleep(0.02)
            return "".join(one["content"] for one in messages)

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

    point = Point("resid_post", 0)
    service = SimpleNamespace(model=Model(1, {point: (4,)}, frozenset([point]), edit_kinds=("add",)), tokenizer=Slow())
    compiled, add = Compiler(service), mia.Add(torch.ones(4), 1.0, layers=[0])
    by_role, plain = (replace(add, where=mia.role("user")),), (add,)
    chats = [[{"role": "user", "content": "a" * n}, {"role": "bot", "content": "b"}] for n in range(1, 9)]

    async def spans(edits: Any, chat: Any) -> Any:
        prompt = await compiled.prompt(edits, list("".join(one["content"] for one in chat).encode()), chat)
        return compiled(edits, prompt).terms[0].spans

    async def main(order: Any, waits: bool) -> list[Any]:
        found = asyncio.gather(*(spans(by_role, chats[n]) for n in order))
        await asyncio.sleep(0)  # until they have begun
        assert await spans(plain, chats[0]) == ((0, None),) and (len(places) < 16) == waits
        return await found

    assert asyncio.run(main(range(8), waits=True)) == [((0, n),) for n in range(1, 9)]
    assert len(places) == 16 and threading.get_ident() not in places
    assert asyncio.run(main(range(7, -1, -1), waits=False)) == [((0, n),) for n in range(8, 0, -1)] and len(places) == 16
