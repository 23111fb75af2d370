"""Texts as matplotlib draws them as they are: no formulas, and a box for each character that its font lacks."""
from __future__ import annotations

from functools import cache

from .marks import CLOSE, OPEN


def printable(text: str) -> str:
    """Return a text without characters that would be warned of, and with dollars that start no formula."""
    text = text.replace(OPEN, "").replace(CLOSE, "")
    return "".join(c if c == "\n" or ord(c) in _glyphs() else "□" for c in text).replace("$", r"\$")


@cache
def _glyphs() -> frozenset[int]:
    """The characters of the font that matplotlib brings along."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
