"""Directions from the activations of pairs: one a layer, by method.

Every function takes rows of the positive and of the negative prompts, `[pair layer d]` float, pair by pair, and returns
`[layer d]` float32. A direction points from negative to positive, and is as long as the sides are apart along it, so that its
own size is the natural dose.
"""
from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


def mean_difference(positive: Tensor, negative: Tensor) -> Tensor:
    """The mean of the positive rows less that of the negative ones, `[layer d]`; pairs need not match.

    Source: Contrastive Activation Addition, arXiv 2312.06681. Sums in float64.
    """
    return (positive.double().mean(0) - negative.double().mean(0)).float()


def pca(positive: Tensor, negative: Tensor) -> Tensor:
    """The first principal axis of the pairs' differences, taken both ways round so that their mean is part of it, `[layer d]`.

    Centred differences, as some tools use, lose just what all pairs share. Source: representation engineering, arXiv 2310.01405.
    """
    return _dosed(_first_axis(positive.double() - negative.double()), positive, negative)


def pca_centred(positive: Tensor, negative: Tensor) -> Tensor:
    """The first principal axis of all rows about their common mean, `[layer d]`: what varies most, be it the label or not.

    Source: conditional activation steering, arXiv 2409.05907.
    """
    rows = torch.cat([positive, negative]).double()
    return _dosed(_first_axis(rows - rows.mean(0)), positive, negative)


def lat(positive: Tensor, negative: Tensor, seed: int = 0) -> Tensor:
    """The first principal axis of differences in random order, each of length one, `[layer d]` (linear artificial tomography).

    Source: representation engineering, arXiv 2310.01405.
    """
    differences = positive.double() - negative.double()
    signs = torch.randint(0, 2, (len(differences), 1, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    lengths = differences.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return _dosed(_first_axis(signs * differences / lengths), positive, negative)


def logistic(positive: Tensor, negative: Tensor, strength: float = 1.0) -> Tensor:
    """The weights of a logistic regression that tells the sides apart, in the rows' own units, `[layer d]`.

    It detects best and need not steer best. strength: the inverse of the L2 penalty on standardised features. Source: linear
    classifier probes, arXiv 1610.01644; scikit-learn.
    """
    from sklearn.linear_model import LogisticRegression

    def weights(rows: Tensor, labels: Tensor) -> Tensor:
        scale = rows.std(0).clamp(min=1e-12)
        fitted = LogisticRegression(C=strength, max_iter=2000).fit(((rows - rows.mean(0)) / scale).numpy(), labels.numpy())
        return torch.from_numpy(fitted.coef_[0]) / scale  # back from standardised features

    return _dosed(_by_layer(weights, positive, negative), positive, negative)


def lda(positive: Tensor, negative: Tensor) -> Tensor:
    """Fisher's discriminant: the mean difference through the inverse of the pooled covariance, shrunk, `[layer d]`.

    The shrinkage is Ledoit and Wolf's. Source: scikit-learn.
    """
    from sklearn.covariance import LedoitWolf

    def weights(rows: Tensor, labels: Tensor) -> Tensor:
        means = [rows[labels == side].mean(0) for side in (0, 1)]
        pooled = torch.cat([rows[labels == side] - means[side] for side in (0, 1)])
        covariance = torch.from_numpy(LedoitWolf(assume_centered=True).fit(pooled.numpy()).covariance_)
        return torch.linalg.solve(covariance, means[1] - means[0])

    return _dosed(_by_layer(weights, positive, negative), positive, negative)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean_diff": mean_difference, "pca": pca, "pca_centred": pca_centred, "lat": lat, "logistic": logistic, "lda": lda}


def _first_axis(rows: Tensor) -> Tensor:
    """The right-singular vector `[layer d]` of the largest singular value of each layer's `[row d]`."""
    return torch.linalg.svd(rows.transpose(0, 1), full_matrices=False).Vh[:, 0]


def _by_layer(weights: Callable[[Tensor, Tensor], Tensor], positive: Tensor, negative: Tensor) -> Tensor:
    rows = torch.cat([positive, negative]).double()
    labels = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))]).long()
    return torch.stack([weights(rows[:, layer], labels) for layer in range(rows.shape[1])])


def _dosed(axis: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """An axis turned from negative to positive, and made as long as the sides' means are apart along it."""
    unit = axis / axis.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    apart = (unit * (positive.double().mean(0) - negative.double().mean(0))).sum(-1, keepdim=True)
    return (unit * apart).float()
