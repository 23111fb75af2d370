"""Vectors of the steering-vectors library, as `torch.save` keeps their fields: directions by block, without a factor.

The library lets its user choose the positions when a vector is applied; by default it adds at all of them.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...analysis.formats import torch_file
from ...edits import Edit
from ...errors import BundleError
from ...selectors import everywhere
from .plain import Says, addition, as_vector, plain, summed

SAYS = Says(kinds=("resid_post", "attn_out_raw", "mlp_out_raw"))


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write the sum of additions at one kind of point, so that multiplier 1 does there what the edits do here."""
    found = plain(edits, "steering-vectors", SAYS, bos)
    kinds = {edit.kind for edit in found}
    if len(kinds) > 1:
        raise BundleError(f"steering-vectors keeps one kind of point a file; these edits are at {', '.join(sorted(kinds))}")
    return torch_file.save(as_vector(summed(found), kinds.pop()), path)


def import_from(path: Path) -> list[Edit]:
    """One Add of what multiplier 1 adds."""
    vector = torch_file.load(path).vector(None)
    return [addition(dict(zip(vector.layers, vector.rows)), point=vector.kind, where=everywhere())]
