"""Tokens: running text, each token on the colour of its value, and all values in a table that unfolds."""
from __future__ import annotations

from html import escape
from math import isnan
from textwrap import fill

from .marks import CLOSE, OPEN, marked
from .parts import Tokens
from .shade import NONE, background, legend, number

_MOST = 1500  # tokens of one view
_WIDTH = 120
_TIED = "\xa0"  # a space at which no line is broken
_BORDER = "<b title='the prompt ends here'>▌</b>"
_CELL = "text-align:left;padding:1px 12px 1px 0"
_HEAD = "".join(f"<th scope='col' style='{_CELL}'>{name}</th>" for name in ("position", "token"))


def as_html(part: Tokens) -> str:
    """Spans in a paragraph, a mark where the prompt ends, the scale, and the values in a folded table."""
    text, rows, gap = [], [], f"<i>{_left_out(part)}</i>"
    for i in _kept(part):
        if i is None:
            text.append(gap)
            rows.append(f"<tr><td colspan='3'>{gap}</td></tr>")
            continue
        token, value = escape(marked(part.texts[i])), number(part.values[i], part.low, part.high)
        style = background(part.values[i], part.low, part.high)
        coloured = f" style='{style}'" if style else ""
        running = token.strip(OPEN + CLOSE)  # words of several tokens stay words, whichever way they run
        border, after = _BORDER if i and i == part.border else "", "<br>" if running.endswith("⏎") else "<wbr>"
        text.append(f"{border}<span{coloured} title='{value}'>{running}</span>{after}")
        rows.append(f"<tr><td>{i}</td><td style='{_CELL}'>{token}</td><td>{value}</td></tr>")
    unit, gaps = escape(part.unit), any(map(isnan, part.values))
    table = (f"<table style='border-collapse:collapse;margin:0'><thead><tr>{_HEAD}<th scope='col'>{unit}</th></tr></thead>"
             f"<tbody>{''.join(rows)}</tbody></table>")
    return (f"<figure style='margin:8px 0'><figcaption>{escape(part.caption)}</figcaption>"
            f"<p style='line-height:1.8;margin:4px 0'>{''.join(text)}</p>"
            f"<p style='font-size:12px;margin:4px 0'>{legend(part.low, part.high, unit, gaps)}</p>"
            f"<details><summary>The numbers</summary>{table}</details></figure>")


def as_text(part: Tokens) -> str:
    """The same tokens, each with its value in brackets; " ▌ " where the prompt ends."""
    words = []
    for i in _kept(part):
        if i is None:
            words.append(_left_out(part).strip().replace(" ", _TIED))
            continue
        value = number(part.values[i], part.low, part.high)
        words += ["▌"] * (0 < i == part.border) + [marked(part.texts[i]) + (f"{_TIED}({value})" if value != NONE else "")]
    title = part.caption if part.unit in part.caption else f"{part.caption} ({part.unit})".strip()
    text = fill("  ".join(words), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{title}\n{text.replace(_TIED, ' ')}"


def _kept(part: Tokens) -> list[int | None]:
    """Which tokens are shown: all, or the first and the last ones around None."""
    n, half = len(part.texts), _MOST // 2
    return list(range(n)) if n <= _MOST else [*range(half), None, *range(n - half, n)]


def _left_out(part: Tokens) -> str:
    n, half = len(part.texts), _MOST // 2
    within = ", and the prompt ends among them" if half <= part.border < n - half else ""
    return f" … {n - 2 * half} tokens are left out of this view{within} … "
