"""What goes between a client and a server, without either: frames, bounds, tokenizers in zips, and answers of servers that are none."""
from __future__ import annotations

import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mia_lab as mia
from mia_lab import cli
from mia_lab.bundles.golden import tokenizer_hash
from mia_lab.engine.settings import Settings
from mia_lab.engine.wire import Reduce, Spec, Take, Term, _body, address
from mia_lab.errors import MiaError, MissingRowsError, ServerError, named
from mia_lab.points import Point
from mia_lab.serve import batch, calls, frames, sampling, vocabulary
from mia_lab.serve.client.outputs import Output
from mia_lab.serve.client.transport import Missing, Transport
from mia_lab.serve.refusing import Refused

SETTINGS = Settings(2, 4, 16, "float32", 32, 4, True, True, 16, 256, True, None, ("add",), "", "NONE, NONE", "cpu", "", "")
SHAPES = {Point("resid_post", layer): (4,) for layer in range(2)} | {Point("q", 0): (2, 2), Point("z", 0): (2, 2)}
ENGINE = calls.Engine(SETTINGS, SHAPES, frozenset({("resid_post", 0), ("resid_post", 1), ("q", 0), ("z", 0)}))
BOUNDS = sampling.Bounds(32, 16, 20)
UID = "0123456789abcdef" * 2
PLAIN = (st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
         | st.binary())
NAMES = st.text().filter(lambda name: name != "blob")
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12)


@given(VALUES)
def test_a_frame_holds_what_was_put_into_it(value: Any) -> None:
    assert frames.unpack(frames.pack(value)) == value


@given(st.binary(max_size=200), st.integers(0, 1 << 64))
def test_bytes_that_are_no_frame_are_said_to_be_none(data: bytes, length: int) -> None:
    for sent in (data, min(length, (1 << 64) - 1).to_bytes(8, "little") + data, len(data).to_bytes(8, "little") + data):
        with pytest.raises(ValueError, match=r"frame|blobs|JSON|blob|line|char|number"):
            frames.unpack(sent)


def test_a_frame_is_bounded_and_whole() -> None:
    sent = frames.pack({"a": b"abc", "b": [b"", 1]})
    for broken in (sent[:-1], sent + b"x", sent.replace(b'"blob":0', b'"blob":9'), sent.replace(b'"blob":0', b'"blob":-'),
                   sent.replace(b"[3,0]", b"[4,0]")):
        with pytest.raises(ValueError, match=r"frame|blobs|blob|Expecting"):
            frames.unpack(broken)
    with pytest.raises(ValueError, match="are the most"):
        frames.unpack(frames.pack("a" * 100), 50)
    for value in ({"blob": 1}, {1: 2}, float("nan")):
        with pytest.raises(ValueError, match=r"name|JSON"):
            frames.pack(value)


def test_a_batch_comes_as_it_was_sent() -> None:
    rows = torch.arange(8.0).view(2, 4)
    sha = address(2, rows.numpy().tobytes())
    spec = Spec((Term("add", "resid_post", 0, ((0, None),), write=sha, aligned=0),), (Take("resid_post", 1, ((1, None),)),))
    asks = [(UID, _body(spec), {"max_tokens": 3}), (UID[::-1], "", {"max_tokens": 3, "logit_bias": {"3": 1.5}})]
    found = batch.read(batch.pack([[1, 2], [3]], asks, {sha: rows}, True), ENGINE, 20)
    assert [(one.ids, one.uid, one.spec) for one in found.ones] == [([1, 2], UID, spec), ([3], UID[::-1], Spec())]
    assert found.ones[1].params == {"max_tokens": 3, "logit_bias": {3: 1.5}}
    assert found.stream
    assert found.named == {sha}
    assert torch.equal(found.vectors[sha], rows)
    assert batch.capture_bytes(found.ones[0], ENGINE, {}) == 4 * (8 + 4 * 4)  # positions 1 to 4, each with its place
    assert batch.capture_bytes(found.ones[1], ENGINE, {}) == 0


