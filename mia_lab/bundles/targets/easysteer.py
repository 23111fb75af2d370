"""Requests of EasySteer: a `steering` object of ordered vectors, each with its payload, algorithm, scale and `apply` clause.

Payloads are float32 under their content's sha256; layers are 0-based blocks, acted on at their output. `direct` is an Add, `erase`
an Ablate, `replace` a Replace, `lm_steer` an Affine without a bias; `loreft` is read as one with a bias.
"""
from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...analysis.formats import gguf
from ...edits import Ablate, Add, Affine, Edit, Replace
from ...errors import BundleError
from ...selectors import Selector
from . import files
from .plain import Plain, Says, plain
from .scopes import Scope, selector_of

_APPLY: dict[str, dict[str, Any]] = {
    "all": {"prompt": "all", "generation": "all"}, "prompt": {"prompt": "all"}, "generated": {"generation": "all"},
    "last": {"prompt_positions": [-1]}, "from": {"prompt_window": [0, None], "generation": "all"},
    "prompt_from": {"prompt_window": [0, None]}, "last_on": {"prompt_window": [0, None], "generation": "all"},
    "generated_first": {"generation_window": [0, 0]}}  # zeros stand for the scope's number
SAYS = Says(("Add", "Ablate", "Replace", "Affine"), scopes=tuple(_APPLY), keep_norm=True)
_ALGORITHMS = {"Add": "direct", "Ablate": "erase", "Replace": "replace", "Affine": "lm_steer"}
_VECTOR = ("source", "data", "algorithm", "scale", "layers", "normalize", "apply", "params", "name")
_LAYER = re.compile(r"layer\.(0|[1-9][0-9]{0,3})")
_KINDS: dict[str, set[str]] = {"direction": set(), "lowrank": {"projector1", "projector2"},
                               "reft": {"rotate_layer", "learned_source_weight"}}
_WIRE = ("version", "kind", "tensors", "extra", "sha256")


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write `{"steering": ...}`, which a request carries as it is; several vectors act in their order ("sequential")."""
    vectors = [_vector(edit) for edit in plain(edits, "EasySteer", SAYS, bos)]
    return files.write_json(path, {"steering": {"vectors": vectors, "conflict": "sequential"}})


def import_from(path: Path) -> list[Edit]:
    """The edits of a request's `steering`, or of a file that holds only that."""
    found = files.read_json(path)
    said = files.mapping(found.get("steering", found), "steering", ("vectors", "conflict", "debug"))
    vectors = files.items(said.get("vectors"), "vectors")
    if len(vectors) > 1 and said.get("conflict", "priority") != "sequential":
        raise BundleError(f"{path} says conflict {str(said.get('conflict', 'priority'))[:40]!r}: where two vectors meet only one acts. "
                          f"Edits here act one after another, which is 'sequential'")
    return [_edit(path, files.mapping(vector, "a vector", _VECTOR)) for vector in vectors]


def digest(wire: dict[str, Any]) -> str:
    """The identity that EasySteer gives a payload: sha256 over its kind, its tensors and its extra fields, in its own spelling."""
    found = hashlib.sha256(f"{wire['kind']}:{wire['version']}".encode())
    for name, tensor in sorted(wire["tensors"].items()):
        found.update(name.encode() + str(tuple(tensor["shape"])).encode() + base64.b64decode(tensor["data"]))
    for key, value in sorted(wire["extra"].items()):
        found.update(f"{key}={value!r}".encode())
    return found.hexdigest()


def _vector(edit: Plain) -> dict[str, Any]:
    rows, scale, layers = edit.rows, edit.factor, sorted(edit.rows)
    if edit.word in ("Ablate", "Replace"):
        if edit.factor != 1.0:
            raise BundleError(f"EasySteer takes out, or replaces, a value wholly; {edit.word} with {edit.factor:g} of it cannot be said")
        scale = 1.0
    if edit.word == "Ablate":  # its divisor has a small number added to the squared norm
        rows = {at: row if row.norm() >= 1 else row / row.norm() for at, row in rows.items()}
    if edit.word == "Affine":
        if edit.bias is not None:
            raise BundleError("EasySteer's low-rank map has no bias; only an Affine without one can be said")
        tensors = {"projector1": edit.read.T, "projector2": rows[layers[0]].T}
    else:
        tensors = {f"layer.{at}": row for at, row in rows.items()}
    wire = {"version": 1, "kind": "lowrank" if edit.word == "Affine" else "direction", "extra": {},
            "tensors": {name: {"shape": list(held.shape), "data": files.packed(held)} for name, held in tensors.items()}}
    return {"data": wire | {"sha256": digest(wire)}, "algorithm": _ALGORITHMS[edit.word], "scale": scale, "layers": layers,
            "normalize": edit.keep_norm, "apply": _apply(edit.scope)}


