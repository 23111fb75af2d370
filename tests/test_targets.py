"""Files of other tools: what goes out comes back with the same effect, and what a format cannot say is refused with the reason.
"""
from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import mia_lab as mia
from mia_lab import cli
from mia_lab.analysis.vectors import Vector
from mia_lab.bundles import folder
from mia_lab.bundles.codec import encode
from mia_lab.bundles.targets import registry
from mia_lab.bundles.targets.kubernetes import bundle_key
from mia_lab.engine.config import EngineOptions
from mia_lab.engine.plugin import register
from mia_lab.errors import BundleError, EditError
from mia_lab.running.launch import bare_engine, close_engine

D = 16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vector(*layers: int) -> Vector:
    rows = draw(len(layers), D)
    return Vector("resid_post", layers, rows, rows.norm(dim=-1), draw(len(layers), seed=1).abs())


def effect(edits: list[mia.Edit]) -> list[tuple]:
    """What edits do at each point, in order: their steps with additions multiplied out, and where."""
    found = []
    for edit in edits:
        for point, steps in sorted(edit.steps.items()):
            for step in steps:
                write = None if step.write is None else tuple((step.write * (step.coeff if step.op == "add" else 1)).flatten().tolist())
                read = None if step.read is None else tuple(step.read.tolist())
                coeff = 1.0 if step.op == "add" else step.coeff
                found.append((point, step.op, coeff, read, write, step.slope, step.offset, step.low, step.high, step.fresh, edit.where))
    return sorted(found, key=lambda one: one[0])


ALL, GENERATED = mia.everywhere(), mia.generated()
ADD = {
    "one layer": lambda where: [mia.Add(draw(D), -1.7, [3], where=where)],
    "a fitted vector": lambda where: [mia.Add(vector(2, 5), 0.3, where=where)],
    "two edits": lambda where: [mia.Add(draw(D), 2.0, [1], where=where), mia.Add(draw(D, seed=7), 0.1, [4], where=where)],
}
FACTORED = ("gguf", "svec", "steering-vectors")
SCOPES = {
    "gguf": [ALL], "svec": [ALL], "steering-vectors": [ALL], "hotwire": [ALL, GENERATED],
    "vllm-hook": [ALL, GENERATED, ~GENERATED, mia.last(), mia.window(-1)],
    "vllm-lens": [ALL, mia.positions([0, 4, 2])], "rhizonymph": [ALL, GENERATED, ~GENERATED],
    "spipe": [ALL, GENERATED, mia.window(-3), mia.window(2)], "intervention": [ALL, GENERATED, mia.window(-3), mia.window(2)],
    "easysteer": [ALL, GENERATED, ~GENERATED, mia.last(), mia.window(-3), mia.window(1), mia.generated(4), mia.window(2) & ~GENERATED],
}
SUFFIX = {"gguf": ".gguf", "svec": ".svec", "steering-vectors": ".pt", "spipe": ".spipe", "intervention": ""}


def through(name: str, edits: list[mia.Edit], tmp_path: Path, **options: Any) -> list[mia.Edit]:
    place = tmp_path / f"v{SUFFIX.get(name, '.json')}"
    options = {"model": "llama"} | options
    written = mia.export(edits, place, format=name, **options)
    return mia.load(written, format=name)


@pytest.mark.parametrize(("name", "which"), [(name, which) for name in SCOPES for which in ADD
                                             if name != "vllm-hook" or which == "one layer"])
def test_an_addition_goes_out_and_comes_back_to_the_bit(name: str, which: str, tmp_path: Path) -> None:
    for where in SCOPES[name]:
        edits = ADD[which](where)
        assert effect(through(name, edits, tmp_path)) == effect(edits), where


