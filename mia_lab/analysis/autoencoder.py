"""Sparse autoencoders: their features as readings, as directions and as edits of the stream they were trained on."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..edits import ClampFeature
from ..errors import EditError
from ..points import Point, parse
from ..reductions import SAE
from .formats.raw import Raw
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SparseAutoencoder:
    """A sparse autoencoder over the value at one point: f = act(x @ encoder + bias), x ~ f @ decoder + decoder_bias.

    encoder `[d feature]`, bias and threshold `[feature]`, decoder `[feature d]`, decoder_bias `[d]`, all float32; what the published
    one subtracts from its input is folded into `bias`. act keeps what exceeds its threshold (ReLU is threshold 0) and, where `k` is
    given, only the k largest. hook: the name of its point; centred: it explains the stream less its mean over d, as TransformerLens
    has it where it centres weights. Source: arXiv:2408.05147 (JumpReLU), arXiv:2406.04093 (top k).
    """

    hook: str
    encoder: Tensor
    bias: Tensor
    decoder: Tensor
    decoder_bias: Tensor
    threshold: Tensor
    k: int | None = None
    model: str = ""
    centred: bool = False

    @classmethod
    def load(cls, folder: str | Path) -> SparseAutoencoder:
        """Read a folder of SAELens: cfg.json and sae_weights.safetensors. EditError for a kind whose features cannot be given exactly."""
        from .formats.saelens import load

        return load(folder)

    @property
    def n_features(self) -> int:
        """How many features it has."""
        return len(self.decoder)

    def point(self, session: Session) -> Point:
        """Its point on a session's model; EditError when its width is another than what is there."""
        found = parse(self.hook, session.n_layers, **session._dialect)
        shape = session._engine.shapes.get(found)
        if shape is not None and int(torch.Size(shape).numel()) != self.decoder.shape[1]:
            raise EditError(f"the autoencoder was trained on {self.model or 'another model'}: it reads {self.decoder.shape[1]} values, and "
                            f"{found} of this model holds {list(shape)}")
        return found

    def encode(self, x: Tensor) -> Tensor:
        """The features `[... feature]` of values `[... d]`, float32; NaN for rows of NaN, which padding is."""
        before = x.float() @ self.encoder + self.bias
        off = before <= self.threshold
        if self.k is not None:
            off |= torch.ones_like(off).scatter(-1, before.topk(self.k, -1).indices, False)
        return torch.where(off & ~before.isnan(), 0.0, before)

    def decode(self, features: Tensor) -> Tensor:
        """The values `[... d]` that features `[... feature]` stand for."""
        return features.float() @ self.decoder + self.decoder_bias

    def unexplained(self, x: Tensor) -> float:
        """The share of the variance of rows `[n d]` that it does not explain: near 0 where it belongs, near 1 or more elsewhere."""
        rows = x.float().flatten(0, -2)
        if not torch.isfinite(rows).all() or len(rows) < 2:
            raise EditError("variance is taken over two or more whole rows; leave padding and BOS out")
        rows = rows - rows.mean(-1, keepdim=True) if self.centred else rows
        return float((rows - self.decode(self.encode(rows))).square().sum() / (rows - rows.mean(0)).square().sum())

    def vector(self, feature: int, session: Session | None = None) -> Vector:
        """The decoder's direction of a feature as a Vector, in the session's unit; without one, at the decoder's own length."""
        at = parse(self.hook, 1 << 20) if session is None else self.point(session)
        row = self.decoder[self._one(feature)]
        return Raw(at.kind, {at.layer: row}, f"feature {feature} of {self.hook}").vector(session)

    def clamp(self, feature: int, value: float, session: Session, **rest: Any) -> ClampFeature:
        """An edit that sets one feature and keeps what the autoencoder does not explain; `rest` as in ClampFeature (where=, when=).

        EditError for top-k activations, where whether a feature is on depends on all others.
        """
        j, at = self._one(feature), self.point(session)
        if self.k is not None:
            raise EditError("a feature of a top-k autoencoder depends on all others, so it cannot be clamped alone; add its direction: "
                            "mia.Add(sae.vector(feature, session), coeff)")
        return ClampFeature(self.encoder[:, j], self.decoder[j], value, float(self.bias[j]), float(self.threshold[j]), [at.layer],
                            at.kind, **rest)

    def reduction(self, k: int = 32) -> SAE:
        """The reduction that gives the k strongest features of captured rows on the device: `s.capture(..., reduce=sae.reduction())`.

        EditError where features have thresholds of their own: there, capture rows and `encode` them.
        """
        if self.k is not None and k > self.k:
            raise EditError(f"this autoencoder keeps {self.k} features a row; {k} were asked for")
        if float(self.threshold.min()) != float(self.threshold.max()):
            raise EditError("each feature has a threshold of its own, and a reduction knows one; capture the rows and use sae.encode(rows)")
        return SAE(self.encoder, self.bias, k, float(self.threshold[0]))

    def _one(self, feature: int) -> int:
        if isinstance(feature, bool) or not isinstance(feature, int) or not 0 <= feature < self.n_features:
            raise EditError(f"there is no feature {feature!r}; there are 0 to {self.n_features - 1}")
        return feature

    def __repr__(self) -> str:
        act = f"top {self.k}" if self.k is not None else "JumpReLU" if self.threshold.any() else "ReLU"
        return (f"SparseAutoencoder: {self.n_features} features of {self.hook}, d {self.decoder.shape[1]}, {act}"
                + (f", trained on {self.model}" if self.model else ""))
