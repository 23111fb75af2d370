"""The parts that every view is made of."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A header and rows of short texts."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph, or a heading where `level` is 1 to 3."""

    text: str
    level: int = 0


@dataclass(frozen=True, slots=True)
class Bars:
    """One signed value a label, drawn to a common scale."""

    labels: tuple[str, ...]
    values: tuple[float, ...]
    caption: str = ""


Part = Table | Prose | Bars
