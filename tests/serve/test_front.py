"""The front by itself: which role a path needs, what is passed on as it is, and a server that cannot start."""
from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from mia_lab.errors import UnsupportedError
from mia_lab.serve import captures, hook, routes
from mia_lab.serve.call import CALL, Call
from mia_lab.serve.front import Front, role_of
from mia_lab.serve.policy import EVERYONE, Policy
from mia_lab.serve.refusing import Refused

OPEN = Policy.open()
LOCKED = Policy.read(b'[[keys]]\nsha256 = "' + b"0" * 64 + b'"\ntenant = "a"\nroles = ["generate"]\n')


@pytest.mark.parametrize(("method", "path", "role"), [
    ("GET", "/health", None), ("HEAD", "/health", None), ("GET", "/metrics", None), ("POST", "/v1/chat/completions", "generate"),
    ("POST", "/inference/v1/generate", "generate"), ("GET", "/v1/models", "generate"), ("GET", "/v1/models/demo", "generate"),
    ("POST", "/health", "administer"), ("GET", "/metrics/", "administer"), ("GET", "/v1/completions", "administer"),
    ("POST", "/v1/completions/", "administer"), ("POST", "/v1/embeddings", "administer"), ("POST", "/invocations", "administer"),
    ("POST", "/collective_rpc", "administer"), ("OPTIONS", "/v1/completions", "administer"), ("POST", "/v1/models/x", "administer"),
])
def test_the_role_of_a_path(method: str, path: str, role: str | None) -> None:
    assert role_of(method, path) == role


@given(st.sampled_from(["GET", "POST", "PUT", "DELETE"]), st.text(max_size=40))
def test_what_is_not_known_needs_the_highest_role(method: str, path: str) -> None:
    known = path.startswith("/v1/models") or path in {"/health", "/ping", "/version", "/metrics", "/load"} or path.startswith("/v1/")
    assert known or role_of(method, f"/{path}x") == "administer"


class Bare(SimpleNamespace):
    """As much of a catalogue as the front looks at."""

    __hash__ = object.__hash__


def serve(app: Any, policy: Policy = OPEN, make: Any = Front, **more: Any) -> Any:
    """A front with as much of a service as it needs, and what it sends for one request."""
    service = SimpleNamespace(catalogue=Bare(policy=policy, bundles={}, digest="d" * 16), nobody=EVERYONE,
                              metrics=SimpleNamespace(refused=lambda refusal: None), **{"routes": None} | more)
    front = make(app, service)

    def ask(path: str = "/v1/completions", method: str = "POST", **scope: Any) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(front({"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", **scope}, None, send))
        return sent

    return ask


