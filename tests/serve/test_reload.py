"""Two API server processes that serve one folder, which changes under load: no request is lost, and none is answered by half of each."""
from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.torch import load

from mia_lab.bundles.pushing import push
from serve.conftest import PROMPT, TOKENS, Guarded, Known
from serve.server import MODEL, xargs

pytestmark = pytest.mark.full


class Line:
    """One connection that stays with the process that took it."""

    def __init__(self, guarded: Guarded, key: str = "root") -> None:
        self._connection = http.client.HTTPConnection(urlsplit(guarded.server.url).netloc, timeout=120)
        self._headers = {"authorization": f"Bearer {2 * key}", "content-type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        self._connection.request(method, path, None if body is None else json.dumps(body), self._headers)
        found = self._connection.getresponse()
        return found.status, {name.lower(): value for name, value in found.getheaders()}, found.read()

    @property
    def process(self) -> str:
        return json.loads(self.ask("GET", "/mia/status")[2])["process"]


@pytest.fixture(scope="module")
def lines(guarded: Guarded) -> list[Line]:
    """A line to each of the two processes."""
    found: dict[str, Line] = {}
    tried = []  # held open, or the next would go to the same process
    end = time.monotonic() + 90  # the second process may still be starting
    while len(found) < 2 and time.monotonic() < end:
        tried.append(Line(guarded))
        found.setdefault(tried[-1].process, tried[-1])
        time.sleep(0.2)
    assert len(found) == 2, "all connections went to one process"
    return list(found.values())


def test_a_capture_made_by_one_process_is_fetched_through_the_other(lines: list[Line], known: Known) -> None:
    asked = xargs({"edits": ["cheerful"], "capture": [{"point": "resid_post", "layers": [8], "at": "prompt"}]})
    for one, other in (lines, lines[::-1]):
        _, headers, _ = one.ask("POST", "/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0} | asked)
        status, _, body = other.ask("GET", f"/mia/captures/{headers['x-mia-lab-capture']}")
        assert status == 200
        rows = load(body)["resid_post.8"]
        assert (rows.float() - known.rows["cheerful", 8][: len(rows)].float()).norm() < 1e-3 * rows.float().norm()


def test_a_reload_reaches_both_processes(guarded: Guarded, lines: list[Line], known: Known) -> None:
    push(known.versions["two"], guarded.folder / "bundles")
    status, _, body = lines[0].ask("POST", "/mia/reload")
    said = json.loads(body)
    assert status == 200 and len(said["adopted"]) == 2 and all(said["adopted"].values())
    assert said["changed"] == {"added": [], "removed": [], "changed": ["mood"]}
    for line in lines:
        assert json.loads(line.ask("GET", "/mia/status")[2])["digest"] == said["digest"]
        _, headers, body = line.ask("POST", "/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
                                    | xargs({"edits": ["mood"]}))
        assert headers["x-mia-lab-config"] == said["digest"]
        assert json.loads(body)["choices"][0]["text"] == known.said["mood two"]
    time.sleep(1.5)  # until the next beat
    metrics = guarded.ask("GET", "/metrics").body.decode().splitlines()
    assert f'mia_lab_config_info{{digest="{said["digest"]}"}} 2.0' in metrics and 'mia_lab_bundles{state="served"} 4.0' in metrics
    again = guarded.ask("POST", "/mia/reload", key="root").json
    assert again["version"] == said["version"] + 1 and again["digest"] == said["digest"] and not any(again["changed"].values())


def test_no_request_is_lost_or_half_steered_while_bundles_change(guarded: Guarded, known: Known) -> None:
    """24 clients at a time, streaming and not; each answer is one version's in full, and its header says which."""
    seen: list[tuple[str, str]] = []
    over = threading.Event()

    def talk(i: int) -> int:
        done = 0
        while not over.is_set():
            found = guarded.complete({"edits": ["mood"]}, max_tokens=TOKENS, stream=bool(i % 2))
            assert found.status == 200, found.body
            text = _streamed(found.body) if i % 2 else found.json["choices"][0]["text"]
            seen.append((found.headers["x-mia-lab-config"], text))
            done += 1
        return done

    digests: dict[str, str] = {}
    with ThreadPoolExecutor(24) as pool:
        talking = [pool.submit(talk, i) for i in range(24)]
        try:
            for version in ("one", "two", "one", "two", "one"):
                push(known.versions[version], guarded.folder / "bundles")
                said = guarded.ask("POST", "/mia/reload", key="root")
                assert said.status == 200 and all(said.json["adopted"].values())
                digests[said.json["digest"]] = version
                time.sleep(0.5)
        finally:
            over.set()
        assert min(future.result() for future in talking) >= 1
    assert len(digests) == 2
    wrong = [(digest, text) for digest, text in seen if text != known.said[f"mood {digests[digest]}"]]
    assert not wrong, wrong[:3]
    counts = Counter(digests[digest] for digest, _ in seen)
    assert len(seen) >= 48 and min(counts["one"], counts["two"]) >= 12


def _streamed(body: bytes) -> str:
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_default_edits_act_until_a_request_says_otherwise(guarded: Guarded, known: Known) -> None:
    try:
        guarded.reload(defaults=[{"name": "cheerful", "coeff": 0.5}])
        plain = guarded.complete(max_tokens=TOKENS, key="plain")
        assert plain.headers["x-mia-lab-edits"] == "cheerful;coeff=0.5"
        assert plain.json["choices"][0]["text"] == known.said["half"]
        without = guarded.complete({"defaults": False}, max_tokens=TOKENS)
        assert "x-mia-lab-edits" not in without.headers
        assert without.json["choices"][0]["text"] == known.said[""]
        refused = guarded.complete({"defaults": False}, key="plain")
        assert refused.status == 403 and "steer" in refused.message
        beams = guarded.complete(use_beam_search=True, n=2, key="plain")
        assert beams.status == 400 and "beam search" in beams.message
    finally:
        guarded.reload()
    assert "x-mia-lab-edits" not in guarded.complete().headers


def test_a_broken_policy_changes_nothing(guarded: Guarded) -> None:
    path = guarded.folder / "serve.toml"
    text, before = path.read_text(), guarded.ask("GET", "/mia/status").json["digest"]
    try:
        for broken, words in (("[[keys", "TOML"), ("speed = 9\n" + text, "speed"), ("[limits]\nrequest_bytes = 10\n", "everyone")):
            path.write_text(broken)
            found = guarded.ask("POST", "/mia/reload", key="root")
            assert found.status == 409 and words in found.message and "what was served still is" in found.message
            assert guarded.ask("GET", "/mia/status").json["digest"] == before
    finally:
        path.write_text(text)
    assert guarded.ask("POST", "/mia/reload", key="root").json["digest"] == before


def test_equal_prompts_of_two_tenants_share_no_cached_block(guarded: Guarded) -> None:
    """The same prompt again is served from the cache; another tenant's is computed."""
    long = "one two three four five six seven eight nine ten " * 30

    def cached(key: str) -> int:
        usage = guarded.complete(prompt=long, key=key, max_tokens=1).json["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    assert cached("acme") == 0 and cached("acme") > 0 and cached("beta") == 0 and cached("plain") > 0
