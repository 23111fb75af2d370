"""Signatures of bundles: ed25519 over the sha256 of every file, in `signature.json` beside them. Nothing is trusted by default.

What is signed has its name in `steer.json`, so that no signed bundle can take the place of another in a server's folder.
"""
from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BundleError, MiaError
from . import folder

FORMAT = "mia_lab signature 1"


def sign(path: str | Path, key: str | Path | bytes) -> Path:
    """Sign a bundle NAME.steer, folder or zip, in place, under this name; a signature that was there is replaced. Return its path.

    key: a private ed25519 key as PEM, or its file: `openssl genpkey -algorithm ed25519 -out key.pem`. BundleError for a bundle that
    does not load or has a name that no server takes, MiaError for another kind of key.
    """
    from .bundle import opened

    bundle, files = opened(path, strict=True)
    named = folder.as_text(bundle.about | {"name": folder.name_of(path)})
    files = {name: data for name, data in files.items() if name != folder.SIGNATURE} | {folder.ABOUT: named}
    private, serialization = _private(key), _library()[0]
    public = private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    signature = base64.b64encode(private.sign(_message(files))).decode()
    about = {"format": FORMAT, "sha256": _sums(files), "public_key": public.hex(), "signature": signature}
    return folder.put(Path(path), files | {folder.SIGNATURE: (json.dumps(about, indent=1, sort_keys=True) + "\n").encode()})


def check(files: Mapping[str, bytes], signer: str | Path | bytes, path: str | Path) -> None:
    """BundleError unless the files are, to the byte, what the holder of a public key signed.

    signer: the public key as PEM, its file, or 64 hexadecimal digits. The key that the bundle names is not believed.
    """
    public = public_key(signer)
    from cryptography.exceptions import InvalidSignature

    if folder.SIGNATURE not in files:
        raise BundleError(f"{path} is not signed, and a signer was asked for")
    try:
        about = json.loads(files[folder.SIGNATURE])
        said, signature = (about["format"], about["sha256"]), base64.b64decode(about["signature"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
        raise BundleError(f"{path}: {folder.SIGNATURE} is no signature") from None
    rest = {name: data for name, data in files.items() if name != folder.SIGNATURE}
    if said != (FORMAT, _sums(rest)):
        raise BundleError(f"{path} is not what was signed: its files have other sums than its signature names")
    try:
        public.verify(signature, _message(rest))
    except InvalidSignature:
        raise BundleError(f"{path} was not signed by this key, or was changed since") from None


def check_name(about: Mapping[str, Any], name: str, path: str | Path) -> None:
    """BundleError unless a signed bundle, as `check` found it, was signed under a name."""
    said = about.get("name")
    if said is None:
        raise BundleError(f"{path} was signed without its name, and could stand for any other that this key signed; sign it again: "
                          f"mia-lab sign {name}.steer --key KEY.pem, then mia-lab push-dir")
    if said != name:
        raise BundleError(f"{path} was signed as {str(said)[:64]!r}, and is served under that name alone: rename it to "
                          f"{str(said)[:64]}.steer, or sign it again as {name}.steer: mia-lab sign {name}.steer --key KEY.pem")


def _sums(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}


def _message(files: Mapping[str, bytes]) -> bytes:
    """What is signed: the format's name, so that no other message can pass for one, and the sums."""
    return json.dumps([FORMAT, _sums(files)], sort_keys=True, separators=(",", ":")).encode()


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MiaError("signatures need the cryptography package: pip install 'mia_lab[export]'") from None
    return serialization, ed25519


def _private(key: str | Path | bytes) -> Any:
    serialization, ed25519 = _library()
    try:
        found = serialization.load_pem_private_key(_bytes(key), password=None)
    except (ValueError, TypeError) as error:
        raise MiaError(f"the key is no private key in PEM without a password: {error}") from None
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise MiaError(f"the key is a {type(found).__name__}; ed25519 is used here: openssl genpkey -algorithm ed25519 -out key.pem")
    return found


def public_key(signer: str | Path | bytes) -> Any:
    """A public ed25519 key, from PEM, its file, or 64 hexadecimal digits; MiaError for anything else."""
    serialization, ed25519 = _library()
    try:
        if isinstance(signer, str) and len(signer) == 64:
            return ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        found = serialization.load_pem_public_key(_bytes(signer))
    except (ValueError, TypeError) as error:
        raise MiaError(f"the signer is no public key, as PEM or 64 hexadecimal digits: {error}. From a private one: openssl pkey -in "
                       f"key.pem -pubout") from None
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise MiaError(f"the signer is a {type(found).__name__}; ed25519 is used here")
    return found


def _bytes(key: str | Path | bytes) -> bytes:
    if isinstance(key, bytes):
        return key
    if isinstance(key, str) and key.startswith("-----BEGIN"):
        return key.encode()
    try:
        return Path(key).read_bytes()
    except OSError as error:
        raise MiaError(f"the key {str(key)[:80]!r} cannot be read: {error}") from None
