"""What a request asks: JSON within bounds, held against what there is and what its key may do."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from served import LAYERS, D, bundle, draw, facts, vector

import mia_lab as mia
from mia_lab.engine.reduce import Reducer
from mia_lab.engine.wire import Spec, Take, encode
from mia_lab.points import Point
from mia_lab.selectors import Context
from mia_lab.serve.asking import Asked, Captured, Resolved, needs, parse, resolve, takes
from mia_lab.serve.catalogue import Catalogue
from mia_lab.serve.policy import EVERYONE, Key, Limits, Named
from mia_lab.serve.refusing import Refused

LIMITS = Limits()


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    """Bundles of many kinds; `polite` acts on every request."""
    home = tmp_path_factory.mktemp("home")
    place = home / "bundles"
    bundle(place / "cheerful.steer.zip", mia.Add(vector(1, 2), 1.0))
    bundle(place / "polite.steer.zip", mia.Add(vector(2), 0.25))
    bundle(place / "bare.steer.zip", mia.Add(draw(D), 4.0, [3]))
    bundle(place / "fixed.steer.zip", mia.Clamp(draw(D), value=1.0, layers=[1]))
    bundle(place / "heads.steer.zip", mia.Add(draw(D // 2), 1.0, [0], "z", head=1))
    probes = [mia.Probe(draw(D, seed=5), 0, bias=0.5, mean=draw(D, seed=6)), mia.Probe(draw(D, seed=7), 1, "attn_out")]
    gate = mia.Gate(probes, above=0.5)
    bundle(place / "gated.steer.zip", *[mia.Add(vector(layer), 1.0, when=gate) for layer in (2, 3)])
    bundle(place / "cosine.steer.zip", mia.Add(vector(2), 1.0, when=mia.Gate(mia.Probe(draw(D), 0, cosine=True), above=0.5)))
    (home / "serve.toml").write_text("[defaults]\nedits = ['polite']")
    found = Catalogue.read(home, facts())
    assert not found.quarantined and len(found.bundles) == 7
    return found


def ask(**said: Any) -> Asked:
    return parse(json.dumps(said), LIMITS)


def key(*roles: str, **changed: Any) -> Key:
    return Key("acme", frozenset(roles), **changed)


def prompt(n: int = 6) -> Context:
    return Context(tuple(range(1, n + 1)))


def attempt(call: Callable[[], Any]) -> Any:
    """What a call gives, or its refusal, which any client can be sent."""
    try:
        return call()
    except Refused as refusal:
        json.dumps(refusal.body(), ensure_ascii=False).encode()
        return refusal


def refusal(status: int, catalogue: Catalogue, who: Key = EVERYONE, **said: Any) -> str:
    with pytest.raises(Refused) as found:
        takes(resolve(ask(**said), catalogue, who), prompt())
    assert found.value.status == status
    return found.value.message


# -- reading ----------------------------------------------------------------------------------------------------------


def test_the_whole_of_a_request_is_read() -> None:
    found = ask(edits=[{"name": "cheerful", "coeff": -0.5}, "polite"], defaults=False, monitor=["cheerful"], monitor_at=-1,
                capture=[{"point": "resid_post", "layers": [1, -1], "at": [0, 3], "before": True}, {"point": "z.1", "layers": None}])
    captures = Captured("resid_post", (1, -1), (0, 3), True), Captured("z.1")
    assert found == Asked((Named("cheerful", -0.5), Named("polite")), False, captures, ("cheerful",), -1)
    assert ask(capture=[{"point": "z", "layers": 2}]).captures == (Captured("z", (2,)),)
    assert ask() == parse(" {} ", LIMITS) == Asked()
    assert str(ask(edits=[{"name": "a", "coeff": -0.0}]).edits[0].coeff) == "0.0"


NAMES = ("", "../x", "a/b", "a\\\\b", ".hidden", "a b", "a\\u0000", "\\ud800", "é", "ａ", "a\\n", "x" * 65, "-a", "%2e%2e")
CAPTURES = ("layers: []", "layers: 'all'", "layers: [true]", "layers: [1.0]", "layers: [" + "1," * 1024 + "1]", "layers: 1.5", "layers: {}",
            "layers: [4294967296]", "at: 'first'", "at: null", "at: true", "at: 1.0", "at: []", "at: [[0]]", "at: ['last']", "at: [true]",
            "at: 9223372036854775808", "at: [" + "1," * 64 + "1]", "at: {}", "before: 1", "before: 'no'", "before: null", "shape: 1")
EDITS = ("coeff: NaN", "coeff: Infinity", "coeff: -Infinity", "coeff: 1e309", "coeff: 1e39", "coeff: " + "9" * 400, "coeff: " + "9" * 9000,
         "coeff: true", "coeff: '1'", "coeff: null", "coeff: []", "name: 'b'", "layers: [1]")


def quoted(said: str) -> str:
    name, _, value = said.partition(": ")
    return f'"{name}": ' + value.replace("'", '"')


NO_REQUEST = [
    "", "{", "[]", '"x"', "1", "null", "true", '{"edits": NaN}', '{"edits": [{"coeff": 1}]}', '{"edits": [], "edits": []}', '{"edit": []}',
    '{"edits": {"name": "a"}}', '{"edits": "a"}', '{"edits": [1]}', '{"edits": [["a"]]}', '{"edits": [null]}', '{"edits": null}',
    '{"defaults": 0}', '{"defaults": "false"}', '{"defaults": null}', '{"terms": []}', '{"monitor": "a"}', '{"monitor": ["a", "a"]}',
    '{"v": 2, "terms": [], "takes": [], "gates": [], "reduce": null}', "[" * 60_000, '{"edits":' * 7000, '{"capture": ' + "[" * 5000,
    '{"monitor": [1]}', '{"monitor_at": "all"}', '{"monitor": ["a"], "monitor_at": null}', '{"capture": {}}', '{"capture": [1]}',
    '{"capture": [{}]}', '{"capture": ["z"]}', '{"capture": [{"point": 1}]}', '{"capture": [{"point": ""}]}',
    '{"capture": [{"point": "' + "x" * 200 + '"}]}',
    *[f'{{"edits": ["{name}"]}}' for name in NAMES], *[f'{{"monitor": ["{name}"]}}' for name in NAMES],
    *[f'{{"capture": [{{"point": "z", {quoted(rest)}}}]}}' for rest in CAPTURES],
    *[f'{{"edits": [{{"name": "a", {quoted(rest)}}}]}}' for rest in EDITS]]


@pytest.mark.parametrize("text", NO_REQUEST, ids=range(len(NO_REQUEST)))
def test_what_is_no_request_is_refused(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(Refused) as found:
        parse(text, LIMITS)
    assert found.value.status == 400 and time.monotonic() - began < 10
    assert json.dumps(found.value.body(), ensure_ascii=False).encode()


@pytest.mark.parametrize("value", [None, 1, True, {"edits": []}, ["{}"], b"{}"])
def test_what_is_no_string_is_refused(value: Any) -> None:
    with pytest.raises(Refused, match="is a string that holds JSON"):
        parse(value, LIMITS)


def test_counts_and_bytes_are_bounded() -> None:
    for text in ('{"edits": []}' + " " * 65_536, "é" * 40_000, "\ud800" * 30_000):
        with pytest.raises(Refused) as found:
            parse(text, LIMITS)
        assert found.value.status == 413
    assert len(ask(edits=["a"] * 8).edits) == 8
    for said in ({"edits": ["a"] * 9}, {"capture": [{"point": "z"}] * 65}, {"monitor": [f"a{i}" for i in range(17)]}):
        with pytest.raises(Refused, match="is a list of at most"):
            ask(**said)
    with pytest.raises(Refused, match="at most 1, not of 2"):
        parse('{"edits": ["a", "b"]}', Limits(edits_per_request=1))


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["last", "resid_post", "a"])
within = st.sampled_from(["name", "coeff", "point", "layers", "at", "before", "x"])
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(within, inner, max_size=3), max_leaves=8)
requests = st.dictionaries(st.sampled_from(["edits", "defaults", "capture", "monitor", "monitor_at", "x"]), values, max_size=4)


@settings(max_examples=400, deadline=None)
@given(requests.map(json.dumps) | st.text(max_size=40) | st.binary(max_size=40).map(lambda data: data.decode("utf-8", "surrogateescape")))
@example("\0")
def test_any_text_is_read_or_refused(text: str) -> None:
    found = attempt(lambda: parse(text, LIMITS))
    assert isinstance(found, Asked) or found.status == 400


@settings(max_examples=300, deadline=None)
@given(said=st.fixed_dictionaries({}, optional={
    "edits": st.lists(st.sampled_from(["cheerful", "polite", "bare", "gone"]), max_size=3), "defaults": st.booleans(),
    "monitor": st.lists(st.sampled_from(["cheerful", "gated", "heads", "fixed"]), max_size=2, unique=True),
    "capture": st.lists(st.fixed_dictionaries({"point": st.text(max_size=12) | st.sampled_from(
        ["resid_post", "hook_z", "blocks.2.hook_out", "model.layers.1.output", "attention", "pattern", "embed", "mlp_out"])}, optional={
            "layers": st.integers(-9, 9) | st.lists(st.integers(-9, 9), max_size=3), "before": st.booleans(),
            "at": st.sampled_from(["last", "prompt", "generated", "all"]) | st.integers(-9, 9) | st.lists(st.integers(-9, 9), max_size=4)}),
        max_size=3)}), roles=st.sets(st.sampled_from(["generate", "steer", "capture"])), n=st.integers(1, 9))
def test_any_request_becomes_a_spec_or_is_refused(said: dict[str, Any], roles: set[str], n: int, catalogue: Catalogue) -> None:
    found = attempt(lambda: resolve(ask(**said), catalogue, key(*roles, max_dose=1.0)))
    rows = found if isinstance(found, Refused) else attempt(lambda: takes(found, prompt(n)))
    if isinstance(rows, Refused):
        assert rows.status in (400, 403, 404)
        return
    read, reduce, matrices, labels = rows
    encode("r", Spec((), tuple(read), (), reduce))
    assert all(dose <= 1.000001 for dose in found.doses.values()) and bool(labels) == bool(matrices) == bool(said.get("monitor"))
    assert "steer" in roles or not (said.get("edits") or said.get("defaults") is False)
    assert "capture" in roles or not read


# -- edits ------------------------------------------------------------------------------------------------------------


def test_defaults_act_first_and_can_be_left_out(catalogue: Catalogue) -> None:
    found = resolve(ask(edits=[{"name": "cheerful", "coeff": -0.5}]), catalogue, EVERYONE)
    assert found.acted == (("polite", 1.0), ("cheerful", -0.5)) and [edit.coeff for edit in found.edits] == [0.25, -0.5]
    assert found.doses == {Point("resid_post", 1): pytest.approx(0.5), Point("resid_post", 2): pytest.approx(0.75)}
    assert needs(None, catalogue) and resolve(None, catalogue, EVERYONE).acted == (("polite", 1.0),)
    bare = resolve(ask(defaults=False), catalogue, EVERYONE)
    assert bare.idle and not bare.acted and not bare.captures_anything


def test_equal_requests_give_the_same_edits(catalogue: Catalogue) -> None:
    one, other = (resolve(ask(edits=[{"name": "cheerful", "coeff": 0.75}]), catalogue, EVERYONE) for _ in range(2))
    assert all(a is b for a, b in zip(one.edits, other.edits))


def test_a_request_without_anything_needs_nothing(catalogue: Catalogue, tmp_path: Path) -> None:
    assert not needs(None, Catalogue.read(tmp_path, facts())) and needs(ask(), catalogue)


def test_roles_say_what_a_key_may_ask(catalogue: Catalogue) -> None:
    assert resolve(None, catalogue, key("generate")).acted == (("polite", 1.0),)
    for said, role in (({"edits": ["cheerful"]}, "steer"), ({"defaults": False}, "steer"), ({"capture": [{"point": "z"}]}, "capture"),
                       ({"monitor": ["cheerful"]}, "capture")):
        others = {"generate", "steer", "capture", "administer"} - {role}
        assert f"needs the role '{role}'" in refusal(403, catalogue, key(*others), **said)
        resolve(ask(**said), catalogue, key(role))


def test_names_say_which_edits_a_key_may_use(catalogue: Catalogue) -> None:
    mine = key("steer", "capture", edits=("cheer*",))
    assert resolve(ask(edits=["cheerful"], monitor=["cheerful"]), catalogue, mine).acted[-1] == ("cheerful", 1.0)
    for said in ({"edits": ["bare"]}, {"edits": ["gone"]}, {"monitor": ["bare"]}, {"monitor": ["gone"]}, {"edits": ["polite"]}):
        assert "may not use" in refusal(403, catalogue, mine, **said)  # whether there is one or not
    assert "'cheerless' here; there are cheerful" in refusal(404, catalogue, mine, edits=["cheerless"])
    assert "no edit 'gone'" in refusal(404, catalogue, edits=["gone"])
    assert "may use no edit" in refusal(403, catalogue, key("steer", edits=()), edits=["cheerful"])


def test_doses_are_capped_at_each_point_over_all_edits(catalogue: Catalogue) -> None:
    capped = key("steer", max_dose=0.5)
    assert max(resolve(ask(edits=[{"name": "cheerful", "coeff": -0.25}]), catalogue, capped).doses.values()) == pytest.approx(0.5)
    message = refusal(403, catalogue, capped, edits=[{"name": "cheerful", "coeff": -0.26}])
    assert "a dose of 0.51 at resid_post.2, the server's default edits included; your key may use 0.5" in message
    assert resolve(ask(edits=[{"name": "cheerful", "coeff": 0.5}], defaults=False), catalogue, capped)
    twice = [{"name": "cheerful", "coeff": 0.2}, {"name": "cheerful", "coeff": -0.2}]  # what they undo counts, as gates may part them
    refusal(403, catalogue, capped, edits=twice)
    refusal(403, catalogue, key("steer", max_dose=0.1))  # by the default alone
    assert resolve(ask(edits=["cheerful"] * 8), catalogue, EVERYONE)


def test_a_dose_that_is_unknown_is_over_any_cap(catalogue: Catalogue) -> None:
    assert "that of bare is unknown" in refusal(403, catalogue, key("steer", max_dose=1e6), edits=["bare"])
    assert resolve(ask(edits=["bare"]), catalogue, key("steer")).edits
    assert resolve(ask(edits=["fixed"]), catalogue, key("steer", max_dose=1.0)).edits


def test_coefficients_that_mean_nothing_are_refused(catalogue: Catalogue) -> None:
    assert "which no coefficient multiplies" in refusal(400, catalogue, edits=[{"name": "fixed", "coeff": 0.5}])
    assert "float32 holds" in refusal(400, catalogue, edits=[{"name": "bare", "coeff": 3e38}])


# -- captures ---------------------------------------------------------------------------------------------------------


def spans(catalogue: Catalogue, n: int = 6, **said: Any) -> list[Take]:
    return takes(resolve(ask(capture=[said]), catalogue, EVERYONE), prompt(n))[0]


@pytest.mark.parametrize(("at", "expected"), [
    ("last", ((5, 6),)), ("prompt", ((0, 6),)), ("generated", ((6, None),)), ("all", ((0, None),)), (0, ((0, 1),)), (-1, ((5, 6),)),
    ([4, -1, 0, 5], ((0, 1), (4, 6)))])
def test_positions_are_of_the_prompt(at: Any, expected: tuple, catalogue: Catalogue) -> None:
    assert spans(catalogue, point="resid_post", layers=1, at=at) == [Take("resid_post", 1, expected)]


@pytest.mark.parametrize("at", [6, -7, [0, 6], 2**31 - 1, -2**31])
def test_positions_past_the_prompt_are_refused(at: Any, catalogue: Catalogue) -> None:
    assert "the prompt has 6 tokens, 0 to 5" in refusal(400, catalogue, capture=[{"point": "resid_post", "at": at}])


def test_points_are_named_in_any_spelling(catalogue: Catalogue) -> None:
    assert [take.layer for take in spans(catalogue, point="resid_post")] == list(range(LAYERS))
    for name in ("resid_post.2", "blocks.2.hook_resid_post", "model.layers.2.output"):
        assert spans(catalogue, point=name, before=True) == [Take("resid_post", 2, ((5, 6),), True)]
    assert [take.layer for take in spans(catalogue, point="attn.hook_z", layers=[-1, 0])] == [3, 0]


@pytest.mark.parametrize(("said", "message"), [
    ({"point": "mlp_out"}, "mlp_out is not tapped by this server. Tapped: attn_out at layers 0 to 3; resid_post at layers 0 to 3; z"),
    ({"point": "mlp_out", "layers": 1}, "mlp_out.1 is not tapped"), ({"point": "resid_post", "layers": [0, 4]}, "layer 4 was asked for"),
    ({"point": "resid_post", "layers": -5}, "layer -5"), ({"point": "blocks.9.attn.hook_z"}, "layer 9"),
    ({"point": "x"}, "there is no point"),
    ({"point": "../etc/passwd"}, "there is no point"), ({"point": "pattern"}, "computed from q and k"), ({"point": "logits"}, "logprobs"),
    ({"point": "attention"}, "not tapped"), ({"point": "z.2", "layers": 2}, "names a layer itself"), ({"point": "embed"}, "not tapped"),
    ({"point": "resid_post", "layers": [1, -3]}, "twice")])
def test_points_that_cannot_be_captured_are_refused(said: dict[str, Any], message: str, catalogue: Catalogue) -> None:
    assert message in refusal(400, catalogue, capture=[said])


def test_a_point_is_captured_once_before_and_once_after(catalogue: Catalogue) -> None:
    both = [{"point": "resid_post.1"}, {"point": "resid_post.1", "before": True, "at": "all"}]
    assert len(takes(resolve(ask(capture=both), catalogue, EVERYONE), prompt())[0]) == 2
    assert "names resid_post.1 twice" in refusal(400, catalogue, capture=[both[0], {"point": "resid_post", "at": 0}])


# -- monitors ---------------------------------------------------------------------------------------------------------


def monitored(catalogue: Catalogue, *names: str, **said: Any) -> tuple:
    return takes(resolve(ask(monitor=list(names), **said), catalogue, EVERYONE), prompt())


def computed(reduce: Any, matrices: dict[str, torch.Tensor], site: tuple[str, int], rows: torch.Tensor) -> torch.Tensor:
    """What the engine makes of rows, by its own code."""
    sha = {(kind, layer): sha for kind, layer, sha in reduce.matrices}[site]
    return Reducer._some(reduce, matrices[sha], rows)


def test_an_addition_is_read_on_its_unit_vector(catalogue: Catalogue) -> None:
    read, reduce, matrices, labels = monitored(catalogue, "cheerful")
    assert read == [Take("resid_post", n, ((0, None),)) for n in (1, 2)]
    assert [(x.name, x.index, x.layer, x.before, x.column, x.what) for x in labels] == [
        ("cheerful", 0, 1, False, 0, "projection"), ("cheerful", 1, 2, False, 0, "projection")]
    rows, unit = draw(5, D, seed=9), torch.nn.functional.normalize(vector(1, 2).rows, dim=1)
    for label in labels:
        found = computed(reduce, matrices, ("resid_post", label.layer), rows)[:, label.column]
        torch.testing.assert_close(found, rows @ unit[label.index], rtol=0, atol=1e-5)


def test_a_gate_is_read_by_its_probes_as_it_reads(catalogue: Catalogue) -> None:
    read, reduce, matrices, labels = monitored(catalogue, "gated", monitor_at="last")
    assert read == [Take("resid_post", 0, ((5, 6),), True), Take("attn_out", 1, ((5, 6),), True)]  # once, though two edits have the gate
    row = draw(1, D, seed=9)
    probes = catalogue.bundles["gated"].bundle[0].when.probes
    for label, probe in zip(labels, probes, strict=True):
        found = computed(reduce, matrices, (label.kind, label.layer), row)[0, label.column]
        assert float(found) == pytest.approx(probe.read(row[0]), abs=1e-4) and label.what == "probe"


def test_readings_at_one_point_stand_side_by_side(catalogue: Catalogue) -> None:
    read, reduce, matrices, labels = monitored(catalogue, "cheerful", "polite", "heads")
    places = {(x.name, x.index): (x.kind, x.layer, x.column) for x in labels}
    assert places == {("cheerful", 0): ("resid_post", 1, 0), ("cheerful", 1): ("resid_post", 2, 0), ("polite", 0): ("resid_post", 2, 1),
                      ("heads", 0): ("z", 0, 0)}
    assert len(read) == len(reduce.matrices) == 3
    row = draw(1, D, seed=9)
    head = computed(reduce, matrices, ("z", 0), row)[0, 0]
    torch.testing.assert_close(head, row[0, D // 2 :] @ torch.nn.functional.normalize(draw(D // 2), dim=0), rtol=0, atol=1e-5)
    encode("r", Spec((), tuple(read), (), reduce))
    again = monitored(catalogue, "cheerful", "polite", "heads")[2]
    assert all(again[sha] is matrix for sha, matrix in matrices.items())  # made once


def test_captures_beside_monitors_stay_whole(catalogue: Catalogue) -> None:
    found = takes(resolve(ask(monitor=["polite"], capture=[{"point": "resid_post", "layers": 1}]), catalogue, EVERYONE), prompt())
    assert found[0] == [Take("resid_post", 1, ((5, 6),)), Take("resid_post", 2, ((0, None),))]
    assert [site[:2] for site in found[1].matrices] == [("resid_post", 2)]


def test_monitors_that_read_nothing_right_are_refused(catalogue: Catalogue) -> None:
    both = {"monitor": ["polite"], "capture": [{"point": "resid_post"}]}
    assert "captured already: the reading is a dot product" in refusal(400, catalogue, **both)
    assert "is no dot product" in refusal(400, catalogue, monitor=["cosine"])
    assert "neither an Add nor a gate" in refusal(400, catalogue, monitor=["fixed"])
    assert "no edit 'gone'" in refusal(404, catalogue, monitor=["gone"])
    assert "has 6 tokens" in refusal(400, catalogue, monitor=["polite"], monitor_at=6)


def test_the_request_of_the_documentation(catalogue: Catalogue) -> None:
    text = ('{"edits": [{"name": "cheerful", "coeff": 0.5}, "polite"], "defaults": false, '
            '"capture": [{"point": "resid_post", "layers": [0, 3], "at": "last", "before": false}], "monitor": ["cheerful"]}')
    found: Resolved = resolve(parse(text, LIMITS), catalogue, EVERYONE)
    assert found.acted == (("cheerful", 0.5), ("polite", 1.0)) and len(takes(found, prompt())[0]) == 4
