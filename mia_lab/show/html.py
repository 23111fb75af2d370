"""Parts as HTML with inline styles only: it survives a dead kernel, an untrusted file and an offline export."""
from __future__ import annotations

from html import escape
from math import isfinite

from . import beside, curve, heads, heat, scatter, slides, tokens, words
from .parts import Bars, Beside, Curve, Heads, Heat, Part, Prose, Scatter, Slides, Table, Tokens, Words
from .script import script
from .shade import signed

_SCRIPTS = ("heads", "heat", "slides")  # widgets/NAME.js goes, once, with a fragment that holds a class mia-NAME
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top"
_ROW = "border-bottom:1px solid rgba(128,128,128,0.25)"
_LABEL = "padding:1px 10px;text-align:right;font-weight:normal"
_POSITIVE, _NEGATIVE = "rgba(230,126,34,0.75)", "rgba(41,128,185,0.75)"


def render(*parts: Part) -> str:
    """Return the parts as one HTML fragment."""
    markup = "".join(map(_lower, parts))
    return markup + "".join(script(name) for name in _SCRIPTS if f"class='mia-{name}'" in markup)


def page(title: str, *parts: Part) -> str:
    """Return a self-contained HTML page."""
    return (f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title></head>"
            f"<body style='font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em'>{render(*parts)}</body></html>")


def _lower(part: Part) -> str:
    match part:
        case Prose(text, 0):
            return f"<p>{escape(text)}</p>"
        case Prose(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Table(header, rows, caption):
            return _table(header, rows, caption)
        case Bars(labels, values, caption):
            return _bars(labels, values, caption)
        case Curve():
            return curve.as_html(part, _lower)
        case Scatter():
            return scatter.as_html(part, _lower)
        case Heat():
            return heat.as_html(part)
        case Tokens():
            return tokens.as_html(part)
        case Words():
            return words.as_html(part)
        case Beside():
            return beside.as_html(part, _lower)
        case Heads():
            return heads.as_html(part)
        case Slides():
            return slides.as_html(part, _lower)


def _table(header: tuple[str, ...], rows: tuple[tuple[str, ...], ...], caption: str) -> str:
    head = "".join(f"<th scope='col' style='{_CELL}'>{escape(cell)}</th>" for cell in header)
    cells = ("".join(f"<td style='{_CELL}'>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr style='{_ROW}'>{row}</tr>" for row in cells)
    title = f"<caption style='text-align:left;padding-bottom:4px'>{escape(caption)}</caption>" if caption else ""
    return (f"<table style='border-collapse:collapse'>{title}<thead><tr style='{_ROW}'>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>")


def _bars(labels: tuple[str, ...], values: tuple[float, ...], caption: str) -> str:
    finite = [v for v in values if isfinite(v)]
    top = max(map(abs, finite), default=0.0) or 1.0
    zero = 50 if min(finite, default=0.0) < 0 else 0  # per cent of the width where the bars begin
    rows = []
    for label, value in zip(labels, values):
        width, colour = (100 - zero) * abs(value) / top, _POSITIVE if value >= 0 else _NEGATIVE
        left = zero if value >= 0 else zero - width
        bar = f"<div style='margin-left:{left:.1f}%;width:{width:.1f}%;height:12px;background:{colour}'></div>" if isfinite(value) else ""
        rows.append(f"<tr><th scope='row' style='{_LABEL}'>{escape(label)}</th><td style='width:320px'>{bar}</td>"
                    f"<td style='{_LABEL}'>{signed(value)}</td></tr>")
    return f"<p>{escape(caption)}</p><table style='border-collapse:collapse'><tbody>{''.join(rows)}</tbody></table>"
