"""Streams summarised on the device, and branches split into their parts, against their formulas in float64."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from mia_lab.engine import lens
from mia_lab.engine.splitting import split
from mia_lab.errors import UnsupportedError

ROWS, WIDTH, VOCAB, K = 7, 16, 50, 3


@pytest.fixture
def head() -> torch.Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


def summarised(head: torch.Tensor, shifts: list[torch.Tensor | None], tokens: list[int] | None,
               step: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = lambda x: x @ head.T  # noqa: E731
    return lens.read(rows(2), [rows(3), rows(2)], shifts, K, tokens, step, logits, logits, torch.device("cpu"))


def test_a_summary_is_what_it_says(head: torch.Tensor) -> None:
    shift = rows(4, WIDTH, WIDTH + 1)
    values, places = summarised(head, [shift, None], [4, 0], ROWS)
    moved = rows(3).double() + rows(3).double() @ shift[:, :-1].T.double() + shift[:, -1].double()
    said = (rows(2).double() @ head.T.double()).log_softmax(-1)
    for i, stream in enumerate((moved, rows(2).double())):
        expected = (stream @ head.T.double()).log_softmax(-1)
        top = expected.topk(K)
        asked = expected[:, [4, 0]]
        entropy, kl = -(expected.exp() * expected).sum(-1), (said.exp() * (said - expected)).sum(-1)
        wanted = torch.cat([entropy[:, None], kl[:, None], top.values, asked], 1)
        torch.testing.assert_close(values[i].double(), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(places[i, :, :K], top.indices)
        assert places[i, :, K : K + 2].tolist() == [[4, 0]] * ROWS
        assert torch.equal(places[i, :, K + 2 :], (expected[:, None] > asked[..., None]).sum(-1) + 1)
    assert not values[1, :, 1].any()


def test_the_model_s_own_choice_is_followed_by_default(head: torch.Tensor) -> None:
    _, places = summarised(head, [None, None], None, ROWS)
    own = (rows(2) @ head.T).argmax(-1)
    assert torch.equal(places[0, :, K], own) and torch.equal(places[1, :, K], own)
    assert (places[1, :, K + 1] == 1).all() and (places[0, :, K + 1] > 1).any()


def test_rows_at_once_change_nothing(head: torch.Tensor) -> None:
    whole, piecewise = (summarised(head, [None, None], None, step) for step in (ROWS, 2))
    torch.testing.assert_close(piecewise[0], whole[0])
    assert torch.equal(piecewise[1], whole[1])


def test_a_probability_of_zero_counts_nothing(head: torch.Tensor) -> None:
    blocked = lambda x: (x @ head.T).index_fill(1, torch.tensor([5]), float("-inf"))  # noqa: E731
    values, _ = lens.read(rows(2), [rows(2)], [None], K, None, ROWS, blocked, blocked, torch.device("cpu"))
    assert values.isfinite().all() and not values[0, :, 1].any()


class Ended(nn.Module):
    """Something that a norm is taken for, and is not."""

    eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("norm", [None, nn.RMSNorm, nn.LayerNorm])
def test_parts_and_what_no_part_adds_sum_to_the_output(norm: type[nn.Module] | None, biased: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, WIDTH, bias=biased)
    after = None if norm is None else norm(WIDTH, eps=1e-5)
    for weight in () if after is None else after.parameters():
        weight.data.normal_()
    x = rows(5, ROWS, 3, 2)
    expected = linear(x.flatten(1)) if after is None else after(linear(x.flatten(1)))
    found = split(x, linear, after, None, torch.float32)
    assert found.shape == (ROWS, 4, WIDTH)
    torch.testing.assert_close(found.sum(1), expected, rtol=1e-5, atol=1e-5)
    some = split(x, linear, after, [2], torch.float32)
    assert torch.equal(some, found[:, [2, 3]])
    without = x.clone()
    without[:, 1] = 0.0
    if after is None:
        torch.testing.assert_close(linear(x.flatten(1)) - linear(without.flatten(1)), found[:, 1], rtol=1e-5, atol=1e-5)


def test_what_is_no_norm_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Ended is not a norm"):
        split(rows(5, ROWS, 3, 2), nn.Linear(6, WIDTH), Ended(), None, torch.float32)
