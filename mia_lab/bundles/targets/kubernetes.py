"""A Kubernetes ConfigMap: a bundle's zip, and the config that `vllm serve` needs for its edits, ready to be mounted.

Keys of a ConfigMap have no slashes, so the pod that mounts it says where in the server's folder each goes: a comment at the top does.
"""
from __future__ import annotations

import base64
import binascii
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...edits import Edit
from ...errors import BundleError
from .. import folder
from ..bundle import Bundle, opened
from . import files
from .engine_config import FOLDER, config_yaml

MAX_BYTES = 1 << 20  # of a ConfigMap, which the cluster keeps in its database
CONFIG = "vllm.yaml"


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write the manifest of a bundle. BundleError where it is larger than a ConfigMap may be, or `edits` is no loaded bundle."""
    if not isinstance(edits, Bundle):
        raise BundleError("a ConfigMap carries a bundle: give mia.load('NAME.steer'), or type mia-lab convert NAME.steer ...")
    name = bundle_name(edits.path)
    config = config_yaml(edits, model or edits.about["model"]["name"])
    packed = base64.b64encode(folder.as_zip(edits.path)).decode()
    if len(packed) + len(config) > MAX_BYTES:
        raise BundleError(f"the bundle takes {len(packed)} bytes, and a ConfigMap {MAX_BYTES}. Put it on a volume and push it there: "
                          f"mia-lab push-dir {edits.path} DIR")
    key = bundle_key(Path(f"{name}.steer.zip"))
    said = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": label(name), "labels": {"app.kubernetes.io/part-of": "mia-lab"}},
            "data": {CONFIG: config}, "binaryData": {key: packed}}
    text = _mount(label(name), key) + files.yaml().safe_dump(said, sort_keys=False, allow_unicode=True, width=120)
    return files.write(path, text.encode())


def import_from(path: Path) -> Bundle:
    """The bundle that a manifest carries."""
    said = files.read_yaml(path)
    held = said.get("binaryData") if said.get("kind") == "ConfigMap" else None
    found = [text for name, text in held.items() if str(name).endswith(".steer.zip")] if isinstance(held, dict) else []
    if len(found) != 1:
        raise BundleError(f"{path} is no ConfigMap with one NAME.steer.zip in its binaryData")
    try:
        data = base64.b64decode(found[0], validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise BundleError(f"{path}: the bundle in it is no base64") from None
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "bundle.steer.zip"
        place.write_bytes(data)
        bundle = opened(place)[0]
    return Bundle(bundle, bundle.about, path)


def bundle_name(path: Path) -> str:
    """NAME of NAME.steer or NAME.steer.zip."""
    return path.name.removesuffix(".zip").removesuffix(".steer")


def bundle_key(path: Path) -> str:
    """A bundle's file name, of letters, digits, dashes, dots and underscores, as a server and a ConfigMap take it."""
    name = re.sub(r"[^-._a-zA-Z0-9]+", "-", bundle_name(path)).lstrip("-._")[:64] or "bundle"
    return f"{name}.steer{'.zip' if path.suffix == '.zip' else ''}"


def _mount(name: str, key: str) -> str:
    """What a pod's spec says, to have the config and the bundle where the server looks for them."""
    items = f"[{{key: {CONFIG}, path: {CONFIG}}}, {{key: {key}, path: bundles/{key}}}]"
    return (f"# In the pod, whose command is: vllm serve --config {FOLDER}/{CONFIG}\n"
            f"#   volumes: [{{name: mia-lab, configMap: {{name: {name}, items: {items}}}}}]\n"
            f"#   containers: [{{..., volumeMounts: [{{name: mia-lab, mountPath: {FOLDER}, readOnly: true}}]}}]\n")


def label(name: str) -> str:
    """A name as Kubernetes takes it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:200] or "bundle"