def test_specs_that_would_take_long_to_read_are_refused_at_once() -> None:
    terms = [{"op": "scale", "kind": "resid_post", "layer": 0, "spans": [[2 * i, 2 * i + 1]], "coeff": 0.5} for i in range(8000)]
    spec = json.dumps({"v": 2, "terms": terms, "takes": [], "gates": [], "reduce": None})
    began = time.monotonic()
    with pytest.raises(Refused, match="too many runs of positions") as refusal:
        batch.read(batch.pack([[1]], [(UID, spec, {})], {}, False), ENGINE, 20)
    assert refusal.value.status == 413
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("sha", ["a", "../a", "\ud800", "F" * 32])
def test_an_address_that_is_none_is_refused(sha: str) -> None:
    """It would come back in an answer, which cannot hold every text."""
    take, by = Take("resid_post", 1, ((0, 1),)), Reduce((("resid_post", 1, sha),))
    for spec in (Spec((Term("add", "resid_post", 0, ((0, None),), write=sha),)), Spec(takes=(take,), reduce=by)):
        with pytest.raises(Refused, match="is the address of no vector") as refusal:
            batch.read(batch.pack([[1]], [(UID, _body(spec), {})], {}, False), ENGINE, 20)
        assert refusal.value.status == 400


@given(st.dictionaries(st.sampled_from(["prompts", "asks", "params", "specs", "vectors", "stream", "x"]), VALUES))
@settings(max_examples=300)
def test_any_batch_is_read_or_refused(changes: dict[str, Any]) -> None:
    said = frames.unpack(batch.pack([[1, 2]], [(UID, "", {})], {}, False))
    try:
        batch.read(frames.pack(said | changes), ENGINE, 20)
    except Refused as refusal:
        assert refusal.status in (400, 413)  # noqa: PT017  a batch may also be right


@given(st.sampled_from(sorted(calls.METHODS)), st.lists(VALUES | st.just([UID]) | st.just("resid_post"), max_size=8) | VALUES)
@settings(max_examples=500)
def test_any_call_is_checked_or_refused(method: str, args: Any) -> None:
    try:
        found = calls.checked(method, args, ENGINE)
    except Refused as refusal:
        assert refusal.status in (400, 404, 413)  # noqa: PT017
    else:
        assert all(calls.UID.fullmatch(uid) for uid in found.uids)


def test_calls_that_would_fill_the_memory_are_refused() -> None:
    large = calls.Engine(replace(SETTINGS, max_len=64), SHAPES | {Point("q", 0): (512, 2)}, ENGINE.sites)
    uids, many = [f"{i:032x}" for i in range(calls.MAX_UIDS)], [list(range(64))] * calls.MAX_UIDS
    lens = [uids, many, [["resid_post", 0]] * 4, False, ["resid_post", 1], 16, list(range(16)), [None] * 4]
    asked = {"pattern": (413, [uids, 0, many, False, None]), "lens": (413, lens),
             "fetch": (400, [[UID, UID], "resid_post", 0, False, False]),
             "split": (400, [[UID], "z", 0, [[1, 1]], False, None]), "unembed": (413, [bytes(16 * ((1 << 22) + 1)), False])}
    for method, (status, args) in asked.items():
        with pytest.raises(Refused) as refusal:
            calls.checked(method, args, large)
        assert refusal.value.status == status, method


@pytest.mark.parametrize(("name", "value"), [
    ("extra_args", {}), ("structured_outputs", {}), ("n", 17), ("n", True), ("temperature", float("inf")), ("temperature", "1"),
    ("max_tokens", 33), ("max_tokens", 0), ("logprobs", 21), ("logprobs", -1), ("stop", [""]),
    ("stop", ["a"] * 65), ("stop_token_ids", [16]), ("seed", 1 << 63),
    ("logit_bias", {"16": 1.0}), ("logit_bias", {"x": 1.0}), ("logit_bias", {"1": 1e9}), ("allowed_token_ids", []), ("ignore_eos", 1)])
