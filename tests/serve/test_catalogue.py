"""A server's folder: what is sound is served, byte for byte as it was checked, and the rest is set aside with a reason."""
from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import socket
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.torch import save
from served import LAYERS, D, bundle, draw, facts, vector

import mia_lab as mia
from mia_lab.bundles import folder as bundle_folder
from mia_lab.bundles.pushing import push
from mia_lab.errors import BundleError, MiaError
from mia_lab.points import Point
from mia_lab.serve import catalogue as module
from mia_lab.serve.catalogue import Catalogue, Served
from mia_lab.serve.disk import MAX_ENTRIES, DiskError
from mia_lab.serve.policy import PolicyError
from mia_lab.serve.refusing import Refused

MODEL = facts()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A server's folder with one sound bundle."""
    (tmp_path / "home" / "bundles").mkdir(parents=True)
    bundle(tmp_path / "home" / "bundles" / "good.steer.zip")
    return tmp_path / "home"


def read(home: Path, **changed: Any) -> Catalogue:
    return Catalogue.read(home, facts(**changed) if changed else MODEL)


def reason(home: Path, name: str) -> str:
    """Why one is set aside, while the sound one is served."""
    found = read(home)
    assert "good" in found.bundles and name not in found.bundles
    return found.quarantined[name]


def test_bundles_are_served_whether_they_are_zips_or_folders(home: Path, tmp_path: Path) -> None:
    bundle(home / "bundles" / "other.steer", mia.Add(vector(0), 1.0), mia.Clamp(draw(D), value=1.0, layers=[3], point="attn_out"))
    found = read(home)
    assert sorted(found.bundles) == ["good", "other"] and not found.quarantined and found.policy.keys == ()
    served = found.bundles["other"]
    (tmp_path / "back.steer.zip").write_bytes(served.zipped())
    assert mia.load(tmp_path / "back.steer.zip") == mia.load(home / "bundles" / "other.steer") == list(served.bundle)
    assert found.bundles["good"].doses == {Point("resid_post", n): pytest.approx(0.5) for n in (1, 2)}
    assert served.doses == {Point("resid_post", 0): pytest.approx(1.0)}


def test_the_digest_is_of_what_was_accepted_and_of_the_policy(home: Path) -> None:
    first = read(home).digest
    assert len(first) == 16 and first == read(home).digest
    shutil.copy(home / "bundles" / "good.steer.zip", home / "bundles" / "broken.steer.zip.txt")
    (home / "bundles" / ".previous").mkdir()
    assert read(home).digest == first
    seen = {first}
    (home / "serve.toml").write_text("")
    seen.add(read(home).digest)
    (home / "serve.toml").write_text("[limits]\nbody_bytes = 5")
    seen.add(read(home).digest)
    shutil.copy(home / "bundles" / "good.steer.zip", home / "bundles" / "twin.steer.zip")
    seen.add(read(home).digest)
    bundle(home / "bundles" / "twin.steer.zip", mia.Add(vector(1), 1.0))
    seen.add(read(home).digest)
    assert len(seen) == 5


def test_what_was_pushed_is_found_and_hidden_names_are_not_looked_at(home: Path, tmp_path: Path) -> None:
    for edit in (mia.Add(vector(1), 1.0), mia.Add(vector(1), 2.0)):
        push(bundle(tmp_path / "mood.steer", edit), home / "bundles")
    assert (home / "bundles" / ".previous").is_dir()
    found = read(home)
    assert sorted(found.bundles) == ["good", "mood"] and not found.quarantined and found.bundles["mood"].bundle[0].coeff == 2.0
    with pytest.raises(BundleError, match="no name that a server takes"):
        push(bundle(tmp_path / "my mood.steer"), home / "bundles")


