"""Selectors: rules for positions, resolved to disjoint ascending spans of one prompt."""
from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mia_lab as mia
from mia_lab.errors import EditError
from mia_lab.selectors import CONTENT, ENDLESS, Context, Selector, intersect, merge

N = 10


def at(n: int = N, has_bos: bool = False, **rest: Any) -> Context:
    """A prompt of the tokens 0, 1, ..."""
    return Context(range(n), has_bos, **rest)


class Words:
    """A tokenizer of words, each a token with the space before it; marks in angle brackets are special."""

    words = ("<s>", "<user>", "<bot>", "<end>", "a", " b", " c", "bc", " ab", "cab")
    all_special_ids = (0, 1, 2, 3)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = [0] if add_special_tokens else []
        while text:
            found.append(max((i for i, word in enumerate(self.words) if text.startswith(word)), key=lambda i: len(self.words[i])))
            text = text.removeprefix(self.words[found[-1]])
        return found

    def decode(self, ids: Any) -> str:
        return "".join(self.words[i] for i in ids)

    def apply_chat_template(self, messages: list[dict], tokenize: bool, return_dict: bool = True) -> list[int] | str:
        text = "<s>" + "".join(f"<{message['role']}>{message['content']}<end>" for message in messages)
        return self.encode(text, add_special_tokens=False) if tokenize else text


WORDS = Words()
TEXT = Context(WORDS.encode("a b c ab<end>bc"), True, WORDS)  # <s>, a, _b, _c, _ab, <end>, bc


@pytest.mark.parametrize(("selector", "with_bos", "without"), [
    (CONTENT, [(1, None)], [(0, None)]),
    (mia.everywhere(), [(0, None)], [(0, None)]),
    (mia.prompt(), [(1, N)], [(0, N)]),
    (mia.generated(), [(N, None)], [(N, None)]),
    (mia.generated(3), [(N, N + 3)], [(N, N + 3)]),
    (mia.last(), [(N - 1, N)], [(N - 1, N)]),
    (mia.window(2, 5), [(2, 5)], [(2, 5)]),
    (mia.window(0), [(0, None)], [(0, None)]),
    (mia.window(-3), [(7, None)], [(7, None)]),
    (mia.window(-3, -1), [(7, 9)], [(7, 9)]),
    (mia.window(2, -1), [(2, 9)], [(2, 9)]),
    (mia.window(8, 14), [(8, 14)], [(8, 14)]),  # into the generation
    (mia.window(20), [(20, None)], [(20, None)]),
    (mia.positions([4]), [(4, 5)], [(4, 5)]),
    (mia.positions([-1, 0]), [(0, 1), (9, 10)], [(0, 1), (9, 10)]),
    (mia.positions([5, 3, 4, 7, 3]), [(3, 6), (7, 8)], [(3, 6), (7, 8)]),
    (mia.positions([9, -1]), [(9, 10)], [(9, 10)]),
    (mia.positions([12]), [(12, 13)], [(12, 13)]),
    (mia.positions(range(2, 5)), [(2, 5)], [(2, 5)]),
    (mia.tokens(3, 7, 4, 99), [(3, 5), (7, 8)], [(3, 5), (7, 8)]),
    (~mia.prompt(), [(0, 1), (N, None)], [(N, None)]),
    (~mia.everywhere(), [], []),
    (~mia.positions([0, 3]), [(1, 3), (4, None)], [(1, 3), (4, None)]),
    (mia.prompt() & ~mia.last(), [(1, 9)], [(0, 9)]),
    (mia.last() | mia.generated(2), [(9, 12)], [(9, 12)]),
    (mia.positions([0]) | mia.window(5), [(0, 1), (5, None)], [(0, 1), (5, None)]),
    (mia.window(2, 5) & mia.window(7), [], []),
    (~(mia.window(2, 5) | mia.generated()), [(0, 2), (5, N)], [(0, 2), (5, N)]),
])
def test_a_rule_resolves_to_spans(selector: Selector, with_bos: list, without: list) -> None:
    assert selector.spans(at(has_bos=True)) == with_bos
    assert selector.spans(at()) == without


