"""Heat: the same cells in HTML and in text, under the right labels, coloured by sign and size, small enough."""
from __future__ import annotations

import math
import random
import re

import pytest
from show.golden import check
from show.markup import parsed

from mia_lab.show import heat, html, shade, text
from mia_lab.show.parts import Heat

NAN = math.nan
SIGNED = Heat(("L0", "L17"), ("0 <bos>", "1 ' a'|' b'", "2 \n"), ((0.25, NAN, -1.0), (2.0, -0.001, 0.5)), "patching <i>")
NOTED = Heat(("1", "0"), ("0 The", "1  cat"), ((0.9, 0.5), (NAN, 0.0)), "lens", ((" sat", "<b>"), ("\n", "a rather long token")),
             ((" sat 0.90\n'on' 0.05", "<b> & 0.50"), ("", "a rather long token 0.00")), 0.0, 1.0, ("layer", "after"), "probability")


def made(rows: int, columns: int) -> Heat:
    """A large grid whose every cell says where it is."""
    draw = random.Random(0)
    value = tuple(tuple(draw.random() for _ in range(columns)) for _ in range(rows))
    told = tuple(tuple(f"{i},{j}" for j in range(columns)) for i in range(rows))
    notes = tuple(tuple(f"{i},{j} 0.52\n<other> 0.11\nthird 0.05\nKL 0.31, entropy 1.25" for j in range(columns)) for i in range(rows))
    return Heat(tuple(f"r{i}" for i in range(rows)), tuple(f"c{j}" for j in range(columns)), value, "large", told, notes, 0.0, 1.0)


def cells(part: Heat) -> list[list[str]]:
    return [[cell for _, _, cell in row] for row in parsed(html.render(part)).rows]


@pytest.mark.parametrize(("name", "part"), [("heat_signed", SIGNED), ("heat_noted", NOTED)])
def test_html_and_text_are_as_they_were_looked_at(name: str, part: Heat) -> None:
    check(f"{name}.html", heat.as_html(part))
    check(f"{name}.txt", text.render(part))


def test_text_holds_the_cells_of_the_table() -> None:
    lines = [re.split(r"\s{2,}", line) for line in text.render(SIGNED).splitlines()[1:]]
    assert lines == cells(SIGNED)
    lines = [re.split(r"\s{2,}", line) for line in text.render(NOTED).splitlines()[1:]]
    assert lines[1:] == [["1", "·sat 0.90", "<b> 0.50"], ["0", "⏎", "a rather long… 0.00"]]
    assert [[re.sub(r"(?<=.) [\d.]+$", "", said) for said in line] for line in lines[1:]] == cells(NOTED)[1:]


def test_a_gap_is_neither_a_number_nor_coloured() -> None:
    rows = parsed(html.render(SIGNED)).rows
    assert rows[1][2] == ("td", {}, shade.NONE)
    assert "no value" in html.render(SIGNED) and "no value" not in html.render(made(2, 2))
    assert rows[2][2] == ("td", {}, "0.00")  # not -0.00, and no colour either


def test_a_note_stands_where_it_belongs_and_is_escaped() -> None:
    rows = parsed(html.render(NOTED)).rows
    assert rows[1][1][1]["title"] == " sat 0.90\n'on' 0.05"
    assert rows[2][2][1]["title"] == "a rather long token 0.00"
    assert "title" not in rows[2][1][1]
    bare = Heat(("r",), ("c",), ((0.5,),), texts=(("a very long text of a cell",),))
    assert parsed(html.render(bare)).rows[1][1][1]["title"] == "a very long text of a cell 0.50"


@pytest.mark.parametrize(("value", "low", "high", "expected"), [
    (1.0, -1.0, 1.0, "rgba(230,126,34,0.6)"), (-0.5, -1.0, 1.0, "rgba(41,128,185,0.3)"), (9.0, -1.0, 1.0, "rgba(230,126,34,0.6)"),
    (0.5, 0.0, 1.0, "rgba(230,126,34,0.3)"), (3.0, 2.0, 4.0, "rgba(230,126,34,0.3)"), (2.0, -4.0, 1.0, "rgba(230,126,34,0.3)"),
    (-math.inf, -1.0, 1.0, "rgba(41,128,185,0.6)")])
