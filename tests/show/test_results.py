"""Results as they are shown: looked at once, kept as golden files, and held to their own numbers."""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import made_analyses as made
import pytest
import torch
from show.golden import check
from show.markup import LIMIT, parsed

import mia_lab as mia
from mia_lab.bench import report
from mia_lab.errors import MiaError
from mia_lab.lazy import LazyTensor

RESULTS: dict[str, Callable[[], Any]] = {
    "lens": made.lens, "lens_of_one": lambda: made.lens((3,)), "patch_grid": made.grid,
    "patch_grid_heads": lambda: made.grid(2, (0, 3), None), "patch_grid_layers": lambda: made.grid(3, None, None),
    "cosines": made.cosines, "attribution": made.attribution, "attribution_heads": lambda: made.attribution(2, 2),
    "points": made.points, "cache": made.cache, "prompt_view": lambda: made.cache()[1], "overhead": made.overhead, "card": made.card}


@pytest.mark.parametrize("name", RESULTS)
def test_it_looks_as_it_did(name: str) -> None:
    found = RESULTS[name]()
    parsed(found._repr_html_())
    check(f"{name}.html", found._repr_html_())
    check(f"{name}.txt", repr(found))


@pytest.mark.parametrize("big", [
    lambda: made.lens((128,), ("embed", *range(32)), 5), lambda: made.lens((128,) * 9, tuple(range(32)), 5),
    lambda: made.grid(32, None, 128), lambda: made.grid(32, tuple(range(16)), 64), lambda: made.cosines(40),
    lambda: made.attribution(80, 64)])
def test_a_large_result_is_a_small_view(big: Callable[[], Any]) -> None:
    found = big()
    assert "left out of this view" in parsed(found._repr_html_()).text
    assert len(repr(found)) < LIMIT / 5


# -- the lens ---------------------------------------------------------------------------------------------------------


def test_a_cell_of_a_lens_is_its_row_of_data() -> None:
    found = made.lens()
    rows = iter(parsed(found._repr_html_()).rows)
    for prompt in range(2):
        n = len(found.tokens[prompt])
        assert [cell[2] for cell in next(rows)][1:] == [f"{j} {made.TEXTS[j]}".replace(" " * 2, " ·") for j in range(n)]
        for layer in found.layers[::-1]:
            label, *cells = next(rows)
            assert label[2] == str(layer) and len(cells) == n
            for j, (_, attrs, _) in enumerate(cells):
                (data,) = (row for row in found.data if (row["prompt"], row["position"], row["layer"]) == (prompt, j, layer))
                told = attrs["title"].splitlines()
                assert told[-1] == f"KL {data['kl']:.2f}, entropy {data['entropy']:.2f}"
                assert [line.rsplit(" ", 1)[1] for line in told[:-1]] == [f"{p:.2f}" for p in data["top_probabilities"]]
                assert f",{round(0.6 * data['top_probabilities'][0], 2):g})" in attrs["style"]


def test_a_lens_in_text_is_of_the_first_prompt_and_says_how_many_there_are() -> None:
    text = repr(made.lens((128,) * 3, ("embed", *range(32))))
    assert "on 3 prompts, layers embed to 31" in text and "prompt 0, 128 positions" in text and "prompt 1" not in text
    assert len(text.splitlines()) < 20 and "KL at the last position, by layer, in nats: 0.1 at 31" in text


# -- grids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "values"), [(made.grid(), made.grid().scores), (made.cosines(), made.cosines().values)])
def test_a_grid_shows_its_values(found: Any, values: torch.Tensor) -> None:
    rows = parsed(found._repr_html_()).rows[1:]
    for row, expected in zip(rows, values.tolist(), strict=True):
        for (_, attrs, cell), value in zip(row[1:], expected, strict=True):
            assert cell == ("–" if math.isnan(value) else f"{value:.2f}".replace("-0.00", "0.00"))
            assert ("230,126,34" in attrs.get("style", "")) == (value >= 0.01)


