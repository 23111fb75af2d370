"""Identities that each edit, fit and readout must satisfy whatever the model: those that need none. Others: parity/test_self_checks.py.

Edits are run as in the engine: through the wire, the tables and the tap's own arithmetic, on rows that come as one tensor or as the
two halves of a stream.
"""
from __future__ import annotations

from itertools import permutations
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

import mia_lab as mia
from mia_lab.analysis.fitting import METHODS, lat, mean_difference, pca
from mia_lab.analysis.judging import auroc
from mia_lab.engine.claims import Claims
from mia_lab.engine.config import Sizes
from mia_lab.engine.router import Router
from mia_lab.engine.tables import Tables
from mia_lab.engine.wire import KEY, Spec, encode
from mia_lab.kernels import program as P
from mia_lab.kernels.bias import bias_reference
from mia_lab.kernels.tap import tap_reference
from mia_lab.points import Point
from mia_lab.running.compile import Model, compile_edits
from mia_lab.selectors import Context

D, N = 64, 40
AT = Point("resid_post", 0)
PLACE = dict(layers=[0], where=mia.everywhere())
KINDS = ("add", "ablate", "clamp", "scale", "replace", "affine", "clampfeature")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tapped(*edits: mia.Edit, h: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The stream `[row d]` after edits, of rows h or of the pair (h, residual)."""
    sizes = Sizes(len(h), requests=1, programs=8, plans=1, terms=64, bank_bytes=64 * 4 * D, captured_tokens=1)
    tables = Tables([D], [False], sizes, torch.float32, torch.device("cpu"))
    router = Router(tables, [(AT.kind, AT.layer)], Claims())
    found = compile_edits(edits, Context(range(5), False), Model(1, {AT: (D,)}, frozenset([AT]), frozenset(), KINDS))
    for sha, rows in found.vectors.items():
        tables.register(sha, rows)
    params = SimpleNamespace(extra_args={KEY: encode("r", Spec(tuple(found.terms), (), tuple(found.gates)))})
    router.admit(SimpleNamespace(finished_req_ids=[], scheduled_new_reqs=[SimpleNamespace(req_id="r", sampling_params=params)]))
    router.route(["r"], np.array([len(h)]), np.array([0]), torch.zeros(len(h), dtype=torch.int64))
    out = h.clone()
    tap_reference(out, residual, *tables.of_site(0))
    return out if residual is None else out + residual


def correlated(k: int = 3) -> torch.Tensor:
    """Unit directions `[k d]` whose cosines to each other are near 0.9."""
    return normalize(draw(1, D, seed=1) + 0.33 * draw(k, D, seed=2), dim=-1)


def off(found: torch.Tensor, wanted: torch.Tensor | float, h: torch.Tensor) -> float:
    """The largest difference, over the mean length of rows."""
    return float((found.double() - wanted).abs().max() / h.norm(dim=-1).mean())


H = 3 * draw(N, D)
U, W = (normalize(draw(2, D, seed=5), dim=-1)[i] for i in range(2))
Q = torch.linalg.qr(draw(D, 3, seed=6))[0].T.contiguous()
READERS = {"ablate": mia.Ablate(U, **PLACE), "ablate a span": mia.Ablate(list(correlated()), **PLACE), "clamp": mia.Clamp(U, 2.0, **PLACE),
           "clamp together": mia.Clamp(list(correlated()), [1.0, -1.0, 2.0], **PLACE), "range": mia.Clamp(U, low=-1.0, high=0.5, **PLACE),
           "scale": mia.Scale(0.3, **PLACE), "replace": mia.Replace(W, blend=0.4, **PLACE),
           "norm kept": mia.Add(W, 3.0, keep_norm=True, **PLACE), "affine": mia.Affine(Q, Q.flip(0), torch.ones(3), **PLACE),
           "feature": mia.ClampFeature(U, W, 2.0, bias=0.1, threshold=0.2, **PLACE)}


@pytest.mark.parametrize("name", READERS)
def test_e4_a_stream_in_two_halves_is_edited_as_its_sum(name: str) -> None:
    residual = 2 * draw(N, D, seed=9)
    whole, halves = tapped(READERS[name], h=H + residual), tapped(READERS[name], h=H, residual=residual)
    assert off(halves, whole.double(), H) < 1e-6
    assert off(whole, (H + residual).double(), H) > 1e-2


def test_e5_ablation_leaves_nothing_along_its_direction_and_keeps_the_rest() -> None:
    once = tapped(READERS["ablate"], h=H)
    assert off(once @ U, 0.0, H) < 1e-6
    assert off(tapped(READERS["ablate"], h=once), once.double(), H) < 1e-6
    assert off((once.double().square().sum(-1) + (H.double() @ U.double()).square()).sqrt(), H.double().norm(dim=-1), H) < 1e-6


def test_e5_a_clamp_hits_its_target_and_moves_nothing_else_whatever_the_direction_s_length() -> None:
    for length in (1.0, 7.0):
        found = tapped(mia.Clamp(length * U, 2.5, **PLACE), h=H)
        assert off(found @ U, 2.5, H) < 1e-6
        assert off(found - torch.outer(found @ U, U), (H - torch.outer(H @ U, U)).double(), H) < 1e-6
    assert off(tapped(mia.Clamp(U, float(H[0] @ U), **PLACE), h=H[:1]), H[:1].double(), H) < 1e-6
    # The formula with a direction of length s, as some tools write it, lands at p + s (tau - s p).
    s, p = 7.0, H.double() @ U.double()
    loose = mia.Affine((s * U)[None], (-s * U)[None], torch.tensor([-2.5]), **PLACE)
    assert off(tapped(loose, h=H) @ U, p + s * (2.5 - s * p), 50 * H) < 1e-6


def test_e6_one_affine_map_is_add_ablate_clamp_and_nothing() -> None:
    b = torch.tensor([1.0, -2.0, 0.5])
    loreft = lambda w, bias=None: tapped(mia.Affine.loreft(Q, w, bias, **PLACE), h=H)  # noqa: E731
    assert off(loreft(Q), H.double(), H) < 1e-6
    assert off(loreft(torch.zeros_like(Q)), tapped(mia.Ablate(list(Q), **PLACE), h=H).double(), H) < 1e-6
    assert off(loreft(torch.zeros_like(Q), b), tapped(mia.Clamp(list(Q), b.tolist(), **PLACE), h=H).double(), H) < 1e-6
    assert off(loreft(Q, b), tapped(mia.Add(b @ Q, 1.0, **PLACE), h=H).double(), H) < 1e-6
    w = draw(3, D, seed=8)
    found = loreft(w, b)
    assert off(found @ Q.T, (H @ w.T + b).double(), H) < 2e-6
    assert off(found - found @ Q.T @ Q, (H - H @ Q.T @ Q).double(), H) < 2e-6


def test_e7_correlated_directions_are_edited_together_whatever_their_order() -> None:
    v, targets = correlated(), [1.0, -1.0, 2.0]
    assert cosine_similarity(v[0], v[1], dim=0) > 0.8
    clamped, cleaned = tapped(READERS["clamp together"], h=H), tapped(READERS["ablate a span"], h=H)
    assert off(clamped @ v.T, torch.tensor(targets).double(), H) < 2e-6 and off(cleaned @ v.T, 0.0, H) < 2e-6
    for order in permutations(range(3)):
        some, values = [v[i] for i in order], [targets[i] for i in order]
        assert off(tapped(mia.Clamp(some, values, **PLACE), h=H), clamped.double(), H) < 2e-6
        assert off(tapped(mia.Ablate(some, **PLACE), h=H), cleaned.double(), H) < 2e-6
    one_by_one = tapped(*(mia.Ablate(u, **PLACE) for u in v), h=H)
    assert off(one_by_one @ v[0], 0.0, H) > 1e-2  # the trap that a joint edit avoids


def test_d1_a_planted_direction_is_found_and_centring_the_differences_would_lose_it() -> None:
    truth, nuisance = torch.linalg.qr(draw(D, 2, seed=3))[0].T
    noise = lambda seed: 0.3 * draw(400, 1, D, seed=seed) + 1.5 * draw(400, 1, 1, seed=seed + 1) * nuisance  # noqa: E731
    common = 3 * draw(400, 1, D, seed=20)
    positive, negative = common + 2 * truth + noise(30), common - 2 * truth + noise(40)
    for method in (mean_difference, pca, lat):
        assert cosine_similarity(method(positive, negative)[0], truth, dim=0) > 0.99, method.__name__
    differences = (positive - negative)[:, 0]
    centred = torch.linalg.svd(differences - differences.mean(0), full_matrices=False).Vh[0]
    assert cosine_similarity(centred, truth, dim=0).abs() < 0.1 < 0.9 < cosine_similarity(centred, nuisance, dim=0).abs()


def test_d2_probes_have_the_weights_of_the_rows_themselves_and_auroc_is_what_gaussians_have() -> None:
    from sklearn.linear_model import LogisticRegression

    scales = torch.logspace(-2, 2, 16)
    a, b = (draw(300, 16, seed=seed) * scales + sign * 0.3 * scales for seed, sign in ((1, 1), (2, -1)))
    rows = torch.cat([a, b]).double()
    standard = ((rows - rows.mean(0)) / rows.std(0)).numpy()
    logits = torch.from_numpy(standard @ LogisticRegression(max_iter=2000).fit(standard, [1] * 300 + [0] * 300).coef_[0])
    found = rows @ METHODS["logistic"](a[:, None], b[:, None])[0].double()
    scale = (logits - logits.mean()).norm() / (found - found.mean()).norm()  # a direction is as long as its sides are apart
    assert ((found - found.mean()) * scale - (logits - logits.mean())).abs().max() < 1e-5 * logits.std()
    for d in (0.5, 1.5, 2.07):
        positive, negative = draw(40000, seed=7) + d, draw(40000, seed=8)
        assert float(auroc(positive, negative)) == pytest.approx(NormalDist().cdf(d / 2**0.5), abs=0.01)


# -- attention and monitors -------------------------------------------------------------------------------------------


def attention(coeff: float, exact: bool = False, span: tuple[int, int] = (3, 6), n: int = 12) -> torch.Tensor:
    """What each head and row of one request pays each key `[row head key]` under a bias of `coeff` nats on a span, or a share."""
    rows = torch.full((n, P.ROW_COLUMNS), -1, dtype=torch.int32)
    rows[:, P.PROGRAM], rows[:, P.HISTORY], rows[:, P.SLOT], rows[:, P.POSITION] = 0, 0, 0, torch.arange(n)
    words, numbers = torch.tensor([[P.BIAS, -1, -1, -1, *span, 0, 0]], dtype=torch.int32), torch.zeros(1, P.COLUMNS)
    numbers[0, P.COEFF], numbers[0, P.SLOPE] = coeff, float(exact)
    q, k, out = draw(n, 4, 8, seed=1), draw(n, 2, 8, seed=2), torch.zeros(n, 4, n)
    v = torch.eye(n)[:, None].expand(n, 2, n).contiguous()  # each key's value is its place, so that the output is the pattern
    bias_reference(out, q, k, v, rows, torch.tensor([[0, 1, -1, 0]], dtype=torch.int32), words, numbers, torch.zeros(n, 2),
                   torch.zeros(1, 2, dtype=torch.int32), torch.zeros(n, 2, 8), torch.zeros(n, 2, n), 0.5, 0.0, 0, None)
    return out


def test_a2_what_a_bias_on_a_span_makes_of_its_share() -> None:
    """Spotlight's bias, ln(alpha / p), misses its target; the exact one of each row reaches it; PASTA's scaling is a bias too."""
    span = torch.zeros(12)
    span[3:6] = 1
    weights = attention(0.0).double()
    torch.testing.assert_close(weights.sum(-1), torch.ones(12, 4).double(), rtol=0, atol=1e-6)
    p = (weights * span).sum(-1)
    for alpha in (0.6, 0.9):
        b = float(np.log(alpha) - p[3:].mean().log())
        reached = (attention(b).double() * span).sum(-1)
        torch.testing.assert_close(reached, p * np.exp(b) / (p * np.exp(b) + 1 - p), rtol=0, atol=1e-6)
        row, head = 11, 2
        one = float((attention(float(np.log(alpha) - p[row, head].log())) * span)[row, head].sum())
        assert one == pytest.approx(alpha / (1 + alpha - float(p[row, head])), abs=1e-6)
        assert one < min(alpha, 1 / (2 - float(p[row, head])))  # its target, and what it can reach at most
        exact = (attention(alpha, exact=True) * span).sum(-1)
        raised = (p > 0) & (p < alpha)
        assert raised.any() and not raised[:3].any()  # rows before the span see nothing of it
        assert (exact[raised] - alpha).abs().max() < 1e-6
        torch.testing.assert_close(exact[~raised].double(), p[~raised], rtol=0, atol=1e-6)
    outside = torch.where(span > 0, weights, 0.01 * weights)
    torch.testing.assert_close(attention(-np.log(0.01))[3:].double(), (outside / outside.sum(-1, keepdim=True))[3:], rtol=0, atol=1e-6)
    torch.testing.assert_close(attention(2.0, span=(0, 12)).double(), weights, rtol=0, atol=1e-6)


def test_r4_a_condition_score_is_even_and_for_small_states_the_size_of_the_cosine() -> None:
    """CAST's score (arXiv:2409.05907), and the signed cosine that a Probe reads instead."""
    k, x = draw(D, seed=1).double(), draw(D, seed=2).double()
    probe = mia.Probe(k, 0, cosine=True)

    def cast(x: torch.Tensor) -> torch.Tensor:
        q = torch.tanh(k * (k @ x) / (k @ k))
        return x @ q / (x.norm() * q.norm())

    signed = x @ probe.direction.double() / x.norm()
    assert float(cast(1e-3 * x)) == pytest.approx(abs(float(signed)), abs=5e-6)
    assert float(cast(x)) == pytest.approx(float(cast(-x)), abs=1e-12)
    assert float((-x) @ probe.direction.double() / x.norm()) == -float(signed)
    assert float(cast(1e4 * k)) < 0.9  # saturated: no longer the cosine, which is 1
