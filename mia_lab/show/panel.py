"""What the drawings of all parts have in common: how a number is written, which stretch an axis shows, and a panel for plotly."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from textwrap import wrap
from typing import Any

from .colours import INK, css

MOST_TICKS = 32


@dataclass(frozen=True, slots=True)
class Panel:
    """Plotly traces over one pair of axes, as plain dicts, and the height in px."""

    traces: tuple[dict[str, Any], ...]
    x: dict[str, Any]
    y: dict[str, Any]
    caption: str
    height: int = 300


def number(value: float) -> str:
    """A value with four digits, "–" where there is none."""
    return "–" if value != value else f"{value:.4g}"


def interval(value: float, low: float | None, high: float | None) -> str:
    """A value with its interval, where it has one."""
    if low is None or high is None or low != low or high != high:
        return number(value)
    return f"{number(value)} [{number(low)}, {number(high)}]"


def span(values: Iterable[float]) -> tuple[float, float]:
    """The ends of an axis that shows all finite values with some room."""
    finite = [v for v in values if isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return low - room, high + room


def stretches(*values: Sequence[float]) -> list[list[int]]:
    """Runs of places at which all of several sequences are finite."""
    found: list[list[int]] = [[]]
    for i, here in enumerate(zip(*values)):
        if all(map(isfinite, here)):
            found[-1].append(i)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def gap(value: float) -> float | None:
    """A value as JSON has it: None, which leaves a gap, where it is not finite."""
    return value if isfinite(value) else None


def plain(text: str) -> str:
    """A text as plotly shows it as it is, which takes tags for markup."""
    return escape(text, quote=False)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a caption."""
    return wrap(text, width, break_long_words=False) if text else []


def thinned(n: int) -> range:
    """The places of the ticks of `n` labels: as many as stay readable."""
    return range(0, n, -(-n // MOST_TICKS) or 1)


def axis(title: str, **more: Any) -> dict[str, Any]:
    """A plotly axis that is readable on dark and light pages."""
    return {"title": {"text": plain(title)}, "gridcolor": css(INK, 0.25), "linecolor": css(INK), "zeroline": False, "showline": True,
            "ticks": "outside", "tickcolor": css(INK), **more}


def named(title: str, labels: Sequence[str], **more: Any) -> dict[str, Any]:
    """An axis whose places 0, 1, ... have names. Places are numbers, since plotly would merge two of one name."""
    at = list(thinned(len(labels)))
    return axis(title, tickvals=at, ticktext=[plain(labels[i]) for i in at], **more)
