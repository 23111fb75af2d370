"""The overhead card over HTTP: what its clock counts, its proofs, its processes, and one run of both servers."""
from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from mia_lab import cli
from mia_lab.bench import load, served, servers
from mia_lab.bench.cases import Work
from mia_lab.bench.load import Answer, Load
from mia_lab.bench.overhead_card import OverheadCard
from mia_lab.errors import MiaError, ProofError, ServerError

WORK = Work(batch=2, tokens_in=4, tokens_out=3)
OURS = {"x-mia-lab-config": "c0ffee"}
CAPTURED = OURS | {"x-mia-lab-capture": "h"}


def event(*tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "x", "token_ids": list(tokens)}]}).encode() + b"\n\n"


def answer(*tokens: int, headers: dict[str, str] | None = None, start: float = 1.0, gap: float = 0.5, captured: bytes = b"") -> Answer:
    return Answer(headers or {}, tokens, tuple((start + gap * i, 1) for i in range(len(tokens))), captured)


# -- what came when ---------------------------------------------------------------------------------------------------


def test_events_are_read_across_the_blocks_in_which_they_came() -> None:
    whole = event(7) + event(8, 9) + event() + event(10) + b"data: [DONE]\n\n"
    cut, twice = len(event(7)) + 9, len(event(7)) + len(event(8, 9))
    found = load.read([(1.0, whole[:cut]), (2.0, whole[cut:twice]), (3.0, whole[twice:])], OURS)
    assert found.tokens == (7, 8, 9, 10) and found.headers == OURS
    assert found.times == ((1.0, 1), (2.0, 2), (3.0, 1))  # an event counts when its last byte came


@pytest.mark.parametrize(("sent", "says"), [
    (event(7), "broke off after 1 tokens"), (b"data: [DONE]\n\n", "broke off after 0"),
    (event(7) + b'data: {"error": {"message": "engine died"}}\n\n', "engine died")])
def test_a_stream_that_breaks_off_is_no_answer(sent: bytes, says: str) -> None:
    with pytest.raises(ServerError, match=says):
        load.read([(1.0, sent)], {})


def test_times_are_those_of_a_client() -> None:
    early, late = answer(1, 2, 3, 4, start=1.0, gap=0.5), answer(1, 2, 3, 4, start=2.0, gap=0.1)
    run = Load((early, late), start=0.5, end=3.0).times()
    assert run.ttft_ms == pytest.approx(1000) and run.tpot_ms == pytest.approx(300) and run.seconds == pytest.approx(2.5)
    assert run.step_ms == pytest.approx(100)  # of the four gaps after the last stream began, three are 0.1 s
    two = replace(early, times=((1.0, 2), (2.0, 2)))  # two tokens came with the first event, two with the second
    run = Load((two,), 0.5, 3.0).times()
    assert (run.tpot_ms, run.step_ms) == pytest.approx((1000 / 3, 500))


def test_tokens_that_all_came_at_once_have_no_time_between_them() -> None:
    whole = Answer({}, (1, 2, 3), ((1.0, 3),))
    assert Load((answer(1, 2, 3), whole), 0.0, 2.0).times().step_ms == pytest.approx(500)
    with pytest.raises(ServerError, match="3 tokens came at once"):
        Load((whole, whole), 0.0, 2.0).times()


# -- proofs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spoiled", "says"), [
    (dict(tokens=(1, 2)), "said 2 tokens of 3"), (dict(headers={}), "not by mia_lab"),
    (dict(headers=OURS), "says 'nothing'"), (dict(headers=OURS | {"x-mia-lab-edits": "far-1;coeff=1"}), "says 'far-1;coeff=1'"),
    (dict(headers=CAPTURED | {"x-mia-lab-edits": "far-0;coeff=1"}), "was captured"), (dict(tokens=(5, 5, 6)), "steered towards token 5")])
def test_a_steered_request_proves_itself_by_tokens_and_headers(spoiled: dict[str, Any], says: str) -> None:
    case = served._steered("steer one layer", WORK, ["far-0"] * 2, [5, 5])
    good = answer(5, 5, 5, headers=OURS | {"x-mia-lab-edits": "far-0;coeff=1"})
    assert case.prove([good] * 2) == 0
    assert case.asks == ({"edits": ["far-0"]},) * 2
    with pytest.raises(ProofError, match=says):
        case.prove([good, replace(good, **spoiled)])


def test_each_server_answers_as_itself() -> None:
    idle = [answer(1, 2, 3, headers=OURS)] * 2
    native = [answer(1, 2, 3)] * 2
    served.check_native(native, WORK)
    case = served._idle("idle", WORK)
    assert case.prove(idle) == 0 and case.asks == ({}, {})
    with pytest.raises(ProofError, match="without mia_lab answered request 0 with x-mia-lab-config"):
        served.check_native(idle, WORK)
    with pytest.raises(ProofError, match="not by mia_lab"):
        case.prove(native)
    with pytest.raises(ProofError, match="to run under no edit"):
        case.prove([answer(1, 2, 3, headers=OURS | {"x-mia-lab-edits": "x;coeff=1"})])


def rows(tokens: tuple[int, ...], layers: int = 2) -> dict[str, torch.Tensor]:
    """A capture whose last layer leads to these tokens, by the identity as unembedding; position 3 is the prompt's last."""
    at = torch.arange(3, 3 + len(tokens)) if len(tokens) == 1 else torch.arange(3 + len(tokens))
    found = {f"resid_post.{layer}.positions": at.clone() for layer in range(layers)}
    values = torch.zeros(len(at), 8)
    values[torch.arange(len(at) - len(tokens), len(at)), torch.tensor(tokens)] = 1.0
    return found | {f"resid_post.{layer}": values.clone() for layer in range(layers)}


