"""Prompts: what becomes token ids, what is refused before anything runs, and which positions `at` names."""
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers

from mia_lab.errors import PromptError
from mia_lab.prompts import Prompts, read, resolve_at

ROOM = 10
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
TEMPLATE = ("{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'a>' }}{% endif %}")


@pytest.fixture(scope="module")
def tokenizer(models: Path) -> Any:
    """One token a character, BOS (1) first."""
    return transformers.AutoTokenizer.from_pretrained(tiny.tokenizer(models))


@pytest.fixture(scope="module")
def chatty(tokenizer: Any) -> Any:
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = TEMPLATE
    return with_template


def ids(text: str) -> list[int]:
    return [ord(character) - 29 for character in text]


AB = [1, *ids("ab")]


@pytest.mark.parametrize(("prompt", "expected"), [
    ("ab", AB), ([1, 5, 319], [1, 5, 319]), ((1, 5), [1, 5]), (range(3), [0, 1, 2]), (torch.tensor([1, 5]), [1, 5]),
    (torch.tensor([7], dtype=torch.int32), [7]), (" ", [1, *ids(" ")]),
])
def test_one_prompt_is_a_batch_of_one_that_says_so(tokenizer: Any, prompt: Any, expected: list[int]) -> None:
    found = read(prompt, tokenizer, ROOM)
    assert (found.ids, found.one) == ([expected], True)
    assert all(type(i) is int for i in found.ids[0])


@pytest.mark.parametrize(("prompts", "expected"), [
    (["ab"], [AB]), (("ab", "b"), [AB, [1, *ids("b")]]), ([[1, 5], [6]], [[1, 5], [6]]), ([(1, 5)], [[1, 5]]),
    (torch.tensor([[1, 5], [6, 7]]), [[1, 5], [6, 7]]), ([torch.tensor([1, 5]), "ab", [9]], [[1, 5], AB, [9]]),
])
def test_a_list_of_prompts_is_a_batch_and_may_mix_types(tokenizer: Any, prompts: Any, expected: list) -> None:
    found = read(prompts, tokenizer, ROOM)
    assert (found.ids, found.one) == (expected, False)


def test_a_chat_goes_through_the_template_up_to_the_answer(chatty: Any) -> None:
    expected = ids("uxaya>")
    assert chatty.decode(expected) == "uxaya>"
    for one in (CHAT, tuple(CHAT)):
        found = read(one, chatty, ROOM)
        assert (found.ids, found.one) == ([expected], True)
    found = read([CHAT, CHAT[:1], "ab"], chatty, ROOM)
    assert (found.ids, found.one) == ([expected, ids("uxa>"), AB], False)


def test_each_chat_keeps_its_messages_and_other_prompts_have_none(chatty: Any) -> None:
    assert read(CHAT, chatty, ROOM).messages == [CHAT]
    assert read([tuple(CHAT), "ab", [1, 5], torch.tensor([1])], chatty, ROOM).messages == [CHAT, None, None, None]
    assert Prompts.of([[1], [2, 3]]) == Prompts([[1], [2, 3]], False, [None, None])


def test_prompts_repeat_one_after_the_other(chatty: Any) -> None:
    found = read([CHAT[:1], "ab"], chatty, ROOM).times(2)
    assert found.ids == [ids("uxa>")] * 2 + [AB] * 2
    assert found.messages == [CHAT[:1]] * 2 + [None] * 2
    assert not read("ab", chatty, ROOM).times(2).one
    assert read("ab", chatty, ROOM).times(1) == read("ab", chatty, ROOM)


def test_a_chat_without_a_template_is_an_error_that_says_what_to_give(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="tokenizer has no chat template; give the prompt as plain text"):
        read(CHAT, tokenizer, ROOM)


@pytest.mark.parametrize(("prompts", "says"), [
    ([], "no prompt was given"),
    (torch.zeros(0, 3, dtype=torch.int64), "no prompt was given"),
    ("", "prompt 0 is empty"),
    (["ab", ""], "prompt 1 is empty"),
    ([[1], []], "prompt 1 is empty"),
    (torch.zeros(0, dtype=torch.int64), "prompt 0 is empty"),
])
def test_an_empty_prompt_is_refused(tokenizer: Any, prompts: Any, says: str) -> None:
    with pytest.raises(PromptError) as caught:
        read(prompts, tokenizer, ROOM)
    assert str(caught.value) == says


FORMS = "a prompt is a string, a list of token ids or a list of chat messages, not {}"
GIVE = "prompt {} is of type {}; give a string, a list of token ids or a list of chat messages"


