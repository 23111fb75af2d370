"""What a Session can find out about a model: vectors, lenses, patches, sweeps. The work is done in `analysis/`."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .points import kind_of
from .texts import Texts

if TYPE_CHECKING:
    from .analysis.judging import Separability
    from .analysis.vectors import Vector


class Analyses(Texts):
    """The methods of a Session that an analysis stands behind."""

    _units: dict[str, torch.Tensor]

    def vector(self, pairs: Iterable, *, method: str = "mean_diff", point: str = "resid_post", at: Any = -1) -> Vector:
        """Fit a steering Vector over all tapped layers from (positive, negative) prompts (see Pairs.of), read at position `at`.

        method: "mean_diff", "pca", "pca_centred", "lat", "logistic" or "lda", see analysis/fitting.py. Each layer is scaled to
        the mean centred norm there, so that an edit's coefficient 1.0 means one such norm.
        """
        from .analysis.vectors import fit

        return fit(self, pairs, method, point, at)

    def separability(self, vector: Vector, pairs: Any, *, at: int = -1, draws: int = 1000) -> Separability:
        """Return how well a vector tells the sides of pairs apart at each of its layers, AUROC with intervals over groups.

        Give it pairs that it was not fitted on: `pairs.split()` keeps some.
        """
        from .analysis.judging import judge

        return judge(self, vector, pairs, at, draws)

    def unit(self, point: str = "resid_post") -> torch.Tensor:
        """Return what coefficient 1.0 stands for at each tapped layer of a kind, `[layer]`: the mean centred norm of the
        stream over neutral text without BOS. Measured once a model, then read from the cache folder."""
        from .analysis.units import measure_unit

        kind = kind_of(point)
        if kind not in self._units:
            self._units[kind] = measure_unit(self, kind)
        return self._units[kind]