def test_colour_is_sign_and_size(value: float, low: float, high: float, expected: str) -> None:
    assert shade.background(value, low, high) == f"background:{expected}"


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, -1.0, 1.0), (NAN, -1.0, 1.0), (2.0, 2.0, 4.0), (0.0, 0.0, 0.0)])
def test_nothing_is_not_coloured(value: float, low: float, high: float) -> None:
    assert shade.background(value, low, high) == ""


def luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 3294.6 if c <= 10.3 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("value", [1.0, -1.0])
@pytest.mark.parametrize(("page", "ink"), [((255, 255, 255), (33, 33, 33)), ((17, 17, 17), (224, 224, 224))])
def test_text_stays_readable_on_full_colour(value: float, page: tuple, ink: tuple) -> None:
    *hue, alpha = map(float, re.findall(r"[\d.]+", shade.background(value, -1, 1)))
    ground = [alpha * h + (1 - alpha) * p for h, p in zip(hue, page)]
    light, dark = sorted((luminance(tuple(ground)), luminance(ink)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (1024, 4), (300, 300), (2, 9000)])
def test_a_large_grid_fits_and_says_what_is_left_out(rows: int, columns: int) -> None:
    part = made(rows, columns)
    found = parsed(html.render(part)).rows
    places = [[tuple(map(int, cell[2].split(","))) for cell in row[1:]] for row in found[1:]]
    for row, at in zip(found[1:], places):
        assert {i for i, _ in at} == {int(row[0][2].removeprefix("… ")[1:])}  # each row under its own label
    heads = [int(cell[2].removeprefix("… ")[1:]) for cell in found[0][1:]]
    assert all([j for _, j in at] == heads for at in places)
    assert places[0][0] == (0, 0) and places[-1][-1] == (rows - 1, columns - 1)
    assert sum(cell[2].startswith("…") for cell in found[0]) + sum(row[0][2].startswith("…") for row in found[1:]) >= 1
    assert len(places) * len(heads) > 1200
    assert f"{columns - len(heads)} of {columns} columns" in html.render(part) or len(heads) == columns
    said = re.search(r"of \d+ columns, from c(\d+) to c(\d+), are left out", text.render(part))
    assert len(heads) == columns or sorted([*heads, *range(int(said[1]), int(said[2]) + 1)]) == list(range(columns))


def test_a_grid_that_fits_is_left_alone() -> None:
    part = made(18, 24)
    assert heat.fitted(part) is part


@pytest.mark.parametrize("grids", [dict(values=((1.0,),)), dict(texts=(("a", "b"), ("c",))), dict(notes=(("a", "b"),))])
def test_cells_that_fit_no_label_are_refused(grids: dict) -> None:
    with pytest.raises(ValueError, match="2 rows and 2 columns"):
        Heat(**dict(rows=("a", "b"), columns=("c", "d"), values=((1.0, 2.0), (3.0, 4.0))) | grids)


@pytest.mark.parametrize(("top", "said"), [(0.01, "0.0050"), (1.0, "0.50"), (20.0, "10.0"), (500.0, "250")])
def test_decimals_follow_the_scale(top: float, said: str) -> None:
    assert shade.number(top / 2, -top, top) == said


def test_values_beyond_the_ends_of_the_colours_are_counted() -> None:
    assert "; 1 value is beyond the fullest colour" in html.render(SIGNED) and "beyond" not in html.render(NOTED)
    assert "; 2 values are beyond" in html.render(Heat(("r",), ("a", "b", "c"), ((-1.5, 1.25, NAN),)))
    assert "beyond" not in html.render(Heat(("r",), ("a", "b"), ((0.1, -0.9),), low=-0.1, high=0.9))
