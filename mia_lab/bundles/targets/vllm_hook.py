"""Activation steering of vLLM-Hook and of its MIA: a JSON config whose `steering` part names a vector in a `.pt` beside it.

`optimal_layer` counts blocks from 0, `add_vector` adds coefficient times the vector to their output. Its other method, `adjust_rs`,
projects only one of the two halves of a stream that vLLM hands on apart, so it is no Clamp and is refused.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...analysis.formats.torch_file import read
from ...edits import Add, Edit
from ...errors import BundleError
from . import files
from .plain import Says, plain
from .scopes import Scope, selector_of

_PHASES = {("both", "all_tokens"): Scope("all"), ("prefill", "all_tokens"): Scope("prompt"), ("decode", "all_tokens"): Scope("generated"),
           ("prefill", "last_token"): Scope("last"), ("both", "last_token"): Scope("last_on", (1,))}
SAYS = Says(scopes=tuple(scope.word for scope in _PHASES.values()), several=False)
_KEYS = ("method", "coefficient", "optimal_layer", "vector_path", "phase", "positions", "apply_at_all_positions")


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write NAME.json and NAME.pt beside it; its one vector must be the same at each layer. model: the model's id."""
    edit = plain(edits, "vLLM-Hook", SAYS, bos)[0]
    modes = next((modes for modes, scope in _PHASES.items() if scope == edit.scope), None)
    if modes is None:
        raise BundleError(f"vLLM-Hook can leave out all of a prompt but its last position, not all but {edit.scope.args[0]}")
    first, *others = edit.rows.values()
    if not all(torch.equal(first, row) for row in others):
        raise BundleError("vLLM-Hook adds one vector at all its layers; this edit has another at each. Export one layer, as in "
                          "mia.Add(v[8], 0.2)")
    layers = sorted(edit.rows)
    steering = {"method": "add_vector", "coefficient": edit.factor,
                "optimal_layer": layers if len(layers) > 1 else layers[0],  # vLLM-Hook itself takes one number
                "vector_path": path.with_suffix(".pt").name, "phase": modes[0], "positions": modes[1]}
    about = {"provider": "mia_lab", "name": path.stem, "model_id": model}
    return files.write_pair(path, {"dir": first.clone()}, {"model_info": about, "steering": steering})


def import_from(path: Path) -> list[Edit]:
    """The Add that a config's `steering` part stands for."""
    said = files.mapping(files.read_json(path).get("steering"), f"{path}: steering", _KEYS)
    if said.get("method", "adjust_rs") != "add_vector":
        raise BundleError(f"{path} steers by {str(said.get('method', 'adjust_rs'))[:40]!r}, which projects one half of the stream only; "
                          f"only 'add_vector' can be read")
    layers = said.get("optimal_layer")
    layers = [files.layer(at, "optimal_layer") for at in files.items(layers if isinstance(layers, list) else [layers], "optimal_layer")]
    value = read(files.beside(path, said.get("vector_path"), "vector_path"))
    row = value.get("dir") if isinstance(value, dict) else None
    row = torch.tensor(row) if isinstance(row, list) and all(isinstance(x, float) for x in row) else row
    if not isinstance(row, torch.Tensor) or row.ndim != 1:
        raise BundleError(f"{said['vector_path']} holds no direction `dir` of one axis")
    where = selector_of(_scope(said, path))
    return [Add(files.finite(row.float(), "dir"), files.number(said.get("coefficient", 0.0), "coefficient"), layers, where=where)]


def _scope(said: dict[str, Any], path: Path) -> Scope:
    every = files.flag(said.get("apply_at_all_positions", True), "apply_at_all_positions")
    modes = said.get("phase") or "both", said.get("positions") or ("all_tokens" if every else "last_token")
    if modes == ("decode", "last_token"):
        modes = "decode", "all_tokens"
    if modes not in list(_PHASES):
        raise BundleError(f"{path} says phase and positions {str(modes)[:80]}; known are {', '.join(map(str, _PHASES))}")
    return _PHASES[modes]