def _apply(scope: Scope) -> dict[str, Any]:
    clause = dict(_APPLY[scope.word])
    match scope.word:
        case "from" | "prompt_from":
            if scope.word == "from" and scope.args[0] > 1:
                raise BundleError(f"EasySteer steers all that is generated, also where a prompt is shorter than {scope.args[0]}; it cannot "
                                  f"say {selector_of(scope)}")
            clause["prompt_window"] = [scope.args[0], None]
        case "last_on":
            clause["prompt_window"] = [-scope.args[0], None]
        case "generated_first":
            clause["generation_window"] = [0, scope.args[0]]
    return clause


def _where(clause: Any) -> Selector:
    said = {key: value for key, value in files.mapping(clause, "apply").items() if value is not None}
    window, first = said.get("prompt_window"), said.get("generation_window")
    number = window[0] if isinstance(window, list) and len(window) == 2 and window[1] is None else None
    number = first[1] if number is None and isinstance(first, list) and len(first) == 2 and first[0] == 0 else number
    args = (abs(number),) if isinstance(number, int) and not isinstance(number, bool) else ()
    for word in _APPLY:
        scope = Scope(word, args if word in ("from", "prompt_from", "last_on", "generated_first") else ())
        if (scope.args or word in ("all", "prompt", "generated", "last")) and scope.args != (0,) and (
                word != "from" or args[0] <= 1) and _apply(scope) == said:
            return selector_of(scope)
    raise BundleError(f"the clause apply={str(said)[:120]} cannot be said by a selector here")


def _edit(path: Path, vector: dict[str, Any]) -> Edit:
    algorithm, scale = vector.get("algorithm", "direct"), files.number(vector.get("scale", 1.0), "scale")
    where, keep = _where(vector.get("apply")), files.flag(vector.get("normalize", False), "normalize")
    if vector.get("params"):
        raise BundleError(f"the vector has params {str(vector['params'])[:60]}, which cannot be read here")
    if keep and algorithm != "direct":
        raise BundleError(f"normalize with the algorithm {str(algorithm)[:40]!r} cannot be said by an edit here")
    kind, tensors, extra = _payload(path, vector)
    only = vector.get("layers")
    only = None if only is None else [files.layer(at, "layers") for at in files.items(only, "layers")]
    if (kind, algorithm) == ("lowrank", "lm_steer") and only:
        return Affine(tensors["projector1"].T, tensors["projector2"].T, None, only, where=where, coeff=scale)
    if (kind, algorithm) == ("reft", "loreft"):
        at = only if extra.get("layer") is None else [files.layer(extra["layer"])]
        return Affine.loreft(tensors["rotate_layer"].T, tensors["learned_source_weight"], tensors.get("learned_source_bias"), layers=at,
                             where=where, coeff=scale)
    if kind != "direction" or algorithm not in ("direct", "erase", "replace"):
        raise BundleError(f"the algorithm {str(algorithm)[:40]!r} with a payload of kind {str(kind)[:40]!r} cannot be read here")
    layers, rows = files.by_layer({at: row for at, row in tensors.items() if only is None or at in only}, "the payload")
    if algorithm == "erase" and (rows * scale).norm(dim=-1).min() < 0.01:
        raise BundleError(f"{path} erases a direction that is so short, with its scale, that EasySteer takes only a part of it out")
    rows = rows[0] if (rows == rows[0]).all() else rows
    if algorithm == "direct":
        return Add(rows, scale, layers, where=where, keep_norm=keep)
    return Ablate(rows, 1.0, layers, where=where) if algorithm == "erase" else Replace(rows * scale, layers, where=where)


def _payload(path: Path, vector: dict[str, Any]) -> tuple[Any, dict[Any, torch.Tensor], dict[str, Any]]:
    """A vector's kind, tensors (directions by layer) and extra fields, from the request itself or a GGUF beside it."""
    if vector.get("source") is not None:
        return "direction", dict(gguf.load(files.beside(path, vector["source"], "source")).rows), {}
    wire = files.mapping(vector.get("data"), "data", _WIRE)
    listed, extra = files.mapping(wire.get("tensors"), "tensors"), files.mapping(wire.get("extra"), "extra")
    if wire.get("kind") not in list(_KINDS):
        raise BundleError(f"the payload is of kind {str(wire.get('kind'))[:40]!r}; known are {', '.join(_KINDS)}")
    tensors: dict[Any, torch.Tensor] = {}
    for name, held in listed.items():
        held = files.mapping(held, name, ("shape", "data"))
        tensors[name] = files.unpacked(held.get("data"), held.get("shape"), "float32", f"the tensor {name[:40]}")
    if wire.get("version") != 1 or wire.get("sha256") != digest(wire):
        raise BundleError("the payload is not of version 1, or its sha256 is not that of its content")
    flat = wire["kind"] == "direction"
    strange = [name for name, held in tensors.items() if held.ndim != (1 if flat or name == "learned_source_bias" else 2)]
    strange += [name for name in tensors if flat and not _LAYER.fullmatch(name)]
    if strange or not _KINDS[wire["kind"]] <= set(tensors):
        raise BundleError(f"the payload of kind {wire['kind']!r} has {str(strange or 'not all of its tensors')[:80]}")
    if flat:
        tensors = {files.layer(name.removeprefix("layer."), f"the tensor {name[:40]}"): row for name, row in tensors.items()}
    return wire["kind"], tensors, extra
