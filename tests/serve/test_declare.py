"""The opt-in of a server: what it asks to tap is what somebody named, or what its bundles need."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served import LAYERS, D, bundle, draw, vector

import mia_lab as mia
from mia_lab.engine.config import EngineOptions
from mia_lab.errors import MiaError, PointError
from mia_lab.points import Point
from mia_lab.running.declare import EDIT_KINDS, declare, needed
from mia_lab.serve.declare import expand
from mia_lab.serve.disk import DiskError

STREAM = tuple(("resid_post", n) for n in range(LAYERS))
MODEL = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS, intermediate_size=4 * D), get_hidden_size=lambda: D,
                        get_num_attention_heads=lambda parallel: 2, get_num_kv_heads=lambda parallel: 1, get_head_size=lambda: D // 2,
                        get_num_experts=lambda: 0, dtype=torch.bfloat16)
CONFIG = SimpleNamespace(model_config=MODEL, parallel_config=None)


def options(**said: Any) -> EngineOptions:
    """What an engine makes of an opt-in that came through JSON, as it does from a command line and to another process."""
    expanded = json.loads(json.dumps(expand(json.loads(json.dumps(said)), CONFIG)))
    assert expand(expanded, CONFIG) == expanded  # a second process that reads it changes nothing
    found = EngineOptions.of(SimpleNamespace(additional_config={"mia_lab": expanded}))
    assert found is not None
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "bundles").mkdir()
    return tmp_path


def test_without_a_word_the_stream_is_tapped_for_every_edit_but_of_attention() -> None:
    found = options()
    assert (found.sites, found.exact, found.kinds) == (STREAM, frozenset(), {"resid_post"})
    assert found.edits == EDIT_KINDS[:-1] and (found.max_captured_tokens, found.max_biased_tokens, found.complete) == (0, 0, True)


def test_it_is_what_a_session_declares() -> None:
    for points in (["resid_post", ["attn_out", 3]], ["q", "blocks.1.hook_mlp_out"], "pattern", ["attn_out", 2], ["resid_post.0"]):
        as_session = tuple(points) if points == ["attn_out", 2] else points if isinstance(points, str) else [
            tuple(p) if isinstance(p, list) else p for p in points]
        found = options(points=points, edits=["add"])
        assert (found.sites, found.exact, found.kinds) == declare(as_session, LAYERS, False) and found.edits == ("add",)
    biased = options(points=["resid_post"], max_biased_tokens=64, max_captured_tokens=5, delivery="best_effort")
    assert biased.edits == EDIT_KINDS and ("attention", 0) in biased.sites and biased.max_biased_tokens == 64
    assert biased.max_captured_tokens == 5 and not biased.complete


def test_bundles_add_the_points_that_they_need(home: Path) -> None:
    gate = mia.Gate(mia.Probe(draw(D), 0, "attn_out"), above=0.0)
    bundle(home / "bundles" / "one.steer.zip", mia.Add(vector(2), 1.0, when=gate), mia.Scale(0.5, [3], "z", heads=[1]))
    bundle(home / "bundles" / "larger.steer.zip", mia.Add(draw(D), 1.0, [1], "mlp_out"), model={"name": "x", "n_layers": 9, "d_model": D})
    bundle(home / "bundles" / "far.steer.zip", mia.Add(draw(D), 1.0, [LAYERS], "mlp_out"))
    (home / "bundles" / "broken.steer.zip").write_bytes(b"x")
    found = options(serve=str(home))
    assert set(found.sites) == {*STREAM, ("attn_out", 0), ("z", 3)} and found.exact == frozenset()
    assert list(found.sites) == sorted(found.sites, key=lambda site: (site[1], found.sites.index(site)))  # in the order of the forward pass
    assert set(options(serve=str(home), points=["resid_post"]).sites) == set(STREAM)  # whoever names points means these
    assert expand({"serve": str(home), "prove": False}, CONFIG)["prove"] is False


def test_a_bundle_with_a_bias_enables_it(home: Path) -> None:
    bundle(home / "bundles" / "bias.steer.zip", mia.AttentionBias(mia.span("x"), share=0.5, layers=[1]))
    found = options(serve=str(home))
    assert found.max_biased_tokens == 4096 and "attentionbias" in found.edits and ("attention", 1) in found.sites
    assert options(serve=str(home), max_biased_tokens=64).max_biased_tokens == 64
    narrow = options(serve=str(home), edits=["add"])
    assert narrow.max_biased_tokens == 0 and narrow.edits == ("add",) and not [site for site in narrow.sites if site[0] == "attention"]
    assert options(edits=["attentionbias"]).max_biased_tokens == 4096


def test_what_is_spelled_out_stays_as_it_is(home: Path) -> None:
    edits = mia.load(bundle(home / "bundles" / "one.steer.zip"))
    written = json.loads(mia.export(edits, home / "vllm.json", format="vllm").read_text())["mia_lab"]
    assert written["serve"] == "/etc/mia_lab" and expand(written, CONFIG) == written  # no folder is looked into
    assert options(**written).sites == (("resid_post", 1), ("resid_post", 2))
    session = EngineOptions(STREAM).as_json()
    assert expand(session, CONFIG) == session


def test_what_an_edit_needs() -> None:
    gate = mia.Gate([mia.Probe(draw(D), 0), mia.Probe(draw(D), 1, "attn_out")], above=0.0)
    assert needed(mia.Add(draw(D), 1.0, [3], when=gate)) == {Point("resid_post", 0), Point("attn_out", 1), Point("resid_post", 3)}
    assert needed(mia.Add(draw(D), 1.0, [3], when=mia.After(1))) == {Point("resid_post", 3)}


@pytest.mark.parametrize(("said", "message"), [
    ("/etc/mia_lab", "is an object"), ([], "is an object"), (None, "is an object"), ({"serve": 1}, '"serve" is 1'),
    ({"serve": ""}, "is a folder"),
    ({"server": "x"}, "has 'server'; it may have serve, points"), ({"edits": "add"}, "it is a list"), ({"edits": ["push"]}, "'push'"),
    ({"edits": [["add"]]}, "it is a list of add"), ({"points": []}, '"points" is'), ({"points": 5}, '"points" is'),
    ({"points": {"a": 1}}, '"points" is'), ({"points": ["nowhere"]}, "there is no point"), ({"points": [["attn_out", 9]]}, "layer 9"),
    ({"points": [["attn_out", "x"]]}, "there is no point|not an integer"), ({"points": [None]}, "a point is"),
    ({"max_captured_tokens": -1}, "a number of tokens"), ({"max_biased_tokens": True}, "a number of tokens"),
    ({"max_biased_tokens": 1.5}, "a number of tokens"), ({"max_biased_tokens": 2**31}, "a number of tokens"),
    ({"delivery": "some"}, '"delivery" is'), ({"prove": "no"}, "true or false"), ({"exact": []}, 'goes with "sites"'),
    ({"sites": [], "points": ["z"]}, 'goes without "sites"'), ({"serve": "/no/such/folder"}, "there is no folder")])
def test_what_cannot_be_is_refused_in_words(said: Any, message: str) -> None:
    with pytest.raises(MiaError, match=message) as found:
        expand(said, CONFIG)
    assert isinstance(found.value, (ValueError, PointError, DiskError))