def test_sampling_parameters_are_bounded(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        sampling.checked({name: value}, BOUNDS)


def test_an_output_grows_by_what_comes() -> None:
    found = Output("x", [1])
    one = {"index": 1, "text": "a", "tokens": [1], "logprobs": [[[1, -0.5, 1, "a"]]], "cumulative": -0.5, "reason": None, "stop": None}
    piece = {"finished": False, "cached": 0, "prompt_logprobs": [None, [[3, "-inf", None, None]]], "outputs": [one]}
    found.grow(piece)
    found.grow(piece | {"prompt_logprobs": None, "finished": True})
    assert (found.outputs[1].text, found.outputs[1].token_ids, found.outputs[0].text) == ("aa", [1, 1], "")
    assert [step[1].logprob for step in found.outputs[1].logprobs] == [-0.5, -0.5]
    assert found.prompt_logprobs[1][3].logprob == float("-inf")
    assert found.finished
    with pytest.raises(ValueError, match="no continuation"):
        found.grow(piece | {"outputs": [{**one, "index": 1 << 40}]})


def test_errors_keep_their_names_over_the_wire() -> None:
    assert isinstance(named("MissingRowsError", "gone"), MissingRowsError)
    for name in ("KeyboardInterrupt", "annotations", "named", "__builtins__"):
        assert type(named(name, "x")) is MiaError


@pytest.fixture(scope="module")
def tokenizer(models: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.tokenizer(models))


def test_a_tokenizer_crosses_as_text_and_is_the_same(tokenizer: Any) -> None:
    data = vocabulary._written(tokenizer)
    assert all(name.endswith((".json", ".jinja", ".txt")) for name in zipfile.ZipFile(io.BytesIO(data)).namelist())
    found = vocabulary.read(data, tokenizer_hash(tokenizer))
    assert found.encode("steer me") == tokenizer.encode("steer me")
    with pytest.raises(ServerError, match="not read here as the one that it uses"):
        vocabulary.read(data, "other")


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "tokenizer.py", "model.pkl", ".x.json", "a/b.json"])
def test_a_zip_with_anything_else_is_refused(name: str) -> None:
    with pytest.raises(ServerError, match="beside a tokenizer's files"):
        vocabulary.read(zipped({name: b"{}"}), "")


def test_a_zip_bomb_is_refused_before_it_unfolds() -> None:
    with pytest.raises(ServerError, match="too many files or bytes"):
        vocabulary.read(zipped({f"a{i}.json": bytes(60 << 20) for i in range(5)}), "")
    with pytest.raises(ServerError, match="no zip"):
        vocabulary.read(b"PK", "")


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """An HTTP server that answers every request in one way; its address."""
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer(self)

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        found.shutdown()
        found.server_close()


def with_body(status: int, body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def said(message: str, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message} | more}).encode()


@pytest.mark.parametrize(("status", "body", "words"), [
    (404, b'{"detail":"Not Found"}', "no server with mia_lab"), (404, said("Not Found"), "no server with mia_lab"),
    (405, b"", "no server with mia_lab"), (500, b"<html>", "no server with mia_lab"), (200, b"<html>hello</html>", "no frame"),
    (200, frames.pack({"n_layers": 1}), "describes itself otherwise"), (200, frames.pack([1]), "describes itself otherwise"),
    (401, said("no such key"), "refuses this key: no such key"), (401, b'{"error":"Unauthorized"}', "refuses this key"),
    (403, said("needs a role"), "refuses: needs a role"), (429, said("too much"), "refuses: too much")])
def test_what_is_no_server_of_ours_is_said_to_be_none(status: int, body: bytes, words: str) -> None:
    with answering(with_body(status, body)) as url, pytest.raises(ServerError, match=words):
        mia.Client(url, "key", timeout=5)


def test_addresses_and_keys_are_checked() -> None:
    for url in ("localhost:8000", "ftp://x", "http://", "http://x?y=1", "http://x:99999", "file:///etc/passwd", "http://a\nb"):
        with pytest.raises(ServerError, match="no address of a server"):
            Transport(url)
    with pytest.raises(ServerError, match="holds no user or password") as error:
        Transport("http://me:secret@host")
    assert "secret" not in str(error.value)
    with pytest.raises(ServerError, match="printable"):
        Transport("http://x", "key\r\nX-Other: 1")
    with pytest.raises(ServerError, match=r"there is no server at http://127\.0\.0\.1:1"):
        mia.Client("http://127.0.0.1:1")
    with answering(with_body(302, b"", location="http://elsewhere/")) as url, pytest.raises(ServerError, match="elsewhere"):
        Transport(url).get("/")
    with answering(with_body(200, b"plain")) as url, pytest.raises(ServerError, match="no secure connection"):
        Transport(url.replace("http:", "https:")).get("/")
    with answering(lambda handler: time.sleep(2)) as url, pytest.raises(ServerError, match=r"no sign of life for 0\.2 seconds"):
        Transport(url, timeout=0.2).get("/")


