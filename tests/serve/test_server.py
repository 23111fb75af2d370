"""A real server on the demo model says what a Session says with the same edits, and shows the same rows."""
from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from mia_lab.engine.wire import Spec, Take, Term, _body, address
from mia_lab.serve import batch, frames
from serve.conftest import MESSAGES, OTHER, PROMPT, TOKENS, Known
from serve.server import MODEL, Server, launch, xargs
from serve.spans import Spans

pytestmark = pytest.mark.full

ASKED = {"cheerful": ["cheerful"], "half": [{"name": "cheerful", "coeff": 0.5}], "both": ["cheerful", {"name": "ablated", "coeff": 1}],
         "gated": ["gated"], "": []}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def rows_of(server: Server, handle: str, key: str | None = None) -> dict[str, torch.Tensor]:
    """What is captured under a handle."""
    found = server.ask("GET", f"/mia/captures/{handle}", key=key)
    assert found.status == 200, found.body
    return load(found.body)


def said(server: Server, handle: str, folder: Path) -> dict[str, str]:
    """What a capture's metadata says."""
    path = folder / "found.safetensors"
    path.write_bytes(server.ask("GET", f"/mia/captures/{handle}").body)
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_completions_say_what_a_session_says(name: str, stream: bool, client: openai.OpenAI, known: Known) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "extra_body": xargs({"edits": ASKED[name]})}
    found = client.completions.create(**body, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in found) if stream else found.choices[0].text
    assert text == known.said[name]
    assert not name or text != known.said[""]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["cheerful", "both", ""])
def test_chats_say_what_a_session_says(name: str, stream: bool, client: openai.OpenAI, known: Known) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, "extra_body": xargs({"edits": ASKED[name]})}
    found = client.chat.completions.create(**body, stream=stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found) if stream else found.choices[0].message.content
    assert text == known.said[f"{name}:chat"]
    assert not name or text != known.said[":chat"]


def test_responses_are_steered_too(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "input": "How was your holiday by the sea?", "max_output_tokens": TOKENS, "temperature": 0, "store": False}
    texts = [client.responses.create(**body, extra_body=xargs(asked)).output_text for asked in (None, {"edits": ["cheerful"]})]
    assert texts[0] != texts[1]


def test_a_streamed_response_says_what_acted_or_is_refused(server: Server) -> None:
    """Though vLLM's first events of one come before its request runs."""
    body = {"model": MODEL, "input": "How was your holiday by the sea?", "max_output_tokens": 4, "store": False, "stream": True}
    asked = {"edits": ["cheerful"], "capture": [{"point": "resid_post", "layers": [8]}]}
    found = server.ask("POST", "/v1/responses", body | xargs(asked))
    assert found.status == 200 and found.headers["x-mia-lab-edits"] == "cheerful;coeff=1"
    assert found.body.startswith(b"event: response.created") and b"event: response.completed" in found.body
    assert rows_of(server, found.headers["x-mia-lab-capture"])["resid_post.8"].shape[0] == 1
    refused = server.ask("POST", "/v1/responses", body | xargs({"edits": ["nothing"]}))
    assert refused.status == 404 and "there is no edit 'nothing' here" in refused.message


def test_what_stands_where_vllm_does_not_read_it_is_refused(server: Server) -> None:
    found = server.ask("POST", "/v1/completions", {"model": MODEL, "prompt": PROMPT, "mia_lab": {"edits": ["cheerful"]}})
    assert found.status == 400 and "Put it into vllm_xargs" in found.message


def test_the_headers_say_what_acted(server: Server) -> None:
    found = server.complete(PROMPT, {"edits": [{"name": "cheerful", "coeff": 0.5}, "gated"]})
    assert found.headers["x-mia-lab-edits"] == "cheerful;coeff=0.5, gated;coeff=1"
    assert found.headers["x-mia-lab-config"] == server.ask("GET", "/mia/status").json["digest"]
    plain = server.complete(PROMPT)
    assert "x-mia-lab-edits" not in plain.headers and "x-mia-lab-capture" not in plain.headers
    assert plain.headers["x-mia-lab-config"] == found.headers["x-mia-lab-config"]


