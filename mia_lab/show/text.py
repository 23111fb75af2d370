"""Parts as plain text."""
from __future__ import annotations

from .parts import Bars, Part, Prose, Table


def render(*parts: Part) -> str:
    """Return the parts as text, one under the other."""
    return "\n\n".join(_lower(part) for part in parts)


def _lower(part: Part) -> str:
    match part:
        case Prose(text, level):
            return f"{text}\n{'-' * len(text)}" if level else text
        case Bars(labels, values, caption):
            rows = tuple((label, f"{value:+.3g}") for label, value in zip(labels, values))
            return _lower(Table((caption or "label", "value"), rows))
        case Table(header, rows, caption):
            widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
            lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)]
            return "\n".join(([caption] if caption else []) + lines)
