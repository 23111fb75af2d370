"""Slides and columns: complete without a script, and the same in text."""
from __future__ import annotations

import pytest
from show.golden import check
from show.markup import parsed

from mia_lab.show import html, text
from mia_lab.show.parts import Beside, Prose, Slides

PAGES = tuple((Beside(((Prose("as it was"),), (Prose(f"with {c}: <b>bold</b>"),))),) for c in ("-0.2", "+0.2"))
PART = Slides("coefficient & <more>", ("-0.2", "+0.2"), PAGES, 1)


def test_slides_look_as_they_did() -> None:
    check("slides.html", html.render(PART))
    check("slides.txt", text.render(PART))


def test_every_page_is_in_the_markup_under_its_heading() -> None:
    markup = html.render(PART).partition("<script>")[0]
    parsed(html.render(PART))
    for label in ("-0.2", "+0.2"):
        assert f"coefficient &amp; &lt;more&gt;: {label}</h4>" in markup
        assert f"with {label}: &lt;b&gt;bold&lt;/b&gt;" in markup
    assert "display:none" not in markup and "hidden" not in markup


def test_a_script_comes_once_however_deep_and_many_the_slides_are() -> None:
    nested = Slides("layer", ("8", "9"), ((PART,), (PART,)))
    assert html.render(nested, PART).count("<script>") == 1
    assert "<script>" not in html.render(Prose("class='mia-slides'"))


def test_a_label_is_escaped_wherever_it_stands() -> None:
    markup = html.render(Slides("'><script>", ("' onclick='x",), ((Prose("p"),),))).rpartition("<script>")[0]
    assert "<script" not in markup and "' onclick" not in markup


def test_pages_without_a_label_are_an_error() -> None:
    with pytest.raises(ValueError, match="longer"):
        html.render(Slides("coefficient", ("1",), PAGES))
