"""Which positions an edit acts on, in the few words that other tools have for it, and back into selectors."""
from __future__ import annotations

from dataclasses import dataclass

from ...errors import BundleError
from ...selectors import Selector, everywhere, generated, last, positions, window

BOS = ("none", "skip", "edit")  # prompts have none; they begin with one, which is left out; it is edited like the rest
WORDS = {"all": "every position", "from": "every position from one on", "prompt": "the prompt, BOS too",
         "prompt_from": "the prompt from a position on", "generated": "generated positions", "generated_first": "the first generated ones",
         "last": "the prompt's last position", "last_on": "the prompt's last ones and all that follow", "positions": "listed positions"}
_BOS_TOO = {"content": "all", "prompt": "prompt"}
_BOS_OUT = {"content": ("from", (1,)), "prompt": ("prompt_from", (1,))}


@dataclass(frozen=True, slots=True)
class Scope:
    """A word of `WORDS` and its numbers: where it begins, how many, or which."""

    word: str
    args: tuple[int, ...] = ()


def scope_of(where: Selector, bos: str | None, format: str) -> Scope:
    """The word for a selector; BundleError where there is none.

    bos: one of `BOS`, needed for selectors that leave BOS out, since other tools count positions and do not know it.
    """
    if bos is not None and bos not in BOS:
        raise BundleError(f"bos={bos!r}; it is one of {', '.join(BOS)}")
    if where.rule in _BOS_TOO:
        if bos is None:
            raise BundleError(f"{where} leaves BOS out, and {format} does not know BOS. Say bos='none' where prompts have none, 'skip' "
                              f"where each begins with one, or 'edit' to let it be edited with the rest")
        return Scope(*_BOS_OUT[where.rule]) if bos == "skip" else Scope(_BOS_TOO[where.rule])
    found = next((scope for scope in _candidates(where) if selector_of(scope) == where), None)
    if found is None:
        raise BundleError(f"{format} has no word for the positions {where}")
    return found


def selector_of(scope: Scope) -> Selector:
    """The selector for a word."""
    match scope.word:
        case "all":
            return everywhere()
        case "from":
            return window(scope.args[0])
        case "prompt":
            return ~generated()
        case "prompt_from":
            return window(scope.args[0]) & ~generated()
        case "generated":
            return generated()
        case "generated_first":
            return generated(scope.args[0])
        case "last":
            return last()
        case "last_on":
            return window(-scope.args[0])
    return positions(scope.args)


def _candidates(where: Selector) -> list[Scope]:
    """Words that could say it, with the numbers in it."""
    inner = where.args[0] if where.args and isinstance(where.args[0], Selector) else where
    number = inner.args[0] if inner.args and isinstance(inner.args[0], int) else None
    found = [Scope("all"), Scope("prompt"), Scope("generated"), Scope("last")]
    if number is not None and number >= 0:
        found += [Scope("from", (number,)), Scope("prompt_from", (number,))]
        found += [Scope("generated_first", (number,))] if number else []
    elif number is not None:
        found.append(Scope("last_on", (-number,)))
    if where.rule == "positions" and all(place >= 0 for place in where.args):
        found.append(Scope("positions", where.args))
    return found
