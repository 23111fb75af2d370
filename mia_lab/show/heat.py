"""Heat: a grid of coloured cells, as a table that is complete without a script; widgets/heat.js lets arrow keys walk over it."""
from __future__ import annotations

from dataclasses import replace
from html import escape
from math import isqrt

from .marks import marked
from .parts import Heat
from .shade import NONE, background, legend, number

BUDGET = 260_000  # characters of HTML of the cells of one grid
BRIEF = 60_000  # of those that a text shows where it is to be short
_MARKUP = 58  # of a cell, beside its text and its note
_LABEL = 90  # of a row's or a column's heading
_CUT = 14  # characters of a cell's text; the note has the rest
_TABLE = "border-collapse:collapse;font-size:12px;line-height:1.2;margin:0"
_FRAME = "overflow:auto;max-width:100%;max-height:760px"
_SIDE = "white-space:nowrap;text-align:right"


def as_html(part: Heat) -> str:
    """A table with the caption above and the scale below it. What does not fit is left out of the middle, and named."""
    part = fitted(part)
    head = "".join(f"<th scope='col' style='min-width:40px'>{escape(_shown(label))}</th>" for label in part.columns)
    rows = "".join(f"<tr><th scope='row' style='{_SIDE}'>{escape(_shown(label))}</th>{''.join(_cell(part, i, j) for j in range(len(row)))}"
                   f"</tr>" for i, (label, row) in enumerate(zip(part.rows, part.values)))
    corner = "<br>".join(map(escape, _corner(part)))
    return (f"<figure class='mia-heat' style='margin:8px 0'><figcaption style='padding-bottom:4px'>{escape(part.caption)}</figcaption>"
            f"<div style='{_FRAME}'><table cellpadding='5' style='{_TABLE}'><thead><tr><th style='{_SIDE}'>{corner}</th>{head}"
            f"</tr></thead><tbody>{rows}</tbody></table></div><p style='font-size:12px;margin:6px 0'>"
            f"{legend(part.low, part.high, escape(part.unit), _gaps(part))}{_beyond(part)}</p></figure>")


def as_text(part: Heat) -> str:
    """The same cells as an aligned grid, with the value beside each text."""
    part = fitted(part)
    lines = [(" ".join(_corner(part)), *map(_shown, part.columns))]
    for i, (label, row) in enumerate(zip(part.rows, part.values)):
        said = (number(value, part.low, part.high) for value in row)
        lines.append((_shown(label), *(said if part.texts is None else
                                       (text if value == NONE else f"{text} {value}"
                                        for text, value in zip((_text(part, i, j) for j in range(len(row))), said)))))
    widths = [max(map(len, column)) for column in zip(*lines)]
    grid = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
    title = part.caption if part.unit in part.caption else f"{part.caption} ({part.unit})".strip()
    return "\n".join([title, *grid])


def fitted(part: Heat, budget: int = BUDGET) -> Heat:
    """The part itself, or, where its cells would take more than `budget` characters of HTML, one without the middle of its longer side.

    The caption names what is left out, and the heading behind the gap begins with an ellipsis.
    """
    costs = [[_MARKUP + len(escape(_text(part, i, j))) + len(escape(_note(part, i, j))) for j in range(len(row))]
             for i, row in enumerate(part.values)]
    sides = len(part.rows), len(part.columns)
    rows, columns = map(list, map(range, sides))
    most = min(len(rows) * len(columns), 2 * budget // _MARKUP)
    while sum(costs[i][j] for i in rows for j in columns) + _LABEL * (len(rows) + len(columns)) > budget and most > 1:
        most = most * 9 // 10
        short = min(*sides, isqrt(most))
        rows, columns = (_ends(n, short if n == min(sides) else most // short) for n in sides)
    return part if (len(rows), len(columns)) == sides else _elided(part, rows, columns)


def _ends(n: int, keep: int) -> list[int]:
    """The first and the last of n places, `keep` of them in all."""
    return [*range(-(-keep // 2)), *range(n - keep // 2, n)] if keep < n else list(range(n))


def _elided(part: Heat, rows: list[int], columns: list[int]) -> Heat:
    def pick(grid: tuple[tuple, ...] | None) -> tuple[tuple, ...] | None:
        return None if grid is None else tuple(tuple(grid[i][j] for j in columns) for i in rows)

    def labels(found: tuple[str, ...], kept: list[int]) -> tuple[str, ...]:
        return tuple(("… " if i and kept[i - 1] != at - 1 else "") + found[at] for i, at in enumerate(kept))

    sides = (("rows", part.rows, rows), ("columns", part.columns, columns))
    gaps = [f"{len(found) - len(kept)} of {len(found)} {name}, from {_shown(found[len(kept) - len(kept) // 2])} to "
            f"{_shown(found[-1 - len(kept) // 2])}," for name, found, kept in sides if len(kept) < len(found)]
    return replace(part, rows=labels(part.rows, rows), columns=labels(part.columns, columns), values=pick(part.values),
                   texts=pick(part.texts), notes=pick(part.notes),
                   caption=f"{part.caption}; {' and '.join(gaps)} are left out of this view, not of .data")


def _cell(part: Heat, i: int, j: int) -> str:
    style, note, text = background(part.values[i][j], part.low, part.high), _note(part, i, j), _text(part, i, j)
    attributes = (f" style='{style}'" if style else "") + (f" title='{escape(note)}'" if note else "")
    return f"<td{attributes}>{escape(text)}</td>"


def _text(part: Heat, i: int, j: int) -> str:
    """What stands in a cell, in HTML and in text."""
    if part.texts is None:
        return number(part.values[i][j], part.low, part.high)
    text = _shown(part.texts[i][j])
    return text if len(text) <= _CUT else text[:_CUT - 1] + "…"


def _note(part: Heat, i: int, j: int) -> str:
    """What is told of a cell; where the producer says nothing, what the cell itself does not show."""
    if part.notes is not None:
        return part.notes[i][j]
    return "" if part.texts is None else f"{_shown(part.texts[i][j])} {number(part.values[i][j], part.low, part.high)}"


def _shown(text: str) -> str:
    return marked(text) if text else ""


def _corner(part: Heat) -> tuple[str, str]:
    return f"{part.axes[0]} ↓", f"{part.axes[1]} →"


def _gaps(part: Heat) -> bool:
    return any(value != value for row in part.values for value in row)


def _beyond(part: Heat) -> str:
    """What is said where values are beyond the ends of the colours."""
    reach = max(abs(part.low), abs(part.high)) if part.low < 0 else part.high
    n = sum(abs(value) > reach * 1.0001 for row in part.values for value in row)
    return f"; {n} {'value is' if n == 1 else 'values are'} beyond the fullest colour" if n else ""
