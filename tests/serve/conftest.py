"""One Session that says what is right, and the servers that have to say the same, of which one is up at a time: vLLM's CPU build
binds each to the same core."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.bundles.golden import Golden
from mia_lab.bundles.pushing import push
from mia_lab.points import Point
from serve.server import CHAT, Answer, Server, running
from serve.spans import ENV, Spans, collecting

PROMPT = "The weather this morning was"
OTHER = "I opened the letter and"
MESSAGES = [{"role": "user", "content": "How was your holiday by the sea?"}]
TOKENS = 12
PAGE = "https://page.example"  # which may read what the server with keys answers
PAIRS = [("I love this wonderful day", "I hate this awful day"), ("What a delightful gift", "What a horrible mess"),
         ("She smiled with joy", "She cried in pain")]


@dataclass
class Known:
    """A server's folder, versions of a bundle that take each other's place, and what a Session says and sees with the same edits.

    said: the text after PROMPT, or after MESSAGES where the name ends in ":chat", by the edits' name. rows: resid_post `[pos d_model]`
    by (edits, layer).
    """

    folder: Path
    versions: dict[str, Path] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    rows: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    goldens: dict[str, list[Golden]] = field(default_factory=dict)
    row: torch.Tensor = None  # what "cheerful" adds


@pytest.fixture(scope="package")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """What is right, from a Session with the servers' settings."""
    found, away = Known(tmp_path_factory.mktemp("serve")), tmp_path_factory.mktemp("versions")
    bundles = found.folder / "bundles"
    bundles.mkdir()
    with mia.Session("demo", enforce_eager=True, max_num_seqs=16, max_model_len=512) as s:
        v = s.vector(PAIRS)
        probe = mia.Gate([mia.Probe(v[5].rows[0], 5)], above=-1e9, over="prompt_last")
        edits = {"cheerful": [mia.Add(v[8], 0.8)], "ablated": [mia.Ablate(v[9].rows[0], layers=[9]), mia.Add(v[10], 0.3)],
                 "gated": [mia.Add(v[10], 0.8, when=probe)]}
        for name, mine in edits.items():
            mia.export(mine, bundles / f"{name}.steer.zip", session=s, max_tokens=TOKENS, prompts=[PROMPT, OTHER])
            found.goldens[name] = mia.load(bundles / f"{name}.steer.zip").goldens
        for name, coeff in (("one", 1.0), ("two", -0.8)):
            edits[f"mood {name}"] = [mia.Add(v[8], coeff)]
            place = away / name / "mood.steer.zip"
            found.versions[name] = mia.export(edits[f"mood {name}"], place, session=s, max_tokens=2, prompts=[PROMPT])
        push(found.versions["one"], bundles)
        found.row = 0.8 * edits["cheerful"][0].rows[Point("resid_post", 8)]
        edits |= {"": None, "half": [mia.Add(v[8], 0.4)], "both": [*edits["cheerful"], *edits["ablated"]]}
        chat = s.tokenizer.apply_chat_template(MESSAGES, chat_template=CHAT.read_text(), add_generation_prompt=True, tokenize=True,
                                               return_dict=False)
        for name, mine in edits.items():
            s.reset_prefix_cache()
            found.said[name] = s.generate(PROMPT, max_tokens=TOKENS, edits=mine)
            found.said[f"{name}:chat"] = s.generate(list(chat), max_tokens=TOKENS, edits=mine)
        for name in ("", "cheerful", "gated"):
            s.reset_prefix_cache()
            _, cache = s.run_with_cache(PROMPT, ["resid_post"], max_tokens=TOKENS, edits=edits[name])
            found.rows |= {(name, layer): cache["resid_post", layer][0].clone() for layer in (5, 8, 9, 10)}
    return found


@pytest.fixture(scope="package")
def spans() -> Iterator[Spans]:
    """The spans that `server` exports."""
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(known: Known, spans: Spans, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One process, open to everyone."""
    place, said = tmp_path_factory.mktemp("open"), {"serve": str(known.folder)}
    with running(place, said, "--otlp-traces-endpoint", spans.endpoint, env=ENV) as found:
        yield found


KEYS = {"root": dict(tenant="ops", roles=["generate", "steer", "capture", "administer"]),
        "acme": dict(tenant="acme", roles=["generate", "steer", "capture"]),
        **{name: dict(tenant=name, roles=["generate", "steer", "capture"]) for name in ("beta", "gamma")},
        "plain": dict(tenant="acme", roles=["generate"]),
        "capped": dict(tenant="acme", roles=["generate", "steer"], edits=["cheerful", "mood"], max_dose=0.5)}
LIMITS = {"request_bytes": 4096, "capture_bytes_per_request": 400_000, "capture_bytes": 4_000_000, "body_bytes": 50_000}


@dataclass(frozen=True)
class Guarded:
    """A server with keys, two API processes, and its folder. A key is its name in KEYS, twice."""

    server: Server
    folder: Path

    def ask(self, method: str, path: str, body: Any = None, key: str = "acme", **options: Any) -> Answer:
        """Send a request with one of the keys."""
        return self.server.ask(method, path, body, key=2 * key, **options)

    def complete(self, mia: Any = None, key: str = "acme", prompt: Any = PROMPT, **fields: Any) -> Answer:
        """A greedy completion with one of the keys."""
        return self.server.complete(prompt, mia, key=2 * key, **fields)

    def reload(self, defaults: list[dict[str, Any]] = (), **limits: Any) -> dict[str, Any]:
        """Write serve.toml and have it read; return what the server says to it."""
        write_policy(self.folder, defaults, **limits)
        found = self.ask("POST", "/mia/reload", key="root")
        assert found.status == 200, found.body
        return found.json


def write_policy(folder: Path, defaults: list[dict[str, Any]] = (), **limits: Any) -> None:
    """serve.toml with KEYS."""
    said = lambda value: str(value).lower() if isinstance(value, bool) else json.dumps(value)  # noqa: E731
    inline = lambda found: "{ " + ", ".join(f"{name} = {said(value)}" for name, value in found.items()) + " }"  # noqa: E731
    lines = ["[defaults]", f"edits = [{', '.join(map(inline, defaults))}]", "[limits]"]
    lines += [f"{name} = {value}" for name, value in (LIMITS | limits).items()]
    for name, key in KEYS.items():
        lines += ["[[keys]]", f'sha256 = "{hashlib.sha256((2 * name).encode()).hexdigest()}"']
        lines += [f"{field} = {said(value)}" for field, value in key.items()]
    (folder / "serve.toml").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="package")
def guarded(known: Known, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Two API processes, keys, and a folder of its own."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "bundles").mkdir()
    for path in (known.folder / "bundles").glob("*.zip"):
        (folder / "bundles" / path.name).write_bytes(path.read_bytes())
    write_policy(folder)
    patient = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"}  # a line to one process stays open while others are asked
    place, said = tmp_path_factory.mktemp("keys"), {"serve": str(folder)}
    options = ["--enable-prompt-tokens-details", "--allowed-origins", json.dumps([PAGE])]
    with running(place, said, *options, processes=2, env=patient) as found:
        yield Guarded(found, folder)
