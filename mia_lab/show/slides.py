"""Slides: pages of which a slider shows one at a time; without a script they stand one under the other."""
from __future__ import annotations

from collections.abc import Callable
from html import escape

from .parts import Part, Slides

_HEADING = "margin:10px 0 2px;font-size:1em"


def as_html(part: Slides, lower: Callable[[Part], str]) -> str:
    """Every page under its own heading; widgets/slides.js makes one of them visible at a time."""
    name = escape(part.name)
    pages = (f"<div class='mia-page' data-label='{escape(label)}'><h4 style='{_HEADING}'>{name}: {escape(label)}</h4>"
             f"{''.join(map(lower, page))}</div>" for label, page in zip(part.labels, part.pages, strict=True))
    return f"<div class='mia-slides' role='group' aria-label='{name}' data-start='{part.start}'>{''.join(pages)}</div>"


def as_text(part: Slides, lower: Callable[[Part], str]) -> str:
    """Every page under its own heading."""
    return "\n\n".join("\n".join([f"{part.name}: {label}", *map(lower, page)]) for label, page in zip(part.labels, part.pages, strict=True))
