"""Selectors: which positions of a request something touches. Each resolves to spans of absolute positions."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from .engine.wire import Span
from .errors import EditError

ENDLESS = 1 << 31


@dataclass(frozen=True)
class Context:
    """What selectors resolve against: one prompt's token ids, and its tokenizer and chat messages where there are any."""

    ids: Sequence[int]
    has_bos: bool = False
    tokenizer: Any = field(default=None, compare=False)
    messages: Sequence[dict] | None = field(default=None, compare=False)

    @property
    def n(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)

    @cached_property
    def turns(self) -> list[tuple[str, int, int]]:
        """The role of each chat message, and where its tokens begin and end; EditError where that cannot be told."""
        return _turns(self)


@dataclass(frozen=True, slots=True)
class Selector:
    """A rule for positions; selectors combine with `&`, `|` and `~`."""

    rule: str
    args: tuple = ()

    def spans(self, prompt: Context) -> list[Span]:
        """Return the disjoint, ascending spans that the rule selects in a request with this prompt; EditError when it cannot."""
        if self.rule not in _RULES:
            raise EditError(f"there is no selector {self.rule!r}")
        return [(a, None if b >= ENDLESS else b) for a, b in _RULES[self.rule](prompt, *self.args)]

    @property
    def reads_text(self) -> bool:
        """Whether it depends on what the prompt's tokens are, not only on how many there are."""
        return self.rule in ("tokens", "special", "span", "role") or any(isinstance(a, Selector) and a.reads_text for a in self.args)

    @property
    def reads_messages(self) -> bool:
        """Whether it depends on which message of a chat a token belongs to."""
        return self.rule == "role" or any(isinstance(a, Selector) and a.reads_messages for a in self.args)

    def __and__(self, other: Selector) -> Selector:
        return Selector("and", (self, other))

    def __or__(self, other: Selector) -> Selector:
        return Selector("or", (self, other))

    def __invert__(self) -> Selector:
        return Selector("not", (self,))

    def __str__(self) -> str:
        return f"{self.rule}({', '.join(map(str, self.args))})"


Run = list[tuple[int, int]]  # as Span, with ENDLESS for no end


def _window(prompt: Context, start: int, stop: int | None) -> Run:
    first = start + prompt.n if start < 0 else start
    last = ENDLESS if stop is None else stop + prompt.n if stop < 0 else stop
    if first < 0 or last <= first:
        raise EditError(f"window({start}, {stop}) selects nothing in a prompt of {prompt.n} tokens")
    return [(first, last)]


def _positions(prompt: Context, *places: int) -> Run:
    found = sorted({p + prompt.n if p < 0 else p for p in places})
    if found[0] < 0:
        raise EditError(f"positions{places} reach before the start of a prompt of {prompt.n} tokens")
    return merge([(p, p + 1) for p in found])


def _tokens(prompt: Context, *wanted: int | str) -> Run:
    ids: set[int] = set()
    for item in wanted:
        found = [item] if isinstance(item, int) else prompt.tokenizer.encode(item, add_special_tokens=False)
        if len(found) != 1:
            raise EditError(f"{item!r} is {len(found)} tokens of this model; tokens() takes single ones, span() takes text")
        ids |= set(found)
    return merge([(i, i + 1) for i, token in enumerate(prompt.ids) if token in ids])


def _special(prompt: Context) -> Run:
    ids = set(prompt.tokenizer.all_special_ids)
    return merge([(i, i + 1) for i, token in enumerate(prompt.ids) if token in ids])


def _span(prompt: Context, text: str, occurrence: int) -> Run:
    whole = prompt.tokenizer.decode(prompt.ids)
    starts = [i for i in range(len(whole)) if whole.startswith(text, i)]
    if not -len(starts) <= occurrence < len(starts):
        raise EditError(f"the text {text!r} occurs {len(starts)} times in the prompt; occurrence {occurrence} was asked for")
    low = starts[occurrence]
    # Tokens that share a character have no border between them: the text of a prefix that ends there is not one of the whole.
    prefix = lambda i: prompt.tokenizer.decode(prompt.ids[:i])  # noqa: E731
    start = bisect_right(range(prompt.n + 1), low, key=lambda i: len(prefix(i)))  # to decode every prefix would take minutes
    while len(prefix(start)) > low or not whole.startswith(prefix(start)):
        start -= 1
    borders: list[tuple[int, int]] = []  # from the last one before the text on, with how many characters lie before each
    while not borders or borders[-1][1] < low + len(text):
        found = prefix(start)
        borders += [(start, len(found))] if whole.startswith(found) else []
        start += 1
    groups = [(a, b) for (a, before), (b, after) in pairwise(borders) if before < low + len(text) and after > low]
    return merge(groups)


def _role(prompt: Context, name: str) -> Run:
    runs = [(start, stop) for role, start, stop in prompt.turns if role == name]
    if not runs:
        raise EditError(f"no message has the role {name!r}; there are {', '.join(sorted({role for role, *_ in prompt.turns}))}")
    return merge(runs)


