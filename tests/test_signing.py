"""Signed bundles: a signature covers every byte, and whatever is not as it was signed is refused. And bundles in a server's folder."""
from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from served import bundle, facts, vector

import mia_lab as mia
from mia_lab import cli
from mia_lab.bundles import folder, pushing
from mia_lab.bundles.codec import encode
from mia_lab.errors import BundleError, MiaError
from mia_lab.serve.catalogue import Catalogue

PEM, RAW = serialization.Encoding.PEM, serialization.Encoding.Raw
SAID = {"tokens": [1], "log_probabilities": [-0.5]}


def pem(private: ed25519.Ed25519PrivateKey) -> bytes:
    return private.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def public(private: ed25519.Ed25519PrivateKey) -> str:
    return private.public_key().public_bytes(RAW, serialization.PublicFormat.Raw).hex()


KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))


def write(path: Path, coeff: float = 1.0) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    about = {"edits": encode([mia.Add(torch.arange(8.0), coeff, [2])], tensors, "edits"), "model": {"name": "m"}, "tokenizer": "t",
             "golden": {"environment": {"device": "cpu"}, "outputs": [{"prompt": [1, 2], "steered": SAID, "plain": SAID}]}}
    return folder.write(path, about, tensors)


@pytest.fixture(params=[".steer", ".steer.zip"])
def signed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return mia.sign(write(tmp_path / f"x{request.param}"), pem(KEY))


def change(path: Path, alter: Callable[[dict[str, bytes]], None]) -> None:
    """Alter a bundle's files, and put them back as they are."""
    held = folder.get(path)
    alter(held)
    if path.is_dir():
        shutil.rmtree(path)
    if path.suffix != ".zip":
        path.mkdir()
        for name, data in held.items():
            (path / name).write_bytes(data)
        return
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)


