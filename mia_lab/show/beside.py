"""Beside: what is held against something else, next to it."""
from __future__ import annotations

from collections.abc import Callable

from .parts import Beside, Part

_ROW = "display:flex;gap:24px;align-items:flex-start"
_PINNED = "flex:none;width:300px;overflow-wrap:anywhere"
_OTHER = "flex:1;max-width:560px;overflow-wrap:anywhere"


def as_html(part: Beside, lower: Callable[[Part], str]) -> str:
    """Columns side by side, the first of a fixed width."""
    columns = (f"<div style='{_OTHER if i else _PINNED}'>{''.join(map(lower, column))}</div>" for i, column in enumerate(part.columns))
    return f"<div style='{_ROW}'>{''.join(columns)}</div>"


def as_text(part: Beside, lower: Callable[[Part], str]) -> str:
    """Columns one under the other, all but the first indented."""
    texts = ["\n".join(map(lower, column)) for column in part.columns]
    return "\n".join([*texts[:1], *("\n".join(f"  {line}" for line in text.splitlines()) for text in texts[1:])])
