"""Colours of drawings: each is told from a white and from a near-black page, and from the others by those who see two hues."""
from __future__ import annotations

INK = (121, 121, 121)  # axes and text: the grey that stands out from #fff as much as from #111
ORANGE, BLUE = (230, 126, 34), (41, 128, 185)  # positive and negative, as areas
LINES = ((212, 106, 17), (41, 128, 185), (150, 0, 255), (180, 135, 105), (105, 105, 120), (210, 75, 255))
MARKS = ("o", "s", "^", "D", "v", "P", "X")  # a series is told by its mark, too
_PLOTLY = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x"}


def css(colour: tuple[int, int, int], alpha: float = 1.0) -> str:
    """A colour as CSS and plotly write it."""
    return f"rgba({colour[0]},{colour[1]},{colour[2]},{alpha:g})"


def share(colour: tuple[int, int, int], alpha: float = 1.0) -> tuple[float, float, float, float]:
    """A colour as matplotlib takes it."""
    return colour[0] / 255, colour[1] / 255, colour[2] / 255, alpha


def line(i: int) -> tuple[int, int, int]:
    """The colour of the i-th series."""
    return LINES[i % len(LINES)]


def mark(i: int) -> str:
    """The mark of the i-th series, as matplotlib names it; it changes when colours come round again."""
    return MARKS[(i + i // len(LINES)) % len(MARKS)]


def symbol(i: int) -> str:
    """The same mark, as plotly names it."""
    return _PLOTLY[mark(i)]
