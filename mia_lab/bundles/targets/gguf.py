"""GGUF control vectors of repeng and llama.cpp: directions by block, added at every position, without a factor.

`direction.N` is added to the output of block N, so it is `resid_post` N; llama.cpp refuses a file with block 0.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...analysis.formats import gguf
from ...edits import Edit
from ...selectors import everywhere
from .plain import Says, addition, as_vector, plain, summed

SAYS = Says()


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write the sum of additions; each is multiplied by its coefficient, so that strength 1 does there what the edits do here.

    model: the architecture, as "llama", which the file keeps as a label.
    """
    return gguf.save(as_vector(summed(plain(edits, "a GGUF control vector", SAYS, bos))), path, model)


def import_from(path: Path) -> list[Edit]:
    """One Add of what strength 1 adds."""
    vector = gguf.load(path).vector(None)
    return [addition(dict(zip(vector.layers, vector.rows)), where=everywhere())]
