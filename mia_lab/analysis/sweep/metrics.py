"""Metrics of answers that are given, not generated: the model's own probabilities of them, and what a probe reads.

They are continuous, cost one pass over the prompt, and have no sampling noise. Each metric of this package is a small frozen
spec: `items` says what it is measured on, `asks` which requests that takes, `score` what number comes of their outcomes.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ...errors import EditError, PromptError
from ...gates import Probe
from .items import Item, Lab
from .trials import Ask, Outcome


class Metric(Protocol):
    """What a sweep needs of a metric. better: which way a change of it is good, +1 or -1; a loss is a change the other way."""

    name: str
    better: int

    def ready(self, lab: Lab) -> Metric:
        """The metric with what it names found in the model; EditError where that is missing."""
        ...

    def items(self, lab: Lab) -> Sequence[Item]:
        """What it is measured on."""
        ...

    def asks(self, lab: Lab, item: Item, system: str | None) -> list[Ask]:
        """The requests for one item."""
        ...

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """The number for one item; base: the same requests of the unsteered model."""
        ...


@dataclass(frozen=True, kw_only=True)
class OnPrompts:
    """A metric measured on the prompts of the sweep."""

    name: str
    better: int = 1

    def ready(self, lab: Lab) -> Metric:
        """The metric itself."""
        return self

    def items(self, lab: Lab) -> Sequence[Item]:
        """The prompts."""
        return lab.items


@dataclass(frozen=True)
class TokenOdds(OnPrompts):
    """The log-odds of one set of next tokens against another, in nats, at the end of the prompt."""

    target: tuple[int | str, ...]
    opposite: tuple[int | str, ...]

    def asks(self, lab: Lab, item: Item, system: str | None) -> list[Ask]:
        """One pass over the prompt."""
        ask = lab.prompt(item, system)
        return [replace(ask, rows=(ask.given - 1,))]

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """log sum p(target) - log sum p(opposite)."""
        logits = outcomes[0].logits[0].double()
        one, other = (logits[list(side)].logsumexp(0) for side in (self.target, self.opposite))
        return float(one - other)

    def ready(self, lab: Lab) -> Metric:
        """The same with token ids."""
        sides = [tuple(dict.fromkeys(_token(lab, t) for t in side)) for side in (self.target, self.opposite)]
        both = set(sides[0]) & set(sides[1])
        if both or not all(sides):
            raise EditError(f"token {min(both)} is on both sides" if both else "token_odds needs tokens on both sides")
        return replace(self, target=sides[0], opposite=sides[1])


@dataclass(frozen=True)
class AnswerOdds(OnPrompts):
    """log p(target | prompt), less log p(opposite | prompt) where there is one, in nats; columns: they name columns of the prompts."""

    target: str
    opposite: str | None = None
    columns: bool = False

    def asks(self, lab: Lab, item: Item, system: str | None) -> list[Ask]:
        """One pass over the prompt and each answer."""
        return [lab.continued(item, system, self._text(item, name)) for name in (self.target, self.opposite) if name is not None]

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """The first answer's log-probability less the second's."""
        values = [log_probability(outcome) for outcome in outcomes]
        return values[0] - sum(values[1:])

    def _text(self, item: Item, name: str) -> str:
        if not self.columns:
            return name
        if name not in item.row:
            raise EditError(f"the prompts have no column {name!r}; there are {sorted(item.row)}")
        if item.row[name] is None or item.row[name] != item.row[name]:
            raise EditError(f"the column {name!r} is empty for the prompt {item.prompt!r}")
        return str(item.row[name])


@dataclass(frozen=True, eq=False)
class ProbeReading(OnPrompts):
    """What a probe reads at the prompt's last token, before the edits at its own point: an edit there does not count as an effect."""

    probe: Probe

    def asks(self, lab: Lab, item: Item, system: str | None) -> list[Ask]:
        """One pass over the prompt."""
        return [replace(lab.prompt(item, system), reads=(self.probe.at,))]

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """value . direction + bias, or the cosine."""
        return self.probe.read(outcomes[0].reads[0])


def log_probability(outcome: Outcome) -> float:
    """The log-probability of the given tokens that follow an ask's rows, summed, in nats."""
    targets = torch.tensor([outcome.ask.ids[p + 1] for p in outcome.ask.rows])
    logits = outcome.logits
    return float((logits.gather(1, targets[:, None])[:, 0].double() - logits.logsumexp(1).double()).sum())


def _token(lab: Lab, token: int | str) -> int:
    if isinstance(token, int):
        if token < 0:
            raise PromptError(f"{token} is no token id")
        return token
    ids = lab.tokens(token)
    if len(ids) != 1:
        raise PromptError(f"{token!r} is {len(ids)} tokens of this model; token_odds takes single ones, answer_odds takes texts")
    return ids[0]


def token_odds(target: Sequence[int | str], opposite: Sequence[int | str], *, name: str = "token_odds") -> TokenOdds:
    """The log-odds of the target tokens against the opposite ones as the next token, in nats; texts of one token each, or ids.

    Mind the space: " good" is what follows a word.
    """
    if isinstance(target, str) or isinstance(opposite, str):
        raise EditError('token_odds takes lists of tokens, token_odds([" good", " great"], [" bad"])')
    return TokenOdds(tuple(target), tuple(opposite), name=name)


def answer_odds(target: str, opposite: str | None = None, *, columns: bool = False, name: str = "answer_odds") -> AnswerOdds:
    """The log-probability of an answer, of any length, given the prompt; less another's, where one is given. In nats.

    columns: the two are names of columns that the prompts' lines have. For answers of one token it is their logit difference.
    """
    return AnswerOdds(target, opposite, columns, name=name)


def probe_reading(probe: Probe, *, name: str = "probe_reading") -> ProbeReading:
    """What a `mia.Probe` reads at the last token of the prompt. Edits before its point count, one at its point does not."""
    return ProbeReading(probe, name=name)
