"""`.spipe` of the steerability toolkit: a zip with the controls of a pipeline, `spipe.json`, and their tensors by content.

An Add becomes CAA, one control a layer; an Ablate becomes directional ablation. Both are written with their vectors, so that
nothing is fitted where they are loaded. What refers to code or to data that has yet to be fitted is not read. Nor is norm preservation:
it shortens rows that became longer and leaves those that became shorter, so it is no keep_norm.
"""
from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...edits import Ablate, Add, Edit
from ...errors import BundleError
from . import artifacts, files
from .intervention import scope_json, scope_of
from .plain import Plain, Says, plain
from .scopes import selector_of

SAYS = Says(("Add", "Ablate"), scopes=("all", "generated", "last_on", "from"))
MANIFEST, FORMAT = "spipe.json", "spipe/1"
_MAX_ENTRIES = 4096
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # a zip's entries have dates, and equal contents are to give equal bytes
_CAA, _ABLATION = "state_control/caa", "state_control/directional_ablation"
_NO_FINGERPRINTS = dict.fromkeys(("backend_spec_hash", "model_fingerprint", "tokenizer_fingerprint"))
_SCOPE = ("token_scope", "last_k", "from_position", "use_norm_preservation")
_ARGS = {_CAA: ("steering_vector", "data", "train_spec", "layer_id", "multiplier", "normalize_vector", *_SCOPE),
         _ABLATION: ("steering_vector", "data", "train_spec", "alpha", "layer_ids", "layer_range", *_SCOPE)}


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write a zip. model: the model's id or path, which a pipeline is made for."""
    if not model:
        raise BundleError("a .spipe names its model: give model=, such as a Hugging Face id")
    held: dict[str, bytes] = {}
    controls = [control for edit in plain(edits, "a .spipe", SAYS, bos) for control in _controls(edit, held)]
    manifest = {"format": FORMAT, "created_at": "1980-01-01T00:00:00Z", "toolkit_version": f"mia_lab {__version__}",
                "code_dependent": False, "model": {"ref": model, "revision": None}, "controls": controls, "lock": None}
    held[MANIFEST] = (json.dumps(manifest, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(held):
            archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), held[name])
    return files.write(path, buffer.getvalue())


def import_from(path: Path) -> list[Edit]:
    """An edit for each control that is enabled; BundleError for controls of other kinds."""
    with _opened(path) as archive:
        manifest = files.mapping(files.parse_json(_entry(archive, MANIFEST, files.MAX_TEXT, path), MANIFEST), MANIFEST)
        if manifest.get("format") != FORMAT or manifest.get("code_dependent") is not False:
            raise BundleError(f"{path} is of format {str(manifest.get('format'))[:40]!r} or refers to code; {FORMAT} without code is read")
        listed = [files.mapping(control, "a control") for control in files.items(manifest.get("controls"), "controls")]
        edits = [_edit(archive, path, control) for control in listed if files.flag(control.get("enabled"), "enabled")]
    if not edits:
        raise BundleError(f"{path} has no enabled control")
    return edits


def _controls(edit: Plain, held: dict[str, bytes]) -> list[dict[str, Any]]:
    scope = scope_json(edit.scope)
    common = {"token_scope": scope["kind"], "last_k": scope.get("k"), "from_position": scope.get("position"),
              "use_norm_preservation": False}
    if edit.word == "Ablate":
        if not 0 <= edit.factor <= 1:
            raise BundleError(f"a .spipe ablates with a strength from 0 to 1; this one has {edit.factor:g}")
        return [_control(_ABLATION, edit.rows, held, {"alpha": edit.factor, "layer_ids": sorted(edit.rows)} | common)]
    return [_control(_CAA, {at: edit.rows[at]}, held, {"layer_id": at, "multiplier": edit.factor} | common) for at in sorted(edit.rows)]


def _control(method: str, rows: dict[int, torch.Tensor], held: dict[str, bytes], args: dict[str, Any]) -> dict[str, Any]:
    artifact, data = artifacts.pack({str(at): row[None] for at, row in rows.items()})  # [1 d] each
    folder = f"artifacts/{artifact.replace(':', '-')}"
    record = {"id": artifact, "encoding": "tensors", "type": "SteeringVector", "artifact_class": "opaque", "source": None,
              "fit_digest": None, "provenance": _NO_FINGERPRINTS, "type_meta": {"model_type": "unknown"}}
    held[f"{folder}/artifact.safetensors"] = data
    held[f"{folder}/artifact.json"] = json.dumps(record, sort_keys=True, indent=2).encode()
    return {"method": method, "enabled": True, "args": {"steering_vector": {"$artifact": artifact}, **args}, "resolved": None}


