"""Bundles: what goes in comes out, what was changed is refused, and a golden output is the same or the bundle is not verified."""
from __future__ import annotations

import hashlib
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import mia_lab as mia
from mia_lab import cli
from mia_lab.analysis.vectors import Vector
from mia_lab.bundles import folder
from mia_lab.bundles.codec import WORDS, decode_edits, encode
from mia_lab.errors import BundleError, EditError

D = 16
SCHEMA = json.loads(files("mia_lab.bundles").joinpath("steer.schema.json").read_text())


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vector() -> Vector:
    return Vector("resid_post", (1, 2), draw(2, D), draw(2).abs(), draw(2, seed=1).abs(), "lat")


EDITS = {
    "a vector": lambda: mia.Add(vector(), 0.25, layers=[2]),
    "a tensor": lambda: mia.Add(draw(D), -3.0, layers=range(2), keep_norm=True, where=mia.prompt() & ~mia.tokens("a", 7)),
    "ablate": lambda: mia.Ablate([draw(D), draw(D, seed=2)], layers=[0, 1], where=mia.window(2, -1)),
    "clamp": lambda: mia.Clamp(draw(D), low=-1.0, high=2.5, layers=[0]),
    "scale": lambda: mia.Scale(0.0, layers=[1], point="z", heads=[0, 1]),
    "replace": lambda: mia.Replace(draw(3, D), layers=[1], start=2, blend=0.5),
    "affine": lambda: mia.Affine(draw(2, D), draw(2, D, seed=3), draw(2), layers=[1]),
    "feature": lambda: mia.ClampFeature(draw(D), draw(D, seed=4), 2.0, bias=0.5, threshold=0.1, layers=[2]),
    "bias": lambda: mia.AttentionBias(mia.span("read me"), share=0.5, layers=[0], heads=[1]),
    "gated": lambda: mia.Add(draw(D), 1.0, layers=[1], schedule=mia.Decay(20), when=mia.Gate(
        [mia.Probe(draw(D), 0, cosine=True, mean=draw(D)), mia.Probe(draw(D), 1)], below=0.5, rule="any", over="since")),
    "after": lambda: mia.Add(draw(D), 1.0, layers=[1], when=mia.After(["x", 3])),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("suffix", [".steer", ".steer.zip"])
def test_what_goes_in_comes_out(name: str, suffix: str, tmp_path: Path) -> None:
    edits, tensors = [EDITS[name](), EDITS["a tensor"]()], {}
    path = folder.write(tmp_path / f"x{suffix}", {"edits": encode(edits, tensors, "edits")}, tensors)
    found = folder.read(path)
    assert decode_edits(found.about["edits"], found.tensors) == edits


@pytest.mark.parametrize("name", EDITS)
def test_the_published_schema_says_what_is_written(name: str) -> None:
    edit_schema = SCHEMA | {"$ref": "#/$defs/edit"} | dict.fromkeys(("type", "required", "properties", "additionalProperties"))
    edit_schema = {key: value for key, value in edit_schema.items() if value is not None}
    written = encode(EDITS[name](), {}, "edits")
    jsonschema.validate(written, edit_schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written | {"shell": "ls"}, edit_schema)


def test_the_published_schema_knows_every_word_and_field() -> None:
    defined = SCHEMA["$defs"]
    assert set(defined) == {*WORDS, "tensor", "edit"}
    for name, cls in WORDS.items():
        assert set(defined[name]["properties"]) == {"word", *(field.name for field in fields(cls))}, name
    edits = {name for name, cls in WORDS.items() if issubclass(cls, mia.Edit)}
    assert {part["$ref"].rpartition("/")[2] for part in defined["edit"]["anyOf"]} == edits


def test_equal_contents_give_equal_bytes(tmp_path: Path) -> None:
    written = []
    for place in ("one.zip", "two.zip"):
        tensors: dict[str, torch.Tensor] = {}
        about = {"edits": encode([make() for make in EDITS.values()], tensors, "edits"), "model": {"b": 1, "a": "é"}}
        names = list(tensors)
        random.Random(place).shuffle(names)
        written.append(folder.write(tmp_path / place, about, {n: tensors[n] for n in names}).read_bytes())
    assert written[0] == written[1]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    return folder.write(tmp_path / "x.steer", {"edits": encode([EDITS["a vector"]()], tensors, "edits")}, tensors)


def changed(bundle: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    about = json.loads((bundle / "steer.json").read_text())
    change(about)
    (bundle / "steer.json").write_text(json.dumps(about))
    return about


def edits_of(bundle: Path) -> list[mia.Edit]:
    found = folder.read(bundle)
    return decode_edits(found.about["edits"], found.tensors)


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


CHANGES = {
    "an unknown word": (lambda about: about["edits"][0].update(word="Popen"), "no word"),
    "a word that is a list": (lambda about: about["edits"][0].update(word=["Add"]), "no word"),
    "an unknown field": (lambda about: about["edits"][0].update(shell="ls"), "has no 'shell'"),
    "a wrong type": (lambda about: about["edits"][0].update(coeff="much"), "Add"),
    "a tensor that is not there": (lambda about: about["edits"][0].update(vector={"tensor": "../x"}), "does not hold"),
    "no edit": (lambda about: about.update(edits=[1, 2]), "no list of edits"),
    "too deep": (lambda about: about["edits"][0].update(layers=nested(40)), "nests deeper"),
    "another format": (lambda about: about.update(format="other"), "does not say format"),
    "another version": (lambda about: about.update(version=99), "version 99"),
    "another hash": (lambda about: about.update(tensors_sha256="0" * 64), "not the file"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_bundle_is_refused(bundle: Path, name: str) -> None:
    change, message = CHANGES[name]
    changed(bundle, change)
    with pytest.raises(BundleError, match=message):
        edits_of(bundle)


def test_a_changed_tensor_file_is_refused(bundle: Path) -> None:
    file = bundle / "vector.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match="not the file"):
        folder.read(bundle)


@pytest.mark.parametrize("text", ["{", "[]", "NaN", '{"format": NaN}', "[" * 100_000, "\xff"])
def test_what_is_no_bundle_is_refused(bundle: Path, text: str) -> None:
    (bundle / "steer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError):
        folder.read(bundle)


def test_too_much_is_refused_before_it_is_read(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(folder.LIMITS, "steer.json", 100)
    with pytest.raises(BundleError, match="100 are the most"):
        folder.read(bundle)
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("steer.json", "0" * 10_000_000)
        archive.writestr("vector.safetensors", b"")
    with pytest.raises(BundleError, match="100 are the most"):
        folder.read(bomb)


@pytest.mark.parametrize("names", [["steer.json"], ["steer.json", "vector.safetensors", "../../x"], ["steer.json", "/etc/passwd"]])
def test_a_zip_holds_two_files_and_nothing_else(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    with pytest.raises(BundleError, match="nothing else"):
        folder.read(path)
    path.write_bytes(b"PK nonsense")
    with pytest.raises(BundleError, match="cannot be read"):
        folder.read(path)


def test_a_folder_that_is_no_bundle_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter").write_text("one")
    with pytest.raises(BundleError, match="is no bundle"):
        folder.write(place, {}, {})
    assert (place / "chapter").read_text() == "one"


@pytest.mark.parametrize("dtype", ["F64", "C64", "F4"])
def test_tensors_of_another_type_are_refused(bundle: Path, dtype: str) -> None:
    size = {"F64": 8, "C64": 8, "F4": 1}[dtype]
    head = json.dumps({"x": {"dtype": dtype, "shape": [2 if dtype == "F4" else 1], "data_offsets": [0, size]}}).encode()
    data = len(head).to_bytes(8, "little") + head + bytes(size)
    (bundle / "vector.safetensors").write_bytes(data)
    changed(bundle, lambda about: about.update(tensors_sha256=hashlib.sha256(data).hexdigest()))
    with pytest.raises(BundleError, match=r"vector\.safetensors"):
        folder.read(bundle)


def test_what_lies_beside_a_bundle_is_not_lost_and_a_link_stays_one(bundle: Path, tmp_path: Path) -> None:
    about, tensors = folder.read(bundle).about, folder.read(bundle).tensors
    (tmp_path / "link.steer").symlink_to(bundle)
    folder.write(tmp_path / "link.steer", about, tensors)
    assert (tmp_path / "link.steer").is_symlink() and folder.read(bundle).about == about
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([bundle.name, "link.steer"])
    (bundle / "notes.md").write_text("mine")
    with pytest.raises(BundleError, match=r"'notes\.md' beside its bundle, which would be lost"):
        folder.write(bundle, about, tensors)
    assert (bundle / "notes.md").read_text() == "mine"


def test_a_bundle_that_does_not_say_where_it_is_from_is_refused_in_words(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    said = {"tokens": [1], "log_probabilities": [-0.5]}
    about = {"edits": encode([mia.Add(draw(8), 1.0, [1])], tensors, "edits"), "model": {"name": "m"}, "tokenizer": "t",
             "golden": {"environment": {}, "outputs": [{"prompt": [1], "steered": said, "plain": said}]}}
    assert "for m" in repr(mia.load(folder.write(tmp_path / "x.steer", about, tensors)))
    for change in ({"model": {}}, {"golden": {"outputs": about["golden"]["outputs"]}}):
        folder.write(tmp_path / "x.steer", about | change, tensors)
        with pytest.raises(BundleError, match="does not say its model's name"):
            mia.load(tmp_path / "x.steer")
    with pytest.raises(BundleError, match="there is no "):
        mia.load(tmp_path / "y.steer")


def test_what_has_no_word_is_not_written() -> None:
    with pytest.raises(BundleError, match="no word for"):
        encode([object()], {}, "edits")
    with pytest.raises(BundleError, match="JSON cannot say"):
        encode([float("nan")], {}, "edits")


# -- on an engine -----------------------------------------------------------------------------------------------------

OPTIONS = dict(points=["resid_post"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=4, block_size=32, enforce_eager=True)
PROMPTS = ["one two three four five", "some other words to go on from"]


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **OPTIONS)


@pytest.fixture
def exported(session: mia.Session, tmp_path: Path) -> Path:
    push = mia.Add(draw(session.d_model), 2.0, layers=[1])
    return mia.export([push], tmp_path / "x.steer", session=session, prompts=PROMPTS, max_tokens=8)


@pytest.mark.full
def test_a_bundle_does_the_same_and_is_verified(session: mia.Session, exported: Path) -> None:
    jsonschema.validate(json.loads((exported / "steer.json").read_text()), SCHEMA)
    edits = mia.load(exported)
    golden = edits.goldens[0]
    plain = session.completions(list(golden.prompt), max_tokens=8).outputs[0].token_ids
    steered = session.completions(list(golden.prompt), max_tokens=8, edits=edits).outputs[0].token_ids
    assert tuple(plain) == golden.plain.tokens and tuple(steered) == golden.steered.tokens != golden.plain.tokens
    with session.steer(draw(session.d_model, seed=9), 5.0, layers=[0]):  # open scopes do not enter
        found = mia.verify(exported, session)
    assert found.exact and all(one.exact for one in found.steered) and "token for token" in repr(found)


@pytest.mark.full
def test_the_command_says_what_a_bundle_holds_and_how_another_differs(session: mia.Session, exported: Path, tmp_path: Path,
                                                                       capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["inspect", str(exported)]) == 0
    shown = capsys.readouterr().out
    assert "Add(resid_post.1, coeff=2)" in shown and f"d_model {session.d_model}" in shown and "2 outputs" in shown
    assert cli.main(["diff", str(exported), str(exported)]) == 0 and "no difference" in capsys.readouterr().out
    push = mia.Add(draw(session.d_model, seed=1), 2.0, layers=[1])
    other = mia.export([push], tmp_path / "y.steer.zip", session=session, prompts=PROMPTS, max_tokens=8, provenance={"method": "drawn"})
    assert cli.main(["diff", str(exported), str(other)]) == 1
    shown = capsys.readouterr().out
    assert "(other vectors)" in shown and "drawn" in shown and "golden output 0 is another" in shown
    assert cli.main(["inspect", str(tmp_path)]) == 1 and "steer.json" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path), "no-such-model"]) == 1  # said before a model is loaded


@pytest.mark.full
def test_another_vector_is_found_out(session: mia.Session, exported: Path) -> None:
    found = folder.read(exported)
    weaker = {name: 0.9 * tensor for name, tensor in found.tensors.items()}
    about = {key: value for key, value in found.about.items() if key not in ("format", "version", "tensors_sha256")}
    folder.write(exported, about, weaker)
    with pytest.raises(BundleError, match="golden output 0 differs"):
        mia.verify(exported, session)


@pytest.mark.full
def test_another_model_is_found_out(exported: Path, open_tiny: Callable[..., Any], session: mia.Session) -> None:
    changed(exported, lambda about: about["model"].update(weights="0" * 32))
    with pytest.raises(BundleError, match="its weights are"):
        mia.verify(exported, session)
    changed(exported, lambda about: about["model"].update(n_layers=99))
    with pytest.raises(BundleError, match="n_layers 99"):
        mia.verify(exported, session)


@pytest.mark.full
def test_elsewhere_it_holds_within_what_the_model_itself_differs_by(session: mia.Session, exported: Path) -> None:
    changed(exported, lambda about: about["golden"]["environment"].update(device="another one"))
    found = mia.verify(exported, session)
    assert not found.exact and found.tolerance == 1e-3 and all(one.exact for one in found.steered)

    def drift(about: dict[str, Any]) -> None:
        for golden in about["golden"]["outputs"]:
            for side in ("plain", "steered"):
                golden[side]["log_probabilities"] = [x - 0.01 for x in golden[side]["log_probabilities"]]

    changed(exported, drift)  # the model differs there, and the steered one as much
    assert mia.verify(exported, session).tolerance == pytest.approx(0.02, rel=0.05)

    def damage(about: dict[str, Any]) -> None:
        about["golden"]["outputs"][1]["steered"]["log_probabilities"][0] -= 0.05

    changed(exported, damage)
    with pytest.raises(BundleError, match=r"golden output 1 differs by 0\.06"):
        mia.verify(exported, session)


@pytest.mark.full
def test_a_model_that_itself_says_other_things_verifies_nothing(session: mia.Session, exported: Path) -> None:
    def another(about: dict[str, Any]) -> None:
        about["golden"]["environment"]["device"] = "another one"
        about["golden"]["outputs"][0]["plain"]["tokens"][0] += 1

    changed(exported, another)
    with pytest.raises(BundleError, match="cannot be verified here"):
        mia.verify(exported, session)


@pytest.mark.full
def test_what_the_session_cannot_run_is_not_exported(session: mia.Session, tmp_path: Path) -> None:
    with pytest.raises(EditError):
        mia.export(mia.Add(draw(3), 1.0, layers=[0]), tmp_path / "x.steer", session=session)
    with pytest.raises(BundleError, match="at least one edit"):
        mia.export([], tmp_path / "x.steer", session=session)
    assert not list(tmp_path.iterdir())
    path = mia.export(mia.Add(draw(session.d_model), 1.0, layers=[0]), tmp_path / "x.steer", session=session, max_tokens=2)
    shutil.rmtree(path)
    with pytest.raises(BundleError, match="there is no"):
        mia.load(path)