@pytest.mark.parametrize("name", ["", "cheerful", "gated"])
@pytest.mark.parametrize("stream", [False, True])
def test_captured_rows_are_those_of_a_session(name: str, stream: bool, server: Server, known: Known) -> None:
    asked = {"edits": ASKED[name], "capture": [{"point": "resid_post", "layers": [8, 9], "at": "all"}]}
    found = server.complete(PROMPT, asked, max_tokens=TOKENS, stream=stream)
    rows = rows_of(server, found.headers["x-mia-lab-capture"])
    for layer in (8, 9):
        expected, positions = known.rows[name, layer], rows[f"resid_post.{layer}.positions"]
        assert positions.tolist() == list(range(len(expected)))
        assert rows[f"resid_post.{layer}"].dtype == torch.bfloat16
        error = (rows[f"resid_post.{layer}"].float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        assert error.max() < 1e-3


@pytest.mark.parametrize(("at", "expected"), [("last", [-1]), (0, [0]), ([1, -2], [1, -2]), ("prompt", None), ("generated", [])])
def test_the_positions_that_are_asked_for_come(at: Any, expected: list[int] | None, server: Server, tmp_path: Path) -> None:
    found = server.complete(PROMPT, {"capture": [{"point": "blocks.3.hook_resid_post", "at": at}]})
    handle = found.headers["x-mia-lab-capture"]
    about = said(server, handle, tmp_path)
    n = int(about["prompt_tokens"])
    places = list(range(n)) if expected is None else sorted(p % n for p in expected) or list(range(n, n + 7))
    assert rows_of(server, handle)["resid_post.3.positions"].tolist() == places
    assert about["running"] == "false" and about["config"] == found.headers["x-mia-lab-config"] and about["monitors"] == "[]"
    later = load(server.ask("GET", f"/mia/captures/{handle}?since={places[-1]}").body)
    assert later["resid_post.3.positions"].tolist() == [places[-1]] and later["resid_post.3"].shape == (1, 640)


def test_before_is_before_the_edit(server: Server, known: Known) -> None:
    capture = [{"point": "resid_post", "layers": 8, "at": "last", "before": before} for before in (False, True)]
    found = server.complete(PROMPT, {"edits": ["cheerful"], "capture": capture})
    rows = rows_of(server, found.headers["x-mia-lab-capture"])
    moved = (rows["resid_post.8"].float() - rows["resid_post.8.before"].float())[0]
    assert (moved - known.row).norm() < 0.05 * known.row.norm()


def test_monitors_are_dot_products_of_captured_rows(server: Server, known: Known, tmp_path: Path) -> None:
    """A projection after the edit, a gate's probe before it; beside a capture of another point."""
    asked = {"edits": ["cheerful"], "monitor": ["cheerful", "gated"], "capture": [{"point": "resid_post", "layers": 9, "at": "all"}]}
    found = server.complete(PROMPT, asked, max_tokens=TOKENS)
    handle = found.headers["x-mia-lab-capture"]
    rows, labels = rows_of(server, handle), json.loads(said(server, handle, tmp_path)["monitors"])
    assert [(one["name"], one["what"], one["layer"]) for one in labels] == [("cheerful", "projection", 8), ("gated", "probe", 5)]
    expected = known.rows["cheerful", 8].float() @ (known.row / known.row.norm())
    assert rows["monitor.cheerful.0"].dtype == torch.float32
    torch.testing.assert_close(rows["monitor.cheerful.0"], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert rows["monitor.cheerful.0.positions"].tolist() == list(range(len(expected)))
    assert rows["monitor.gated.0"].shape == expected.shape
    assert torch.equal(rows["resid_post.9"], known.rows["cheerful", 9])


def test_golden_outputs_are_reproduced_token_for_token(server: Server, known: Known) -> None:
    for name, goldens in known.goldens.items():
        for golden in goldens:
            for said_, edits in ((golden.steered, [name]), (golden.plain, [])):
                found = server.complete(list(golden.prompt), {"edits": edits}, max_tokens=len(said_.tokens), return_token_ids=True)
                assert tuple(found.json["choices"][0]["token_ids"]) == said_.tokens, (name, edits)


def test_each_prompt_has_a_capture_of_its_own(server: Server, known: Known) -> None:
    found = server.complete([PROMPT, OTHER], {"edits": ["cheerful"], "capture": [{"point": "resid_post", "layers": [8], "at": "prompt"}]})
    handles = found.headers["x-mia-lab-capture"].split(", ")
    rows = [rows_of(server, handle)["resid_post.8"] for handle in handles]
    n = len(known.goldens["cheerful"][0].prompt), len(known.goldens["cheerful"][1].prompt)
    assert tuple(map(len, rows)) == n
    assert (rows[0].float() - known.rows["cheerful", 8][: n[0]].float()).norm() < 0.02 * rows[0].float().norm()


def test_the_capture_of_a_broken_off_stream_is_let_go(client: openai.OpenAI, server: Server) -> None:
    asked = xargs({"capture": [{"point": "resid_post", "at": "all"}]})
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 480, "stream": True, "extra_body": asked}
    with client.completions.with_streaming_response.create(**body) as found:
        handle = found.headers["x-mia-lab-capture"]
        lines = found.iter_lines()  # which closes the connection once nobody holds it
        next(lines)
        assert server.ask("GET", f"/mia/captures/{handle}").status == 200
    end = time.monotonic() + 20
    while time.monotonic() < end and server.ask("GET", f"/mia/captures/{handle}").status == 200:
        time.sleep(0.2)
    assert server.ask("GET", f"/mia/captures/{handle}").status == 404
    assert server.ask("GET", "/mia/status").json["captures"]["bytes"] < 1 << 24


def test_a_deleted_capture_is_gone(server: Server) -> None:
    handle = server.complete(PROMPT, {"capture": [{"point": "resid_post"}]}).headers["x-mia-lab-capture"]
    assert server.ask("DELETE", f"/mia/captures/{handle}").status == 204
    assert server.ask("GET", f"/mia/captures/{handle}").status == 404


@pytest.mark.parametrize("fields", [{"use_beam_search": True, "n": 2}, {"n": 2, "temperature": 1}])
def test_what_would_be_ignored_is_refused(fields: dict[str, Any], server: Server) -> None:
    found = server.complete(PROMPT, {"capture": [{"point": "resid_post"}]}, **fields)
    assert found.status == 400 and ("n is 2" in found.message or "beam search" in found.message)
    assert server.complete(PROMPT, **fields).status == 200


def test_several_continuations_are_all_steered(server: Server, known: Known) -> None:
    found = server.complete(PROMPT, {"edits": ["cheerful"]}, n=2, max_tokens=TOKENS, temperature=1e-6)
    assert [choice["text"] for choice in found.json["choices"]] == [known.said["cheerful"]] * 2


def test_curl_is_enough(server: Server, tmp_path: Path) -> None:
    def curl(*args: str) -> str:
        return subprocess.run(["curl", "--silent", "--show-error", "--fail", *args], check=True, capture_output=True, text=True).stdout

    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True}
    asked = xargs({"edits": ["cheerful"], "capture": [{"point": "resid_post", "layers": [8]}]})
    headers = tmp_path / "headers"
    out = curl("-D", str(headers), "-H", "content-type: application/json", "-d", json.dumps(body | asked), f"{server.url}/v1/completions")
    assert out.count("data: ") == 5 and out.endswith("data: [DONE]\n\n")
    handle = next(line.split(": ")[1].strip() for line in headers.read_text().splitlines() if line.lower().startswith("x-mia-lab-capture"))
    curl("-o", str(tmp_path / "rows.safetensors"), f"{server.url}/mia/captures/{handle}")
    with safe_open(tmp_path / "rows.safetensors", "pt") as file:
        assert set(file.keys()) == {"resid_post.8", "resid_post.8.positions"}
    assert {one["name"] for one in json.loads(curl(f"{server.url}/mia/edits"))["edits"]} == {"cheerful", "ablated", "gated", "mood"}
    bundle = subprocess.run(["curl", "--silent", f"{server.url}/mia/edits/cheerful"], check=True, capture_output=True).stdout
    assert bundle[:2] == b"PK"


