"""Heads: attention patterns as small images, one a head, with the numbers that stand out in a table beside them."""
from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from .image import data_uri, rounded
from .parts import Heads, Table
from .shade import NONE

_BUDGET = 275_000  # characters of tokens, images, their names and their rows in the table
_LEVELS = (256, 64, 16)
_SIDE = 96
_FIGURE = "margin:0;width:124px;font-size:11px;line-height:1.3"
_TOKEN = "padding:0 3px;margin-right:2px;background:rgba(128,128,128,0.12)"
_CELL = "text-align:left;padding:1px 12px 1px 0"
_STYLED = 500  # tokens up to which each has its own background
_OPEN = 12  # heads up to which the table is unfolded


def as_html(part: Heads) -> str:
    """The tokens, an image a head, and the table. widgets/heads.js shows one head large, with its tokens along both sides."""
    same = part.queries == part.keys
    tokens = _tokens("keys", f"{'Rows, top to bottom, and columns' if same else 'Columns'}, left to right:", part.keys)
    tokens = tokens if same else _tokens("queries", "Rows, top to bottom:", part.queries) + tokens
    shown, levels = _fitting(part, _BUDGET - len(tokens))
    notes = [f"Of {len(part.names)} heads the first {len(shown)} are drawn; name fewer layers, heads or positions to see the others."] * (
        len(shown) < len(part.names))
    notes += [f"Shades are rounded to 1/{levels - 1}."] * (levels < 256)
    figures, rows = "".join(figure for figure, _ in shown), "".join(row for _, row in shown)
    head = "".join(f"<th scope='col' style='{_CELL}'>{escape(name)}</th>" for name in _header(part))
    table = f"<table style='border-collapse:collapse'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    unfolded = " open" if len(shown) <= _OPEN else ""
    return (f"<div class='mia-heads' role='group' aria-label='attention heads' data-levels='{levels}'>"
            f"<p>{escape(' '.join([part.caption, *notes]).strip())}</p>{tokens}"
            f"<div class='mia-grid' style='display:flex;flex-wrap:wrap;gap:8px'>{figures}</div>"
            f"<details{unfolded}><summary>The strongest attention of each head</summary>{table}</details></div>")


def as_text(part: Heads) -> str:
    """The table alone."""
    from . import text

    rows = tuple((name, *_told(part, i)) for i, name in enumerate(part.names))
    return text.render(Table(("head", *_header(part)[1:]), rows, part.caption))


def _header(part: Heads) -> tuple[str, ...]:
    return "head", f"strongest, apart from what goes to {part.keys[0]}", "weight", f"mean on {part.keys[0]}"


def _array(part: Heads, i: int) -> np.ndarray:
    return np.frombuffer(b"".join(part.weights[i]), np.uint8).reshape(len(part.queries), len(part.keys))


def _told(part: Heads, i: int) -> tuple[str, str, str]:
    """The strongest pair of one head, its weight, and what the first key has of all queries on average."""
    weights = _array(part, i)
    rest = weights[:, 1:] if len(part.keys) > 1 else weights
    if not rest.any():
        return "none", NONE, f"{weights[:, 0].mean() / 255:.2f}"
    query, key = divmod(int(rest.argmax()), rest.shape[1])
    pair = f"{part.queries[query]} → {part.keys[key + len(part.keys) - rest.shape[1]]}"
    return pair, f"{rest[query, key] / 255:.2f}", f"{weights[:, 0].mean() / 255:.2f}"


def _fitting(part: Heads, budget: int) -> tuple[list[tuple[str, str]], int]:
    """The markup of as many heads as fit, in the finest shades in which all do, or else in the coarsest; and how many shades those are."""
    for levels in _LEVELS:
        shown, room = [], budget
        for figure, row in _drawn(part, levels):
            room -= len(figure) + len(row)
            if room < 0:
                break
            shown.append((figure, row))
        if len(shown) == len(part.names):
            break
    return shown, levels


def _drawn(part: Heads, levels: int) -> Iterator[tuple[str, str]]:
    """The image of each head, and its row in the table."""
    height = max(8, round(_SIDE * min(1.0, len(part.queries) / len(part.keys))))
    for i, name in enumerate(part.names):
        weights, (pair, weight, first) = _array(part, i), _told(part, i)
        image = data_uri(weights if levels == 256 else rounded(weights, levels))
        figure = (f"<figure style='{_FIGURE}'><img src='{image}' width='{_SIDE}' height='{height}' "
                  f"style='image-rendering:pixelated;border:1px solid rgba(128,128,128,0.5)' "
                  f"alt='attention of {escape(name)}, strongest {escape(pair)} {weight}'><figcaption>{escape(name)}</figcaption></figure>")
        cells = "".join(f"<td style='{_CELL}'>{escape(cell)}</td>" for cell in (pair, weight, first))
        yield figure, f"<tr><th scope='row' style='{_CELL};font-weight:normal'>{escape(name)}</th>{cells}</tr>"


def _tokens(kind: str, title: str, texts: tuple[str, ...]) -> str:
    style = f" style='{_TOKEN}'" if len(texts) <= _STYLED else ""
    spans = "".join(f"<span{style}>{escape(text)}</span>\n" for text in texts)
    return f"<p>{title} <span class='mia-{kind}'>{spans}</span></p>"
