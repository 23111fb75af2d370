"""A Client beside a Session of the same model and options: what one says and reads, the other does."""
from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab import cli
from mia_lab.errors import BundleError, ClosedError, EditError, MiaError, MissingRowsError, PromptError, ServerError, UnsupportedError
from mia_lab.serve import batch, frames
from mia_lab.serve.client.client import Client
from serve.server import Server, running

pytestmark = pytest.mark.full

POINTS = ["resid_pre", "resid_post", "mlp_out", "attn_out", "q", "k", "v", "z", "mlp_act", "final_norm"]
OPTIONS = dict(points=POINTS, max_model_len=128, max_num_seqs=8, enforce_eager=True, max_biased_tokens=256)
PROMPTS = ["steer me", "a longer prompt of text", "b"]
SHARE = 24_000_000
KEYS = {"acme": dict(tenant="acme", roles=["generate", "steer", "capture"], inline=True),
        "rival": dict(tenant="rival", roles=["generate", "steer", "capture"], inline=True),
        "reader": dict(tenant="reader", roles=["generate"]),
        "folder-only": dict(tenant="bound", roles=["generate", "steer", "capture", "administer"], inline=False)}


@pytest.fixture(scope="module")
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **OPTIONS)


@pytest.fixture(scope="module")
def direction(session: mia.Session) -> torch.Tensor:
    draw = torch.randn(session.d_model, generator=torch.Generator().manual_seed(0))
    return draw / draw.norm() * session.unit()[1]