async def answering(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": part == b"one"})


def test_an_answer_is_passed_on_with_a_header() -> None:
    start, *rest = serve(answering)()
    assert start["status"] == 200 and start["headers"] == [(b"a", b"b"), (b"x-mia-lab-config", b"d" * 16)]
    assert [message["body"] for message in rest] == [b"one", b"two"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_refusal_takes_the_place_of_a_stream_that_has_not_begun(raises: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        error = CALL.get().refuse(Refused(429, "too many"))
        await send({"type": "http.response.body", "body": b"data: what vLLM says of it", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]"})
        if raises:
            raise error

    start, body = serve(app)()
    assert start["status"] == 429 and (b"retry-after", b"1") in start["headers"] and b"too many" in body["body"]


@pytest.mark.parametrize(("refusal", "runs"), [(None, True), (Refused(404, "no such edit"), False), (None, False)])
def test_a_response_that_streams_before_it_runs_waits(refusal: Refused | None, runs: bool) -> None:
    """vLLM's responses begin with events that come before any request does."""
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for event in (b"created", b"in_progress"):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if refusal is not None:
            CALL.get().refuse(refusal)
            raise RuntimeError("Caught handled exception, but response already started.")
        if runs:
            CALL.get().acted, CALL.get().began = [("cheerful", 0.5)], True
            await send({"type": "http.response.body", "body": b"delta", "more_body": True})
        await send({"type": "http.response.body", "body": b"completed"})

    start, *bodies = serve(app)("/v1/responses")
    if refusal is not None:
        assert start["status"] == 404 and len(bodies) == 1 and b"no such edit" in bodies[0]["body"]
        return
    assert ((b"x-mia-lab-edits", b"cheerful;coeff=0.5") in start["headers"]) == runs
    assert [one["body"] for one in bodies] == [b"created", b"in_progress", *[b"delta"] * runs, b"completed"]


def test_what_fails_in_the_middle_of_an_answer_is_not_hidden() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering(scope, receive, send)
        raise CALL.get().refuse(Refused(400, "too late"))

    with pytest.raises(Refused, match="too late"):
        serve(app)()


def test_other_errors_are_vllms_own() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        serve(app)()


def test_a_prefix_of_a_proxy_opens_no_door() -> None:
    for path, root in (("/x/v1/models", "/x"), ("/v1/models", "/x"), ("/health/v1/models", "/health"), ("/xhealth", "/x")):
        start, _ = serve(answering, LOCKED)(path, "GET", root_path=root)
        assert start["status"] == 401, path
    assert serve(answering, LOCKED)("/x/health", "GET", root_path="/x")[0]["status"] == 200


ORIGIN = (b"origin", b"https://page.example")
PREFLIGHT = [ORIGIN, (b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization")]


def with_cors(policy: Policy, *origins: str) -> Any:
    """A front before an app that has CORS as vLLM's does, for pages of these origins, and what it sends."""
    async def ours(scope: Any, receive: Any, send: Any) -> None:
        raise Refused(404, "no such capture")

    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": []})
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-other"])
    return serve(app.build_middleware_stack(), policy, hook._fronting, routes=ours)


@pytest.mark.parametrize("policy", [OPEN, LOCKED])
@pytest.mark.parametrize("path", ["/v1/completions", "/mia/captures/x"])
def test_a_browser_may_ask_first_without_a_key(path: str, policy: Policy) -> None:
    for origins, status in ((("*",), 200), (("https://page.example",), 200), (("https://other.example",), 400)):
        start, _ = with_cors(policy, *origins)(path, "OPTIONS", headers=PREFLIGHT)
        assert start["status"] == status
        assert dict(start["headers"]).get(b"access-control-allow-headers") == b"authorization"
    lacking = 401 if policy is LOCKED else 404
    assert with_cors(policy, "*")(path, "OPTIONS")[0]["status"] == lacking, "this is no preflight"
    assert with_cors(policy)(path, "OPTIONS", headers=PREFLIGHT)[0]["status"] == lacking, "this server has no CORS"


@pytest.mark.parametrize(("path", "policy", "status"), [("/v1/models", OPEN, 200), ("/v1/models", LOCKED, 401), ("/mia/x", LOCKED, 401),
                                                        ("/mia/x", OPEN, 404)])
def test_a_page_reads_every_answer_that_cors_lets_it(path: str, policy: Policy, status: int) -> None:
    for origins, allowed in ((("*",), b"*"), (("https://page.example",), ORIGIN[1]), (("https://other.example",), None)):
        start, _ = with_cors(policy, *origins)(path, "GET", headers=[ORIGIN])
        said = dict(start["headers"])
        assert (start["status"], said.get(b"access-control-allow-origin"), said[b"vary"]) == (status, allowed, b"Origin")
        assert said[b"access-control-expose-headers"] == b"x-other, x-mia-lab-config, x-mia-lab-edits, x-mia-lab-capture"
    assert b"vary" not in dict(with_cors(policy)(path, "GET", headers=[ORIGIN])[0]["headers"])


@pytest.mark.parametrize("kind", [None, "text/plain", "Text/Plain; charset=utf-8", "multipart/form-data; boundary=b",
                                  "application/octet-stream"])
@pytest.mark.parametrize("path", ["/mia/run", "/mia/call/drop"])
def test_a_page_that_did_not_ask_first_runs_nothing(path: str, kind: str | None) -> None:
    """Browsers send bodies of some types, or of none, wherever a page says, and only keep the answer from it."""
    async def read() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    service = SimpleNamespace(catalogue=Bare(policy=OPEN, bundles={}, digest="d"))
    ours = routes.app(service)
    ask = serve(answering, routes=lambda scope, receive, send: ours(scope, read, send))
    headers = [(b"origin", b"https://page.example"), *([] if kind is None else [(b"content-type", kind.encode())])]
    if kind == "application/octet-stream":
        with pytest.raises(ClientDisconnect):  # it is read
            ask(path, headers=headers)
    else:
        start, body = ask(path, headers=headers)
        assert start["status"] == 400 and b"Content-Type: application/octet-stream" in body["body"]


def test_a_websocket_needs_the_highest_role() -> None:
    (sent,) = serve(answering, LOCKED)("/v1/realtime", type="websocket")
    assert sent["type"] == "websocket.close" and sent["code"] == 1008


def test_a_service_that_cannot_start_ends_the_process(tmp_path: Path) -> None:
    """Under uvicorn, as vLLM runs it: which on its own would end with status 0, or serve without the service."""
    code = """
import asyncio
from types import SimpleNamespace
import uvicorn
from starlette.applications import Starlette
from mia_lab.errors import ProofError
from mia_lab.serve.front import Front

async def start():
    raise ProofError("the start-up proof failed: so it goes")

async def main():
    server = uvicorn.Server(uvicorn.Config(Front(Starlette(), SimpleNamespace(start=start)), port=0))
    await asyncio.get_running_loop().create_task(server.serve())

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ran.returncode == 1
    assert "mia_lab: the server does not start: the start-up proof failed: so it goes" in ran.stderr
    assert "Uvicorn running" not in ran.stderr


def test_a_front_end_that_would_pass_the_keys_by_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm import envs

    from mia_lab.serve import opting

    monkeypatch.setattr(opting, "expand", lambda options, config: options)
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)  # the variable itself is read once a process
    with pytest.raises(UnsupportedError, match="VLLM_USE_RUST_FRONTEND"):
        opting.opt_in({"serve": str(tmp_path)}, None)
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", False)
    monkeypatch.setitem(sys.modules, "smg_grpc_servicer", ModuleType("smg_grpc_servicer"))
    with pytest.raises(UnsupportedError, match="--grpc"):
        opting.opt_in({"serve": str(tmp_path)}, None)


@pytest.mark.parametrize(("ends", "dropped"), [(False, ["one", "two"]), (True, None)])
def test_captures_go_with_who_asked_for_them(ends: bool, dropped: list[str] | None) -> None:
    """What runs on after a whole answer (a response in the background) keeps its capture."""
    async def app(scope: Any, receive: Any, send: Any) -> None:
        CALL.get().running |= {"two", "one"}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data", "more_body": not ends})

    asked: list[Any] = []
    ask = serve(app, rpc=lambda *args: args, later=asked.append)
    ask()
    assert asked == ([] if dropped is None else [("drop", dropped)])


@pytest.mark.parametrize(("status", "refused", "dropped"), [(200, False, None), (200, True, ["ended", "runs"]),
                                                            (500, False, ["ended", "runs"])])
def test_captures_whose_handles_nobody_was_told_are_let_go(status: int, refused: bool, dropped: list[str] | None) -> None:
    """A request of many prompts, of which the first have ended when there is no room for another: no room is left to nobody."""
    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = CALL.get()
        call.handles += ["a", "b"]
        call.ended.add("ended")
        call.running.add("runs")
        if refused:
            raise call.refuse(Refused(429, "full"))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"whole"})

    asked: list[Any] = []
    start, *_ = serve(app, rpc=lambda *args: args, later=asked.append)()
    assert asked == ([] if dropped is None else [("drop", dropped)])
    assert start["status"] == (429 if refused else status) and ((b"x-mia-lab-capture", b"a, b") in start["headers"]) == (dropped is None)


def test_large_files_are_made_beside_the_event_loop() -> None:
    """A capture or a bundle can take seconds to pack, in which no other request would get a token."""
    places: list[int] = []

    async def collected(*args: Any) -> Any:
        row = ["resid_post", 3, False, torch.arange(2).numpy().tobytes(), [4], "float32", bytes(32)]
        return {"note": json.dumps({"config": "c", "prompt_tokens": 2, "monitors": []}).encode(), "running": False, "rows": [row]}

    def dtype_of(kind: str) -> torch.dtype:
        places.append(threading.get_ident())
        return torch.float32

    def zipped() -> bytes:
        places.append(threading.get_ident())
        return b"zip"

    async def main() -> tuple[bytes, bytes]:
        served = {"a": SimpleNamespace(zipped=zipped)}
        token = CALL.set(Call(EVERYONE, Bare(bundles=served), None))
        try:
            found = await routes.bundle(SimpleNamespace(path_params={"name": "a"}))
        finally:
            CALL.reset(token)
        return await captures.fetch(SimpleNamespace(rpc=collected, dtype_of=dtype_of), "", "h" * 32, 0), found.body

    capture, found = asyncio.run(main())
    assert load(capture)["resid_post.3"].shape == (2, 4) and found == b"zip"
    assert len(places) == 2 and threading.get_ident() not in places


def test_no_beam_search_runs_without_its_edits() -> None:
    """Of text, and of what is heard: each of its steps would be a prompt of its own."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

    hook.install()
    default = Bare(policy=Policy.read(b'[defaults]\nedits = ["cheerful"]\n'))
    for kind in (ChatCompletionRequest, CompletionRequest, TranscriptionRequest, TranslationRequest):
        for catalogue, extra in ((default, None), (Bare(policy=OPEN), {"mia_lab": "{}"})):
            token = CALL.set(Call(EVERYONE, catalogue, None))
            try:
                with pytest.raises(Refused, match="beam search takes no edits"):
                    kind.to_beam_search_params(SimpleNamespace(vllm_xargs=extra), 16)
            finally:
                CALL.reset(token)
