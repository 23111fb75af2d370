"""Intervention specs of vLLM-Hook's unified worker, the wire form of the steerability toolkit: ops by layer, tensors by content.

A folder holds `intervention_spec.json` and, in its `artifacts` registry, the tensors. An op acts on the stream after 0-based block N.
`last_k` means the prompt's last k positions and all that follow. Gates are not written: they read layers' inputs, pooled their own way.
`norm_preserving` shortens rows that became longer and leaves those that became shorter, so it is no keep_norm, and is refused.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...edits import Ablate, Add, Edit
from ...errors import BundleError
from . import artifacts, files
from .plain import Plain, Says, plain
from .scopes import Scope, selector_of

SAYS = Says(("Add", "Ablate"), scopes=("all", "generated", "last_on", "from"))
SPEC, REGISTRY = "intervention_spec.json", "artifacts"
_MAX_SPEC = 64 << 10  # bytes that the worker takes
_WORDS = {"all": "all", "after_prompt": "generated", "last_k": "last_on", "from_position": "from"}
_NUMBER = {"last_k": "k", "from_position": "position"}


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write a folder; its `artifacts` may be copied into, or named as, VLLM_HOOK_REGISTRY_DIR. Return the folder."""
    ops: list[dict[str, Any]] = []
    held: dict[str, tuple[bytes, list[int]]] = {}
    for edit in plain(edits, "an intervention spec", SAYS, bos):
        if edit.word == "Ablate" and edit.factor != 1.0:
            raise BundleError("an intervention spec takes a direction out wholly; an Ablate with another strength cannot be said")
        ops += [_op(edit, at, held) for at in sorted(edit.rows)]
    size = len(json.dumps({"ops": ops}, separators=(",", ":")))
    if size > _MAX_SPEC:
        raise BundleError(f"the spec has {size} bytes, and the worker takes {_MAX_SPEC}; use fewer layers or edits")
    for name, (data, shape) in held.items():
        about = {"format_version": 1, "tensors": {"vector": {"dtype": "float32", "shape": shape}}, "meta": {}}
        files.write(path / REGISTRY / name[:2] / f"{name}.safetensors", data)
        files.write_json(path / REGISTRY / name[:2] / f"{name}.json", about)
    files.write_json(path / SPEC, {"ops": ops})
    return path


def import_from(path: Path) -> list[Edit]:
    """An edit for each op."""
    folder = path if path.is_dir() else path.parent
    said = files.mapping(files.read_json(folder / SPEC), SPEC, ("ops",))
    return [_edit(folder, files.mapping(op, f"ops[{i}]", ("layers", "transform", "scope", "gate")))
            for i, op in enumerate(files.items(said.get("ops"), "ops"))]


def scope_json(scope: Scope) -> dict[str, Any]:
    """A scope in the toolkit's words."""
    kind = next(kind for kind, word in _WORDS.items() if word == scope.word)
    return {"kind": kind} | ({_NUMBER[kind]: scope.args[0]} if kind in _NUMBER else {})


def scope_of(kind: Any, number: Any) -> Scope:
    """A scope from the toolkit's words."""
    if not isinstance(kind, str) or kind not in _WORDS:
        raise BundleError(f"the token scope is {str(kind)[:40]!r}; known are {', '.join(_WORDS)}")
    if kind not in _NUMBER:
        return Scope(_WORDS[kind])
    if isinstance(number, bool) or not isinstance(number, int) or not int(kind == "last_k") <= number < 1 << 24:
        raise BundleError(f"the scope {kind} has the number {str(number)[:40]!r}")
    return Scope(_WORDS[kind], (number,))


def _op(edit: Plain, at: int, held: dict[str, tuple[bytes, list[int]]]) -> dict[str, Any]:
    """One op; its artifact goes into `held`, by the digits of its id, with its shape."""
    artifact, data = artifacts.pack({"vector": edit.rows[at]})
    held[artifacts.hex_of(artifact, "the artifact")] = data, list(edit.rows[at].shape)
    how = {"kind": "additive", "strength": edit.factor} if edit.word == "Add" else {"kind": "projection"}
    how |= {"artifact": artifact, "modifiers": []}
    return {"layers": [at], "transform": how, "scope": scope_json(edit.scope), "gate": None}


def _edit(folder: Path, op: dict[str, Any]) -> Edit:
    if op.get("gate") is not None:
        raise BundleError("an op has a gate, which reads and pools in another way than gates here; it cannot be read")
    layers = [files.layer(at, "layers") for at in files.items(op.get("layers"), "layers")]
    said = files.mapping(op.get("scope"), "scope", ("kind", *_NUMBER.values()))
    kind = said.get("kind")
    where = selector_of(scope_of(kind, said.get(_NUMBER[kind]) if kind in list(_NUMBER) else None))
    how = files.mapping(op.get("transform"), "transform", ("kind", "strength", "artifact", "modifiers"))
    name = artifacts.hex_of(how.get("artifact"), "the artifact")
    row = artifacts.read(folder / REGISTRY / name[:2] / f"{name}.safetensors", how["artifact"]).get("vector")
    if not isinstance(row, torch.Tensor) or row.ndim != 1:
        raise BundleError(f"the artifact {name[:16]}... holds no `vector` of one axis")
    if how.get("modifiers"):
        raise BundleError(f"the modifiers {str(how['modifiers'])[:80]} cannot be said by an edit here")
    match how.get("kind"):
        case "additive":
            return Add(row, files.number(how.get("strength"), "strength"), layers, where=where)
        case "projection":
            return Ablate(row, 1.0, layers, where=where)
    raise BundleError(f"the transform {str(how.get('kind'))[:40]!r} cannot be read; known are additive and projection")
