"""Requests of hotwire-vllm: `vllm_xargs.hotwire` names a vector by its file's stem, with a layer and a scale.

The vectors lie in a `.pt` beside the request, a tensor `[layer d]` by 0-based block, added to the block's output; the server reads
its folder once, at start. `decode_only` leaves the prompt out.
"""
from __future__ import annotations

import json
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

SAYS = Says(scopes=("all", "generated"))
_KEYS = ("id", "layer", "scale", "decode_only")


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write NAME.json, the request's part, and NAME.pt beside it; return the request's path."""
    found = plain(edits, "hotwire", SAYS, bos)
    places = [at for edit in found for at in edit.rows]
    if len(set(places)) < len(places):
        raise BundleError("hotwire keeps the last of several vectors at one layer; sum them into one edit first")
    width = {row.shape for edit in found for row in edit.rows.values()}
    if len(width) != 1:
        raise BundleError("the additions have different widths")
    stack = torch.zeros(max(places) + 1, *width.pop())
    for edit in found:
        for at, row in edit.rows.items():
            stack[at] = row
    entries = [{"id": path.stem, "layer": at, "scale": edit.factor} | ({"decode_only": True} if edit.scope.word == "generated" else {})
               for edit in found for at in sorted(edit.rows)]
    return files.write_pair(path, stack, {"vllm_xargs": {"hotwire": json.dumps(entries)}})


def import_from(path: Path) -> list[Edit]:
    """An Add for each entry of a request; given a .pt, the request of the same name beside it is read."""
    request = path.with_suffix(".json")
    if path.suffix == ".pt" and not request.exists():
        raise BundleError(f"{path.name} does not say at which layer and how strongly it is added; put the request beside it, as "
                          f'{request.name}: {{"vllm_xargs": {{"hotwire": "{{\\"id\\": \\"{path.stem}\\", \\"layer\\": 8, ...}}"}}}}')
    found = files.read_json(request if path.suffix == ".pt" else path)
    entries = found.get("vllm_xargs", found)
    entries = files.mapping(entries, "vllm_xargs").get("hotwire", entries)
    entries = files.parse_json(entries, "hotwire") if isinstance(entries, str) else entries
    return [_edit(path, entry) for entry in (entries if isinstance(entries, list) else [entries])]


def _edit(path: Path, entry: Any) -> Edit:
    entry = files.mapping(entry, "an entry of hotwire", _KEYS)
    at, scale = files.layer(entry.get("layer"), "layer"), files.number(entry.get("scale", 1.0), "scale")
    file = files.beside(path, f"{entry.get('id')}.pt", "the vector's id")
    value = read(file)
    if isinstance(value, dict):
        value = next((held for held in value.values() if isinstance(held, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor) or value.ndim not in (1, 2) or (value.ndim == 2 and at >= len(value)):
        raise BundleError(f"{file} holds no tensor [layer d] with layer {at}, nor one [d]")
    row = files.finite((value[at] if value.ndim == 2 else value).float(), str(file))
    only = files.flag(entry.get("decode_only", False), "decode_only")
    return Add(row, scale, [at], where=selector_of(Scope("generated" if only else "all")))
