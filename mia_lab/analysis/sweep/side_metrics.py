"""What steering costs, on fixed texts that no vector was fitted on: KL, perplexity, and answers to questions.

The perplexity of a steered model's own words would reward loops, so it is that of paragraphs somebody else wrote. The first tokens
of a paragraph are the prompt, the rest the continuation, so that edits of prompts, and of generated tokens, both show.
Source of the measures: AxBench, arXiv 2501.17148; directional ablation's choice by KL, arXiv 2406.11717.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from ...errors import EditError
from .items import Item, Lab
from .metrics import Metric, log_probability
from .trials import Ask, Outcome

_LETTERS = "ABCD"


@dataclass(frozen=True)
class OnTexts:
    """A metric measured on the continuation of neutral paragraphs: `given` tokens are the prompt, `scored` follow."""

    name: str
    n: int = 6
    given: int = 12
    scored: int = 32
    better: int = -1

    def ready(self, lab: Lab) -> Metric:
        """The metric itself."""
        return self

    def items(self, lab: Lab) -> Sequence[Item]:
        """Paragraphs, each a group of its own."""
        return [Item(text, f"paragraph {i}") for i, text in enumerate(lab.texts(self.n))]

    def asks(self, lab: Lab, item: Item, system: str | None) -> list[Ask]:
        """One pass over the paragraph's beginning."""
        return [lab.passage(item.prompt, self.given, self.scored, system)]


@dataclass(frozen=True)
class KL(OnTexts):
    """KL(base || steered) of the next token, in nats, the mean over the scored tokens."""

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """The cross-entropy of the base's distribution under the steered one, less the base's own: exactly 0 for equal logits."""
        share = base[0].logits.softmax(-1)
        cross = [(o.logits.logsumexp(-1).double() - (share * o.logits).sum(-1).double()) for o in (outcomes[0], base[0])]
        return float((cross[0] - cross[1]).mean())


@dataclass(frozen=True)
class Perplexity(OnTexts):
    """The mean negative log-probability of the scored tokens, in nats; a difference d of it is a perplexity ratio of exp(d)."""

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """Cross-entropy a token."""
        return -log_probability(outcomes[0]) / len(outcomes[0].ask.rows)


@dataclass(frozen=True)
class Capability:
    """Accuracy on the shipped questions, by the letter of the highest probability, over all four orders of the choices."""

    name: str
    n: int = 40
    better: int = 1
    letters: tuple[int, ...] = ()

    def ready(self, lab: Lab) -> Metric:
        """The same with the letters' tokens; EditError where they are not one token each."""
        for before in (" ", ""):
            found = [lab.tokens(before + letter) for letter in _LETTERS]
            if all(len(ids) == 1 for ids in found):
                return replace(self, letters=tuple(ids[0] for ids in found))
        raise EditError("the letters A to D are not one token each of this model, so questions cannot be answered by letter")

    def items(self, lab: Lab) -> Sequence[Item]:
        """Questions, each a group of its own."""
        return [Item(row["question"], row["question"], row) for row in lab.questions(self.n)]

    def asks(self, lab: Lab, item: Item, system: str | None) -> list[Ask]:
        """Four passes, in which the right choice stands once at each letter."""
        asks = [lab.prompt(Item(rotated(item, turn), item.group), system) for turn in range(4)]
        return [replace(ask, rows=(ask.given - 1,)) for ask in asks]

    def score(self, item: Item, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
        """The share of the orders in which the right letter is the most probable of the four; a tie counts as its share."""
        return mean(self._right(outcome, (item.row["answer"] + turn) % 4) for turn, outcome in enumerate(outcomes))

    def _right(self, outcome: Outcome, right: int) -> float:
        found = outcome.logits[0, list(self.letters)]
        best = found == found.max()
        return float(best[right]) / int(best.sum())


def rotated(item: Item, turn: int) -> str:
    """The question with its choices moved on by `turn` letters."""
    choices = [item.row["choices"][(i - turn) % 4] for i in range(4)]
    lines = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices)]
    return "\n".join([f"Question: {item.row['question']}", *lines, "Answer:"])


def kl(n: int = 6, *, given: int = 12, scored: int = 32, name: str = "kl") -> KL:
    """KL(base || steered) a token, in nats, over `scored` tokens of each of `n` neutral paragraphs, after `given` tokens of it."""
    return KL(name, n, given, scored)


def perplexity(n: int = 6, *, given: int = 12, scored: int = 32, name: str = "perplexity") -> Perplexity:
    """Cross-entropy a token on `n` neutral paragraphs, of which a sweep makes the perplexity ratio exp(steered - base)."""
    return Perplexity(name, n, given, scored)


def capability(n: int = 40, *, name: str = "capability") -> Capability:
    """Accuracy on `n` multiple-choice questions (up to 120), each with its choices in four orders. Chance is 0.25.

    A change of two points is seen with some two thousand questions; with forty, only a collapse is.
    """
    return Capability(name, n)
