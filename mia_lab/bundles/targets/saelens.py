"""One feature of a SAELens autoencoder as an edit: its decoder's direction added, or the feature set to a value.

Only read: an edit knows one feature, and an autoencoder is all of them.
"""
from __future__ import annotations

from pathlib import Path

from ...analysis.autoencoder import SparseAutoencoder
from ...edits import Add, ClampFeature, Edit
from ...errors import BundleError
from ...points import parse
from . import files


def import_from(path: Path, *, feature: int | None = None, value: float | None = None) -> list[Edit]:
    """An Add of the feature's decoder row at its own length, or, with `value`, a ClampFeature to it."""
    if feature is None:
        raise BundleError(f"{path} holds many features; say which: feature=123")
    sae = SparseAutoencoder.load(path)
    vector = sae.vector(feature)
    if value is None:
        return [Add(vector.rows[0], 1.0, list(vector.layers), vector.kind)]
    if sae.k is not None:
        raise BundleError("a feature of a top-k autoencoder depends on all others, so it cannot be set alone; leave value= out")
    at = parse(sae.hook, files.MAX_LAYER)
    return [ClampFeature(sae.encoder[:, feature], sae.decoder[feature], value, float(sae.bias[feature]), float(sae.threshold[feature]),
                         [at.layer], at.kind)]