OTHERS = {
    "easysteer": [mia.Ablate(3 * draw(D), layers=[1, 2], where=ALL), mia.Replace(draw(D), layers=[4], where=GENERATED),
                  mia.Affine(draw(2, D), draw(2, D, seed=3), layers=[1, 6], coeff=0.5, where=mia.last()),
                  mia.Add(draw(D), 2.0, [1], where=ALL, keep_norm=True)],
    "rhizonymph": [mia.Add(draw(D), 2.0, [1], "resid_pre", ALL), mia.Add(draw(D), 2.0, [1], "resid_mid", ALL),
                   mia.Ablate(draw(D), 0.25, [2], where=ALL), mia.Clamp(draw(D), low=-1.0, layers=[3], where=GENERATED),
                   mia.Clamp(draw(D), value=2.5, layers=[4], where=~GENERATED)],
    "intervention": [mia.Ablate(draw(D), layers=[1, 2], where=GENERATED), mia.Add(draw(D), 2.0, [1], where=ALL)],
    "spipe": [mia.Ablate(vector(1, 2), 0.5, where=GENERATED), mia.Add(draw(D), 2.0, [1], where=ALL)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_edits_go_out_and_come_back(name: str, tmp_path: Path) -> None:
    for edit in OTHERS[name]:
        assert effect(through(name, [edit], tmp_path)) == effect([edit])
    assert effect(through(name, OTHERS[name], tmp_path)) == effect(OTHERS[name])


@pytest.mark.parametrize("name", [name for name in SCOPES if name not in ("hotwire", "vllm-hook", "steering-vectors")])
def test_equal_edits_give_equal_bytes(name: str, tmp_path: Path) -> None:
    def written(place: Path) -> dict[str, bytes]:
        found = mia.export(ADD["two edits"](ALL), place, format=name, model="llama")
        return {f.name: f.read_bytes() for f in sorted(found.rglob("*")) if f.is_file()} if found.is_dir() else {"": found.read_bytes()}

    first = written(tmp_path / f"a{SUFFIX.get(name, '.json')}")
    assert first and first == written(tmp_path / f"b{SUFFIX.get(name, '.json')}")


# -- what a format cannot say -----------------------------------------------------------------------------------------

PROBE = mia.Probe(draw(D), 0)
CANNOT = {
    "a gate": (mia.Add(draw(D), 1.0, [1], where=ALL, when=mia.Gate(PROBE, above=0.0)), "cannot say a gate"),
    "a schedule": (mia.Add(draw(D), 1.0, [1], where=ALL, schedule=mia.Decay(9)), "cannot say a schedule"),
    "a head": (mia.Add(draw(4), 1.0, [1], "z", ALL, head=2), "one head"),
    "another point": (mia.Add(draw(D), 1.0, [1], "attn_out", ALL), "this edit is at attn_out"),
    "a selector that reads text": (mia.Add(draw(D), 1.0, [1], where=mia.span("x")), "no word for the positions span"),
    "BOS left out": (mia.Add(draw(D), 1.0, [1]), "does not know BOS. Say bos='none'"),
    "attention": (mia.AttentionBias(mia.span("x"), share=0.5, layers=[1]), "cannot say AttentionBias"),
    "rows by position": (mia.Replace(draw(2, D), layers=[1], start=0, where=ALL), "cannot say"),
}


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("which", CANNOT)
def test_what_a_format_cannot_say_is_refused_with_the_reason(name: str, which: str, tmp_path: Path) -> None:
    edit, says = CANNOT[which]
    with pytest.raises(BundleError, match=says):
        through(name, [edit], tmp_path)
    assert not list(tmp_path.iterdir())


TWO = [mia.Add(draw(D), 1.0, [1], where=ALL), mia.Add(draw(D), 2.0, [1], where=ALL)]
PARTICULAR = [
    ("gguf", [mia.Add(draw(D), 1.0, [0, 1], where=ALL)], "block 0"),
    ("gguf", [mia.Add(draw(D), 1.0, [1], where=GENERATED)], "cannot act at generated positions"),
    ("gguf", [mia.Ablate(draw(D), layers=[1], where=ALL)], "cannot say Ablate; it has a word for Add"),
    ("gguf", [], "no edit"),
    ("hotwire", TWO, "last of several vectors at one layer"),
    ("hotwire", [mia.Add(draw(D), 1.0, [1], where=ALL, keep_norm=True)], "cannot say keep_norm"),
    ("vllm-lens", [mia.Add(draw(D), 1.0, [1], where=ALL, keep_norm=True)], "cannot say keep_norm"),
    ("intervention", [mia.Add(draw(D), 1.0, [1], where=ALL, keep_norm=True)], "cannot say keep_norm"),
    ("spipe", [mia.Add(draw(D), 1.0, [1], where=ALL, keep_norm=True)], "cannot say keep_norm"),
    ("vllm-hook", TWO, "holds one edit; these are 2"),
    ("vllm-hook", ADD["a fitted vector"](ALL), "another at each"),
    ("vllm-hook", [mia.Add(draw(D), 1.0, [1], where=mia.window(-3))], "all but 3"),
    ("vllm-lens", [mia.Add(draw(D), 1.0, [1], where=GENERATED)], "every position; listed positions"),
    ("easysteer", [mia.Ablate(draw(D), 0.5, [1], where=ALL)], "wholly"),
    ("easysteer", [mia.Ablate([draw(D), draw(D, seed=2)], layers=[1], where=ALL)], "2 directions together"),
    ("easysteer", [mia.Affine(draw(2, D), draw(2, D), draw(2), [1], where=ALL)], "no bias"),
    ("easysteer", [mia.Add(draw(D), 1.0, [1], where=mia.window(5))], "shorter than 5"),
    ("rhizonymph", [mia.Clamp(draw(D), value=1.0, layers=[1], where=ALL), TWO[0]], "put the Add before"),
    ("rhizonymph", [mia.Ablate(draw(D), 2.0, [1], where=ALL)], "between 0 and 1"),
    ("rhizonymph", [mia.Ablate(draw(D), layers=[1], where=GENERATED), mia.Ablate(draw(D, seed=2), layers=[1], where=ALL)],
     "everywhere first"),
    ("intervention", [mia.Ablate(draw(D), 0.5, [1], where=ALL)], "wholly"),
    ("intervention", [mia.Add(draw(D), 1.0, range(900), where=ALL)], "the worker takes"),
    ("steering-vectors", [TWO[0], mia.Add(draw(D), 1.0, [1], "mlp_out_raw", ALL)], "one kind of point"),
]


@pytest.mark.parametrize(("name", "edits", "says"), PARTICULAR)
def test_each_formats_own_limits(name: str, edits: list[mia.Edit], says: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=says):
        through(name, edits, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_without_what_the_format_asks_for_is_refused(tmp_path: Path) -> None:
    for name, options, says in (("svec", {}, "give model="), ("spipe", {}, "give model="), ("gguf", {"feature": 1}, "takes no feature="),
                                ("saelens", {}, "not written"), ("no such", {}, "the formats are gguf, svec")):
        with pytest.raises(BundleError, match=says):
            mia.export(TWO[:1], tmp_path / "x", format=name, **options)
    with pytest.raises(BundleError, match="compose is not read"):
        mia.load(tmp_path / "x.yaml", format="compose")
    with pytest.raises(BundleError, match="give session="):
        mia.export(TWO[:1], tmp_path / "x.steer")


@pytest.mark.parametrize(("bos", "same"), [("none", mia.everywhere()), ("edit", mia.everywhere()), ("skip", mia.window(1))])
def test_bos_is_named_by_who_knows_it(bos: str, same: mia.Edit, tmp_path: Path) -> None:
    default = mia.Add(draw(D), 1.0, [2])
    assert through("easysteer", [default], tmp_path, bos=bos)[0].where == same
    if bos == "skip":
        with pytest.raises(BundleError, match=r"every position from one on.*bos='edit'"):
            through("gguf", [default], tmp_path, bos=bos)
    else:
        assert through("gguf", [default], tmp_path, bos=bos)[0].where == same
    with pytest.raises(BundleError, match="one of none, skip, edit"):
        through("gguf", [default], tmp_path, bos="maybe")


def test_additions_at_one_layer_are_summed_where_a_file_holds_one(tmp_path: Path) -> None:
    for name in FACTORED:
        found = through(name, TWO, tmp_path)
        assert torch.equal(found[0].rows[mia.Point("resid_post", 1)], 1.0 * draw(D) + 2.0 * draw(D))


@pytest.mark.parametrize("name", ["hotwire", "vllm-hook"])
def test_a_file_that_is_another_ones_is_not_written_over(name: str, tmp_path: Path) -> None:
    other = mia.export(TWO[:1], tmp_path / "v.pt", format="steering-vectors")
    before = other.read_bytes()
    with pytest.raises(BundleError, match="choose another name"):
        mia.export(TWO[:1], tmp_path / "v.json", format=name)
    assert other.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["v.pt"]
    for _ in range(2):  # its own is replaced
        assert through(name, TWO[:1], tmp_path / "new folder") == mia.load(tmp_path / "new folder" / "v.json", format=name)


@pytest.mark.parametrize("name", ["gguf", "steering-vectors"])
def test_a_folder_that_is_not_there_is_made(name: str, tmp_path: Path) -> None:
    assert effect(through(name, TWO[:1], tmp_path / "a" / "b")) == effect(TWO[:1])
    assert len(list((tmp_path / "a" / "b").iterdir())) == 1


@pytest.mark.parametrize("name", ["svec", "rhizonymph"])
def test_a_path_that_cannot_be_written_is_said_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    with pytest.raises(BundleError, match="directory"):
        mia.export(TWO[:1], tmp_path / "v", format=name, model="llama")
    assert [file.name for file in tmp_path.iterdir()] == ["v"]


def test_one_layer_is_a_number_for_vllm_hook(tmp_path: Path) -> None:
    written = mia.export(TWO[:1], tmp_path / "v.json", format="vllm-hook")
    assert json.loads(written.read_text())["steering"]["optimal_layer"] == 1


def test_a_position_listed_twice_is_added_to_once(tmp_path: Path) -> None:
    mia.export([mia.Add(draw(D), 1.0, [1], where=mia.positions([3, 3, 1]))], tmp_path / "v.json", format="vllm-lens")
    entry, = json.loads(json.loads((tmp_path / "v.json").read_text())["vllm_xargs"]["apply_steering_vectors"])
    assert entry["position_indices"] == [3, 1] and entry["activations"]["shape"] == [1, 2, D]


# -- servers ----------------------------------------------------------------------------------------------------------

SAID = {"tokens": [1], "log_probabilities": [-0.5]}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    gated = mia.Add(draw(D), 1.0, [2], when=mia.Gate(mia.Probe(draw(D), 0, "attn_out"), above=0.0))
    about = {"edits": encode([mia.Add(vector(1, 2), 0.25), gated, mia.Clamp(draw(D), value=1.0, layers=[3])], tensors, "edits"),
             "model": {"name": "org/model", "weights": "w", "configuration": "c", "n_layers": 8, "d_model": D}, "tokenizer": "t",
             "golden": {"environment": {"device": "cpu"}, "outputs": [{"prompt": [1, 2], "steered": SAID, "plain": SAID}]}}
    return folder.write(tmp_path / "Cheerful tone.steer", about, tensors)


def test_vllm_is_told_the_points_and_kinds_of_edit(bundle: Path, tmp_path: Path) -> None:
    edits = mia.load(bundle)
    said = yaml.safe_load(mia.export(edits, tmp_path / "vllm.yaml", format="vllm", model="org/model").read_text())
    assert list(said) == ["model", "additional-config"]
    options = EngineOptions.of(SimpleNamespace(additional_config=said["additional-config"]))
    assert options.sites == (("attn_out", 0), ("resid_post", 1), ("resid_post", 2), ("resid_post", 3))
    assert options.exact == set(options.sites)
    assert options.edits == ("add", "clamp") and said["additional-config"]["mia_lab"]["serve"] == "/etc/mia_lab"
    bare = json.loads(mia.export(edits, tmp_path / "vllm.json", format="vllm").read_text())
    assert bare == said["additional-config"]


def test_a_config_map_carries_the_bundle(bundle: Path, tmp_path: Path) -> None:
    written = mia.export(mia.load(bundle), tmp_path / "map.yaml", format="kubernetes")
    said = yaml.safe_load(written.read_text())
    assert said["kind"] == "ConfigMap" and said["metadata"]["name"] == "cheerful-tone"
    assert list(said["binaryData"]) == ["Cheerful-tone.steer.zip"]  # the cluster takes no blank there
    with pytest.raises(BundleError, match="cannot be read as a zip"):  # a manifest is no bundle to mount
        mia.export(mia.load(written, format="kubernetes"), tmp_path / "compose.yaml", format="compose")
    assert yaml.safe_load(said["data"]["vllm.yaml"])["model"] == "org/model"
    assert mia.load(written, format="kubernetes") == mia.load(bundle)
    said["binaryData"] = {"x.steer.zip": base64.b64encode(b"PK nonsense").decode()}
    written.write_text(yaml.safe_dump(said))
    with pytest.raises(BundleError, match="cannot be read as a zip"):
        mia.load(written, format="kubernetes")
    with pytest.raises(BundleError, match="carries a bundle"):
        mia.export(TWO, tmp_path / "map.yaml", format="kubernetes")
    large = folder.read(bundle)
    large.tensors["edits.1.vector"] = draw(1 << 18)
    rest = {key: value for key, value in large.about.items() if key not in ("format", "version", "tensors_sha256")}
    folder.write(bundle, rest, large.tensors)
    with pytest.raises(BundleError, match=r"push-dir"):
        mia.export(mia.load(bundle), tmp_path / "map.yaml", format="kubernetes")


def test_a_compose_file_mounts_the_bundle_and_asks_for_an_image(bundle: Path, tmp_path: Path) -> None:
    said = yaml.safe_load(mia.export(mia.load(bundle), tmp_path / "compose.yaml", format="compose").read_text())
    service = said["services"]["vllm"]
    assert service["volumes"] == ["./Cheerful tone.steer:/etc/mia_lab/bundles/Cheerful-tone.steer:ro"]  # a name that servers take
    assert service["image"].startswith("${MIA_LAB_IMAGE:?")
    assert yaml.safe_load(said["configs"]["vllm"]["content"])["additional-config"]["mia_lab"]["edits"] == ["add", "clamp"]


@pytest.mark.parametrize(("name", "key"), [
    ("a.steer", "a.steer"), ("Très bien!.steer.zip", "Tr-s-bien-.steer.zip"), ("_-.x.steer", "x.steer"), ("é.steer", "bundle.steer"),
    ("y" * 90 + ".zip", "y" * 64 + ".steer.zip")])
def test_a_bundle_is_mounted_by_a_name_that_a_server_takes(name: str, key: str) -> None:
    assert bundle_key(Path(name)) == key and folder.NAME.fullmatch(key.removesuffix(".zip").removesuffix(".steer"))


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_converts_and_lists(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["targets"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in registry.TARGETS)
    tensors: dict[str, torch.Tensor] = {}
    about = {key: value for key, value in folder.read(bundle).about.items() if key not in ("format", "version", "tensors_sha256", "edits")}
    folder.write(bundle, about | {"edits": encode([mia.Add(vector(1, 2), 0.25)], tensors, "edits")}, tensors)
    assert cli.main(["convert", str(bundle), str(tmp_path / "v.gguf"), "--to", "gguf"]) == 1
    assert "does not know BOS" in capsys.readouterr().err
    assert cli.main(["convert", str(bundle), str(tmp_path / "v.gguf"), "--to", "gguf", "--bos", "none"]) == 0
    assert cli.main(["convert", str(tmp_path / "v.gguf"), str(tmp_path / "v.json"), "--to", "easysteer"]) == 0
    assert effect(mia.load(tmp_path / "v.json", format="easysteer")) == effect(mia.load(tmp_path / "v.gguf"))
    assert cli.main(["convert", str(tmp_path / "v.json"), str(tmp_path / "w.json"), "--from", "easysteer", "--to", "vllm-lens"]) == 0
    assert cli.main(["convert", str(tmp_path / "v.gguf"), str(tmp_path / "v.steer"), "--to", "steer"]) == 1
    assert "give --model" in capsys.readouterr().err


# -- on an engine -----------------------------------------------------------------------------------------------------

OPTIONS = dict(points=["resid_post"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=4, block_size=32, enforce_eager=True)


@pytest.mark.full
def test_another_tools_file_does_here_what_it_says_and_becomes_a_verified_bundle(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    s = open_tiny("llama", **OPTIONS)
    push = mia.Add(draw(s.d_model), 2.0, [1])
    written = mia.export(push, tmp_path / "x.json", format="easysteer", session=s)  # the session knows whether prompts have a BOS
    found = mia.load(written, format="easysteer")
    clean, moved, mine = (s.capture(["one two three"], layers=[1], at=None, edits=[edits]).get() for edits in (None, found, [push]))
    assert torch.equal(moved, mine) and torch.equal(moved[0, 0, 0], clean[0, 0, 0])
    torch.testing.assert_close((moved - clean)[0, 0, -1], 2.0 * draw(s.d_model), rtol=0, atol=1e-5)
    bundle = mia.export(found, tmp_path / "x.steer", session=s, prompts=["one two three"], max_tokens=6)
    key = Ed25519PrivateKey.generate()
    signer = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    with pytest.raises(BundleError, match="is not signed"):
        mia.verify(bundle, s, signer=signer)
    mia.sign(bundle, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert mia.verify(bundle, s, signer=signer).exact and mia.load(bundle) == found
    with pytest.raises(EditError, match="has"):
        mia.export(mia.Add(draw(3), 1.0, [1]), tmp_path / "y.gguf", session=s)


@pytest.mark.full
def test_stock_vllm_starts_with_the_config_and_taps_the_points(models: Path, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    edits = [mia.Add(draw(128), 1.0, [1]), mia.Clamp(draw(128), value=1.0, layers=[2], point="attn_out")]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--config")
    args = parser.parse_args(["--config", str(mia.export(edits, tmp_path / "vllm.yaml", format="vllm", model="m"))])
    asked = args.additional_config["mia_lab"]
    assert asked["serve"] == "/etc/mia_lab"
    register()
    here = {"mia_lab": asked | {"serve": str(tmp_path)}}  # that folder is the server's
    llm = bare_engine(str(tiny.build("llama", models)), dict(tokenizer=str(tiny.tokenizer(models)), dtype="float32", max_model_len=64,
                                                             enforce_eager=True, additional_config=here))
    try:
        assert sorted(map(tuple, llm.collective_rpc("mia_describe")[0]["sites"])) == [("attn_out", 2), ("resid_post", 1)]
    finally:
        close_engine(llm)
