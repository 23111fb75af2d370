"""The parts that every view is made of."""
from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


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

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.values):
            raise ValueError(f"{len(self.values)} bars have {len(self.labels)} labels")


@dataclass(frozen=True, slots=True)
class Heat:
    """A grid of coloured cells, `values[row][column]`, NaN where there is none.

    texts: what stands in each cell, by default its value; notes: what is told of a cell on hover and by keyboard. Colours run from
    `low` to `high`, and are centred on 0 where `low` is negative. axes: what rows and columns are. unit: what the values are.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    caption: str = ""
    texts: tuple[tuple[str, ...], ...] | None = None
    notes: tuple[tuple[str, ...], ...] | None = None
    low: float = -1.0
    high: float = 1.0
    axes: tuple[str, str] = ("layer", "position")
    unit: str = "score"

    def __post_init__(self) -> None:
        for name, grid in (("values", self.values), ("texts", self.texts), ("notes", self.notes)):
            if grid is not None and [len(row) for row in grid] != [len(self.columns)] * len(self.rows):
                raise ValueError(f"a Heat has {len(self.rows)} rows and {len(self.columns)} columns, its {name} have other numbers of them")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Running text, each token coloured by its value, NaN for none; `border` tokens of it are the prompt."""

    texts: tuple[str, ...]
    values: tuple[float, ...]
    caption: str = ""
    low: float = -1.0
    high: float = 1.0
    unit: str = "reading"
    border: int = 0

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.values):
            raise ValueError(f"{len(self.texts)} tokens have {len(self.values)} values")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a Curve: y over x, and where there are intervals, their ends."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        given = [values for values in (self.x, self.y, self.low, self.high) if values is not None]
        if len({len(values) for values in given}) != 1 or (self.low is None) != (self.high is None):
            raise ValueError(f"the series {self.name!r} has {len(self.x)} places, {len(self.y)} values, or intervals of other lengths")
        if not all(map(isfinite, self.x)):
            raise ValueError(f"the series {self.name!r} has a value at no place")


@dataclass(frozen=True, slots=True)
class Curve:
    """Lines over one axis; `zero` draws the line of no effect, which is at `level`.

    ticks: names of x = 0, 1, ... where x only counts; such points are not joined.
    """

    series: tuple[Series, ...]
    x_title: str
    y_title: str
    caption: str = ""
    zero: bool = True
    ticks: tuple[str, ...] | None = None
    level: float = 0.0

    def __post_init__(self) -> None:
        places = range(len(self.ticks or ()))
        beyond = [s.name for s in self.series if self.ticks is not None and not all(x in places for x in s.x)]
        if beyond:
            raise ValueError(f"the series {beyond[0]!r} has a value at none of the {len(places)} names of its axis")


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points in the plane, by group, each with a note. arrows: directions from the origin, for which both axes have one scale."""

    groups: tuple[tuple[str, tuple[tuple[float, float, str], ...]], ...]
    x_title: str
    y_title: str
    caption: str = ""
    arrows: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention patterns, `weights[head]` as rows of bytes (0 to 255 for 0 to 1) `[query key]`, with the tokens of both axes."""

    names: tuple[str, ...]
    weights: tuple[tuple[bytes, ...], ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Text in pieces, each marked "same", "added" or "removed" against another text."""

    pieces: tuple[tuple[str, str], ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Beside:
    """Groups of parts side by side, the first one pinned: it is what the others are held against."""

    columns: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Slides:
    """Groups of parts of which a slider shows one at a time; where no script runs, all of them, one under the other."""

    name: str
    labels: tuple[str, ...]
    pages: tuple[tuple[Part, ...], ...]
    start: int = 0


Part = Table | Prose | Bars | Heat | Tokens | Curve | Scatter | Heads | Words | Beside | Slides