def test_what_was_signed_loads_with_the_signers_key_in_each_form(signed: Path, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(KEY.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    for signer in (public(KEY), tmp_path / "key.pem", (tmp_path / "key.pem").read_bytes(), (tmp_path / "key.pem").read_text()):
        assert mia.load(signed, signer=signer) == mia.load(signed)


def test_a_signature_is_the_same_each_time_and_bytes_stay(signed: Path) -> None:
    before = folder.get(signed)
    mia.sign(signed, pem(KEY))
    assert folder.get(signed) == before and set(before) == {"steer.json", "vector.safetensors", "signature.json"}


def test_what_is_signed_says_its_name_and_is_otherwise_as_it_was(tmp_path: Path) -> None:
    plain, path = folder.get(write(tmp_path / "a.steer")), mia.sign(write(tmp_path / "tone.steer.zip"), pem(KEY))
    held = folder.get(path)
    about = json.loads(held["steer.json"])
    assert about.pop("name") == "tone" and folder.as_text(about) == plain["steer.json"]
    assert held["vector.safetensors"] == plain["vector.safetensors"]
    moved = path.replace(tmp_path / "other.steer.zip")
    assert mia.load(moved, signer=public(KEY)).about["name"] == "tone"
    assert mia.load(mia.sign(moved, pem(KEY)), signer=public(KEY)).about["name"] == "other"
    with pytest.raises(BundleError, match="no name that a server takes"):
        mia.sign(write(tmp_path / "two words.steer"), pem(KEY))


def without_name(held: dict[str, bytes]) -> None:
    """As bundles were signed before their name was."""
    from mia_lab.bundles import signing

    rest = {"steer.json": folder.as_text({key: value for key, value in json.loads(held["steer.json"]).items() if key != "name"}),
            "vector.safetensors": held["vector.safetensors"]}
    held.update(rest)
    said(sha256=signing._sums(rest), signature=base64.b64encode(KEY.sign(signing._message(rest))).decode())(held)


def test_a_bundle_is_put_in_place_under_the_name_that_it_was_signed_under(served: Path, signed: Path) -> None:
    assert pushing.push(signed, served, public(KEY)) == served / "x.steer.zip"
    moved = signed.rename(signed.with_name(signed.name.replace("x", "y")))
    for signer in (None, public(KEY)):
        with pytest.raises(BundleError, match=r"signed as 'x'.*rename it to x\.steer, or sign it again as y\.steer"):
            pushing.push(moved, served, signer)
    change(moved, without_name)
    with pytest.raises(BundleError, match=r"signed without its name.*mia-lab sign y\.steer"):
        pushing.push(moved, served, public(KEY))
    assert pushing.push(moved, served) == served / "y.steer.zip", "where nobody asks for a signature, its name is free"


def flip(name: str, at: int) -> Callable[[dict[str, bytes]], None]:
    def alter(held: dict[str, bytes]) -> None:
        data = bytearray(held[name])
        data[at] ^= 1
        held[name] = bytes(data)
    return alter


def said(**changes: object) -> Callable[[dict[str, bytes]], None]:
    def alter(held: dict[str, bytes]) -> None:
        held["signature.json"] = json.dumps(json.loads(held["signature.json"]) | changes).encode()
    return alter


def resigned(held: dict[str, bytes]) -> None:
    """What someone without the key can do: sign the changed files anew, with their own."""
    from mia_lab.bundles import signing

    flip("steer.json", -3)(held)
    rest = {name: data for name, data in held.items() if name != "signature.json"}
    said(sha256=signing._sums(rest), public_key=public(OTHER), signature=base64.b64encode(OTHER.sign(
        signing._message(rest))).decode())(held)


TAMPERED = {
    "a byte of the tensors": (flip("vector.safetensors", -1), "not what was signed"),
    "a space in the JSON": (lambda held: held.update({"steer.json": held["steer.json"] + b" "}), "not what was signed"),
    "the signature itself": (said(signature="A" * 86 + "=="), "not signed by this key"),
    "the sums": (said(sha256={}), "not what was signed"),
    "the format": (said(format="mia_lab signature 0"), "not what was signed"),
    "no signature": (lambda held: held.pop("signature.json"), "is not signed"),
    "nonsense": (lambda held: held.update({"signature.json": b"[1]"}), "is no signature"),
    "signed by another": (resigned, "not signed by this key"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_whatever_is_not_as_it_was_signed_is_refused(signed: Path, name: str) -> None:
    alter, says = TAMPERED[name]
    change(signed, alter)
    with pytest.raises(BundleError, match=says):
        mia.load(signed, signer=public(KEY))


def test_every_byte_is_covered(tmp_path: Path) -> None:
    path = mia.sign(write(tmp_path / "x.steer"), pem(KEY))
    whole = folder.get(path)
    for name in ("steer.json", "vector.safetensors"):
        for at in range(0, len(whole[name]), 7):
            held = dict(whole)
            flip(name, at)(held)
            (path / name).write_bytes(held[name])
            with pytest.raises(BundleError, match="not what was signed"):
                mia.load(path, signer=public(KEY))
        (path / name).write_bytes(whole[name])
    assert mia.load(path, signer=public(KEY))


def test_another_key_a_missing_file_and_an_extra_one_are_refused(tmp_path: Path) -> None:
    path = mia.sign(write(tmp_path / "x.steer"), pem(KEY))
    with pytest.raises(BundleError, match="not signed by this key"):
        mia.load(path, signer=public(OTHER))
    (path / "run.sh").write_text("ls")
    assert mia.load(path)  # without a signer, what lies beside is nobody's
    for do in (lambda: mia.load(path, signer=public(KEY)), lambda: mia.sign(path, pem(KEY))):
        with pytest.raises(BundleError, match=r"run\.sh"):
            do()
    (path / "run.sh").unlink()
    (path / "vector.safetensors").unlink()
    with pytest.raises(BundleError, match=r"has no vector\.safetensors"):
        mia.load(path, signer=public(KEY))


def test_keys_that_are_none_say_what_to_type(tmp_path: Path) -> None:
    path = write(tmp_path / "x.steer")
    curve = ec.generate_private_key(ec.SECP256R1())
    wrong = curve.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    locked = KEY.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x"))
    for key, says in ((b"nonsense", "no private key"), (wrong, "openssl genpkey"), (locked, "without a password"),
                      (tmp_path / "absent.pem", "cannot be read")):
        with pytest.raises(MiaError, match=says):
            mia.sign(path, key)
    for signer in (b"nonsense", "zz" * 32, tmp_path / "absent.pem", pem(KEY)):
        with pytest.raises(MiaError):
            mia.load(path, signer=signer)
    assert set(folder.get(path)) == {"steer.json", "vector.safetensors"}
    with pytest.raises(BundleError, match="only bundles are signed"):
        mia.load(tmp_path / "x.gguf", signer=public(KEY))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_the_commands_take_keys_of_openssl(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    key, held = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", held], check=True)
    path, place = write(tmp_path / "x.steer"), tmp_path / "served"
    place.mkdir()
    assert cli.main(["push-dir", str(path), str(place), "--signer", str(held)]) == 1 and "is not signed" in capsys.readouterr().err
    assert cli.main(["sign", str(path), "--key", str(key)]) == 0
    assert cli.main(["push-dir", str(path), str(place), "--signer", str(held)]) == 0
    assert mia.load(place / "x.steer.zip", signer=held) == mia.load(path)
    assert cli.main(["inspect", str(path)]) == 0 and "there is one" in capsys.readouterr().out


# -- a server's folder ------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


@pytest.mark.parametrize("suffix", [".steer", ".steer.zip"])
def test_a_bundle_is_put_in_place_and_the_one_before_it_kept(served: Path, suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"tone{suffix}")
    place = pushing.push(path, served)
    first = place.read_bytes()
    assert place == served / "tone.steer.zip" and mia.load(place) == mia.load(path) and first == folder.as_zip(path)
    assert pushing.push(path, served) == place and [file.name for file in served.iterdir()] == ["tone.steer.zip"]
    write(path, 2.0)
    pushing.push(path, served)
    assert mia.load(place)[0].coeff == 2.0
    kept, = (served / ".previous").iterdir()
    assert kept.read_bytes() == first and kept.name.startswith("tone-") and mia.load(kept)[0].coeff == 1.0
    assert sorted(file.name for file in served.iterdir()) == [".previous", "tone.steer.zip"]


def test_signed_bundles_cannot_take_each_others_place(tmp_path: Path) -> None:
    """By whoever can write a server's folder, and has no key."""
    one, other = (mia.sign(bundle(tmp_path / "bundles" / f"{name}.steer.zip", mia.Add(vector(1), coeff)), pem(KEY))
                  for name, coeff in (("one", 1.0), ("other", 2.0)))
    (tmp_path / "serve.toml").write_text(f'signer = "{public(KEY)}"')
    before = Catalogue.read(tmp_path, facts())
    assert sorted(before.bundles) == ["one", "other"]
    kept = one.read_bytes()
    other.replace(one)
    other.write_bytes(kept)
    found = Catalogue.read(tmp_path, before.model, before)
    assert not found.bundles and "rename it to other.steer" in found.quarantined["one"]
    change(other, without_name)
    assert "mia-lab sign other.steer" in Catalogue.read(tmp_path, before.model, before).quarantined["other"]
    (tmp_path / "serve.toml").unlink()
    assert sorted(Catalogue.read(tmp_path, before.model, before).bundles) == ["one", "other"], "where no signature is asked for"


def test_what_does_not_load_changes_nothing(served: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "tone.steer")
    place = pushing.push(path, served)
    before = place.read_bytes()
    (path / "vector.safetensors").write_bytes(b"x")
    with pytest.raises(BundleError, match="not the file"):
        pushing.push(path, served)
    assert place.read_bytes() == before and [file.name for file in served.iterdir()] == ["tone.steer.zip"]
    for source, directory, says in ((write(tmp_path / "a.steer"), tmp_path / "absent", "there is no folder"),
                                    (write(tmp_path / ".steer"), served, "has no name")):
        with pytest.raises(BundleError, match=says):
            pushing.push(source, directory)
    write(served / "b.steer")
    (served / "c.steer.zip").mkdir()
    for name in "bc":
        with pytest.raises(BundleError, match="would not be told apart"):
            pushing.push(write(tmp_path / f"{name}.steer"), served)
    with pytest.raises(BundleError, match="no name that a server takes"):
        pushing.push(write(tmp_path / ".d.steer"), served)


def test_a_push_that_breaks_off_leaves_what_was_there(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tone.steer")
    place = pushing.push(path, served)
    before = place.read_bytes()
    write(path, 2.0)

    def full(number: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        pushing.push(path, served)
    assert place.read_bytes() == before and [file.name for file in served.iterdir()] == ["tone.steer.zip"]
