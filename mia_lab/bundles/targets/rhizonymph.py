"""Named steering modules of the RhizoNymph fork of vLLM: JSON tiers of vectors and clamps by hook point and 0-based block.

`vectors` act on every position, `prefill_vectors` on the prompt, `decode_vectors` on what is generated; at one hook all vectors are
added before any clamp. A module is data, though the server calls it a module.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...edits import Ablate, Add, Clamp, Edit
from ...errors import BundleError
from . import files
from .plain import Plain, Says, plain
from .scopes import Scope, selector_of

_HOOKS = {"pre_attn": "resid_pre", "post_attn": "resid_mid", "post_block": "resid_post"}
_TIERS = {"": Scope("all"), "prefill_": Scope("prompt"), "decode_": Scope("generated")}
SAYS = Says(("Add", "Ablate", "Clamp"), tuple(_HOOKS.values()), tuple(scope.word for scope in _TIERS.values()))
_NAME_OF = {kind: hook for hook, kind in _HOOKS.items()}
_PACKED = ("dtype", "shape", "layer_indices", "data", "scales", "bounds", "strengths")


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write a module for `--steering-modules NAME=PATH`, or for the body of /v1/steering/set."""
    found: dict[str, Any] = {f"{tier}vectors": {} for tier in _TIERS}
    clamped: dict[tuple[str, int], set[str]] = {}  # the tiers of the clamps at each point
    for edit in plain(edits, "a RhizoNymph module", SAYS, bos):
        tier = next(tier for tier, scope in _TIERS.items() if scope == edit.scope)
        hook = _NAME_OF[edit.kind]
        if edit.word == "Add":
            if any((hook, at) in clamped for at in edit.rows):
                raise BundleError("a RhizoNymph module adds before it clamps at one point; put the Add before the Clamp or Ablate")
            _put_vectors(found[f"{tier}vectors"].setdefault(hook, {}), edit)
            continue
        clamps = found.setdefault(f"{tier}clamps", {}).setdefault(hook, {})
        for at, row in edit.rows.items():
            before = clamped.setdefault((hook, at), set())
            if not tier and before - {""}:
                raise BundleError("a RhizoNymph module clamps at all positions before it clamps those of a prompt or what is generated; "
                                  "put the edit that is everywhere first")
            before.add(tier)
            clamps.setdefault(str(at), []).append(_clamp(edit, row))
    for tier in _TIERS:
        found[f"{tier}vectors"] = {hook: _pack(held) for hook, held in found[f"{tier}vectors"].items()} or None
    return files.write_json(path, found)


def import_from(path: Path) -> list[Edit]:
    """The edits of a module, at each point additions first, as the server runs them."""
    known = [f"{tier}{what}" for tier in _TIERS for what in ("vectors", "clamps")]
    found = files.mapping(files.read_json(path), str(path), ["name", *known])
    edits: list[Edit] = []
    for what, read in (("vectors", _additions), ("clamps", _clamps)):
        for tier, scope in _TIERS.items():
            for hook, held in files.mapping(found.get(f"{tier}{what}") or {}, f"{tier}{what}").items():
                if hook not in _HOOKS:
                    raise BundleError(f"{path} steers at {hook[:40]!r}; hooks that are points here: {', '.join(_HOOKS)}")
                edits += read(files.mapping(held, hook), _HOOKS[hook], scope)
    if not edits:
        raise BundleError(f"{path} holds no vector and no clamp")
    return edits


def _put_vectors(held: dict[int, tuple[float, torch.Tensor]], edit: Plain) -> None:
    for at, row in edit.rows.items():
        before = held.get(at)
        held[at] = (edit.factor, row) if before is None else (1.0, before[0] * before[1] + edit.factor * row)


def _pack(held: dict[int, tuple[float, torch.Tensor]]) -> dict[str, Any]:
    layers, rows = files.by_layer({at: row for at, (_, row) in held.items()}, "a hook")
    return {"dtype": "float32", "shape": list(rows.shape), "layer_indices": layers, "data": files.packed(rows),
            "scales": [held[at][0] for at in layers]}