@pytest.fixture(scope="module")
def bundle(session: mia.Session, direction: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mia.export([mia.Add(direction, 1.0, layers=[1])], tmp_path_factory.mktemp("made") / "push.steer", session=session,
                      prompts=PROMPTS, max_tokens=8)


@pytest.fixture(scope="module")
def host(models: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from mia_lab.bundles.folder import as_zip

    folder = tmp_path_factory.mktemp("served")
    (folder / "bundles").mkdir()
    (folder / "bundles" / "push.steer.zip").write_bytes(as_zip(bundle))
    lines = ["[limits]", "capture_bytes_per_request = 4000000", f"capture_bytes_per_tenant = {SHARE}", "body_bytes = 4000000"]
    for key, may in KEYS.items():
        lines += ["[[keys]]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
        lines += [f"{name} = {json.dumps(value)}" for name, value in may.items()]
    (folder / "serve.toml").write_text("\n".join(lines))
    said = {"serve": str(folder), "points": POINTS, "max_biased_tokens": 256}
    options = ["--tokenizer", str(tiny.tokenizer(models)), "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8"]
    with running(folder, said, *options, model=tiny.build("llama", models), processes=2) as found:
        yield found


@pytest.fixture(scope="module")
def client(host: Server) -> Iterator[Client]:
    with mia.Client(host.url, "acme") as found:
        yield found


def same(one: Any, other: Any) -> None:
    """Rows and logits of float32, computed in batches of other sizes."""
    torch.testing.assert_close(torch.as_tensor(one).float(), torch.as_tensor(other).float(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_it_knows_the_model_as_a_session_does(session: mia.Session, client: Client) -> None:
    assert client._engine.settings.environment == session._engine.settings.environment
    assert (client.fingerprint, client.configuration) == (session.fingerprint, session.configuration)
    assert client.tapped == session.tapped
    assert client.edit_kinds == session.edit_kinds
    assert (client.n_layers, client.d_model, client.dtype, client.max_len) == (session.n_layers, session.d_model, session.dtype, 128)
    assert client.to_str_tokens("abc") == session.to_str_tokens("abc")
    assert repr(client.points()) == repr(session.points())
    assert "Client" in repr(client)
    assert "by its server" in client._repr_html_()


def test_it_generates_the_same(session: mia.Session, client: Client) -> None:
    for asked in (dict(), dict(temperature=1.0, seed=3), dict(n=2, temperature=1.0, seed=1), dict(stop=["e"], ignore_eos=True)):
        ours, theirs = (s.completions(PROMPTS, max_tokens=12, logprobs=3, prompt_logprobs=1, **asked) for s in (session, client))
        for a, b in zip(ours, theirs):
            assert a.prompt_token_ids == b.prompt_token_ids
            assert len(a.outputs) == len(b.outputs) == asked.get("n", 1)
            for x, y in zip(a.outputs, b.outputs):
                assert (x.text, list(x.token_ids), x.finish_reason, x.stop_reason) == (y.text, y.token_ids, y.finish_reason, y.stop_reason)
                assert [step.keys() for step in x.logprobs] == [step.keys() for step in y.logprobs]
                same([p.logprob for step in x.logprobs for p in step.values()], [p.logprob for step in y.logprobs for p in step.values()])
            assert b.prompt_logprobs[0] is None
            same([p.logprob for step in a.prompt_logprobs[1:] for p in step.values()],
                 [p.logprob for step in b.prompt_logprobs[1:] for p in step.values()])
    assert client.generate("abc", max_tokens=3) == session.generate("abc", max_tokens=3)
    assert [len(o.outputs[0].token_ids) for o in client.completions(["a"] * 40, max_tokens=2, ignore_eos=True)] == [2] * 40
    with pytest.raises(PromptError, match="these sampling arguments do not work"):
        client.generate("a", temperature=-1.0)
    with pytest.raises(PromptError, match="takes no sampling parameter 'extra_args'"):
        client.generate("a", extra_args={"mia_lab": "{}"})


def test_it_captures_the_same(session: mia.Session, client: Client, direction: torch.Tensor) -> None:
    rows = torch.randn(5, session.d_model, generator=torch.Generator().manual_seed(1))
    asked = [dict(), dict(at=None, layers=[0, 2]), dict(point="z", at=[0, -1]), dict(point="mlp_act", at=slice(1, 3)),
             dict(edits=[mia.Add(direction, 1.0, layers=[1])], before=True), dict(reduce=mia.Project(rows), at=None),
             dict(reduce=mia.Norm()), dict(reduce=mia.Mean(), at=None), dict(point="pattern", at=None),
             dict(point="attn_scores", layers=1), dict(point="pattern", reduce=mia.Mass(mia.window(0, 2)))]
    for call in asked:
        same(client.capture(PROMPTS, **call).get(), session.capture(PROMPTS, **call).get())
    (values, places), (ours, at) = (s.capture(PROMPTS, reduce=mia.TopK(3)) for s in (client, session))
    same(values.get(), ours.get())
    assert places.get().tolist() == at.get().tolist()


def test_it_keeps_caches_the_same(session: mia.Session, client: Client, direction: torch.Tensor) -> None:
    found = [s.run_with_cache(PROMPTS, max_tokens=4, ignore_eos=True, edits=[None, [mia.Add(direction, 1.0, layers=[1])], None])
             for s in (session, client)]
    (logits, cache), (theirs, other) = found
    same(theirs.get(), logits.get())
    assert torch.equal(cache.mask, other.mask)
    for point in cache.keys():  # noqa: SIM118  not a dict
        same(other[point].get(), cache[point].get())
    gone = client.run_with_cache("abc", ["resid_post"])[1]
    client._engine.rpc("drop", gone._source._uids)
    with pytest.raises(MissingRowsError, match="are gone from the server"):
        gone["resid_post", 0].get()


def test_every_kind_of_edit_does_the_same(session: mia.Session, client: Client, direction: torch.Tensor) -> None:
    u = torch.nn.functional.normalize(direction, dim=0)
    gate = mia.Gate([mia.Probe(u, 0)], above=-1e9, over="prompt_last")
    edits = [[mia.Add(direction, 2.0, layers=[1])], [mia.Ablate(u, layers=[1])], [mia.Clamp(u, value=3.0, layers=[1])],
             [mia.Scale(0.5, layers=[2])],
             [mia.Replace(direction, layers=[1])], [mia.Affine(u[None], u[None], torch.tensor([1.0]), layers=[1])],
             [mia.ClampFeature(u, u, 2.0, layers=[1])], [mia.AttentionBias(mia.window(0, 2), bias=3.0, layers=[1])],
             [mia.Add(direction, 2.0, layers=[1], where=mia.generated(), when=gate)]]
    (logits, _), (theirs, _) = (s.run_with_cache(["steer me"] * len(edits), "resid_post", max_tokens=4, ignore_eos=True, edits=edits)
                                for s in (session, client))
    same(theirs.get(), logits.get())
    plain = session.run_with_cache("steer me", "resid_post", max_tokens=4, ignore_eos=True)[0].get()
    assert all((logits.get()[i] - plain[0]).abs().max() > 1e-3 for i in range(len(edits)))
    with client.steer(direction, 2.0, layers=[1]), session.steer(direction, 2.0, layers=[1]):
        same(client.capture("abc").get(), session.capture("abc").get())
    with pytest.raises(EditError, match="width"):
        client.generate("abc", edits=[mia.Add(direction[:5], layers=[1])])


def test_analyses_come_out_the_same(session: mia.Session, client: Client) -> None:
    pairs = [("good day", "bad day"), ("so good", "so bad"), ("good one", "bad one"), ("it is good", "it is bad")]
    ours, theirs = session.vector(pairs), client.vector(pairs)
    same(theirs.raw_norms, ours.raw_norms)
    same(client.unit(), session.unit())
    grids = [s.patch(clean="steer me", corrupt="steer it", metric=mia.logit_diff("a", "b"), progress=False) for s in (session, client)]
    same([cell["metric"] for cell in grids[1].data], [cell["metric"] for cell in grids[0].data])
    lenses = [s.logit_lens(["steer me", "abc"]) for s in (session, client)]
    assert repr(lenses[1]) == repr(lenses[0])
    sweeps = [s.sweep(v[1:3], coeffs=[-1.0, 1.0], prompts=[f"{word} is" for word in "abcdefgh"], metrics=[mia.token_odds(["a"], ["b"])],
                      guards=[], placebos=2, max_tokens=4, progress=False) for s, v in ((session, ours), (client, theirs))]
    assert repr(sweeps[1]) == repr(sweeps[0])


def test_it_watches_the_same_and_can_be_left(session: mia.Session, client: Client, host: Server) -> None:
    ours, theirs = (list(s.watch(["abc", "steer me"], max_tokens=6, layers=[0, 2], ignore_eos=True)) for s in (session, client))
    seen = [{(m.prompt, m.position): m for m in moments} for moments in (ours, theirs)]
    assert seen[0].keys() == seen[1].keys()
    for place, moment in seen[0].items():
        assert (moment.token, moment.next_token) == (seen[1][place].token, seen[1][place].next_token)
        same(seen[1][place].rows, moment.rows)
    moments = client.watch("abc", max_tokens=120, ignore_eos=True)
    next(moments)
    moments.close()
    assert client.generate("abc", max_tokens=3) == session.generate("abc", max_tokens=3)
    running_now = re.compile(r"^vllm:num_requests_running{.*} (.*)$", re.M)
    assert until(lambda: set(running_now.findall(host.ask("GET", "/metrics").body.decode())) == {"0.0"})


def test_bundles_are_listed_fetched_and_verified(client: Client, bundle: Path, host: Server) -> None:
    library = client.library()
    assert list(library) == ["push"]
    assert "push" in repr(library)
    assert "Add" in repr(library)
    assert list(library["push"]) == list(mia.load(bundle))
    found = mia.verify(bundle, client)
    assert found.exact
    assert all(one.exact for one in found.steered)
    with pytest.raises(BundleError, match="holds no 'other'"):
        library["other"]


def test_commands_speak_to_a_real_server(host: Server, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("MIA_LAB_API_KEY", "acme")
    (tmp_path / "key").write_text("folder-only\n")
    assert cli.main(["verify", str(bundle), "--server", host.url]) == 0
    assert cli.main(["serve", "list", "--url", host.url]) == 0
    assert cli.main(["serve", "status", "--url", host.url]) == 0
    assert cli.main(["serve", "reload", "--url", host.url, "--key-file", str(tmp_path / "key")]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in ("golden outputs token for token", "push", "resid_post x4", "reloaded"))
    assert cli.main(["serve", "reload", "--url", host.url]) == 1
    assert "administer" in capsys.readouterr().err


def test_a_new_bundle_is_made_through_a_server(client: Client, session: mia.Session, direction: torch.Tensor, tmp_path: Path) -> None:
    made = mia.export([mia.Add(-direction, 1.0, layers=[1])], tmp_path / "other.steer", session=client, prompts=PROMPTS[:1], max_tokens=4)
    assert mia.verify(made, session).exact


def test_nothing_here_needs_vllm(host: Server) -> None:
    code = f"""
        import sys
        sys.modules["vllm"] = None
        import mia_lab as mia
        with mia.Client({host.url!r}) as client:
            client.capture("abc").get()
            print(client.generate("abc", max_tokens=3))
        assert not {{"starlette", "prometheus_client", "ipywidgets"}} & sys.modules.keys()
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
                           env=os.environ | {"MIA_LAB_API_KEY": "acme"})
    assert found.returncode == 0, found.stderr


def test_what_a_server_does_not_let_a_client_do_is_said(client: Client, host: Server) -> None:
    for key, words in (("wrong", "refuses this key"), ("", "refuses this key"), ("reader", "needs the role 'steer'"),
                       ("folder-only", "inline = true")):
        with pytest.raises(ServerError, match=words):
            mia.Client(host.url, key)
    with pytest.raises(UnsupportedError, match="skip_reading_prefix_cache"):
        client.reset_prefix_cache()
    with pytest.raises(UnsupportedError, match="on its server"):
        client.log  # noqa: B018
    with pytest.raises(UnsupportedError, match="needs gradients"):
        client.attribution_patch(clean="steer me", corrupt="steer it", metric=mia.logit_diff("a", "b"))
    with pytest.raises(MiaError, match="Run them in parts"):
        client.generate(["a" * 120] * 9000, max_tokens=1)
    closed = mia.Client(host.url, "acme")
    closed.close()
    with pytest.raises(ClosedError):
        closed.generate("a")


def test_tenants_do_not_reach_one_anothers_rows(client: Client, host: Server) -> None:
    rows = client.capture("abc", layers=0)
    uids = client._engine._captured.copy()
    with mia.Client(host.url, "rival") as rival:
        for call in (lambda: rival._engine.rpc("fetch", sorted(uids), "resid_post", 0, False, False, 0),
                     lambda: rival._engine.rpc("lens", sorted(uids)[:1], [[0]], [("resid_post", 0)], False, ("resid_post", 2), 1, None,
                                               [None])):
            with pytest.raises(MissingRowsError, match="gone from the server"):
                call()
        rival._engine.rpc("drop", sorted(uids))
        assert rival.capture("abc", layers=0).get().shape == rows.shape
    assert torch.isfinite(rows.get()).all()


def test_what_the_engine_turns_away_is_told_in_words(client: Client, host: Server) -> None:
    with mia.Client(host.url, "rival") as rival:
        assert rival._engine.capture_room() == SHARE
        kept = []
        with pytest.raises(ServerError, match=f"your captures may take {SHARE} bytes together here") as found:  # noqa: PT012
            while len(kept) < 50:
                kept.append(rival.run_with_cache(["a" * 100] * 4)[1])
        assert found.value.status == 429
        assert len(kept) > 1
        assert client.capture("abc", layers=0).get().isfinite().all()  # whose room is its own
        assert kept[0]["resid_post", 0].get().isfinite().any()
        rival._engine.rpc("drop", kept.pop()._source._uids)
        assert rival.capture("abc", layers=0).get().isfinite().all()
    largest = (SPEC % (0, b"2")).replace(b'"reduce":null', b'"reduce":[[],null,false,1000,false]')
    turned_away = host.ask("POST", "/mia/run", body(specs=[largest], asks=[[UID, 0, 0]]), "acme")
    assert turned_away.status == 400
    assert re.match("the 1000 largest of .* values were asked for at resid_post.0", turned_away.message)


def test_vectors_that_a_server_let_go_of_are_sent_again(client: Client, session: mia.Session, direction: torch.Tensor) -> None:
    edits = [mia.Add(direction * 1.5, 1.0, layers=[1])]
    said = session.generate("abc", max_tokens=4, edits=edits)
    assert client.generate("abc", max_tokens=4, edits=edits) == said
    other = [mia.Add(direction * 1.75, 1.0, layers=[1])]
    client._engine._sent |= client._submit.specs(client._read("abc"), [other])[1].keys()  # as after a restart, it believes what is not so
    assert client.generate("abc", max_tokens=4, edits=other) == session.generate("abc", max_tokens=4, edits=other)


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether something becomes so."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


UID = "0" * 32
PARAMS = {"max_tokens": 1, "temperature": 0.0}


def body(**changes: Any) -> bytes:
    """A batch of one prompt, with some fields changed."""
    said = frames.unpack(batch.pack([[1, 2, 3]], [(UID, "", PARAMS)], {}, False))
    return frames.pack({name: value for name, value in (said | changes).items() if value is not ...})


SPEC = b'{"v":2,"terms":[],"takes":[["resid_post",%d,[[0,%s]],false]],"gates":[],"reduce":null}'
HOSTILE = {
    "nothing": b"", "text": b"{}", "length": (1 << 60).to_bytes(8, "little"), "no blobs": (2).to_bytes(8, "little") + b"{}",
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000, "field": body(more=1), "missing": body(asks=...),
    "prompts": body(prompts=[1]), "empty prompt": body(prompts=[b""]), "token": body(prompts=[b"\xff\xff\xff\x7f"]),
    "negative token": body(prompts=[b"\xff\xff\xff\xff"]), "long": body(prompts=[b"\1\0\0\0" * 128]), "odd": body(prompts=[b"\1\0\0"]),
    "none": body(prompts=[], asks=[]), "uneven": body(asks=[]), "uid": body(asks=[["../../x", -1, 0]]),
    "another's uid": body(asks=[[hashlib.sha256(b"rival").hexdigest()[:16] + ".n" + UID, -1, 0]]), "spec": body(asks=[[UID, 7, 0]]),
    "params": body(asks=[[UID, -1, -1]]), "true": body(asks=[[UID, True, 0]]), "extra_args": body(params=[{"extra_args": {}}]),
    "structured": body(params=[{"structured_outputs": {"grammar": "x"}}]), "n": body(params=[{"n": 1 << 20}]),
    "max_tokens": body(params=[{"max_tokens": 1 << 40}]), "logprobs": body(params=[{"logprobs": -1}]),
    "nan": body(params=[{"top_p": "nan"}]),
    "bias": body(params=[{"logit_bias": {"-1": 1.0}}]), "seed": body(params=[{"seed": 1 << 80}]),
    "spec text": body(specs=[b"\xff"], asks=[[UID, 0, 0]]),
    "spec json": body(specs=[b"[" * 100_000], asks=[[UID, 0, 0]]), "site": body(specs=[SPEC % (77, b"null")], asks=[[UID, 0, 0]]),
    "vector": body(vectors={UID: [1, b"abcd"]}), "vector size": body(vectors={UID: [1 << 40, b"abcd"]}), "vectors": body(vectors=[1]),
    "unknown vector": body(specs=[b'{"v":2,"terms":[{"op":"add","kind":"resid_post","layer":0,"spans":[[0,null]],"write":"%s"}],"takes":[],'
                                  b'"gates":[],"reduce":null}' % UID.encode()], asks=[[UID, 0, 0]]),
    "twice": body(prompts=[b"\1\0\0\0"] * 2, asks=[[UID, -1, 0]] * 2), "too much": b"0" * 4_000_001}
CALLS = {
    "no such method": ("shutdown", []), "private": ("_rows", []), "recover": ("recover", []), "register": ("register", [{}]),
    "admit": ("admit", ["x", b"", 1, 1.0, 1]), "none": ("fetch", []),
    "many": ("fetch", [["0" * 32] * 20_000, "resid_post", 0, False, False]),
    "site": ("fetch", [[], "resid_post", 77, False, False]), "path": ("fetch", [["/etc/passwd"], "resid_post", 0, False, False]),
    "huge at": ("pattern", [[UID], 0, [[127] * 10**6], False, None]), "huge k": ("lens", [[UID], [[0]], [["resid_post", 0]], False,
                                                                                          ["resid_post", 0], 10**9, None, [None]]),
    "rows": ("unembed", [b"x" * 7, False]), "tokens": ("readout", [[-1]]), "types": ("split", [[UID], {}, [], None, "x", 3]),
    "args": ("drop", {"uids": []}), "null": ("drop", [[None]]), "gone": ("fetch", [[UID], "resid_post", 0, False, False])}


def test_a_hostile_client_gets_refusals_and_the_server_goes_on(host: Server, client: Client, session: mia.Session) -> None:
    for name, sent in HOSTILE.items():
        found = host.ask("POST", "/mia/run", sent, "acme")
        assert 400 <= found.status < 500, (name, found)
        assert found.json["error"]["message"], name
    for name, (method, args) in CALLS.items():
        found = host.ask("POST", f"/mia/call/{method}", frames.pack({"args": args, "vectors": {}}), "acme")
        assert 400 <= found.status < 500, (name, found)
        assert found.json["error"]["message"], name
    assert host.ask("POST", "/mia/call/fetch%2e%2e%2fx", b"", "acme").status == 404
    assert host.ask("POST", "/mia/run", body()).status == 401
    assert host.ask("GET", "/mia/tokenizer", key="reader").status == 403
    assert host.ask("GET", "/health").status == 200
    assert client.generate("abc", max_tokens=3) == session.generate("abc", max_tokens=3)
