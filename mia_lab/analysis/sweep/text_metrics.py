"""Metrics of generated texts: mood, form, language, repetition, or whatever a Python function makes of them.

What a prompt scores is the mean over its seeds; only the continuation counts, not the prompt.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean
from typing import Any

from ...errors import EditError
from .checks import LANGUAGES, passes
from .items import Item, Lab, check_of
from .metrics import OnPrompts
from .trials import Ask, Outcome


@dataclass(frozen=True, eq=False)
class OnGenerations(OnPrompts):
    """A number for each generated text: `judge(text, item)`."""

    judge: Callable[[str, Item], float]

    def asks(self, lab: Lab, item: Item, system: str | None) -> list[Ask]:
        """One generation a seed."""
        if lab.max_tokens < 1:
            raise EditError(f"{self.name} is measured on generated texts; give max_tokens of at least 1, not {lab.max_tokens}")
        ask = lab.prompt(item, system)
        return [replace(ask, max_tokens=lab.max_tokens, seed=seed) for seed in lab.seeds]

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """The mean over seeds; EditError where the function gave no number."""
        found = [self.judge(outcome.text, item) for outcome in outcomes]
        if any(not isinstance(value, (int, float)) or value != value for value in found):
            raise EditError(f"the metric {self.name!r} gave {found} for a text; it must give a number")
        return float(mean(map(float, found)))


@lru_cache(maxsize=1)
def _vader() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise EditError("sentiment() needs vaderSentiment: pip install vaderSentiment") from None
    return SentimentIntensityAnalyzer()


def sentiment(*, name: str = "sentiment", better: int = 1) -> OnGenerations:
    """VADER's compound sentiment of each text, from -1 to 1. It knows English words; it was made for short social texts.

    Source: Hutto and Gilbert, VADER, 2014; the package vaderSentiment.
    """
    return OnGenerations(lambda text, _: _vader().polarity_scores(text)["compound"], name=name, better=better)


def matches(pattern: str, *, flags: int = re.IGNORECASE, name: str = "matches", better: int = 1) -> OnGenerations:
    """Whether a regular expression is found in each text, 0 or 1."""
    compiled = re.compile(pattern, flags)
    return OnGenerations(lambda text, _: float(bool(compiled.search(text))), name=name, better=better)


def length(unit: str = "words", *, name: str = "length", better: int = 1) -> OnGenerations:
    """The number of "words" or "characters" of each text; bounded by max_tokens."""
    if unit not in ("words", "characters"):
        raise EditError(f'length is in "words" or "characters", not {unit!r}')
    count = (lambda text: len(text.split())) if unit == "words" else len
    return OnGenerations(lambda text, _: float(count(text)), name=name, better=better)


def language(code: str, *, name: str = "language", better: int = 1) -> OnGenerations:
    """Whether each text is in a language ("en", "fr", "de", "es", "pt", "it", "nl"), by its commonest words, 0 or 1."""
    if code not in LANGUAGES:
        raise EditError(f"the language {code!r} is not known; there are {', '.join(LANGUAGES)}")
    return OnGenerations(lambda text, _: float(passes(text, {"kind": "language", "value": code})), name=name, better=better)


def follows(check: dict[str, Any] | None = None, *, name: str = "follows", better: int = 1) -> OnGenerations:
    """Whether each text passes a check, `{"kind": "max_words", "value": 20}`, or by default that which its prompt's line names."""
    if check is not None:
        passes("a", check)  # an unknown check fails here, not after the run
    return OnGenerations(lambda text, item: float(passes(text, check or check_of(item))), name=name, better=better)


def distinct(n: int = 2, *, name: str = "distinct", better: int = 1) -> OnGenerations:
    """The share of each text's runs of n words that are different ones; 1 for a text that is shorter. Marks count as words.

    Source: Li et al., A diversity-promoting objective function, arXiv 1510.03055.
    """
    def judge(text: str, _: Item) -> float:
        runs = _runs(text, n)
        return len(set(runs)) / len(runs) if runs else 1.0

    return OnGenerations(judge, name=name, better=better)


def repeats(n: int = 4, *, name: str = "repeats", better: int = -1) -> OnGenerations:
    """The share of each text's runs of n words that it has said before; loops bring it to 1. 0 for a text that is shorter.

    Marks count as words.
    """
    def judge(text: str, _: Item) -> float:
        runs = _runs(text, n)
        return 1.0 - len(set(runs)) / len(runs) if runs else 0.0

    return OnGenerations(judge, name=name, better=better)


def scored(function: Callable[[str], float], *, name: str | None = None, better: int = 1) -> OnGenerations:
    """What a Python function of the text gives for each."""
    return OnGenerations(lambda text, _: function(text), name=name or getattr(function, "__name__", "scored"), better=better)


def _runs(text: str, n: int) -> list[tuple[str, ...]]:
    found = re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", text.lower())  # a number is a word here, and so is each mark: both occur in loops
    return [tuple(found[i: i + n]) for i in range(len(found) - n + 1)]