def test_a_prompt_of_bos_alone_has_no_content() -> None:
    assert mia.prompt().spans(at(1, True)) == []
    assert mia.prompt().spans(at(1)) == [(0, 1)]
    assert mia.generated().spans(at(1, True)) == CONTENT.spans(at(1, True)) == [(1, None)]


@pytest.mark.parametrize(("selector", "says"), [
    (mia.window(5, 5), r"window\(5, 5\) selects nothing in a prompt of 10 tokens"),
    (mia.window(5, -5), r"window\(5, -5\) selects nothing"),
    (mia.window(5, 3), r"window\(5, 3\) selects nothing"),
    (mia.window(-11), r"window\(-11, None\) selects nothing"),
    (mia.window(3, -11), r"window\(3, -11\) selects nothing"),
    (mia.positions([0, -11]), r"positions\(0, -11\) reach before the start of a prompt of 10 tokens"),
])
def test_a_rule_that_selects_nothing_is_an_error_with_the_prompt_s_length(selector: Selector, says: str) -> None:
    with pytest.raises(EditError, match=says):
        selector.spans(at(has_bos=True))


@pytest.mark.parametrize(("build", "says"), [
    (lambda: mia.positions([]), "at least one position"), (mia.tokens, "at least one token"), (lambda: mia.span(""), "needs a text"),
    (lambda: mia.generated(0), r"generated\(0\) selects nothing"), (lambda: mia.generated(-2), "selects nothing")])
def test_a_selector_of_nothing_is_an_error_at_once(build: Any, says: str) -> None:
    with pytest.raises(EditError, match=says):
        build()


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("selector", "places"), [
    (mia.tokens("a"), [1]), (mia.tokens(" b", 4), [1, 2]), (mia.tokens("cab"), []), (mia.special(), [0, 5]),
    (~mia.special() & mia.prompt(), [1, 2, 3, 4, 6]),
    (mia.span("a"), [1]), (mia.span("a", 1), [4]), (mia.span("a", -1), [4]), (mia.span("b"), [2]),
    (mia.span("b", 1), [4]), (mia.span("b", 2), [6]), (mia.span("b c"), [2, 3]), (mia.span(" b c ab"), [2, 3, 4]),
    (mia.span("c a"), [3, 4]),
    (mia.span("a b c ab<end>bc"), [1, 2, 3, 4, 5, 6])])
def test_rules_over_text_take_the_tokens_that_hold_it(selector: Selector, places: list[int]) -> None:
    assert [p for a, b in selector.spans(TEXT) for p in range(a, b)] == places


class Bytes:
    """A tokenizer of bytes; as in SentencePiece, an unfinished character decodes to a mark for each of its bytes."""

    def decode(self, ids: Any) -> str:
        text = bytes(ids)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            return text[: error.start].decode() + "\N{REPLACEMENT CHARACTER}" * (len(text) - error.start)


@pytest.mark.parametrize(("text", "spans"), [("a", [(0, 1)]), ("\N{GRINNING FACE}", [(1, 5)]), ("b", [(5, 6)])])
def test_a_character_of_several_tokens_is_taken_whole(text: str, spans: list) -> None:
    prompt = Context(list("a\N{GRINNING FACE}b".encode()), tokenizer=Bytes())
    assert mia.span(text).spans(prompt) == spans


@pytest.mark.parametrize("occurrence", [0, 999, -1])
def test_a_long_prompt_is_not_decoded_at_every_token(occurrence: int) -> None:
    """A server finds texts between the steps of all its requests."""
    class Counting(Bytes):
        calls = 0

        def decode(self, ids: Any) -> str:
            self.calls += 1
            return super().decode(ids)

    counting = Counting()
    (found,) = mia.span("b\N{GRINNING FACE}", occurrence).spans(Context(list("ab\N{GRINNING FACE}".encode() * 2000), tokenizer=counting))
    place = 6 * (occurrence % 2000) + 1
    assert found == (place, place + 5) and counting.calls < 60