def nan_in_the_first_layer(found: dict[str, torch.Tensor]) -> None:
    found["resid_post.0"][0, 0] = torch.nan


def another_position(found: dict[str, torch.Tensor]) -> None:
    found["resid_post.1.positions"] += 1


def a_layer_less(found: dict[str, torch.Tensor]) -> None:
    del found["resid_post.0"], found["resid_post.0.positions"]


def another_s_rows(found: dict[str, torch.Tensor]) -> None:
    found["resid_post.1"] = found["resid_post.1"].roll(1, dims=1)


@pytest.mark.parametrize("at", ["last", "all"])
@pytest.mark.parametrize(("spoil", "says"), [(nan_in_the_first_layer, "finite ones"), (another_position, "finite ones"),
                                             (a_layer_less, "1 layers were fetched, and 2"), (another_s_rows, "do not lead")])
def test_a_capture_proves_itself_by_the_rows_that_were_fetched(at: str, spoil: Callable[[dict], None], says: str) -> None:
    model = SimpleNamespace(unembed=lambda found: found)
    case = served._captured("capture", model, WORK, [0, 1], at)
    held = rows((5, 6, 7) if at == "all" else (5,))
    good = answer(5, 6, 7, headers=CAPTURED, captured=save(held))
    positions = 6 if at == "all" else 1
    assert case.prove([good] * 2) == 2 * 2 * positions * 8 * 4  # requests, layers, positions, width, bytes
    spoil(held)
    with pytest.raises(ProofError, match=says):
        case.prove([good, replace(good, captured=save(held))])
    for captured, headers, words in ((b"no file", CAPTURED, "no safetensors"), (good.captured, OURS, "captured nothing")):
        with pytest.raises(ProofError, match=words):
            case.prove([good, replace(good, captured=captured, headers=headers)])


# -- the command, and its processes -----------------------------------------------------------------------------------


def test_engine_options_are_said_as_vllm_s_command_takes_them() -> None:
    found = servers.options({"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "max_model_len": 64,
                             "tokenizer": None, "cudagraph_capture_sizes": [1, 2], "compilation_config": {"mode": 0}})
    assert found == ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "64",
                     "--cudagraph-capture-sizes", "1", "2", "--compilation-config", '{"mode": 0}']
    with pytest.raises(MiaError, match="'api-key', which bench --http chooses itself"):
        servers.options({"api-key": "x"})


@pytest.mark.parametrize(("options", "says"), [(["--alone"], "--alone is for engines in one process"), (["--peers"], "--peers is for"),
                                               (["--case", "idel"], "no case 'idel' over HTTP; there are 'idle'")])
def test_what_says_nothing_to_two_servers_is_refused_at_once(options: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["bench", "demo", "--http", *options]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("script", ["sleep 60 & echo up; sleep 60", "trap '' TERM; sleep 60 & echo up; while :; do sleep 1; done"])
def test_a_server_s_whole_group_ends(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_STOP_SECONDS", 0.3)
    process = subprocess.Popen(["bash", "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    servers._stop(process)
    end = time.monotonic() + 5
    while _group_lives(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert process.returncode is not None and not _group_lives(process.pid)
    process.stdout.close()


def _group_lives(group: int) -> bool:
    states = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return any(int(found[2]) == group and found[0] != "Z" for found in states)


def test_a_signal_to_end_ends_in_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, servers.ended_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("loading\nTraceback (most recent call last):\n  File \"x\", line 1\nValueError: no such model\nbye\n")
    process = subprocess.Popen(["false"])
    process.wait()
    with pytest.raises(MiaError, match=r"status 1 before it served: ValueError: no such model(.|\n)*Its log ends:\n(.|\n)*bye"):
        servers.Server("http://127.0.0.1:9", "m", "k", log, process).wait()


@contextmanager
def answering(status: int, body: bytes, length: int) -> Iterator[str]:
    """A server whose every answer is the same."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(("status", "body", "more", "says"), [(404, b"no model here", 0, "answers 404: no model here"),
                                                             (200, event(7), 100, "broke off"), (200, event(7), 0, "broke off after 1")])
def test_a_server_that_refuses_or_breaks_off_is_an_error(status: int, body: bytes, more: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("its last words")
    with answering(status, body, len(body) + more) as url, pytest.raises(ServerError, match=says):
        load.load(servers.Server(url, "m", "k", tmp_path / "log", None), replace(WORK, batch=1), [[1, 2, 3]])


@pytest.mark.full
def test_the_command_measures_two_servers(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    names, out = ["idle", "another edit in each request", "capture every token, all layers"], tmp_path / "found.json"
    options = ["--batch", "2", "--tokens", "12", "24", "--layers", "32", "--rounds", "1", "--engine", '{"enforce_eager": true}',
               "--case", *names]
    assert cli.main(["bench", "tiny", "--http", "--out", str(out), *options]) == 0
    card = OverheadCard.load(out)
    assert [(row.model, row.case) for row in card.rows] == [("tiny, 32 layers over HTTP", name) for name in names]
    assert all(row.tpot_ms.native > 0 and row.step_ms.case > 0 and row.ttft_ms.case > 0 for row in card.rows)
    assert [row.delivered for row in card.rows] == [0, 0, 2 * (12 + 23) * 32 * 256 * 2]  # requests, positions, layers, width, bytes
    assert "| 2 | 12+24 | another edit in each request |" in capsys.readouterr().out and out.with_suffix(".png").exists()