def test_nothing_is_sent_twice_and_connections_are_kept() -> None:
    seen: list[int] = []

    def once(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.client_address[1])
        if len(seen) < 3:
            with_body(200, b"ok")(handler)
        else:
            handler.close_connection = True  # as a server that dies after it read a request

    with answering(once) as url:
        http = Transport(url)
        assert http.post("/", b"a") == http.post("/", b"b") == b"ok"
        with pytest.raises(ServerError, match="broke off"):
            http.post("/", b"c")
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_a_stream_that_breaks_off_is_an_error() -> None:
    for body, words in ((b'{"a":1}\n{"b"', "in the middle of a line"), (b"nonsense\n", "no JSON")):
        with answering(with_body(200, body)) as url, Transport(url).lines("/", b"") as lines, pytest.raises(ServerError, match=words):
            list(lines)
    with (answering(with_body(409, said("gone", missing=["ab"]))) as url, pytest.raises(Missing) as error,
          Transport(url).lines("/", b"") as lines):
        list(lines)
    assert error.value.shas == ["ab"]


STATUS = {"mia_lab": "1", "vllm": "2", "model": "demo", "digest": "d", "wanted": "d", "version": 3,
          "processes": {"a": {"digest": "d", "seconds": 1.0}}, "points": ["resid_post.0", "resid_post.1", "q.0"],
          "edit_kinds": ["add"], "bundles": 1, "quarantined": 0, "captured_rows": 5,
          "dropped_rows": 0, "gates": {"opened": 1, "closed": 2}, "captures": {"held": 1, "bytes": 2048}}
LISTED = {"digest": "d", "quarantined": {"bad.zip": "no zip"}, "edits": [
    {"name": "push", "kinds": ["Add"], "points": ["resid_post.1"], "doses": {"resid_post.1": 0.5}, "sha256": "ab" * 32, "model": "demo"}]}
RELOADED = {"version": 2, "digest": "d", "adopted": {"a": True, "b": False}, "loaded": ["push"], "quarantined": {},
            "changed": {"added": ["push"], "removed": [], "changed": []}}


@pytest.mark.parametrize(("what", "body", "status", "words"), [
    ("status", STATUS, 0, ["demo", "resid_post x2, q x1", "1 opened, 2 closed", "2 KiB", "1.0 s ago"]),
    ("list", LISTED, 1, ["push", "0.5", "bad.zip", "no zip"]), ("reload", RELOADED, 1, ["push", "version 2", "1 of them not there yet"]),
    ("status", {}, 1, [])])
def test_commands_show_what_a_server_says(what: str, body: Any, status: int, words: list[str], capsys: Any, tmp_path: Path) -> None:
    keys: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        keys.append(handler.headers.get("authorization"))
        with_body(200, json.dumps(body).encode())(handler)

    (tmp_path / "key").write_text("secret\n")
    with answering(answer) as url:
        assert cli.main(["serve", what, "--url", url, "--key-file", str(tmp_path / "key")]) == status
    out, err = capsys.readouterr()
    assert all(word in out for word in words), out
    assert keys == ["Bearer secret"]
    assert bool(err) == (not words)


def test_a_key_is_shown_once_with_what_the_policy_needs(capsys: Any) -> None:
    from mia_lab.serve.policy import Policy

    assert cli.main(["key", "--tenant", "acme", "--roles", "generate", "steer", "--inline"]) == 0
    out = capsys.readouterr().out
    key = next(line.strip() for line in out.splitlines() if line.startswith("  "))
    found = Policy.read(out[out.index("[[keys]]"):].encode()).key_of(f"Bearer {key}")
    assert (found.tenant, found.roles, found.inline) == ("acme", {"generate", "steer"}, True)
    assert cli.main(["key", "--tenant", "../x"]) == 1
    assert cli.main(["verify", "x.steer"]) == 1