def test_a_mounted_config_map_is_read_through_its_links(tmp_path: Path) -> None:
    """As the cluster lays it out: ..data is a link to a folder, and each name a link into it; an update turns ..data over."""
    written = mia.export(mia.load(bundle(tmp_path / "My mood.steer")), tmp_path / "map.yaml", format="kubernetes")
    volume = yaml.safe_load(written.read_text().splitlines()[1].removeprefix("#"))["volumes"][0]
    said, home = yaml.safe_load(written.read_text()), tmp_path / "etc"
    real = home / "..2026_11_30"
    for item in volume["configMap"]["items"]:
        place = real / item["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        held = said["data"].get(item["key"])
        place.write_bytes(held.encode() if held else base64.b64decode(said["binaryData"][item["key"]]))
    (home / "..data").symlink_to("..2026_11_30")
    for name in ("bundles", "vllm.yaml"):
        (home / name).symlink_to(f"..data/{name}")
    found = read(home)
    assert list(found.bundles) == ["My-mood"] and not found.quarantined
    flat = tmp_path / "flat"
    (flat / "bundles" / "..1").mkdir(parents=True)
    bundle(flat / "bundles" / "..1" / "calm.steer.zip")
    (flat / "bundles" / "..data").symlink_to("..1")
    (flat / "bundles" / "calm.steer.zip").symlink_to("..data/calm.steer.zip")
    (tmp_path / "link").symlink_to(flat)  # the folder itself may be one
    assert list(read(tmp_path / "link").bundles) == ["calm"]


# -- set aside --------------------------------------------------------------------------------------------------------


def rezip(path: Path, mode: int = zipfile.ZIP_DEFLATED, **files: bytes) -> None:
    """Write a zip of a sound bundle with other files in it."""
    held = bundle_folder.get(bundle(path)) | {name.replace("_", "."): data for name, data in files.items()}
    with zipfile.ZipFile(path, "w", mode) as archive:
        for name, data in held.items():
            archive.writestr(name, data)


def about(path: Path, change: Callable[[dict[str, Any]], None], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a bundle whose steer.json was changed, as someone would who knows how."""
    files = bundle_folder.get(bundle(path))
    said, data = json.loads(files["steer.json"]), files["vector.safetensors"] if tensors is None else save(tensors)
    said["tensors_sha256"] = hashlib.sha256(data).hexdigest()
    change(said)
    bundle_folder.put(path, {"steer.json": json.dumps(said).encode(), "vector.safetensors": data})


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def edit(said: dict[str, Any], **changed: Any) -> None:
    said["edits"][0].update(changed)


def of_tensor(said: dict[str, Any], **changed: Any) -> None:
    said["edits"] = [{"word": "Add", "vector": {"tensor": "x"}, "layers": [1]} | changed]


def selector(rule: str, *args: Any) -> dict[str, Any]:
    return {"word": "Selector", "rule": rule, "args": list(args)}


def gated(probe: mia.Probe) -> mia.Edit:
    return mia.Add(draw(D), 1.0, [2], when=mia.Gate(probe, above=0.0))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (lambda p: bundle(p, model={"name": "x", "n_layers": 9, "d_model": D}), "with n_layers 9"),
    "other weights": (lambda p: about(p, lambda s: s["model"].update(weights="v")), "its weights are v"),
    "another tokenizer": (lambda p: bundle(p, tokenizer="u"), "another tokenizer"),
    "an untapped point": (lambda p: bundle(p, mia.Add(draw(D), 1.0, [1], "mlp_out")), r'mlp_out\.1, which this server does not.*"points"'),
    "a gate at an untapped point": (lambda p: bundle(p, gated(mia.Probe(draw(D), 0, "mlp_out"))), r"mlp_out\.0, which this server"),
    "a gate of another width": (lambda p: bundle(p, gated(mia.Probe(draw(D - 1), 0))), "width 15"),
    "a gate of a layer too many": (lambda p: bundle(p, gated(mia.Probe(draw(D), 9))), r"resid_post\.9"),
    "a layer too many": (lambda p: bundle(p, mia.Add(draw(D), 1.0, [4])), r"resid_post\.4"),
    "another width": (lambda p: bundle(p, mia.Add(draw(D - 1), 1.0, [1])), "width 15"),
    "a wide tensor": (lambda p: bundle(p, mia.Add(draw(D + 1), 1.0, [1])), "16 values at most"),
    "many edits": (lambda p: bundle(p, *[mia.Scale(2.0, [1])] * 65), "65 edits"),
    "many layers": (lambda p: about(p, lambda s: edit(s, layers=list(range(5)))), "names 5 layers"),
    "many values": (lambda p: about(p, lambda s: edit(s, where=selector("positions", *[1] * 5000))), "more than 4096"),
    "a tensor used twice": (lambda p: about(p, lambda s: s.update(edits=s["edits"] * 2)), "or twice"),
    "a deep list": (lambda p: about(p, lambda s: edit(s, layers=nested(200))), "nests deeper|layers"),
    "a deeper list": (lambda p: rezip(p, steer_json=b"[" * 1_000_000), "no JSON"),
    "a coefficient past float32": (lambda p: about(p, lambda s: edit(s, coeff=1e308)), "float32 holds"),
    "an endless coefficient": (lambda p: about(p, lambda s: edit(s, coeff="1e309")), "finite number that float32"),
    "a huge number": (lambda p: rezip(p, steer_json=b'{"format": ' + b"9" * 100_000 + b"}"), "no JSON"),
    "a selector of nonsense": (lambda p: about(p, lambda s: edit(s, where=selector("positions", "x", None))), "cannot be read"),
    "a selector within itself": (lambda p: about(p, lambda s: edit(s, where=selector("not", 5))), "cannot be read"),
    "a vector of nonsense": (lambda p: about(p, lambda s: s["edits"][0]["vector"].update(kind=5, layers=3)), "cannot be read|Add"),
    "rows for fewer layers": (lambda p: about(p, lambda s: s["edits"][0]["vector"].update(layers=[1, 2, 3])), "cannot be read|Add"),
    "tensors of no numbers": (lambda p: about(p, of_tensor, {"x": torch.full((D,), float("nan"))}), "NaN or infinite"),
    "tensors of nothing": (lambda p: about(p, of_tensor, {"x": torch.zeros(0, 0)}), "shape"),
    "a tensor of another size": (lambda p: about(p, of_tensor, {"x": torch.zeros(3, 3, 3, 3)}), "16 values at most"),
    "a name as a model": (lambda p: bundle(p, model={"name": "\u202e" * 9000, "n_layers": 9, "d_model": D}), "was made for"),
    "a changed tensor": (lambda p: rezip(p, vector_safetensors=save({"x": draw(D)})), "is not the file"),
    "a zip bomb": (lambda p: rezip(p, vector_safetensors=bytes(64 << 20)), "100 times and more"),
    "a larger zip bomb": (lambda p: rezip(p, steer_json=bytes(9 << 20)), "are the most"),
    "a zip that climbs": (lambda p: rezip(p, **{"/__/evil": b"x"}), "and nothing else"),
    "no zip": (lambda p: p.write_bytes(b"PK\x05\x06 nonsense"), "cannot be read as a zip"),
    "an empty file": (lambda p: p.write_bytes(b""), "cannot be read as a zip"),
    "an empty folder": (lambda p: p.mkdir(), "steer.json leads nowhere"),
    "a pipe": (lambda p: os.mkfifo(p), "is no file"),
    "a socket": (lambda p: socket.socket(socket.AF_UNIX).bind(os.path.relpath(p)), "cannot be opened|is no file"),
    "a link to nowhere": (lambda p: p.symlink_to("nowhere"), "leads nowhere"),
    "a link in a circle": (lambda p: p.symlink_to(p.name), "leads nowhere"),
    "a link out": (lambda p: p.symlink_to(bundle(p.parents[2] / "out.steer.zip")), "link that leads out of"),
    "a link to a device": (lambda p: p.symlink_to("/dev/zero"), "link that leads out of"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_served_is_set_aside_with_the_reason(name: str, home: Path) -> None:
    make, message = HOSTILE[name]
    make(home / "bundles" / "bad.steer.zip")
    began = time.monotonic()
    found = reason(home, "bad")
    assert time.monotonic() - began < 20
    assert re.search(message, found), found
    assert found and len(found) < 1100 and found.encode()


def test_a_folder_of_links_out_of_it_is_set_aside(home: Path, tmp_path: Path) -> None:
    bundle(home / "bundles" / "bad.steer")
    (home / "bundles" / "bad.steer" / "steer.json").rename(tmp_path / "steer.json")
    (home / "bundles" / "bad.steer" / "steer.json").symlink_to(tmp_path / "steer.json")
    assert "link that leads out of" in reason(home, "bad")
    (home / "bundles" / "bad.steer" / "steer.json").unlink()
    os.mkfifo(home / "bundles" / "bad.steer" / "steer.json")
    assert "is no file" in reason(home, "bad")
    (home / "bundles" / "far.steer").symlink_to(bundle(tmp_path / "far.steer"))
    assert "link that leads out of" in reason(home, "far")


@pytest.mark.parametrize("name", ["a b.steer.zip", "é.steer.zip", "-x.steer.zip", "x" * 65 + ".steer.zip", ".steer.zip.steer", "a\nb.steer",
                                  "a\u202eb.steer.zip", "notes.txt", "good.zip", "b.steer.zip.part"])
def test_names_that_are_none_are_set_aside(name: str, home: Path) -> None:
    shutil.copy(home / "bundles" / "good.steer.zip", home / "bundles" / name)
    found = read(home)
    assert list(found.bundles) == ["good"] and len(found.quarantined) == (0 if name.startswith(".") else 1)
    assert "good" not in found.quarantined


def test_a_name_that_is_no_text_is_told_as_some(home: Path) -> None:
    (home / "bundles" / os.fsdecode(b"\xff\xfe.steer.zip")).write_bytes(b"x")
    (name, why), = read(home).quarantined.items()
    assert json.dumps({name: why}, ensure_ascii=False).encode() and "\\" in name


def test_two_of_one_name_are_both_set_aside(home: Path) -> None:
    bundle(home / "bundles" / "twin.steer")
    bundle(home / "bundles" / "twin.steer.zip")
    assert "as a folder and as a zip" in reason(home, "twin")


def test_more_than_a_server_holds_is_set_aside(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(map(len, read(home).bundles["good"].files.values()))
    bundle(home / "bundles" / "second.steer.zip")
    bundle(home / "bundles" / "third.steer")
    monkeypatch.setattr(module, "MAX_HELD", size + 100)
    found = read(home)
    assert list(found.bundles) == ["good"] and list(found.quarantined) == ["second", "third"]


def test_a_zip_with_many_entries_is_not_listed(home: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for i in range(70_000):
            archive.writestr(str(i), b"")
    (home / "bundles" / "bad.steer.zip").write_bytes(buffer.getvalue())
    assert "cannot be read as a zip of a bundle" in reason(home, "bad")


def test_a_huge_folder_is_refused_at_once(home: Path) -> None:
    for i in range(MAX_ENTRIES):
        (home / "bundles" / f".{i}").touch()
    with pytest.raises(DiskError, match="more than 1000 entries"):
        read(home)


def test_types_and_kinds_that_a_server_was_not_started_for(home: Path) -> None:
    assert "weights" in read(home, weights="v").quarantined["good"] and "configuration" in read(home, configuration="v").quarantined["good"]
    assert read(home, weights="v", configuration="v", dtype="float32").bundles  # of another type, weights differ in all bits
    assert '"edits"' in read(home, edits=("clamp",)).quarantined["good"]
    assert "0 layers" not in str(read(home, n_layers=LAYERS).quarantined)


# -- policy -----------------------------------------------------------------------------------------------------------

KEYED = f'[[keys]]\nsha256 = "{"0" * 64}"\ntenant = "a"\nroles = ["steer"]\n'


@pytest.mark.parametrize(("text", "message"), [
    ("[defaults]\nedits = ['absent']", r"'absent' is not served: there is no absent\.steer\.zip"),
    ("[defaults]\nedits = ['broken']", "'broken' is not served: .*zip"),
    ("[defaults]\nedits = [{ name = 'fixed', coeff = 0.5 }]", "fixed has Clamp, which no coefficient multiplies"),
    ("signer = 'no-such-file'", "leads nowhere"), ("signer = 'bundles'", "is no file"), (f"signer = '{'x' * 64}'", "no public key"),
    ("signer = 'serve.toml'", "no public key"), ("nonsense", "no TOML")])
def test_a_policy_that_cannot_be_followed_is_an_error(home: Path, text: str, message: str) -> None:
    (home / "bundles" / "broken.steer.zip").write_bytes(b"x")
    bundle(home / "bundles" / "fixed.steer.zip", mia.Clamp(draw(D), value=1.0, layers=[1]))
    (home / "serve.toml").write_text(text)
    with pytest.raises(MiaError, match=message):
        read(home)


def test_a_policy_that_is_not_read_is_not_taken_for_none(home: Path, tmp_path: Path) -> None:
    (home / "serve.toml").symlink_to("nowhere")
    with pytest.raises(DiskError, match="leads nowhere"):
        read(home)
    (home / "serve.toml").unlink()
    (tmp_path / "other.toml").write_text("")
    (home / "serve.toml").symlink_to(tmp_path / "other.toml")
    with pytest.raises(DiskError, match="leads out of"):
        read(home)
    with pytest.raises(DiskError, match="there is no folder"):
        read(home / "absent")


def test_taking_the_last_key_away_opens_no_door(home: Path) -> None:
    (home / "serve.toml").write_text(KEYED)
    before = read(home)
    (home / "serve.toml").unlink()
    with pytest.raises(PolicyError, match="would let everyone in"):
        Catalogue.read(home, MODEL, before)
    assert read(home).policy.keys == ()  # a fresh start may


def test_what_did_not_change_stays_the_same_object(home: Path) -> None:
    bundle(home / "bundles" / "mood.steer.zip")
    before = read(home)
    bundle(home / "bundles" / "mood.steer.zip", mia.Add(vector(1), 2.0))
    after = Catalogue.read(home, MODEL, before)
    assert after.bundles["good"] is before.bundles["good"] and after.bundles["mood"] is not before.bundles["mood"]
    assert before.bundles["mood"].bundle[0].coeff == 0.5 and after.digest != before.digest
    assert Catalogue.read(home, facts(), before).bundles["good"] is not before.bundles["good"]  # another model is another check


def test_only_what_the_signer_signed_is_served(home: Path) -> None:
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    before = read(home)
    mia.sign(bundle(home / "bundles" / "mine.steer"), pem)
    mia.sign(bundle(home / "bundles" / "theirs.steer.zip"), Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (home / "key.pem").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    for signer in (key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex(), "key.pem"):
        (home / "serve.toml").write_text(f'signer = "{signer}"')
        found = Catalogue.read(home, MODEL, before)
        assert list(found.bundles) == ["mine"]
        assert "is not signed" in found.quarantined["good"] and "not signed by this key" in found.quarantined["theirs"]


# -- coefficients -----------------------------------------------------------------------------------------------------


def test_equal_coefficients_give_the_same_edits(home: Path) -> None:
    served = read(home).bundles["good"]
    once = served.edits(0.25)
    assert once is served.edits(0.25) and once[0].coeff == 0.125 and served.edits(1.0)[0] is served.bundle[0]
    shared = [next(iter(edits[0].steps.values()))[0].write for edits in (once, served.edits(1.0))]
    assert shared[0] is shared[1]  # a coefficient costs no memory
    for i in range(600):
        served.edits(float(i))
    assert len(served._scaled) <= 256


def test_only_additions_take_a_coefficient(home: Path) -> None:
    bundle(home / "bundles" / "fixed.steer.zip", mia.Add(vector(1), 1.0), mia.Clamp(draw(D), value=1.0, layers=[1]))
    served = read(home).bundles["fixed"]
    assert len(served.edits(1.0)) == 2
    for coeff, message in ((0.5, "has Clamp"), (-1.0, "has Clamp")):
        with pytest.raises(Refused, match=message) as found:
            served.edits(coeff)
        assert found.value.status == 400
    with pytest.raises(Refused, match="float32 holds"):
        read(home).bundles["good"].edits(1e300)


@pytest.mark.parametrize("unit", [torch.zeros(2), -torch.ones(2), torch.full((2,), float("nan")), torch.ones(3)])
def test_a_vector_without_a_sound_unit_has_no_dose(unit: torch.Tensor, home: Path) -> None:
    made = vector(1, 2)
    object.__setattr__(made, "unit", unit)
    bundle(home / "bundles" / "odd.steer.zip", mia.Add(made, 1.0))
    bundle(home / "bundles" / "bare.steer.zip", mia.Add(draw(D), 1.0, [1]))
    found: dict[str, Served] = dict(read(home).bundles)
    assert found["odd"].doses is None and found["bare"].doses is None
