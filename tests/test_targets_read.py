"""Files of other tools that are read: what their own code wrote or documents, and hostile ones, refused before memory is taken.

In tests/files/ are files that repeng, steering-vectors and SAELens wrote.
"""
from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mia_lab as mia
from mia_lab.bundles.targets import easysteer
from mia_lab.errors import BundleError

D = 16
FILES = Path(__file__).parent / "files"
ALL, GENERATED = mia.everywhere(), mia.generated()
TWO = [mia.Add(torch.ones(D), 1.0, [1], where=ALL), mia.Add(torch.ones(D), 2.0, [1], where=ALL)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- files of the tools themselves ------------------------------------------------------------------------------------


def test_what_repeng_and_steering_vectors_wrote_becomes_edits() -> None:
    rows = draw(3, D)
    edit, = mia.load(FILES / "repeng-0.4.0.gguf")
    assert [row.tolist() for row in edit.rows.values()] == rows.tolist() and edit.where == ALL and edit.coeff == 1.0
    with pytest.raises(BundleError, match="give the session"):  # of attention's own output
        mia.load(FILES / "steering-vectors-0.12.2.pt", format="steering-vectors")


def test_a_feature_of_sae_lens_becomes_an_edit() -> None:
    path = FILES / "sae-lens-6.54.12-jumprelu"
    sae = mia.SparseAutoencoder.load(path)
    add, = mia.load(path, format="saelens", feature=3)
    point, = add.steps
    assert torch.equal(add.rows[point], sae.decoder[3])
    clamp, = mia.load(path, format="saelens", feature=3, value=4.0)
    step, = clamp.steps[point]
    assert torch.equal(step.read, sae.encoder[:, 3]) and (step.low, step.threshold) == (4.0, float(sae.threshold[3]))
    for options, says in (({}, "say which"), ({"feature": 999}, "no feature 999")):
        with pytest.raises(BundleError, match=says):
            mia.load(path, format="saelens", **options)
    with pytest.raises(BundleError, match="top-k"):
        mia.load(FILES / "sae-lens-6.54.12-topk", format="saelens", feature=1, value=1.0)


@pytest.mark.parametrize("change", [{"metadata": [1]}, {"activation_fn_kwargs": [1]}, {"model_from_pretrained_kwargs": [1]},
                                    {"architecture": "topk", "k": "x"}])
def test_a_damaged_configuration_of_sae_lens_is_refused_in_words(change: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(FILES / "sae-lens-6.54.12-jumprelu", tmp_path / "sae")
    said = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(said | change))
    with pytest.raises(BundleError, match=r"no SAELens folder|how many features"):
        mia.load(tmp_path / "sae", format="saelens", feature=1)


@pytest.mark.parametrize("name", ["b_enc", "b_dec", "threshold"])
def test_weights_of_sae_lens_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    shutil.copytree(FILES / "sae-lens-6.54.12-jumprelu", tmp_path / "sae")
    file = tmp_path / "sae" / "sae_weights.safetensors"
    weights = load_file(file)
    save_file({key: held[:1].clone() if key == name else held.clone() for key, held in weights.items()}, file)
    with pytest.raises(BundleError, match=f"{name} of shape"):
        mia.load(tmp_path / "sae", format="saelens", feature=1)


def test_the_forms_that_other_tools_document_are_read(tmp_path: Path) -> None:
    def read(name: str, value: Any) -> list[mia.Edit]:
        (tmp_path / "x.json").write_text(json.dumps(value))
        return mia.load(tmp_path / "x.json", format=name)

    torch.save({"v": draw(4, D)}, tmp_path / "tesla.pt")
    torch.save(draw(D), tmp_path / "one.pt")
    flat, single = read("hotwire", {"id": "tesla", "layer": 2, "scale": 1.5}), read("hotwire", {"id": "one", "layer": 3})
    assert torch.equal(flat[0].rows[mia.Point("resid_post", 2)], draw(4, D)[2]) and flat[0].coeff == 1.5
    assert torch.equal(single[0].rows[mia.Point("resid_post", 3)], draw(D))

    torch.save({"dir": draw(D), "avg_proj": torch.tensor(1.0)}, tmp_path / "dir.pt")
    steering = {"method": "add_vector", "coefficient": 10, "optimal_layer": [6, 10], "vector_path": "dir.pt",
                "apply_at_all_positions": True}
    assert read("vllm-hook", {"steering": steering})[0].layers == [6, 10]
    assert read("vllm-hook", {"steering": steering | {"apply_at_all_positions": False}})[0].where == mia.window(-1)
    with pytest.raises(BundleError, match="adjust_rs"):
        read("vllm-hook", {"steering": steering | {"method": "adjust_rs"}})

    module = {"vectors": {"post_block": {"15": [0.1, 0.2], "20": {"vector": [0.4, 0.5], "scale": 2.0}}},
              "prefill_vectors": {"pre_attn": {"15": [0.3, 0.4]}}, "decode_vectors": None}
    found = read("rhizonymph", module)
    assert [(str(point), edit.coeff) for edit in found for point in edit.steps] == [
        ("resid_post.15", 1.0), ("resid_post.20", 2.0), ("resid_pre.15", 1.0)] and found[2].where == ~GENERATED

    value = draw(1, D).bfloat16()
    tensor = {"data": base64.b64encode(value.view(torch.int16).numpy().tobytes()).decode(), "dtype": "int16", "shape": [1, D],
              "original_dtype": "torch.bfloat16"}
    lens = [{"activations": tensor, "layer_indices": [18], "scale": 2.0, "norm_match": False, "position_indices": None}]
    assert torch.equal(read("vllm-lens", {"apply_steering_vectors": lens})[0].rows[mia.Point("resid_post", 18)], value[0].float())

    (tmp_path / "v.gguf").write_bytes((FILES / "repeng-0.4.0.gguf").read_bytes())
    spec = {"vectors": [{"source": "v.gguf", "scale": 2.0, "layers": [2, 3], "apply": {"prompt": "all", "generation": "all"}}]}
    assert read("easysteer", spec)[0].layers == [2, 3] and read("easysteer", {"steering": spec})[0].coeff == 2.0


def test_zstd_as_vllm_lens_writes_it_is_read_and_a_bomb_is_not(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")

    def read(raw: bytes, shape: list[int]) -> list[mia.Edit]:
        data = base64.b64encode(zstandard.ZstdCompressor(level=1).compress(raw)).decode()
        tensor = {"data": data, "dtype": "float32", "original_dtype": "torch.float32", "shape": shape, "compression": "zstd"}
        (tmp_path / "x.json").write_text(json.dumps({"apply_steering_vectors": [{"activations": tensor, "layer_indices": [1]}]}))
        return mia.load(tmp_path / "x.json", format="vllm-lens")

    assert torch.equal(read(draw(1, D).numpy().tobytes(), [1, D])[0].rows[mia.Point("resid_post", 1)], draw(D))
    with pytest.raises(BundleError, match="and has 65 bytes"):
        read(b"\0" * (200 << 20), [1, D])


def test_the_identity_of_an_easysteer_payload_is_that_of_its_own_code() -> None:
    """Worked out from the rule in vllm-steer's payloads.py: kind and version, then names, shapes and bytes, then extra fields."""
    row = torch.tensor([1.0, 2.0])
    wire = {"version": 1, "kind": "direction", "extra": {}, "tensors": {"layer.3": {"shape": [2], "data": base64.b64encode(
        row.numpy().tobytes()).decode()}}}
    assert easysteer.digest(wire) == hashlib.sha256(b"direction:1" + b"layer.3" + b"(2,)" + row.numpy().tobytes()).hexdigest()
    reft = wire | {"kind": "reft", "extra": {"layer": None}}
    assert easysteer.digest(reft) == hashlib.sha256(b"reft:1layer.3(2,)" + row.numpy().tobytes() + b"layer=None").hexdigest()


# -- hostile files ----------------------------------------------------------------------------------------------------

REQUEST = {"activations": {"data": "AAAA", "dtype": "float32", "original_dtype": "torch.float32", "shape": [1, D]}, "layer_indices": [1]}
HELD = REQUEST["activations"] | {"data": base64.b64encode(bytes(4 * D)).decode()}
HOSTILE = [
    ("svec", '{"model_type": "x", "directions": {"1": [[NaN]]}}', "no number"),
    ("svec", '{"model_type": "x", "directions": {"1": [[1e400]]}}', "NaN or infinite"),
    ("svec", '{"model_type": "x", "directions": {"1": [[1e300]]}}', "NaN or infinite"),
    ("svec", '{"model_type": "x", "directions": {"1": [[1, "2"]]}}', "no number"),
    ("svec", '{"model_type": "x", "directions": {"1": [1], "2": [1, 2]}}', "different widths"),
    ("svec", '{"model_type": "x", "directions": {"1": [1], "1": [2]}}', "given twice"),
    ("svec", '{"model_type": "x", "directions": {"-1": [1]}}', "counted from 0"),
    ("svec", '{"model_type": "x", "directions": {"99999999999999": [1]}}', "counted from 0"),
    ("svec", '{"model_type": "x", "directions": {"1": [[1], [2]]}}', "has 2 rows"),
    ("svec", '{"model_type": "x", "num_heads": 2, "directions": {"1": [1]}}', "by head"),
    ("svec", "[" * 100_000, "no JSON"),
    ("svec", '{"a":' * 40 + "1" + "}" * 40, "nests deeper"),
    ("svec", "\xff\xfe", "no JSON"),
    ("svec", "[]", "an object was expected"),
    ("vllm-lens", json.dumps({"apply_hooks": [{"fn": {"cloudpickle": "gASV"}}]}), "pickled code"),
    ("vllm-lens", json.dumps({"apply_steering_vectors": [REQUEST]}), "its data are not"),
    ("vllm-lens", json.dumps({"apply_steering_vectors": [REQUEST | {"activations": REQUEST["activations"] | {"shape": [1 << 40, 16]}}]}),
     "can be read"),
    ("vllm-lens", json.dumps({"apply_steering_vectors": [REQUEST | {"activations": REQUEST["activations"] | {"dtype": "object"}}]}),
     "the type 'object'"),
    ("rhizonymph", json.dumps({"vectors": {"post_block": {"dtype": "float32", "shape": [1, 1 << 30], "layer_indices": [1],
                                                          "data": "AA=="}}}), "can be read"),
    ("rhizonymph", json.dumps({"vectors": {"os_system": {"1": [1.0]}}}), "hooks that are points"),
    ("rhizonymph", json.dumps({"vectors": {}}), "no vector and no clamp"),
    ("hotwire", json.dumps({"id": "../../etc/passwd", "layer": 1, "scale": 1}), "outside the folder"),
    ("hotwire", json.dumps({"id": "/etc/passwd", "layer": 1, "scale": 1}), "outside the folder"),
    ("hotwire", json.dumps({"id": "x", "layer": True, "scale": 1}), "counted from 0"),
    ("hotwire", json.dumps({"id": "x", "layer": 1, "scale": "1"}), "finite number"),
    ("hotwire", json.dumps({"id": "nothing", "layer": 1, "scale": 1}), "cannot be read"),
    ("vllm-hook", json.dumps({"steering": {"method": "add_vector", "optimal_layer": 1, "vector_path": "../x.pt"}}), "outside the folder"),
    ("vllm-hook", json.dumps({"steering": {"method": "add_vector", "optimal_layer": [], "vector_path": "x.pt"}}), "something in it"),
    ("easysteer", json.dumps({"vectors": [{"source": "../v.gguf", "apply": {"prompt": "all"}}]}), "outside the folder"),
    ("easysteer", json.dumps({"vectors": [{"data": {}, "apply": {"prompt_tokens": [1]}}]}), "cannot be said by a selector"),
    ("easysteer", json.dumps({"vectors": [{"data": {}, "apply": {"prompt": "all"}}]}), "was expected"),
    ("easysteer", json.dumps({"vectors": [{}, {}]}), "only one acts"),
    ("vllm-lens", json.dumps({"apply_steering_vectors": [REQUEST | {"norm_match": True, "activations": HELD}]}), "has norm_match"),
    ("easysteer", json.dumps({"vectors": [{"apply": {"prompt": "all"}, "params": {"x": 1}}]}), "params"),
]


@pytest.mark.parametrize(("name", "text", "says"), HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=says):
        mia.load(tmp_path / "x.json", format=name)


def test_a_changed_payload_or_artifact_is_refused(tmp_path: Path) -> None:
    place = mia.export(TWO[:1], tmp_path / "x.json", format="easysteer")
    said = json.loads(place.read_text())
    said["steering"]["vectors"][0]["data"]["tensors"]["layer.1"]["data"] = base64.b64encode(bytes(4 * D)).decode()
    place.write_text(json.dumps(said))
    with pytest.raises(BundleError, match="sha256 is not that"):
        mia.load(place, format="easysteer")
    place = mia.export(TWO[:1], tmp_path / "spec", format="intervention")
    file = next(place.rglob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(BundleError, match="not the file of its id"):
        mia.load(place, format="intervention")
    spec = place / "intervention_spec.json"
    for change, says in (("../../../../etc/passwd", "an id is"), ("sha256:" + "0" * 64, "there is no file")):
        said = json.loads(spec.read_text())
        said["ops"][0]["transform"]["artifact"] = change
        spec.write_text(json.dumps(said))
        with pytest.raises(BundleError, match=says):
            mia.load(place, format="intervention")
    said["ops"][0]["transform"] |= {"artifact": f"sha256:{file.stem}", "modifiers": [{"kind": "norm_preserving"}]}
    spec.write_text(json.dumps(said))
    file.write_bytes(whole)
    with pytest.raises(BundleError, match="modifiers"):
        mia.load(place, format="intervention")
    said["ops"][0]["gate"] = {"readout": {}}
    spec.write_text(json.dumps(said))
    with pytest.raises(BundleError, match="has a gate"):
        mia.load(place, format="intervention")


@pytest.mark.parametrize(("change", "says"), [
    (lambda said: said.update(code_dependent=True), "refers to code"), (lambda said: said.update(format="spipe/2"), "spipe/2"),
    (lambda said: said["controls"][0].update(method="output_control/rad"), "no edit"),
    (lambda said: said["controls"][0]["args"].update(steering_vector=None), "has yet to be fitted"),
    (lambda said: said["controls"][0]["args"].update(steering_vector={"$ref": "os:system"}), "has yet to be fitted"),
    (lambda said: said["controls"][0]["args"].update(layer_id=None), "counted from 0"),
    (lambda said: said["controls"][0]["args"].update(use_norm_preservation=True), "only shortens"),
    (lambda said: said["controls"][0].update(enabled=False), "no enabled control")])
def test_a_spipe_that_is_more_than_edits_is_refused(change: Callable[[dict], None], says: str, tmp_path: Path) -> None:
    place = mia.export(TWO[:1], tmp_path / "x.spipe", format="spipe", model="m")
    with zipfile.ZipFile(place) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    said = json.loads(held["spipe.json"])
    change(said)
    with zipfile.ZipFile(place, "w") as archive:
        for name, data in (held | {"spipe.json": json.dumps(said).encode()}).items():
            archive.writestr(name, data)
    with pytest.raises(BundleError, match=says):
        mia.load(place)


def test_bombs_are_found_before_memory_is_taken(tmp_path: Path) -> None:
    bomb = tmp_path / "x.spipe"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("spipe.json", b"0" * (40 << 20))
    with pytest.raises(BundleError, match="more than"):
        mia.load(bomb)
    aliases = "a: &a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
    for text, says in ((aliases, "alias"), ("a: !!bool x", "a tag"), ("a: [" + "x," * 5000 + "]", "values"),
                       ("a: " + "1:" * 400_000 + "1", "no ConfigMap"), ("kind: Secret", "no ConfigMap"),
                       ("x: !!python/object/apply:os.system [ls]", "no plain YAML"), ("[" * 9000, "no plain YAML")):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(BundleError, match=says):
            mia.load(tmp_path / "x.yaml", format="kubernetes")
    large = tmp_path / "x.svec"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BundleError, match="are the most"):
        mia.load(large)


def test_torch_files_that_lie_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "v.pt"
    torch.save({1: torch.zeros(1).expand(1 << 40)}, place)
    with pytest.raises(BundleError, match="more than the file holds"):
        mia.load(place, format="steering-vectors")
    torch.save({1: draw(D)}, place, _use_new_zipfile_serialization=False)
    with pytest.raises(BundleError, match=r"no zip of torch\.save"):
        mia.load(place, format="steering-vectors")
    torch.save({1: draw(D)}, place)
    with zipfile.ZipFile(place) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    with pytest.raises(BundleError, match="compressed or too large"):
        mia.load(place, format="steering-vectors")


def test_a_container_held_many_times_is_looked_into_once(tmp_path: Path) -> None:
    nested: Any = [torch.zeros(1)]
    for _ in range(6):
        nested = [nested] * 1000
    torch.save({1: nested}, tmp_path / "v.pt")
    with pytest.raises(BundleError, match="no single direction"):
        mia.load(tmp_path / "v.pt", format="steering-vectors")


@pytest.mark.parametrize("value", [{1: torch.tensor(3.0)}, {1: torch.ones(3, dtype=torch.complex64)},
                                   {"layer_activations": [torch.ones(3)]},
                                   {"layer_activations": {1: torch.ones(3)}, "layer_type": ["mlp"]}])
def test_a_torch_file_with_another_thing_in_it_is_refused(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "v.pt")
    with pytest.raises(BundleError, match=r"no single direction|no point here"):
        mia.load(tmp_path / "v.pt", format="steering-vectors")


def gguf_file(fields: bytes, names: list[str], width: int) -> bytes:
    """A control vector with one more field, whose directions all lie at the same place."""
    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), 2) + text("general.architecture") + struct.pack("<I", 8) + text("controlvector")
    head += text("more") + fields + b"".join(text(name) + struct.pack("<IQIQ", 1, width, 0, 0) for name in names)
    return head + bytes(-len(head) % 32) + bytes(4 * width)


