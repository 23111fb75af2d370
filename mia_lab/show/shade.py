"""Values as backgrounds: the hue is the sign, the alpha the size, and text on them stays readable in dark and light."""
from __future__ import annotations

from math import floor, isfinite, log10

from .colours import BLUE, ORANGE, css

TOP = 0.6  # the largest alpha on which white text on a black page and black text on a white one keep a contrast of 4.5
NONE = "–"  # what stands for NaN
_STEPS = 4
_LEGEND = "display:inline-block;width:18px;height:11px"


def share(value: float, low: float, high: float) -> float:
    """How far a value reaches on its scale, -1 to 1: from 0 where `low` is negative, else from `low`; NaN stays NaN."""
    zero = 0.0 if low < 0 else low
    span = (max(abs(low), abs(high)) if low < 0 else high - low) or 1.0
    return value if value != value else max(-1.0, min(1.0, (value - zero) / span))


def background(value: float, low: float, high: float) -> str:
    """The CSS that colours a value, or "" where there is nothing to colour: NaN, and what is next to zero."""
    reach = share(value, low, high)
    alpha = round(TOP * abs(reach), 2) if reach == reach else 0.0
    return f"background:{css(ORANGE if reach > 0 else BLUE, alpha)}" if alpha else ""


def number(value: float, low: float, high: float) -> str:
    """A value with the decimals that its scale needs; NaN is a dash, never a number."""
    if not isfinite(value):
        return NONE if value != value else f"{value:+}"
    top = max(abs(low), abs(high)) or 1.0
    decimals = max(0, 2 - floor(log10(top)))
    text = f"{value:.{decimals}f}"
    return text if float(text) else text.removeprefix("-")


def signed(value: float) -> str:
    """A value with its sign and three digits; NaN is a dash."""
    return NONE if value != value else f"{value:+.3g}"


def legend(low: float, high: float, unit: str, gaps: bool) -> str:
    """A bar of colours between its ends, as HTML: what the colours mean, told to those who do not see them, too."""
    zero = 0.0 if low < 0 else low
    steps = [high * i / _STEPS if low < 0 else low + (high - low) * i / _STEPS for i in range(1, _STEPS + 1)]
    below = [low * i / _STEPS for i in range(_STEPS, 0, -1)] if low < 0 else []
    ends = (number(low, low, high), number(zero, low, high), number(high, low, high))
    said = f"blue {ends[0]}, none {ends[1]}, orange {ends[2]}" if low < 0 else f"none {ends[1]}, orange {ends[2]}"
    bars = ["".join(f"<span style='{_LEGEND};{background(value, low, high)}'></span>" for value in values) for values in (below, steps)]
    scale = f"{ends[0]} {bars[0]} {ends[1]} {bars[1]} {ends[2]}" if low < 0 else f"{ends[1]} {bars[1]} {ends[2]}"
    return f"<span role='img' aria-label='colours: {said}'>{scale}</span> {unit}{f'; {NONE} no value' if gaps else ''}"