def _turns(prompt: Context) -> list[tuple[str, int, int]]:
    if not prompt.messages:
        raise EditError("role() needs a prompt of chat messages")
    beginnings = [list(prompt.messages[: i + 1]) for i in range(len(prompt.messages))]
    ends = _ends_of_parts(prompt, beginnings) or _ends_of_beginnings(prompt, beginnings)
    return [(message["role"], start, stop) for message, (start, stop) in zip(prompt.messages, pairwise([0, *ends]))]


def _ends_of_parts(prompt: Context, beginnings: list[list[dict]]) -> list[int]:
    """How many tokens a chat has after each message, from the text that the template adds with each; none where these do not make up the
    prompt: some tokenizers make other tokens of a part than of the whole."""
    tokenizer = prompt.tokenizer
    texts = ["", *(tokenizer.apply_chat_template(messages, tokenize=False) for messages in beginnings)]
    if not all(text.startswith(before) for before, text in pairwise(texts)):
        return []
    parts = [tokenizer.encode(text[len(before):], add_special_tokens=False) for before, text in pairwise(texts)]
    ends = list(accumulate(map(len, parts)))
    return ends if list(prompt.ids[: ends[-1]]) == [token for part in parts for token in part] else []


def _ends_of_beginnings(prompt: Context, beginnings: list[list[dict]]) -> list[int]:
    """The same, from the tokens of each beginning of the chat: seconds for a long one. EditError where the prompt begins otherwise."""
    ends = []
    for messages in beginnings:
        ids = prompt.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        if list(prompt.ids[: len(ids)]) != list(ids):
            raise EditError("this chat template rewrites earlier messages when later ones follow, so roles have no fixed tokens")
        ends.append(len(ids))
    return ends


def _not(prompt: Context, inner: Selector) -> Run:
    edges = [0, *(edge for run in _run(prompt, inner) for edge in run), ENDLESS]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2]) if a < b]


def _and(prompt: Context, one: Selector, other: Selector) -> Run:
    return intersect(_run(prompt, one), _run(prompt, other))


def _or(prompt: Context, one: Selector, other: Selector) -> Run:
    return merge(sorted(_run(prompt, one) + _run(prompt, other)))


def _run(prompt: Context, selector: Selector) -> Run:
    return _RULES[selector.rule](prompt, *selector.args)


def intersect(one: list, other: list) -> list:
    """Return the positions in both of two lists of spans."""
    closed = [[(a, ENDLESS if b is None else b) for a, b in spans] for spans in (one, other)]
    found = [(max(a, c), min(b, d)) for a, b in closed[0] for c, d in closed[1]]
    return sorted((a, b) for a, b in found if a < b)


def merge(spans: list[Span]) -> list[Span]:
    """Join ascending spans that touch or overlap."""
    out: list[Span] = []
    for start, stop in spans:
        if out and out[-1][1] is not None and out[-1][1] >= start:
            out[-1] = (out[-1][0], stop if stop is None else max(stop, out[-1][1]))
        elif not out or out[-1][1] is not None:
            out.append((start, stop))
    return out


_RULES = {
    "content": lambda p: [(int(p.has_bos), ENDLESS)],
    "everywhere": lambda p: [(0, ENDLESS)],
    "prompt": lambda p: [(int(p.has_bos), p.n)] if p.n > p.has_bos else [],
    "generated": lambda p, stop=None: [(p.n, ENDLESS if stop is None else p.n + stop)],
    "last": lambda p: [(p.n - 1, p.n)],
    "window": _window, "positions": _positions, "tokens": _tokens, "special": _special, "span": _span, "role": _role,
    "not": _not, "and": _and, "or": _or,
}
CONTENT = Selector("content")


def everywhere() -> Selector:
    """Every position, BOS too."""
    return Selector("everywhere")


def prompt() -> Selector:
    """The prompt's positions, except BOS."""
    return Selector("prompt")


def generated(first: int | None = None) -> Selector:
    """The positions of generated tokens, or of the `first` so many."""
    if first is None:
        return Selector("generated")
    if first < 1:
        raise EditError(f"generated({first}) selects nothing")
    return Selector("generated", (int(first),))


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


def tokens(*wanted: int | str) -> Selector:
    """The prompt's positions that hold one of these tokens, given as ids or as text that is one token."""
    if not wanted:
        raise EditError("tokens() needs at least one token")
    return Selector("tokens", wanted)


def special() -> Selector:
    """The prompt's positions that hold special tokens (BOS, turn marks, padding); `~special()` excludes them."""
    return Selector("special")


def span(text: str, occurrence: int = 0) -> Selector:
    """The prompt's tokens that overlap a text in it, its first occurrence or another; -1 is the last.

    Decodes each beginning of the prompt: about a second for a thousand tokens.
    """
    if not text:
        raise EditError("span() needs a text")
    return Selector("span", (text, int(occurrence)))


def role(name: str) -> Selector:
    """The tokens of the chat messages of one role, turn marks included. What a template puts before the first message, as a system prompt
    of its own, counts as that message's."""
    return Selector("role", (name,))