def test_an_attribution_by_layer_holds_every_part_of_a_layer_once() -> None:
    found = made.attribution(3, 2)
    rows = {row[0][2]: row[1:] for row in parsed(found._repr_html_()).rows if row and row[0][2] in ("0", "1", "2")}
    parts = {row["component"]: row["contribution"] for row in found.data}
    assert list(rows) == ["2", "1", "0"]
    assert [cell[2] for cell in rows["1"]] == [f"{parts[name]:.2f}" for name in ("L1H0", "L1H1", "1_mlp_out")]
    assert rows["2"][2][2] == "–"


# -- caches -----------------------------------------------------------------------------------------------------------


def test_a_cache_shows_itself_without_fetching() -> None:
    source = made.Rows()
    cache = made.cache(source)
    html = cache._repr_html_() + cache[0]._repr_html_() + cache["resid_post", 0]._repr_html_()
    assert source.asked == 0 and cache.nbytes_fetched == 0
    assert "[2 5 4]" in html and "0 of 2" in html and "&lt;lazy resid_post.0" in html
    cache["resid_post", 1].sum()
    assert "1 of 2" in cache._repr_html_() and source.asked == 1
    assert "[5 4]" in cache[0]._repr_html_() and "4 of them of the prompt and 1 generated" in cache[0]._repr_html_()


def test_a_lazy_tensor_is_a_line() -> None:
    def load() -> torch.Tensor:
        raise AssertionError("it was fetched")

    html = LazyTensor(load, (2, 3), torch.float32, "<x>")._repr_html_()
    assert html == "<code>&lt;lazy &lt;x&gt; [2, 3] float32, 24 B, not fetched&gt;</code>"


# -- cards ------------------------------------------------------------------------------------------------------------


def test_an_overhead_card_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    found = made.overhead()
    report.save(tmp_path / "o.json", found.machine, found.facts, found.rows, found.peers)
    again = mia.OverheadCard.load(tmp_path / "o.json")
    assert again.rows == found.rows and again.peers == found.peers and again.facts == found.facts and again.machine == found.machine
    assert again.data[2]["tpot_ms_ratio"] == 1.2 and again.data[2]["case"] == "steer every layer" and again.data[2]["batch"] == 32
    assert again._repr_html_() == found._repr_html_()


def test_an_overhead_card_shows_what_was_not_measured_as_a_gap() -> None:
    rows = parsed(made.overhead()._repr_html_()).rows
    assert [cell[2] for cell in rows[0]] == ["case ↓ batch →", "1", "32"]
    assert [[cell[2] for cell in row] for row in rows[1:3]] == [["idle", "0.40", "-1.00"], ["steer every layer", "–", "20.00"]]
    assert "time per token +20.00 [+19.00, +22.00] %" in rows[2][2][1]["title"] and rows[2][1][1]["title"] == "not measured"


@pytest.mark.parametrize("text", ["[]", "{", "{}", json.dumps({"machine": {}, "facts": [], "rows": [{"model": "x"}]})])
def test_what_is_no_overhead_card_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "o.json").write_text(text)
    with pytest.raises(MiaError, match=r"is no overhead card.*mia-lab bench MODEL"):
        mia.OverheadCard.load(tmp_path / "o.json")


def test_every_measured_card_that_is_shipped_shows() -> None:
    for path in sorted(Path(report.__file__).with_name("measured").glob("*.json")):
        found = mia.OverheadCard.load(path)
        shown = parsed(found._repr_html_()).text
        assert all(row.case in shown for row in found.rows)


def test_a_support_card_counts_failures_and_is_iterated() -> None:
    found = made.card()
    assert not found.works and len(found) == 3 and [line.verdict for line in found] == ["ok", "absent", "FAILED"]
    assert found.data[2] == asdict(found.lines[2]) and "does not all work" in repr(found)
    assert re.search(r"^\| feature \| gate \| FAILED \| a & b \|$", found.markdown, re.MULTILINE)