@pytest.mark.parametrize(("fields", "names", "width", "says"), [
    (struct.pack("<IIQ", 9, 0, 1 << 21) + bytes(1 << 21), ["direction.1"], 4, "values"),
    (struct.pack("<IQ", 8, 1 << 21) + bytes(1 << 21), ["direction.1"], 4, "fields take more"),
    (struct.pack("<II", 4, 0), [f"direction.{i}" for i in range(1, 100)], 4096, "with those before it"),
    (struct.pack("<II", 4, 0), ["direction." + "1" * 5000], 4, "holds 1-D F32 tensors")])
def test_a_gguf_that_would_fill_memory_is_refused(fields: bytes, names: list[str], width: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(gguf_file(fields, names, width))
    with pytest.raises(BundleError, match=says):
        mia.load(tmp_path / "v.gguf")


def test_a_direction_that_easysteer_would_take_out_in_part_is_refused(tmp_path: Path) -> None:
    place = mia.export([mia.Ablate(draw(D), layers=[1], where=ALL)], tmp_path / "x.json", format="easysteer")
    said = json.loads(place.read_text())
    said["steering"]["vectors"][0]["scale"] = 0.0
    place.write_text(json.dumps(said))
    with pytest.raises(BundleError, match="only a part"):
        mia.load(place, format="easysteer")


@pytest.mark.parametrize("at", range(8, 300, 3))
def test_a_damaged_gguf_is_refused_or_read_and_never_hangs(at: int, tmp_path: Path) -> None:
    data = bytearray((FILES / "repeng-0.4.0.gguf").read_bytes())
    data[at : at + 8] = (1 << 62).to_bytes(8, "little")
    (tmp_path / "v.gguf").write_bytes(data)
    try:
        found = mia.load(tmp_path / "v.gguf")
    except BundleError:
        return
    assert all(torch.isfinite(row).all() for row in found[0].rows.values())


WRITTEN = {"svec": "x.svec", "hotwire": "x.json", "vllm-hook": "x.json", "vllm-lens": "x.json", "easysteer": "x.json",
           "rhizonymph": "x.json", "intervention": "x", "spipe": "x.spipe", "steering-vectors": "x.pt", "gguf": "x.gguf"}
PUT = [None, [], {}, -1, 10**30, True, "x", [[1]], {"a": 1}, 1.5, [1, "a"], [None], {"kind": []}, "sha256:" + "0" * 64]


def spoilt(value: Any, dice: random.Random) -> Any:
    """A JSON value with one thing in it taken away or replaced, also within JSON that is a text in it."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        return json.dumps(spoilt(json.loads(value), dice))
    if not isinstance(value, (dict, list)) or not value or dice.random() < 0.15:
        return dice.choice(PUT)
    copy = value.copy()
    at = dice.choice(list(copy)) if isinstance(copy, dict) else dice.randrange(len(copy))
    if dice.random() < 0.1:
        del copy[at]
    else:
        copy[at] = spoilt(copy[at], dice)
    return copy


@pytest.mark.parametrize("name", WRITTEN)
def test_whatever_is_wrong_with_a_file_is_said_in_words(name: str, tmp_path: Path) -> None:
    place = mia.export(TWO[:1], tmp_path / WRITTEN[name], format=name, model="m")
    dice, read = random.Random(name), 0
    for file in [place] if place.is_file() else [place / "intervention_spec.json"]:
        whole = file.read_bytes()
        for _ in range(150):
            if file.suffix in (".json", ".svec"):
                data = json.dumps(spoilt(json.loads(whole), dice)).encode()
            else:
                at = dice.randrange(len(whole))
                data = whole[:at] + bytes([dice.randrange(256)]) + whole[at + dice.choice([0, 1, 1, 9]):]
            file.write_bytes(data)
            try:
                read += bool(mia.load(place, format=name))
            except BundleError:
                continue
    assert read < 150