def _clamp(edit: Plain, row: torch.Tensor) -> dict[str, Any]:
    if edit.word == "Ablate":
        if not 0 <= edit.factor <= 1:
            raise BundleError(f"a clamp's strength lies between 0 and 1; this Ablate has {edit.factor:g}")
        return {"vector": row.tolist(), "value": 0.0, "strength": edit.factor}
    bounds = {"min": edit.low, "max": edit.high}
    return {"vector": row.tolist()} | {name: level for name, level in bounds.items() if level is not None}


def _additions(held: dict[str, Any], kind: str, scope: Scope) -> Iterator[Edit]:
    where = selector_of(scope)
    if "data" in held:
        layers, rows = _unpack(held)
        scales = [files.number(x, "scales") for x in files.items(held.get("scales") or [1.0] * len(layers), "scales")]
        if len(set(layers)) < len(layers) or len(scales) != len(layers):
            raise BundleError(f"a packed hook has layers {str(layers)[:60]} and {len(scales)} scales")
        for scale in dict.fromkeys(scales):
            mine = [i for i, one in enumerate(scales) if one == scale]
            yield Add(rows[mine[0]] if len(mine) == 1 else rows[mine], scale, [layers[i] for i in mine], kind, where)
        return
    for at, entry in held.items():
        entry = files.mapping(entry, "an entry", ("vector", "scale")) if isinstance(entry, dict) else {"vector": entry}
        scale = files.number(entry.get("scale", 1.0), "scale")
        yield Add(files.direction(entry.get("vector"), f"the vector at layer {at[:10]}"), scale, [files.layer(at)], kind, where)


def _clamps(held: dict[str, Any], kind: str, scope: Scope) -> Iterator[Edit]:
    if "data" in held:
        layers, rows = _unpack(held)
        bounds, strengths = held.get("bounds"), files.items(held.get("strengths") or [1.0] * len(layers), "strengths")
        if not isinstance(bounds, list) or len(bounds) != len(layers) or len(strengths) != len(layers) or any(
                not isinstance(pair, list) or len(pair) != 2 for pair in bounds):
            raise BundleError("a packed clamp needs one pair of bounds and one strength a row")
        listed = [(at, row, *pair, strength) for at, row, pair, strength in zip(layers, rows, bounds, strengths)]
    else:
        listed = [(files.layer(at), *_entry(entry)) for at, entries in held.items() for entry in files.items(entries, "clamps")]
    for at, row, low, high, strength in listed:
        yield _edit(at, row, *(None if x is None else files.number(x, "a bound") for x in (low, high)),
                    files.number(strength, "strength"), kind, scope)


def _entry(entry: Any) -> tuple[torch.Tensor, Any, Any, Any]:
    entry = files.mapping(entry, "a clamp", ("vector", "min", "max", "value", "strength"))
    row, value = files.direction(entry.get("vector"), "a clamp's vector"), entry.get("value")
    return row, entry.get("min") if value is None else value, entry.get("max") if value is None else value, entry.get("strength", 1.0)


def _edit(at: int, row: torch.Tensor, low: float | None, high: float | None, strength: float, kind: str, scope: Scope) -> Edit:
    where = selector_of(scope)
    if low == high == 0:
        return Ablate(row, strength, [at], kind, where)
    if strength != 1:
        raise BundleError(f"a clamp to [{low}, {high}] by {strength:g} of the way cannot be said by an edit here; only to 0, as Ablate")
    return Clamp(row, low=low, high=high, layers=[at], point=kind, where=where)


def _unpack(held: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    files.mapping(held, "a packed hook", _PACKED)
    layers = [files.layer(at, "layer_indices") for at in files.items(held.get("layer_indices"), "layer_indices")]
    rows = files.unpacked(held.get("data"), held.get("shape"), held.get("dtype"), "a packed hook")
    if rows.ndim != 2 or len(rows) != len(layers):
        raise BundleError(f"a packed hook has shape {list(rows.shape)} and {len(layers)} layers")
    return layers, rows
