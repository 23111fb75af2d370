"""What a sweep is measured on: prompts with their groups, in parts for choosing and for reporting, and pieces of fixed text."""
from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import EditError, PromptError
from ...prompts import following
from ...running.submit import has_bos
from ..data import rows
from ..units import neutral_text
from .trials import Ask

if TYPE_CHECKING:
    from ...session import Session

_FIRST_NEUTRAL = 60  # the paragraphs before are those that units and random directions are made of


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to measure on, of a group (its topic or template); row: whatever else its line in a data set says."""

    prompt: Any
    group: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Lab:
    """Where metrics get their requests from: the session, the prompts of one part, and how texts are generated.

    part: "select" or "holdout"; no piece of fixed text is in both.
    """

    session: Session
    items: tuple[Item, ...]
    part: str
    max_tokens: int
    seeds: tuple[int | None, ...]

    def prompt(self, item: Item, system: str | None) -> Ask:
        """The request of a prompt, with a system prompt before it where there is one."""
        prompt = framed(item.prompt, system)
        read = self.session._read([prompt])
        return Ask(tuple(read.ids[0]), len(read.ids[0]), messages=read.messages[0])

    def texts(self, n: int) -> list[str]:
        """`n` neutral paragraphs of this part."""
        return _share(neutral_text()[_FIRST_NEUTRAL:], self.part, n, "neutral paragraphs")

    def questions(self, n: int) -> list[dict[str, Any]]:
        """`n` questions of this part of the capability set, evenly over its subjects."""
        mine = _share(rows("capability"), self.part, None, "questions")
        if n > len(mine):
            raise EditError(f"{n} questions were asked for; each part has {len(mine)}")
        return [mine[i * len(mine) // n] for i in range(n)]

    def tokens(self, text: str) -> list[int]:
        """A text's tokens as they follow another text, without special ones."""
        return following(self.session.tokenizer, text)

    def continued(self, item: Item, system: str | None, answer: str) -> Ask:
        """A prompt with an answer after it, and the rows from which the answer's tokens are told."""
        start, more = self.prompt(item, system), self.tokens(answer)
        if not more:
            raise PromptError(f"the answer {answer!r} has no token")
        return self._checked(Ask((*start.ids, *more), start.given, tuple(range(start.given - 1, start.given + len(more) - 1)),
                                 messages=start.messages))

    def passage(self, text: str, given: int, scored: int, system: str | None) -> Ask:
        """The beginning of a text and so many tokens that go on with it, whose rows are wanted."""
        ids = list(self.session.tokenizer.encode(text))
        lead = has_bos(self.session.tokenizer, ids)
        body = ids[lead: lead + given + scored]
        if len(body) < given + scored:
            raise EditError(f"a neutral paragraph has {len(body)} tokens of this model, fewer than the {given} given and {scored} scored")
        first = [*ids[:lead], *([] if system is None else self.tokens(f"{system}\n\n")), *body[:given]]
        return self._checked(Ask((*first, *body[given:]), len(first), tuple(range(len(first) - 1, len(first) + scored - 1))))

    def _checked(self, ask: Ask) -> Ask:
        if len(ask.ids) >= self.session.max_len:
            raise PromptError(f"a text to score has {len(ask.ids)} tokens; the context holds {self.session.max_len} with one more. "
                              f"Load with a larger max_model_len, or score shorter texts")
        return ask


def read_items(prompts: Any) -> list[Item]:
    """Read prompts from strings, token ids, chat messages, or lines of a data set with a "prompt" and perhaps a "group".

    A prompt without a group is a group of its own; equal prompts are one group.
    """
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable) or hasattr(prompts, "iterrows"):
        raise EditError("prompts is a list of prompts, or a data set whose lines have a prompt; of a data frame give df.to_dict('records')")
    out = []
    for entry in prompts:
        if isinstance(entry, Item):
            out.append(entry)
        elif isinstance(entry, Mapping):
            if "prompt" not in entry:
                raise EditError(f"a line of prompts has the keys {sorted(entry)}; it needs a prompt")
            name = entry.get("group")
            own = name is None or name != name  # a data frame says NaN for none
            out.append(Item(entry["prompt"], repr(entry["prompt"]) if own else str(name), dict(entry)))
        elif isinstance(entry, int):
            raise EditError(f"{entry} is no prompt; a prompt of token ids is a list of them in the list of prompts")
        else:
            out.append(Item(entry, repr(entry)))
    if not out:
        raise EditError("there is no prompt to sweep over")
    return out


def divide(items: Sequence[Item], seed: int = 0) -> tuple[list[Item], list[Item]]:
    """Divide whole groups at random into prompts to choose on and to report on, about half each; EditError for one group."""
    names = sorted({item.group for item in items})
    if len(names) < 4:
        raise EditError(f"choosing and reporting need two groups of prompts each; these prompts have {len(names)}. Give more prompts, or "
                        f"both parts yourself: prompts=..., holdout=...")
    random.Random(seed).shuffle(names)
    chosen = set(names[: (len(names) + 1) // 2])
    return [item for item in items if item.group in chosen], [item for item in items if item.group not in chosen]


def framed(prompt: Any, system: str | None) -> Any:
    """A prompt under a system prompt: a message of its own before chat messages, a paragraph of its own before a plain text."""
    if system is None:
        return prompt
    if isinstance(prompt, str):
        return f"{system}\n\n{prompt}"
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        first = dict(prompt[0])
        if first["role"] == "system":
            return [first | {"content": f"{system}\n\n{first['content']}"}, *prompt[1:]]
        return [{"role": "system", "content": system}, *prompt]
    raise PromptError("a system prompt can stand before a text or chat messages, not before token ids")


def check_of(item: Item) -> dict[str, Any]:
    """The check that a line of a data set names; EditError where there is none."""
    found = item.row.get("check")
    if found is None:
        raise EditError("follows() needs prompts whose lines have a check, such as mia.dataset('instruction_prompts')")
    return json.loads(found) if isinstance(found, str) else dict(found)


def _share(everything: Sequence[Any], part: str, n: int | None, what: str) -> list[Any]:
    mine = list(everything[part != "select"::2])
    if n is not None and not 0 < n <= len(mine):
        raise EditError(f"{n} {what} were asked for; each part has {len(mine)}")
    return mine[:n]
