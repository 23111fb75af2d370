"""Attention heads: each image holds the weights, the table their numbers, and many heads still fit."""
from __future__ import annotations

import base64
import io
import re

import made_up
import numpy as np
import pytest
import torch
from PIL import Image
from show.golden import check
from show.markup import parsed

from mia_lab.show import heads, html, image, text
from mia_lab.show.parts import Heads

PART = Heads(("one", "<two>"), (((255, 0), (51, 204)), ((255, 0), (26, 229))), ("0 <s>", "1 ·a"), ("0 <s>", "1 ·a"), "two & heads")
PART = Heads(PART.names, tuple(tuple(map(bytes, head)) for head in PART.weights), PART.queries, PART.keys, PART.caption)


def pixels(uri: str) -> np.ndarray:
    """RGBA bytes `[row column 4]` of a data URI, by another decoder."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def drawn(markup: str) -> list[np.ndarray]:
    return [pixels(uri) for uri in re.findall(r"src='([^']+)'", markup)]


def test_heads_look_as_they_did() -> None:
    check("heads.html", html.render(PART))
    check("heads.txt", text.render(PART))
    check("attention.html", made_up.attention()._repr_html_())
    check("attention.txt", repr(made_up.attention()))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 3), (128, 128)])
def test_an_image_is_read_by_others_as_the_weights_in_one_colour(shape: tuple[int, int]) -> None:
    weights = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = pixels(image.data_uri(weights))
    assert found.shape == (*shape, 4) and (found[..., 3] == weights).all() and (found[..., :3] == (230, 126, 34)).all()


@pytest.mark.parametrize("levels", [16, 64, 256])
def test_rounding_keeps_the_ends_and_moves_nothing_by_more_than_half_a_step(levels: int) -> None:
    every = np.arange(256, dtype=np.uint8)
    found = image.rounded(every, levels)
    assert len(set(found)) == levels and found[0] == 0 and found[-1] == 255
    assert np.abs(found.astype(int) - every).max() <= 0.5 * 255 / (levels - 1) + 0.5


def test_the_images_are_the_weights_of_the_view() -> None:
    view = made_up.attention()
    found = torch.tensor(np.stack(drawn(view._repr_html_()))[..., 3] / 255)
    assert (found - view.weights.flatten(0, 1)).abs().max() <= 0.5 / 255 + 1e-6


def test_text_and_html_tell_the_same_numbers() -> None:
    markup = html.render(PART)
    for cells in (("1 ·a → 1 ·a", "0.80", "0.60"), ("1 ·a → 1 ·a", "0.90", "0.55")):
        assert all(f">{cell}</td>" in markup and cell in text.render(PART) for cell in cells)


def test_names_say_what_a_head_shares_and_sees() -> None:
    assert made_up.attention((4, 5), 4).names == (
        "layer 4 head 0, kv 0, window 4", "layer 4 head 1, kv 0, window 4", "layer 4 head 2, kv 1, window 4",
        "layer 4 head 3, kv 1, window 4", "layer 5 head 0, kv 0", "layer 5 head 1, kv 0", "layer 5 head 2, kv 1", "layer 5 head 3, kv 1")


def test_a_view_is_complete_without_its_script() -> None:
    markup = made_up.attention()._repr_html_().partition("<script>")[0]
    assert markup.count("<img") == markup.count("<figcaption>") == 4 and markup.count("<th scope='row'") == 4
    assert "&lt;b&gt;" in markup and "<b>" not in markup and "⏎" in markup
    parsed(made_up.attention(at=[3, 8])._repr_html_())


def test_data_has_every_weight_that_a_query_can_see() -> None:
    view = made_up.attention(at=[-1 + 9, 2])
    assert len(view.data) == 2 * 2 * (9 + 3)
    row = next(r for r in view.data if (r["layer"], r["head"], r["query"], r["key"]) == (5, 1, 2, 1))
    assert row["weight"] == float(view.weights[1, 1, 1, 1]) and row["query_token"] == " cat" and row["key_token"] == "The"


def test_the_figure_is_the_first_head() -> None:
    view = made_up.attention()
    assert np.array_equal(np.asarray(view.figure.data[0].z, float), view.weights[0, 0].numpy())


@pytest.mark.parametrize(("heads", "n", "levels"), [(32, 100, 256), (32, 200, 64), (32, 300, 16)])
def test_32_long_heads_fit(heads: int, n: int, levels: int) -> None:
    markup = made_up.attention((5,), heads, n)._repr_html_()
    assert markup.count("<img") == heads and len(markup) < 300_000
    assert f"data-levels='{levels}'" in markup and (f"rounded to 1/{levels - 1}" in markup) == (levels < 256)


def test_what_does_not_fit_is_left_out_and_said() -> None:
    markup = made_up.attention(range(32), 32, 64)._repr_html_()
    n = markup.count("<img")
    assert 32 < n < 1024 and f"Of 1024 heads the first {n} are drawn" in markup and len(markup) < 300_000
    assert "and 1012 heads more" in repr(made_up.attention(range(32), 32, 8))
    assert "are drawn" not in heads.as_html(PART)


def test_the_longest_prompt_fits() -> None:
    markup = made_up.attention((5,), 2, 4096, at=[4095])._repr_html_()
    assert markup.count("<img") == 2 and len(markup) < 300_000


def test_the_figure_of_a_long_prompt_is_small_and_names_what_it_leaves_out() -> None:
    figure = made_up.attention((5,), 1, 400).figure
    assert len(str(figure._repr_mimebundle_()["application/vnd.plotly.v1+json"])) < 300_000
    assert "of 400 columns, from" in figure._repr_html_() and figure.data[0].x[-1].startswith("399 ")


def test_a_head_that_rests_on_the_first_token_alone_has_no_strongest_pair() -> None:
    alone = Heads(("one",), ((b"\xff\x00",),), ("0 <s>",), ("0 <s>", "1 a"))
    assert text.render(alone).splitlines()[-1].split() == ["one", "none", "–", "1.00"] and "<td" in html.render(alone)
