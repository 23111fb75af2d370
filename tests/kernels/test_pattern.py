"""Attention rebuilt from queries and keys, against a loop over rows, heads and keys."""
from __future__ import annotations

import math

import pytest
import torch

from mia_lab.kernels.pattern import attention_pattern, attention_scores

KEYS, KV_HEADS, E = 9, 2, 4
ROWS = [0, 3, 8, 5]
HIDDEN = float("-inf")
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01])
SINKS = torch.tensor([0.0, -1.0, 2.0, 5.0, -20.0, 1.0])
VARIANTS = [dict(), dict(softcap=1.5), dict(window=1), dict(window=3), dict(window=100), dict(slopes=SLOPES),
            dict(softcap=2.0, window=4, slopes=SLOPES)]


def draw(heads: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(len(ROWS), heads, E, generator=g).to(dtype), torch.randn(KEYS, KV_HEADS, E, generator=g).to(dtype)


def score(q: torch.Tensor, k: torch.Tensor, distance: int, scale: float, softcap: float = 0.0, window: int | None = None,
          slope: float = 0.0) -> float:
    """One row's score of one key, for one head."""
    if distance < 0 or (window is not None and distance >= window):
        return HIDDEN
    found = scale * sum(float(a) * float(b) for a, b in zip(q, k))
    if softcap:
        found = softcap * math.tanh(found / softcap)
    return found - slope * distance


def loop(q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor | None = None, **options: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    return torch.tensor([[[score(q[i, head], k[key, head // group], row - key, 0.5, slope=0.0 if slopes is None else float(slopes[head]),
                                 **options) for key in range(len(k))] for head in range(q.shape[1])] for i, row in enumerate(ROWS)])


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.zeros_like(scores)
    for i, j in torch.cartesian_prod(torch.arange(scores.shape[0]), torch.arange(scores.shape[1])):
        weights = [math.exp(float(s)) for s in scores[i, j]]
        total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[j])))
        out[i, j] = torch.tensor([w / total for w in weights])
    return out


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_scores_are_what_a_loop_says(options: dict, heads: int) -> None:
    q, k = draw(heads)
    options = options | ({"slopes": options["slopes"][:heads]} if "slopes" in options else {})
    found = attention_scores(q, k, torch.tensor(ROWS), scale=0.5, **options)
    assert (found.shape, found.dtype) == ((len(ROWS), heads, KEYS), torch.float32)
    torch.testing.assert_close(found, loop(q, k, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_pattern_is_the_softmax_of_what_a_row_sees(options: dict, sinks: torch.Tensor | None) -> None:
    q, k = draw(6, seed=1)
    found = attention_pattern(attention_scores(q, k, torch.tensor(ROWS), scale=0.5, **options), sinks)
    expected = softmax(loop(q, k, **options), sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found == 0, expected == 0)
    total = found.sum(-1)
    assert sinks is None or (total[:, SINKS >= -1] < 1).all()
    torch.testing.assert_close(total, torch.ones_like(total) if sinks is None else expected.sum(-1))


def test_a_row_sees_keys_up_to_itself_and_within_its_window() -> None:
    q, k = draw(6)
    for window, first in ((None, [0, 0, 0, 0]), (3, [0, 1, 6, 3]), (1, ROWS)):
        seen = attention_scores(q, k, torch.tensor(ROWS), scale=0.5, window=window) > HIDDEN
        for i, row in enumerate(ROWS):
            assert seen[i, 0].nonzero().flatten().tolist() == list(range(first[i], row + 1))


def test_heads_share_a_key_head_in_runs() -> None:
    q, k = torch.ones(len(ROWS), 6, E), torch.ones(KEYS, KV_HEADS, E) * torch.tensor([1.0, 2.0])[:, None]
    found = attention_scores(q, k, torch.tensor(ROWS), scale=1.0)
    assert found[2, :, 0].tolist() == [4.0, 4.0, 4.0, 8.0, 8.0, 8.0]


def test_sixteen_bit_values_are_multiplied_in_float32() -> None:
    q, k = draw(6, dtype=torch.bfloat16)
    found = attention_scores(q, k, torch.tensor(ROWS), scale=0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loop(q, k), rtol=1e-5, atol=1e-6)
