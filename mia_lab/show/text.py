"""Parts as plain text."""
from __future__ import annotations

from . import beside, curve, heads, heat, scatter, slides, tokens, words
from .parts import Bars, Beside, Curve, Heads, Heat, Part, Prose, Scatter, Slides, Table, Tokens, Words
from .shade import signed


def render(*parts: Part) -> str:
    """Return the parts as text, one under the other."""
    return "\n\n".join(_lower(part) for part in parts)


def _lower(part: Part) -> str:
    match part:
        case Prose(text, level):
            return f"{text}\n{'-' * len(text)}" if level else text
        case Bars(labels, values, caption):
            rows = tuple((label, signed(value)) for label, value in zip(labels, values))
            return _lower(Table((caption or "label", "value"), rows))
        case Table(header, rows, caption):
            grid = [[cell.replace("\n", "⏎") for cell in row] for row in (header, *rows)]
            widths = [max(map(len, column)) for column in zip(*grid)]
            lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in grid]
            return "\n".join(([caption] if caption else []) + lines)
        case Curve():
            return curve.as_text(part, _lower)
        case Scatter():
            return scatter.as_text(part, _lower)
        case Heat():
            return heat.as_text(part)
        case Tokens():
            return tokens.as_text(part)
        case Words():
            return words.as_text(part)
        case Beside():
            return beside.as_text(part, _lower)
        case Heads():
            return heads.as_text(part)
        case Slides():
            return slides.as_text(part, _lower)
