"""Tokens as they are shown: with marks for what could not be seen, and never turning the text around them."""
from __future__ import annotations

import re

# Control characters as their pictures; what breaks lines, turns the direction of all that follows, or has no width, by its number.
_UNSEEN = ({code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "␡"} | str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})
           | {code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), 0x61C, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F),
                                                   *range(0x2060, 0x2068), 0xFEFF)})
OPEN, CLOSE = "\u2068", "\u2069"  # around text that runs from right to left: numbers and arrows beside it stay where they are
_LEFTWARD = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe\U00010800-\U00010fff\U0001e800-\U0001efff]")


def marked(token: str) -> str:
    """Return a token's text with "·" for each leading space, "⏎" for a newline, "⇥" for a tab and "∅" for no text at all.

    Other characters that cannot be seen, or that would turn the text around them, have marks too, as "␛" and "<U+202E>".
    """
    body = token.lstrip(" ")
    text = "·" * (len(token) - len(body)) + body.translate(_UNSEEN) or "∅"
    return f"{OPEN}{text}{CLOSE}" if OPEN not in text and _LEFTWARD.search(text) else text
