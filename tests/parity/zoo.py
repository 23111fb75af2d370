"""One edit of every kind, with every selector, gate and schedule, sized to a session's model."""
from __future__ import annotations

from typing import Any

import torch

import mia_lab as mia
from mia_lab.points import Point


class Zoo:
    """Draws edits. Vectors are about `dose` of the mean centred norm of the stream where they act."""

    def __init__(self, session: mia.Session, seed: int = 0, dose: float = 0.7) -> None:
        self.session, self.draw, self.dose = session, torch.Generator().manual_seed(seed), dose
        self.shapes = session._submit.model.shapes
        self.rows = {p: self._typical(p) for p in session.tapped}

    def _typical(self, point: Point) -> torch.Tensor:
        """Values `[row width]` at a point, of a text, without BOS."""
        _, cache = self.session.run_with_cache(list(range(3, 43)), [point])
        return cache[point][0, 1:].float().flatten(1)

    def vector(self, point: Point, factor: float = 1.0) -> torch.Tensor:
        """A random direction, as long as `dose` mean centred norms."""
        rows = self.rows[point]
        v = torch.randn(rows.shape[1], generator=self.draw)
        return v / v.norm() * (rows - rows.mean(0)).norm(dim=1).mean() * self.dose * factor

    def leaning(self, point: Point) -> torch.Tensor:
        """A unit direction that real values have a part along."""
        rows = self.rows[point]
        v = rows[int(torch.randint(len(rows), (1,), generator=self.draw))] + 0.3 * self.vector(point)
        return v / v.norm()

    def edits(self, point: Point, **rest: Any) -> dict[str, mia.Edit]:
        """Every kind of edit at one point."""
        at = dict(layers=[point.layer], point=point.kind) | rest
        rows, shape = self.rows[point], self.shapes[point]
        u, w = self.leaning(point), self.leaning(point) + torch.nn.functional.normalize(self.vector(point), dim=0)
        w = w / w.norm()
        p = rows @ u
        norm = float(rows.norm(dim=1).mean())
        found = {
            "add": mia.Add(self.vector(point), 1.0, **at),
            "add keeping the norm": mia.Add(self.vector(point), 1.0, keep_norm=True, **at),
            "ablate": mia.Ablate(u, **at),
            "ablate a subspace": mia.Ablate([u, w, self.vector(point)], 0.8, **at),
            "clamp": mia.Clamp(u, value=-norm / 2, **at),
            "clamp a range": mia.Clamp(u, low=float(p.quantile(0.3)), high=float(p.quantile(0.6)), **at),
            "clamp two": mia.Clamp([u, w], value=[norm / 2, -norm / 3], **at),
            "scale": mia.Scale(0.6, **at),
            "replace": mia.Replace(self.vector(point) * 2, **at),
            "blend": mia.Replace(self.vector(point) * 2, blend=0.4, **at),
            "affine": mia.Affine(torch.stack([u, w]), torch.stack([w, self.vector(point) / norm]), torch.tensor([0.1, 0.2]), **at),
            "loreft": mia.Affine.loreft(torch.linalg.qr(torch.stack([u, w]).T).Q.T, torch.stack([w, u]), torch.tensor([0.3, -0.2]), **at),
            "clamp a feature": mia.ClampFeature(u, w, norm / 2, bias=-float(p.median()), threshold=0.01, **at),
        }
        if len(shape) == 2:
            head = torch.randn(shape[1], generator=self.draw) * norm / 4
            found |= {"switch a head off": mia.Scale(0.0, heads=[1], **at), "scale heads": mia.Scale(1.7, heads=[0, 2], **at),
                      "add to a head": mia.Add(head, 1.0, head=2, **at), "replace a head": mia.Replace(head, head=0, **at)}
        return found

    def aligned(self, point: Point, start: int, n: int, **rest: Any) -> mia.Replace:
        """Rows of another text, by position."""
        rows = self.rows[point][torch.randint(len(self.rows[point]), (n,), generator=self.draw)]
        return mia.Replace(rows, layers=[point.layer], point=point.kind, start=start, **rest)

    def probe(self, point: Point, cosine: bool = False, mean: bool = True) -> tuple[mia.Probe, torch.Tensor]:
        """A probe, and its readings on typical rows."""
        u = self.leaning(point)
        middle = self.rows[point].mean(0) if mean else None
        probe = mia.Probe(u, point.layer, point.kind, bias=0.0 if cosine else 0.25, cosine=cosine, mean=middle)
        x = self.rows[point] - (0.0 if middle is None else middle)
        r = x @ u + probe.bias
        return probe, r / x.norm(dim=1) if cosine else r