def _opened(path: Path) -> zipfile.ZipFile:
    if not path.is_file() or path.stat().st_size > artifacts.MAX_BYTES:
        raise BundleError(f"{path} is no file of at most {artifacts.MAX_BYTES} bytes")
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise BundleError(f"{path} cannot be read as a zip: {error}") from None
    if len(archive.infolist()) > _MAX_ENTRIES or len(set(archive.namelist())) < len(archive.namelist()):
        archive.close()
        raise BundleError(f"{path} has more than {_MAX_ENTRIES} entries, or two of one name")
    return archive


def _entry(archive: zipfile.ZipFile, name: str, limit: int, path: Path) -> bytes:
    """One entry's bytes, never more than a limit, whatever the header says."""
    try:
        with archive.open(name) as file:
            found = file.read(limit + 1)
    except (KeyError, zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError, zlib.error) as error:
        raise BundleError(f"{path} has no {name} that can be read: {error}") from None
    if len(found) > limit:
        raise BundleError(f"{path}: {name} has more than {limit} bytes")
    return found


def _edit(archive: zipfile.ZipFile, path: Path, control: dict[str, Any]) -> Edit:
    frozen = control.get("resolved") or control
    method, args = (frozen.get("method"), frozen.get("args")) if isinstance(frozen, dict) else (None, None)
    if method not in _ARGS:
        said = str(method or control.get("method"))[:60]
        raise BundleError(f"{path} has a control {said!r}, which is no edit; known are {', '.join(_ARGS)}")
    args = {key: value for key, value in files.mapping(args, f"{method}: args", _ARGS[method]).items() if value is not None}
    rows = _directions(archive, path, args.get("steering_vector"))
    scope = args.get("token_scope", "after_prompt" if method == _CAA else "all")
    where = selector_of(scope_of(scope, args.get(scope) if scope in ("last_k", "from_position") else None))
    if files.flag(args.get("use_norm_preservation", False), "use_norm_preservation"):
        raise BundleError(f"{path} has a control with use_norm_preservation, which only shortens; no edit here does that")
    if method == _CAA:
        at = files.layer(args.get("layer_id"), "layer_id (a layer chosen by depth cannot be read)")
        if at not in rows or len(rows[at]) != 1:
            raise BundleError(f"{path}: the vector of CAA has no single direction at layer {at}")
        row = rows[at][0]
        row = row / row.norm() if files.flag(args.get("normalize_vector", False), "normalize_vector") and row.any() else row
        return Add(row, files.number(args.get("multiplier", 1.0), "multiplier"), [at], where=where)
    layers = [files.layer(at, "layer_ids") for at in files.items(args.get("layer_ids"), "layer_ids")]
    absent = [at for at in layers if at not in rows or len(rows[at]) != len(rows[layers[0]])]
    if absent or args.get("layer_range") is not None:
        raise BundleError(f"{path}: an ablation with layers {absent} that its vector lacks, or with a layer_range, cannot be said "
                          f"here")
    stack = torch.stack([rows[at] for at in layers])  # [layer k d]
    return Ablate([stack[:, i] for i in range(stack.shape[1])], files.number(args.get("alpha", 1.0), "alpha"), layers, where=where)


def _directions(archive: zipfile.ZipFile, path: Path, value: Any) -> dict[int, torch.Tensor]:
    """Directions `[k d]` by layer."""
    if not isinstance(value, dict) or set(value) != {"$artifact"}:
        raise BundleError(f"{path} has a control whose vector has yet to be fitted; save the pipeline after steer()")
    name = artifacts.hex_of(value["$artifact"], "the artifact")
    data = _entry(archive, f"artifacts/sha256-{name}/artifact.safetensors", artifacts.MAX_BYTES, path)
    found = artifacts.unpack(data, value["$artifact"], f"the artifact {name[:16]}...")
    rows = {files.layer(at): held[None] if held.ndim == 1 else held for at, held in found.items()}
    if any(held.ndim != 2 for held in rows.values()):
        raise BundleError(f"the artifact {name[:16]}... holds directions of more than two axes")
    return rows