@pytest.mark.parametrize(("selector", "says"), [
    (mia.tokens(" b c"), "' b c' is 2 tokens of this model; tokens() takes single ones, span() takes text"),
    (mia.tokens(""), "'' is 0 tokens of this model"),
    (mia.span("cc"), "the text 'cc' occurs 0 times in the prompt; occurrence 0 was asked for"),
    (mia.span("a", 2), "the text 'a' occurs 2 times in the prompt; occurrence 2 was asked for"),
    (mia.span("a", -3), "occurrence -3 was asked for"),
    (mia.role("user"), "role() needs a prompt of chat messages"),
])
def test_text_that_is_not_there_is_an_error(selector: Selector, says: str) -> None:
    with pytest.raises(EditError) as caught:
        selector.spans(TEXT)
    assert says in str(caught.value)


CHAT = [{"role": "user", "content": "a b"}, {"role": "bot", "content": " c"}, {"role": "user", "content": "a"}]
IDS = [*WORDS.apply_chat_template(CHAT, True, False), 2]  # the answer's mark follows


def test_a_role_is_its_messages_with_their_marks() -> None:
    chat = Context(IDS, True, WORDS, CHAT)
    assert mia.role("user").spans(chat) == [(0, 5), (8, 11)]  # what precedes the first message goes with it
    assert mia.role("bot").spans(chat) == [(5, 8)]
    assert (mia.role("bot") & ~mia.special()).spans(chat) == [(6, 7)]
    with pytest.raises(EditError, match="no message has the role 'system'; there are bot, user"):
        mia.role("system").spans(chat)


class Bare(Words):
    """Without marks: tokens reach from one message into the next."""

    words = (*Words.words, " a", "b")

    def apply_chat_template(self, messages: list[dict], tokenize: bool, return_dict: bool = True) -> list[int] | str:
        text = "".join(message["content"] for message in messages)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def test_a_token_that_belongs_to_two_messages_is_neithers() -> None:
    bare, chat = Bare(), [{"role": "user", "content": "a"}, {"role": "bot", "content": " b"}, {"role": "user", "content": " ab"}]
    whole = Context(bare.apply_chat_template(chat, tokenize=True), False, bare, chat)
    assert mia.role("bot").spans(whole) == [(1, 2)] and whole.turns == [("user", 0, 1), ("bot", 1, 2), ("user", 2, 3)]
    chat[1:] = [{"role": "bot", "content": " a"}, {"role": "user", "content": "b"}]
    with pytest.raises(EditError, match="no fixed tokens"):
        mia.role("bot").spans(Context(bare.apply_chat_template(chat, tokenize=True), False, bare, chat))


