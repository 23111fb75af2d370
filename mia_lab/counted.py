"""Numbers of things in sentences."""
from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """`n` and the noun, in the plural unless there is one: "1 head", "3 heads"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
