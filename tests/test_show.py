"""One form of parts, two lowerings that never disagree."""
from __future__ import annotations

import re

from mia_lab.show import html, text
from mia_lab.show.parts import Bars, Prose, Table

PARTS = (Prose("Title", 1), Prose("Words & <more>."), Table(("a", "b"), (("1", "x"), ("22", "y"))),
         Bars(("up", "down"), (2.0, -1.0), "effect"))


def test_text_is_aligned() -> None:
    assert text.render(*PARTS) == (
        "Title\n-----\n\nWords & <more>.\n\na   b\n1   x\n22  y\n\neffect  value\nup      +2\ndown    -1")


def test_html_is_escaped_and_holds_every_cell() -> None:
    page = html.render(*PARTS)
    assert "Words &amp; &lt;more&gt;." in page
    for cell in ("1", "x", "22", "y", "+2", "-1", "effect"):
        assert f">{cell}<" in page
    assert "<script" not in page
    assert "<style" not in page


def drawn(*values: float) -> list[tuple[str, str]]:
    """The left edge and width of each bar, in per cent."""
    return re.findall(r"margin-left:([\d.]+)%;width:([\d.]+)%", html.render(Bars(("up", "down"), values)))


def test_bars_share_a_scale_and_a_zero() -> None:
    assert drawn(2.0, -1.0) == [("50.0", "50.0"), ("25.0", "25.0")]
    assert drawn(2.0, 1.0) == [("0.0", "100.0"), ("0.0", "50.0")]


def test_a_page_stands_alone() -> None:
    page = html.page("T & t", *PARTS)
    assert page.startswith("<!doctype html>")
    assert "<title>T &amp; t</title>" in page
    assert "http" not in page


def test_a_cell_of_two_lines_stays_a_line() -> None:
    assert text.render(Table(("a", "b"), (("x\ny", "1"),))) == "a    b\nx⏎y  1"
