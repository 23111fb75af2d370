"""What a PatchGrid says of its numbers: scores, pairs, labels, gaps."""
from __future__ import annotations

import pytest
import torch

import mia_lab as mia
from mia_lab.errors import EditError

RAW = torch.tensor([[[0.0, 1.0, 4.0], [2.0, 0.0, 0.0]], [[1.0, 1.0, 1.0], [3.0, 1.0, 2.0]]]).double()  # [pair layer position]
CLEAN, CORRUPT = torch.tensor([4.0, 3.0]).double(), torch.tensor([0.0, 1.0]).double()
LABELS = ("0 'a'", "1 'b'|'c'", "-1 'd'")


def grid(raw: torch.Tensor = RAW, **rest: object) -> mia.PatchGrid:
    return mia.PatchGrid(**dict(point="resid_post", layers=(0, 5), heads=None, positions=LABELS, raw=raw, clean=CLEAN, corrupt=CORRUPT,
                                metric="logit 'x' - logit 'y'") | rest)


def test_scores_are_the_quotient_of_means_and_pairs_their_own() -> None:
    assert grid().per_pair.tolist() == [[[0.0, 0.25, 1.0], [0.5, 0.0, 0.0]], [[0.0, 0.0, 0.0], [1.0, 0.0, 0.5]]]
    torch.testing.assert_close(grid().scores, torch.tensor([[0, 1 / 6, 4 / 6], [4 / 6, 0, 1 / 6]]))
    back = grid(direction="noise")
    torch.testing.assert_close(back.scores, 1 - grid().scores)


def test_rows_are_labelled_and_the_largest_come_first() -> None:
    rows = grid().data
    assert len(rows) == RAW.numel()
    assert rows[2] == {"pair": 0, "layer": 0, "position": "-1 'd'", "metric": 4.0, "score": 1.0}
    assert [(row["layer"], row["position"]) for row in grid().top(2)] == [(0, "-1 'd'"), (5, "0 'a'")]
    heads = grid(RAW, heads=(1, 2, 3), positions=None)
    assert heads.data[1] == {"pair": 0, "layer": 0, "head": 2, "metric": 1.0, "score": 0.25}
    both = grid(RAW[..., None].expand(-1, -1, -1, 2), heads=(1, 2, 3), positions=LABELS[:2])
    assert "L5 H3" in repr(both) and both.data[-1]["head"] == 3


def test_a_gap_is_shown_and_not_counted() -> None:
    raw = RAW.clone()
    raw[0, 1, 0] = float("nan")
    part = grid(raw)
    assert not part.complete and part.scores[1, 0].isnan() and "1 of 12 cells are NaN" in repr(part)
    assert grid().complete and part.top(1)[0]["position"] == "-1 'd'"
    assert part.agreement(grid())["largest_difference"] == 0


def test_agreement_is_of_the_same_cells() -> None:
    found = grid().agreement(grid(RAW * 2))
    assert found["correlation"] == pytest.approx(0.9, abs=0.1) and found["largest_difference"] > 0.5
    with pytest.raises(EditError, match="differ in layers"):
        grid().agreement(grid(layers=(0, 1)))


def test_views_hold_every_cell() -> None:
    html = grid()._repr_html_()
    assert html.count("<td") == 2 * 3 and html.count("<th scope='row'") == 2 and "0.67" in html and "http" not in html and "&#x27;" in html
    figure = grid().figure
    assert figure.data[0].z[0][2] == pytest.approx(2 / 3) and list(figure.data[0].y) == ["L0", "L5"]
    one = grid(RAW[..., 0], positions=None)
    assert "score" in repr(one) and "0.67" in repr(one)
