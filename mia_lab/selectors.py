"""Selectors: which positions of a request an edit touches. Each resolves to spans of absolute positions."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import EditError

Span = tuple[int, int | None]  # [start, stop); stop None means to the end of the generation


@dataclass(frozen=True, slots=True)
class Selector:
    """A rule for positions. `rule` is one of: content, everywhere, prompt, generated, last, window, positions."""

    rule: str
    args: tuple[int | None, ...] = ()

    def spans(self, n_prompt: int, has_bos: bool) -> list[Span]:
        """Return the disjoint, ascending spans that the rule selects in a request whose prompt has `n_prompt` tokens."""
        first = int(has_bos)
        match self.rule:
            case "content":
                return [(first, None)]
            case "everywhere":
                return [(0, None)]
            case "prompt":
                return [(first, n_prompt)] if n_prompt > first else []
            case "generated":
                return [(n_prompt, None)]
            case "last":
                return [(n_prompt - 1, n_prompt)]
            case "window":
                start, stop = self.args
                start = start + n_prompt if start < 0 else start
                stop = stop + n_prompt if stop is not None and stop < 0 else stop
                if start < 0 or (stop is not None and stop <= start):
                    raise EditError(f"window{self.args} selects nothing in a prompt of {n_prompt} tokens")
                return [(start, stop)]
            case "positions":
                places = sorted({p + n_prompt if p < 0 else p for p in self.args})
                if places[0] < 0:
                    raise EditError(f"positions{self.args} reach before the start of a prompt of {n_prompt} tokens")
                return merge([(p, p + 1) for p in places])
        raise EditError(f"there is no selector {self.rule!r}")


def merge(spans: list[Span]) -> list[Span]:
    """Join ascending spans that touch."""
    out: list[Span] = []
    for start, stop in spans:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


CONTENT = Selector("content")


def everywhere() -> Selector:
    """Every position, BOS too."""
    return Selector("everywhere")


def prompt() -> Selector:
    """The prompt's positions, except BOS."""
    return Selector("prompt")


def generated() -> Selector:
    """The positions of generated tokens."""
    return Selector("generated")


def last() -> Selector:
    """The last position of the prompt."""
    return Selector("last")


def window(start: int, stop: int | None = None) -> Selector:
    """Positions from `start` up to `stop`; negative ones count from the end of the prompt, None is no end."""
    return Selector("window", (int(start), None if stop is None else int(stop)))


def positions(places: Iterable[int]) -> Selector:
    """The listed positions; negative ones count from the end of the prompt."""
    places = tuple(int(p) for p in places)
    if not places:
        raise EditError("positions() needs at least one position")
    return Selector("positions", places)