class Alone(Words):
    """Makes other tokens of a part of a text than of the whole, as tokenizers do that put a space before what they are given."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [4, *super().encode(text, False)] if text.startswith("<bot>") else super().encode(text, add_special_tokens)


def test_a_chat_whose_parts_have_other_tokens_is_read_from_its_beginnings() -> None:
    alone = Alone()
    chat = Context(WORDS.apply_chat_template(CHAT, tokenize=True), True, alone, CHAT)
    assert mia.role("bot").spans(chat) == [(5, 8)]


def test_a_template_that_rewrites_earlier_messages_is_refused() -> None:
    with pytest.raises(EditError, match="rewrites earlier messages"):
        mia.role("user").spans(Context(IDS[:3] + IDS[4:], True, WORDS, CHAT))


# -- as data ----------------------------------------------------------------------------------------------------------


def test_equal_rules_are_equal_and_cannot_be_changed() -> None:
    assert mia.window(1, 4) == mia.window(1, 4) != mia.window(1, 5)
    assert len({mia.positions([1, 2]), mia.positions([1, 2]), mia.positions([2, 1])}) == 2
    assert mia.last() & mia.prompt() == mia.last() & mia.prompt() != mia.prompt() & mia.last()
    assert len({~mia.last(), ~mia.last(), mia.last() | ~mia.last()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        mia.last().rule = "prompt"


def test_its_text_is_its_rule() -> None:
    assert str(mia.window(2, -1)) == "window(2, -1)"
    assert str(mia.prompt() & ~mia.special()) == "and(prompt(), not(special()))"


SIMPLE = st.one_of(
    st.sampled_from([CONTENT, mia.everywhere(), mia.prompt(), mia.generated(), mia.generated(3), mia.last()]),
    st.builds(mia.window, st.integers(-6, 12), st.none() | st.integers(-6, 12)),
    st.builds(mia.tokens, st.integers(0, 9), st.integers(0, 9)),
    st.builds(mia.positions, st.lists(st.integers(-6, 12), min_size=1, max_size=6)))
RULES = st.recursive(SIMPLE, lambda inner: st.one_of(
    inner.map(lambda one: ~one), st.builds(Selector.__and__, inner, inner), st.builds(Selector.__or__, inner, inner)), max_leaves=5)


def held(rule: Selector, n: int, has_bos: bool) -> set[int]:
    """Those of the first 20 positions that a rule says, by sets."""
    everything = range(20)
    match rule.rule:
        case "not":
            return set(everything) - held(rule.args[0], n, has_bos)
        case "and":
            return held(rule.args[0], n, has_bos) & held(rule.args[1], n, has_bos)
        case "or":
            return held(rule.args[0], n, has_bos) | held(rule.args[1], n, has_bos)
    a, b = (*rule.args, None, None)[:2]
    from_end = lambda p: p + n if p is not None and p < 0 else p  # noqa: E731
    return set({
        "content": everything[has_bos:], "everywhere": everything, "prompt": everything[has_bos:n], "last": [n - 1],
        "generated": everything[n : None if a is None else n + a],
        "window": everything[from_end(a) : from_end(b)] if rule.rule == "window" else (),
        "tokens": [p for p in range(n) if p in rule.args], "positions": [from_end(p) for p in rule.args if rule.rule == "positions"],
    }[rule.rule])


@given(RULES, st.integers(1, 8), st.booleans())
def test_spans_ascend_apart_from_each_other_and_hold_what_the_rule_says(rule: Selector, n: int, has_bos: bool) -> None:
    try:
        spans = rule.spans(at(n, has_bos))
    except EditError:
        assert "window" in str(rule) or "positions" in str(rule)
        return
    edges = [edge if edge is not None else 10**9 for span in spans for edge in span]
    assert edges == sorted(set(edges))  # so neither empty, nor overlapping, nor touching
    assert {p for start, stop in spans for p in range(start, 20 if stop is None else stop)} == held(rule, n, has_bos)


@given(SIMPLE, SIMPLE)
def test_an_intersection_takes_open_ends_as_endless(one: Selector, other: Selector) -> None:
    try:
        spans = [rule.spans(at(5)) for rule in (one, other)]
    except EditError:
        return
    assert intersect(*spans) == [(a, ENDLESS if b is None else b) for a, b in (one & other).spans(at(5))]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=6), st.booleans())
def test_merging_joins_what_touches_and_keeps_the_rest(steps: list[tuple[int, int]], open_end: bool) -> None:
    spans, at = [], 0
    for gap, length in steps:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    if open_end and spans:
        spans[-1] = (spans[-1][0], None)
    merged = merge(spans)
    rows = lambda parts: [p for a, b in parts for p in range(a, 99 if b is None else b)]  # noqa: E731
    assert rows(merged) == rows(spans)
    assert all(stop < start for (_, stop), (start, _) in pairwise(merged))
