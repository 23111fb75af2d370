"""What a server does not do: a clear 4xx each time, and it goes on as if nothing had been asked."""
from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mia_lab.bundles import folder
from serve.conftest import OTHER, PAGE, PROMPT, TOKENS, Guarded, Known
from serve.server import xargs

pytestmark = pytest.mark.full
CAPTURE = {"capture": [{"point": "resid_post", "layers": [8], "at": "prompt"}]}
WIRE = "a" * 32 + ' {"v":2,"terms":[],"takes":[["resid_post",3,[[0,null]],false]],"gates":[],"reduce":null}'
NUMBER = '{"edits": [{"name": "cheerful", "coeff": %s}]}'


@pytest.fixture(autouse=True)
def healthy(guarded: Guarded, known: Known) -> Any:
    """After each test, the server is well and steers as before."""
    yield
    assert guarded.server.ask("GET", "/health").status == 200
    assert guarded.complete({"edits": ["cheerful"]}, max_tokens=TOKENS).json["choices"][0]["text"] == known.said["cheerful"]


ASKED = {
    "no JSON": ("{", 400, "JSON"),
    "an array": ("[]", 400, "mia_lab"),
    "empty": ("", 400, "JSON"),
    "too long": ('{"edits": ["' + "x" * 5000 + '"]}', 413, "4096 bytes"),
    "too deep": ("[" * 3000, 400, "JSON"),
    "an unknown word": ('{"edit": ["cheerful"]}', 400, "edit"),
    "a word twice": ('{"edits": [], "edits": ["cheerful"]}', 400, "twice"),
    "NaN": (NUMBER % "NaN", 400, ""),
    "infinity": (NUMBER % "Infinity", 400, ""),
    "minus infinity": (NUMBER % "-Infinity", 400, ""),
    "a coefficient that float32 cannot hold": (NUMBER % "1e308", 400, "coeff"),
    "a coefficient that is infinite once read": (NUMBER % "1e999", 400, "coeff"),
    "a coefficient that is true": (NUMBER % "true", 400, "coeff"),
    "an edit that is not there": ('{"edits": ["nobody"]}', 404, "nobody"),
    "a name that climbs": ('{"edits": ["../serve.toml"]}', 400, "name"),
    "a name with a slash": ('{"edits": ["a/b"]}', 400, "name"),
    "a name with a NUL": ('{"edits": ["a\\u0000"]}', 400, "name"),
    "too many edits": (json.dumps({"edits": ["cheerful"] * 9}), 400, "8"),
    "an edit that no coefficient multiplies": ('{"edits": [{"name": "ablated", "coeff": 2}]}', 400, "coeff"),
    "a point that is none": ('{"capture": [{"point": "soul"}]}', 400, "soul"),
    "a point that is not tapped": ('{"capture": [{"point": "mlp_out", "layers": [3]}]}', 400, "mlp_out"),
    "a layer that is none": ('{"capture": [{"point": "resid_post", "layers": [99]}]}', 400, "99"),
    "a position past the prompt": ('{"capture": [{"point": "resid_post", "at": 400}]}', 400, "400"),
    "a point captured and monitored": ('{"capture": [{"point": "resid_post", "layers": [8]}], "monitor": ["cheerful"]}', 400, "already"),
    "a raw spec of the engine": (WIRE, 400, "JSON"),
    "a capture over its limit": (json.dumps({"capture": [{"point": "resid_post", "at": "all"}]}), 413, "400000"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked(name: str, stream: bool, guarded: Guarded) -> None:
    text, status, words = ASKED[name]
    fields = {"max_tokens": 200} if "limit" in name else {}
    found = guarded.complete(text, stream=stream, **fields)
    assert found.status == status, found.body
    assert words in found.message
    assert found.json["error"]["code"] == status
    assert "x-mia-lab-capture" not in found.headers


@pytest.mark.parametrize("value", [7, ["cheerful"], 0.5, {"edits": []}])
def test_what_is_not_a_string(value: Any, guarded: Guarded) -> None:
    found = guarded.complete(vllm_xargs={"mia_lab": value})
    assert found.status == 400 and found.json["error"]["message"]


def test_a_chat_is_refused_the_same_way(guarded: Guarded) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "vllm_xargs": {"mia_lab": "{"}}
    for stream in (False, True):
        found = guarded.ask("POST", "/v1/chat/completions", body | {"stream": stream})
        assert found.status == 400 and "JSON" in found.message


def test_the_engine_is_not_spoken_to_directly(guarded: Guarded) -> None:
    """The route that takes vLLM's own sampling parameters, where there is one, lets no spec past either."""
    body = {"model": "demo", "token_ids": [2, 5, 6], "sampling_params": {"max_tokens": 2, "extra_args": {"mia_lab": WIRE}}}
    found = guarded.ask("POST", "/inference/v1/generate", body)
    assert (found.status == 400 and "JSON" in found.message) or (found.status == 403 and "disabled" in found.message)


WHO = {
    "no key": (None, "POST", "/v1/completions", 401),
    "a wrong key": ("Bearer wrong", "POST", "/v1/completions", 401),
    "no scheme": ("rootroot", "POST", "/v1/completions", 401),
    "another scheme": ("Basic rootroot", "POST", "/v1/completions", 401),
    "a key that is not ASCII": ("Bearer \u00e9" * 3, "POST", "/v1/completions", 401),
    "the models without a key": (None, "GET", "/v1/models", 401),
    "the status without a key": (None, "GET", "/mia/status", 401),
    "a reload without its role": ("Bearer acmeacme", "POST", "/mia/reload", 403),
    "a path of vLLM's that is nobody's": ("Bearer acmeacme", "GET", "/openapi.json", 403),
    "a path that is not quite an open one": (None, "GET", "/metrics/../v1/models", 401),
    "an encoded path": (None, "GET", "/%76%31/models", 401),
    "an open path by another method": (None, "POST", "/health", 401),
    "a capture without its role": ("Bearer plainplain", "GET", "/mia/captures/" + "a" * 32, 403),
    "a bundle without its role": ("Bearer plainplain", "GET", "/mia/edits/cheerful", 403),
    "a bundle beyond its names": ("Bearer cappedcapped", "GET", "/mia/edits/gated", 404),
    "a path of ours that is none": ("Bearer acmeacme", "GET", "/mia/nothing", 404),
    "a client's run without inline": ("Bearer acmeacme", "POST", "/mia/run", 403),
}


@pytest.mark.parametrize("name", WHO)
def test_who_asks(name: str, guarded: Guarded) -> None:
    key, method, path, status = WHO[name]
    body = {"model": "demo", "prompt": "a", "max_tokens": 1} if method == "POST" else None
    found = guarded.server.ask(method, path, body, headers={} if key is None else {"authorization": key})
    assert found.status == status, found.body
    assert found.message and found.json["error"]["code"] == status
    assert ("www-authenticate" in found.headers) == (status == 401)


def test_what_is_open_needs_no_key(guarded: Guarded) -> None:
    for path in ("/health", "/ping", "/version", "/metrics", "/load"):
        assert guarded.server.ask("GET", path).status == 200, path


def test_a_page_may_ask_first_and_read_what_was_refused(guarded: Guarded) -> None:
    origin = {"origin": PAGE}
    asking = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for path in ("/v1/completions", "/mia/status"):
        found = guarded.server.ask("OPTIONS", path, headers=asking)
        assert found.status == 200 and found.headers["access-control-allow-headers"] == "authorization"
        refused = guarded.server.ask("OPTIONS", path, headers=origin)
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == PAGE
        assert guarded.server.ask("OPTIONS", path, headers=asking | {"origin": "https://other.example"}).status == 400
    ran = guarded.server.ask("POST", "/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 1}, "acmeacme", origin)
    assert ran.status == 200 and ran.headers["access-control-allow-origin"] == PAGE and ran.headers["vary"] == "Origin"
    assert "x-mia-lab-capture" in ran.headers["access-control-expose-headers"]


def test_two_authorizations_are_none(guarded: Guarded) -> None:
    import http.client
    from urllib.parse import urlsplit

    connection = http.client.HTTPConnection(urlsplit(guarded.server.url).netloc)
    connection.putrequest("GET", "/v1/models")
    for key in ("wrong", "acmeacme"):
        connection.putheader("authorization", f"Bearer {key}")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


MAY = {
    "steering": ("plain", {"edits": ["cheerful"]}, 403, "steer"),
    "capturing": ("plain", CAPTURE, 403, "capture"),
    "monitoring": ("capped", {"monitor": ["cheerful"]}, 403, "capture"),
    "an edit beyond its names": ("capped", {"edits": ["gated"]}, 403, "gated"),
    "a dose over its cap": ("capped", {"edits": ["cheerful"]}, 403, "0.5"),
    "a dose over its cap, the other way": ("capped", {"edits": [{"name": "cheerful", "coeff": -1}]}, 403, "0.5"),
    "a dose over its cap, in parts": ("capped", {"edits": [{"name": name, "coeff": 0.4} for name in ("cheerful", "mood")]}, 403, "0.5"),
}


@pytest.mark.parametrize("name", MAY)
def test_what_a_key_may_not(name: str, guarded: Guarded) -> None:
    key, asked, status, words = MAY[name]
    found = guarded.complete(asked, key=key)
    assert found.status == status and words in found.message
    assert guarded.complete({"edits": [{"name": "cheerful", "coeff": 0.5}]}, key="capped").status == 200


def test_a_capture_is_its_tenants_alone(guarded: Guarded) -> None:
    handle = guarded.complete(CAPTURE).headers["x-mia-lab-capture"]
    path = f"/mia/captures/{handle}"
    for key in ("beta", "root"):
        assert guarded.ask("GET", path, key=key).status == 404
        assert guarded.ask("DELETE", path, key=key).status == 204  # of a capture of its own that is not there
    assert guarded.ask("GET", path).status == 200


@pytest.mark.parametrize("handle", ["..", "%2e%2e", "%2e%2e%2fstatus", "a/b", "a%2fb", "", "%00", "x" * 31, "x" * 5000, "é".encode().hex()])
def test_a_handle_that_is_none(handle: str, guarded: Guarded) -> None:
    for method in ("GET", "DELETE"):
        found = guarded.ask(method, f"/mia/captures/{handle}")
        assert found.status in (404, 405), found.body


@pytest.mark.parametrize("since", ["-1", "x", "1e3", "9999999999", "%EF%BC%91"])
def test_a_position_that_is_none(since: str, guarded: Guarded) -> None:
    handle = guarded.complete(CAPTURE).headers["x-mia-lab-capture"]
    assert guarded.ask("GET", f"/mia/captures/{handle}?since={since}").status == 400


def test_a_capture_expires(guarded: Guarded) -> None:
    try:
        guarded.reload(capture_seconds=1.5)
        handle = guarded.complete(CAPTURE, max_tokens=1).headers["x-mia-lab-capture"]
        time.sleep(3)
        found = guarded.ask("GET", f"/mia/captures/{handle}")
        assert found.status == 404 and "expired" in found.message
    finally:
        guarded.reload()


@pytest.fixture
def held(guarded: Guarded) -> Iterator[Callable[[], int]]:
    """How many bytes are held of captures; the limits are as before after it."""
    yield lambda: guarded.ask("GET", "/mia/status").json["captures"]["bytes"]
    guarded.reload()


def test_a_tenant_has_a_share_of_the_room_for_captures(guarded: Guarded, held: Callable[[], int]) -> None:
    before, capture = held(), lambda key, **more: guarded.complete(CAPTURE, key=key, **more)
    handle = capture("beta").headers["x-mia-lab-capture"]
    size = held() - before
    guarded.reload(capture_bytes_per_tenant=3 * size // 2)
    for stream in (False, True):
        found = capture("beta", stream=stream)
        assert found.status == 429 and "retry-after" in found.headers
        assert f"your captures may take {3 * size // 2} bytes together here; {size} are taken" in found.message
    assert guarded.complete({"edits": ["cheerful"]}, key="beta").status == 200
    other = capture("gamma")
    assert other.status == 200 and held() == before + 2 * size
    assert guarded.ask("GET", f"/mia/captures/{handle}", key="beta").status == 200
    guarded.ask("DELETE", f"/mia/captures/{handle}", key="beta")
    handle = capture("beta").headers["x-mia-lab-capture"]
    for key, name in (("beta", handle), ("gamma", other.headers["x-mia-lab-capture"])):
        guarded.ask("DELETE", f"/mia/captures/{name}", key=key)
    assert held() == before


def test_captures_have_room_together(guarded: Guarded, held: Callable[[], int]) -> None:
    handle = guarded.complete(CAPTURE, key="root", prompt="a b c d " * 40).headers["x-mia-lab-capture"]
    guarded.reload(capture_bytes=held() + 10)
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    asked = {"/v1/completions": {"model": "demo", "prompt": ["a b c", "d e f"], "max_tokens": 2}, "/v1/chat/completions": chat,
             "/v1/responses": {"model": "demo", "input": "hi", "max_output_tokens": 2}}
    for path, body in asked.items():
        for stream in (False, True):
            found = guarded.ask("POST", path, body | {"stream": stream} | xargs(CAPTURE), key="beta")
            assert found.status == 429, (path, stream, found)
            assert "the captures of all tenants may take" in found.message and "which yours take 0" in found.message
            assert "x-mia-lab-capture" not in found.headers
    guarded.ask("DELETE", f"/mia/captures/{handle}", key="root")
    assert guarded.complete(CAPTURE, key="beta").status == 200
    guarded.reload(capture_bytes=1)
    found = guarded.complete(CAPTURE)
    assert found.status == 413 and "a request are the most here" in found.message  # it never fits


def test_room_is_given_by_the_server_alone(guarded: Guarded, held: Callable[[], int]) -> None:
    before, forged = held(), '{"note":"","size":1,"seconds":1e5,"limit":1099511627776,"share":1099511627776}'
    for defaults in ([], [{"name": "cheerful"}]):
        guarded.reload(defaults)
        for mia in (None, {}, CAPTURE):
            found = guarded.complete(vllm_xargs=xargs(mia).get("vllm_xargs", {}) | {"mia_lab_room": forged})
            assert found.status == 400 and "mia_lab_room" in found.message
    assert held() == before


def test_a_body_that_is_too_long(guarded: Guarded) -> None:
    found = guarded.ask("POST", "/mia/reload", b"x" * 60_000, key="root")
    assert found.status == 413 and "50000" in found.message


def test_bad_bundles_are_set_aside_and_the_others_served(guarded: Guarded, tmp_path: Path) -> None:
    place = guarded.folder / "bundles"
    good = (place / "cheerful.steer.zip").read_bytes()
    files = folder.get(place / "cheerful.steer.zip")
    bomb, changed, cut = place / "bomb.steer.zip", place / "changed.steer.zip", place / "cut.steer.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("steer.json", b" " * (64 << 20))
        archive.writestr("vector.safetensors", b"")
    changed.write_bytes(folder.zipped(files | {folder.TENSORS: files[folder.TENSORS][:-1] + b"\x01"}))
    cut.write_bytes(good[: len(good) // 2])
    (place / "out.steer.zip").symlink_to("/etc/hostname")
    (place / "no name.steer.zip").write_bytes(good)
    (place / "twice.steer").mkdir()
    (place / "twice.steer.zip").write_bytes(good)
    try:
        said = guarded.reload()
        assert said["loaded"] == ["ablated", "cheerful", "gated", "mood"]
        assert {"bomb", "changed", "cut", "out", "twice", "no name.steer.zip"} == set(said["quarantined"])
        assert all(said["quarantined"].values()) and "bytes" in said["quarantined"]["bomb"]
        listed = guarded.ask("GET", "/mia/edits", key="root").json
        assert listed["quarantined"] == said["quarantined"] and len(listed["edits"]) == 4
        assert "quarantined" not in guarded.ask("GET", "/mia/edits").json
        assert guarded.complete({"edits": ["bomb"]}).status == 404
    finally:
        for path in place.iterdir():
            if path.name.split(".")[0] not in ("ablated", "cheerful", "gated", "mood", ""):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        assert not guarded.reload()["quarantined"]


def test_several_continuations_have_no_capture(guarded: Guarded) -> None:
    found = guarded.complete(CAPTURE, n=2, temperature=1)
    assert found.status == 400 and "n is 2" in found.message


def test_one_bad_prompt_of_two_refuses_both(guarded: Guarded) -> None:
    """Position 5 is one of the first prompt's tokens and not of the second's."""
    for stream in (False, True):
        found = guarded.complete({"capture": [{"point": "resid_post", "layers": [8], "at": 5}]}, prompt=[PROMPT, "Hi"], stream=stream)
        assert found.status == 400 and "position 5" in found.message
    assert guarded.complete({"capture": [{"point": "resid_post", "layers": [8], "at": 0}]}, prompt=[PROMPT, OTHER]).status == 200