@pytest.mark.parametrize(("prompts", "says"), [
    (None, FORMS.format("NoneType")), (5, FORMS.format("int")), ({"role": "user"}, FORMS.format("dict")),
    (iter(["ab"]), FORMS.format("list_iterator")), (np.array([1, 2]), FORMS.format("ndarray")),
    (["ab", 5], GIVE.format(1, "int")), ([None], GIVE.format(0, "NoneType")), ([1.5], GIVE.format(0, "float")),
    ([{"content": "x"}], GIVE.format(0, "dict")),
])
def test_another_type_is_refused_with_the_types_there_are(tokenizer: Any, prompts: Any, says: str) -> None:
    with pytest.raises(PromptError) as caught:
        read(prompts, tokenizer, ROOM)
    assert str(caught.value) == says


@pytest.mark.parametrize("prompts", [torch.tensor(1), [torch.tensor(1)], b"ab"])
def test_these_types_are_refused_too(tokenizer: Any, prompts: Any) -> None:
    with pytest.raises(PromptError):
        read(prompts, tokenizer, ROOM)


@pytest.mark.parametrize(("prompts", "says"), [
    ([1, 320], "prompt 0 holds 320, which is no token id of this model (0 to 319)"),
    ([[1], [1, -1]], "prompt 1 holds -1, which is no token id of this model (0 to 319)"),
    ([1, "a"], "prompt 0 holds 'a', which is no token id"),
    ([1, True], "prompt 0 holds True, which is no token id"),
    ([1, 2.0], "prompt 0 holds 2.0, which is no token id"),
    pytest.param([1, None], "prompt 0 holds None, which is no token id"),
    (torch.tensor([1.0, 2.0]), "prompt 0 holds 1.0, which is no token id"),
    (torch.zeros(1, 2, 2, dtype=torch.int64), "prompt 0 holds [0, 0], which is no token id"),
])
def test_what_is_no_token_id_is_named(tokenizer: Any, prompts: Any, says: str) -> None:
    with pytest.raises(PromptError) as caught:
        read(prompts, tokenizer, ROOM)
    assert says in str(caught.value)


@pytest.mark.parametrize("make", [lambda n: "a" * (n - 1), lambda n: [1] * n, lambda n: torch.tensor([1] * n)])
def test_a_prompt_must_leave_room_for_one_generated_token(tokenizer: Any, make: Any) -> None:
    assert len(read(make(ROOM - 1), tokenizer, ROOM).ids[0]) == ROOM - 1
    for n in (ROOM, ROOM + 3):
        with pytest.raises(PromptError) as caught:
            read(["ok", make(n)], tokenizer, ROOM)
        assert str(caught.value) == (f"prompt 1 has {n} tokens; the context holds 10 with at least one generated. "
                                     f"Shorten it or load with max_model_len={n + 1} or more")


# -- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "expected"), [
    (None, [0, 1, 2, 3, 4]), (0, [0]), (-1, [4]), (-5, [0]), (slice(1, None), [1, 2, 3, 4]), (slice(-2, None), [3, 4]),
    (slice(None, None, -2), [4, 2, 0]), (slice(3, 99), [3, 4]), ([1, -1], [1, 4]), ((2,), [2]), (range(3), [0, 1, 2]),
    ([3, 1, 3], [3, 1, 3]), (np.array([0, 2]), [0, 2]), (torch.tensor([-1, 0]), [4, 0]), (iter([2]), [2]),
])
def test_at_names_positions_of_the_prompt_in_the_order_given(at: Any, expected: list[int]) -> None:
    found = resolve_at(at, 5)
    assert found == expected
    assert all(type(p) is int for p in found)


@pytest.mark.parametrize("at", [5, -6, [0, 5], [-6], "last", 1.0, True, [None], [[1, 2]], {"a": 1}, [True, False],
                                np.array([True, False]), torch.tensor([False, True])])
def test_a_position_that_the_prompt_lacks_is_an_error_with_those_it_has(at: Any) -> None:
    with pytest.raises(PromptError) as caught:
        resolve_at(at, 5)
    assert str(caught.value) == f"at={at!r} does not fit a prompt of 5 tokens (positions 0 to 4)"


@pytest.mark.parametrize("at", [[], slice(5, None), slice(3, 2), range(0), ()])
def test_no_position_is_an_error(at: Any) -> None:
    with pytest.raises(PromptError) as caught:
        resolve_at(at, 5)
    assert str(caught.value) == f"at={at!r} names no position of a prompt of 5 tokens"


@pytest.mark.parametrize("at", [np.int64(1), torch.tensor(1)])
def test_any_integer_names_a_position(at: Any) -> None:
    assert resolve_at(at, 5) == [1]


@pytest.mark.parametrize("at", ["12", [1.7]])
def test_what_is_no_integer_names_no_position(at: Any) -> None:
    with pytest.raises(PromptError):
        resolve_at(at, 5)
