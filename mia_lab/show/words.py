"""Words: a text against another one, told by underline and strike, not by colour alone."""
from __future__ import annotations

import re
from collections.abc import Callable
from difflib import SequenceMatcher
from html import escape

from .parts import Words

_HTML = {"same": ("", ""), "added": ("<ins style='background:rgba(230,126,34,0.3)' title='added'>", "</ins>"),
         "removed": ("<del style='background:rgba(41,128,185,0.3)' title='removed'>", "</del>")}
_TEXT = {"same": ("", ""), "added": ("{+", "+}"), "removed": ("[-", "-]")}
_WORD = re.compile(r"\s*\S+|\s+$")


def words_between(one: str, other: str, caption: str = "") -> Words:
    """Return what `other` adds to `one`, and what it lacks of it, word by word.

    The pieces that are the same or added make up `other`, those that are the same or removed make up `one`, to the character.
    """
    before, after = _WORD.findall(one), _WORD.findall(other)
    pieces = []
    for _, start, end, first, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if before[start:end] == after[first:last]:
            pieces.append(("same", "".join(before[start:end])))
        else:
            found = (("removed", "".join(before[start:end])), ("added", "".join(after[first:last])))
            pieces += [(kind, text) for kind, text in found if text]
    return Words(tuple(pieces), caption)


def as_html(part: Words) -> str:
    """A paragraph with `<ins>` and `<del>`."""
    title = f"<p style='margin:4px 0'>{escape(part.caption)}</p>" if part.caption else ""
    return f"{title}<p style='white-space:pre-wrap;margin:4px 0'>{_joined(part, _HTML, escape)}</p>"


def as_text(part: Words) -> str:
    """The text with `{+added+}` and `[-removed-]`."""
    return "\n".join(([part.caption] if part.caption else []) + [_joined(part, _TEXT, str)])


def _joined(part: Words, marks: dict[str, tuple[str, str]], write: Callable[[str], str]) -> str:
    unknown = [kind for kind, _ in part.pieces if kind not in marks]
    if unknown:
        raise ValueError(f'a piece of Words is "same", "added" or "removed", not {unknown[0]!r}')
    return "".join(f"{marks[kind][0]}{write(text)}{marks[kind][1]}" for kind, text in part.pieces)