def counts(server: Server) -> dict[str, float]:
    """What the server's metrics say."""
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line.startswith("mia_lab_"))}


def test_the_metrics_count(server: Server) -> None:
    before = counts(server)
    server.complete(PROMPT, {"edits": ["gated"], "capture": [{"point": "resid_post", "layers": [8], "at": "all"}]})
    assert server.complete(PROMPT, {"edits": ["nobody"]}).status == 404
    time.sleep(1.5)  # until the next beat
    after = counts(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['mia_lab_requests_total{edit="gated"}'] == 1 and after['mia_lab_active_edits{edit="gated"}'] == 0
    assert grown["mia_lab_dose_count"] == 1 and grown["mia_lab_dose_sum"] == pytest.approx(0.8, rel=1e-3)
    assert grown['mia_lab_refusals_total{status="404"}'] == 1 and grown["mia_lab_capturing_requests_total"] == 1
    assert grown["mia_lab_captured_rows_total"] >= 13 and grown["mia_lab_dropped_rows_total"] == 0
    assert grown['mia_lab_gate_decisions_total{decision="opened"}'] == 1
    assert after["mia_lab_held_capture_bytes"] > 0
    digest = server.ask("GET", "/mia/status").json["digest"]
    assert after[f'mia_lab_config_info{{digest="{digest}"}}'] == 1 and after['mia_lab_bundles{state="served"}'] == 4


def test_spans_say_what_acted(server: Server, spans: Spans) -> None:
    steered = server.complete(PROMPT, {"edits": [{"name": "cheerful", "coeff": 0.5}], "capture": [{"point": "resid_post"}]})
    found = spans.wait(steered.json["id"])
    assert found["mia_lab.edits"] == ["cheerful"] and found["mia_lab.capture"] is True
    assert found["mia_lab.dose"] == pytest.approx(0.4, rel=1e-3)
    assert found["mia_lab.config"] == steered.headers["x-mia-lab-config"]
    assert not any(name.startswith("mia_lab") for name in spans.wait(server.complete(PROMPT).json["id"]))


def test_what_a_notebook_client_runs_is_counted_and_traced_too(server: Server, spans: Spans, known: Known) -> None:
    """Three requests of one batch: with an edit and a capture, with a capture, and with neither."""
    rows = known.row[None].float().contiguous()
    sha, take = address(1, rows.numpy().tobytes()), Take("resid_post", 8, ((0, None),))
    steered = _body(Spec((Term("add", "resid_post", 8, ((1, None),), write=sha),), (take,)))
    params = {"max_tokens": 2, "temperature": 0.0}
    asks = [(uuid.uuid4().hex, spec, params) for spec in (steered, _body(Spec((), (take,))), "")]
    trace, before = uuid.uuid4().hex, counts(server)
    found = server.ask("POST", "/mia/run", batch.pack([[2, 9]] * 3, asks, {sha: rows}, False),
                       headers={"traceparent": f"00-{trace}-{'1' * 16}-01"})
    assert found.status == 200, found.body
    dropped = server.ask("POST", "/mia/call/drop", frames.pack({"args": [[uid for uid, *_ in asks]], "vectors": {}}))
    assert dropped.status == 200, dropped.body
    after = counts(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['mia_lab_requests_total{edit="(inline)"}'] == 1 and after['mia_lab_active_edits{edit="(inline)"}'] == 0
    assert grown["mia_lab_capturing_requests_total"] == 2 and grown['mia_lab_calls_total{method="drop"}'] == 1
    assert grown["mia_lab_dose_count"] == 0  # the unit of an edit that came along is not known
    said = spans.several(3, lambda found: found["trace"] == trace)
    asked = [(one["mia_lab.edits"], one["mia_lab.capture"], "mia_lab.dose" in one) for one in said if "mia_lab.config" in one]
    assert sorted(asked) == [([], True, False), (["(inline)"], True, False)]


def test_without_opting_in_nothing_is_touched(tmp_path: Path) -> None:
    """In a process of its own: the plugin is loaded, an engine's config is made, and vLLM's classes are as they were."""
    code = """
from fastapi import FastAPI
from starlette.applications import Starlette
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from mia_lab.models import resolve
before = AsyncLLM.generate, Starlette.build_middleware_stack, FastAPI.build_middleware_stack
for extra in ({}, {"other": {"mia_lab": {"serve": "/nowhere"}}}):
    config = AsyncEngineArgs(model=str(resolve("demo")), additional_config=dict(extra)).create_engine_config()
    assert config.additional_config == extra, config.additional_config
assert getattr(AsyncEngineArgs.create_engine_config, "mia_lab", False), "the plugin was not loaded"
assert before == (AsyncLLM.generate, Starlette.build_middleware_stack, FastAPI.build_middleware_stack)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_policy_that_cannot_be_followed_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "bundles").mkdir()
    (tmp_path / "serve.toml").write_text("[limits]\nspeed = 9\n")
    failed = launch(tmp_path, {"serve": str(tmp_path)})
    try:
        assert failed.process.wait(100) not in (0, None)
    finally:
        failed.stop()
    log = failed.log.read_text()
    assert "[limits] has 'speed'" in log and "Loading weights" not in log


FAULTY = """
def register():
    from mia_lab.engine.router import NEUTRAL, Router
    capture = Router._capture
    def forgetful(self, table, batch, *rest):
        table[batch.rows[batch.owner == batch.owner[0]], 0] = NEUTRAL
        return capture(self, table, batch, *rest)
    Router._capture = forgetful
"""


def test_a_server_whose_edits_do_not_act_refuses_to_start(known: Known, tmp_path: Path) -> None:
    """Another plugin breaks steering in the engine's processes, and the start-up proof sees it."""
    about = tmp_path / "faulty-0.dist-info"
    about.mkdir()
    (tmp_path / "faulty.py").write_text(FAULTY)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nfaulty = faulty:register\n")
    failed = launch(tmp_path, {"serve": str(known.folder)}, env={"PYTHONPATH": str(tmp_path)})
    try:
        assert failed.process.wait(200) not in (0, None)
    finally:
        failed.stop()
    log = failed.log.read_text()
    assert "mia_lab: the server does not start: the start-up proof failed: Add at" in log
    assert "Uvicorn running" not in log
