"""Metrics of texts and of logits, on texts and logits made up for the purpose."""
from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

import mia_lab as mia
from mia_lab.analysis.data import rows
from mia_lab.analysis.sweep.checks import language_of, passes
from mia_lab.analysis.sweep.items import Item, Lab, check_of, divide, framed, read_items
from mia_lab.analysis.sweep.side_metrics import rotated
from mia_lab.analysis.sweep.trials import Ask, Outcome
from mia_lab.errors import EditError, PromptError

ITEM = Item("", "g")


def score(metric: Any, text: str, item: Item = ITEM) -> float:
    return metric.score(item, [Outcome(Ask((1,), 1, max_tokens=9), None, (), text)], [])


def given(logits: torch.Tensor, targets: list[int], lead: int = 2) -> Outcome:
    """An outcome of a prompt of `lead` tokens and an answer, with the logits that tell it."""
    at = tuple(range(lead - 1, lead - 1 + len(targets)))
    return Outcome(Ask((*range(lead), *targets), lead, at), None, (), "", logits)


TEXTS = {
    "en": "The house was very clean and the staff were friendly, so we would go back to it.",
    "fr": "La maison était très propre et le personnel aimable, nous y retournerons avec plaisir dans un an.",
    "de": "Das Haus war sehr sauber und die Leute waren freundlich, wir kommen nächstes Jahr mit den Kindern.",
    "es": "La casa estaba muy limpia y el personal era amable, por eso volveremos con los niños en verano.",
    "pt": "A casa estava muito limpa e o pessoal foi simpático, por isso vamos voltar com as crianças no verão.",
    "it": "La casa era molto pulita e il personale gentile, per questo torneremo con i bambini nella prossima estate.",
    "nl": "Het huis was erg schoon en de mensen waren vriendelijk, dus komen we volgend jaar met de kinderen terug.",
}


@pytest.mark.parametrize("code", TEXTS)
def test_a_language_is_told_by_its_commonest_words(code: str) -> None:
    assert language_of(TEXTS[code]) == code
    assert [score(mia.language(other), TEXTS[code]) for other in TEXTS] == [float(other == code) for other in TEXTS]


def test_shipped_english_is_english_and_nothing_is_no_language() -> None:
    found = [language_of(row["positive"]) for row in rows("sentiment_pairs")]
    assert found.count("en") > 0.9 * len(found) and set(found) <= {"en", None}
    assert language_of("") is None and language_of("Berlin 1924") is None


@pytest.mark.parametrize(("check", "right", "wrong"), [
    ({"kind": "max_words", "value": 3}, "one two three", "one two three four"),
    ({"kind": "min_words", "value": 3}, "one two three", "one two"),
    ({"kind": "max_sentences", "value": 2}, 'He said "go." She went.', "One. Two! Three?"),
    ({"kind": "bullets", "value": 2}, "Two:\n- one\n* two", "- one\n- two\n- three"),
    ({"kind": "numbered", "value": 2}, "1. one\n2) two", "1. one"),
    ({"kind": "json"}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ({"kind": "json"}, " [1, 2] ", "17"),
    ({"kind": "quoted"}, '"All of it."', '"Half" of it.'),
    ({"kind": "no_commas"}, "no, none".replace(",", ""), "no, none"),
    ({"kind": "uppercase"}, "ALL 2", "aLL"),
    ({"kind": "lowercase"}, "all 2", "All"),
    ({"kind": "language", "value": "de"}, TEXTS["de"], TEXTS["nl"]),
])
def test_a_check_tells_right_from_wrong(check: dict, right: str, wrong: str) -> None:
    assert passes(right, check) and not passes(wrong, check) and not passes("  ", check)
    assert (score(mia.follows(check), right), score(mia.follows(check), wrong)) == (1.0, 0.0)


def test_a_check_comes_from_the_line_of_the_prompt() -> None:
    items = read_items(mia.dataset("instruction_prompts"))
    assert all(check_of(item)["kind"] for item in items)
    first = next(item for item in items if check_of(item)["kind"] == "max_words")
    assert score(mia.follows(), "a few words", first) == 1.0
    assert score(mia.follows(), "word " * 300, first) == 0.0
    with pytest.raises(EditError, match="instruction_prompts"):
        score(mia.follows(), "text")
    for wrong in ({"kind": "rhyme"}, {"kind": "language", "value": "tlh"}):
        with pytest.raises(EditError, match="there are"):
            mia.follows(wrong)


def test_sentiment_is_vader_s() -> None:
    assert score(mia.sentiment(), "I love this wonderful day") > 0.8 > -0.6 > score(mia.sentiment(), "I hate this terrible day")
    assert score(mia.sentiment(), "") == 0.0


def test_repetition_is_seen_and_short_texts_have_none() -> None:
    assert score(mia.repeats(2), "a b a b a b") == pytest.approx(3 / 5)
    assert score(mia.distinct(2), "a b a b a b") == pytest.approx(2 / 5)
    for loop in ("!!!!!!!!!!!!", "1 2 1 2 1 2 1 2 1 2", "... ... ... ..."):
        assert score(mia.repeats(), loop) > 0.6 and score(mia.distinct(), loop) < 0.3
    assert (score(mia.repeats(), "one two three"), score(mia.distinct(4), "one two three")) == (0.0, 1.0)


def test_texts_are_counted_matched_and_given_to_functions() -> None:
    assert (score(mia.length(), "one two"), score(mia.length("characters"), "one two")) == (2.0, 7.0)
    assert (score(mia.matches(r"\bsorry\b"), "I am Sorry."), score(mia.matches("sorry"), "glad")) == (1.0, 0.0)
    several = [Outcome(Ask((1,), 1, max_tokens=9, seed=seed), None, (), text) for seed, text in enumerate(("a", "aaa"))]
    assert mia.scored(len).score(ITEM, several, []) == 2.0 and mia.scored(len).name == "len"
    with pytest.raises(EditError, match="it must give a number"):
        score(mia.scored(lambda text: float("nan")), "a")


def test_answers_are_scored_by_their_own_log_probability() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    log_p = logits.double().log_softmax(-1)
    expected = float(log_p[0, 4] + log_p[1, 7] + log_p[2, 4])
    metric = mia.answer_odds("x", "y")
    assert metric.score(ITEM, [given(logits, [4, 7, 4])], []) == pytest.approx(expected, abs=1e-6)
    other = given(logits[:1], [5])
    assert metric.score(ITEM, [given(logits, [4, 7, 4]), other], []) == pytest.approx(expected - float(log_p[0, 5]), abs=1e-6)


def test_token_odds_are_of_summed_probabilities() -> None:
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(1))
    p = logits.double().softmax(-1)[0]
    found = mia.token_odds([1, 2], [3, 4, 5]).score(ITEM, [given(logits, [0])], [])
    assert found == pytest.approx(math.log(float(p[1] + p[2])) - math.log(float(p[3] + p[4] + p[5])), abs=1e-6)
    with pytest.raises(EditError, match="lists of tokens"):
        mia.token_odds(" good", " bad")


def test_kl_and_perplexity_are_their_definitions_and_exactly_nothing_for_equal_logits() -> None:
    base, steered = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(2)).unbind()
    p, q = base.double().log_softmax(-1), steered.double().log_softmax(-1)
    one, other = given(base, [3, 1, 4, 1, 5]), given(steered, [3, 1, 4, 1, 5])
    assert mia.kl().score(ITEM, [other], [one]) == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=1e-6)
    assert mia.kl().score(ITEM, [one], [one]) == 0.0
    ratio = math.exp(mia.perplexity().score(ITEM, [other], [one]) - mia.perplexity().score(ITEM, [one], [one]))
    ce = [-float(x[range(5), [3, 1, 4, 1, 5]].mean()) for x in (q, p)]
    assert ratio == pytest.approx(math.exp(ce[0] - ce[1]), rel=1e-6)


def test_choices_turn_so_that_the_right_one_stands_once_at_each_letter() -> None:
    row = {"question": "Which?", "choices": ["w", "x", "y", "z"], "answer": 2}
    letters = [next(line[0] for line in rotated(Item("", "", row), turn).splitlines() if line.endswith(" y")) for turn in range(4)]
    assert letters == list("CDAB")


def test_a_scorer_that_knows_nothing_is_right_by_chance() -> None:
    metric, draw = mia.capability(1), torch.Generator().manual_seed(3)
    metric = type(metric)(metric.name, letters=(5, 6, 7, 8))
    items = [Item("", "", row) for row in rows("capability")]
    for always in range(4):  # an eye for one letter only, exactly
        logits = torch.zeros(1, 9)
        logits[0, 5 + always] = 1.0
        assert {metric.score(item, [given(logits, [0])] * 4, []) for item in items} == {0.25}
    assert metric.score(items[0], [given(torch.zeros(1, 9), [0])] * 4, []) == 0.25
    random = [metric.score(item, [given(torch.randn(1, 9, generator=draw), [0]) for _ in range(4)], []) for item in items]
    assert abs(sum(random) / len(random) - 0.25) < 3 * math.sqrt(0.25 * 0.75 / (4 * len(items)))
    knowing = [given(torch.eye(9)[5 + (items[0].row["answer"] + turn) % 4][None], [0]) for turn in range(4)]
    assert metric.score(items[0], knowing, []) == 1.0


def test_prompts_are_divided_by_whole_groups() -> None:
    items = read_items(mia.dataset("sentiment_prompts"))
    select, holdout = divide(items)
    assert len(select) + len(holdout) == len(items) and abs(len(select) - len(holdout)) <= 4
    assert not {item.group for item in select} & {item.group for item in holdout}
    assert divide(items) == (select, holdout) != divide(items, seed=1)
    assert [item.group for item in read_items(["a", "b", "a"])] == ["'a'", "'b'", "'a'"]
    with pytest.raises(EditError, match="two groups of prompts each"):
        divide(read_items(["a", "b", "c"]))
    with pytest.raises(EditError, match="it needs a prompt"):
        read_items([{"text": "a"}])
    frame = {"prompt": ["a", "b"], "group": ["x", "y"]}
    for wrong in (frame, pandas.DataFrame(frame), [5, 6, 7], "a"):
        with pytest.raises(EditError, match="prompt"):
            read_items(wrong)
    assert [item.group for item in read_items([{"prompt": "a", "group": float("nan")}, {"prompt": "b", "group": 1}])] == ["'a'", "1"]


def test_a_system_prompt_stands_before_what_there_is() -> None:
    assert framed("go on", "Be glad.") == "Be glad.\n\ngo on"
    user = {"role": "user", "content": "hi"}
    assert framed([user], "Be glad.") == [{"role": "system", "content": "Be glad."}, user]
    assert framed([{"role": "system", "content": "Be short."}, user], "Be glad.")[0]["content"] == "Be glad.\n\nBe short."
    with pytest.raises(PromptError, match="not before token ids"):
        framed([1, 2, 3], "Be glad.")


@pytest.mark.parametrize(("arguments", "expected"), [((-0.4, 0.4, 9), 0.1), ((-0.3, 0.3, 7), 0.1), ((0.05, 0.05, 1), 0.0)])
def test_a_grid_is_even_and_its_middle_is_zero(arguments: tuple, expected: float) -> None:
    found = mia.grid(*arguments)
    assert len(found) == arguments[2] and (found[0], found[-1]) == arguments[:2]
    assert all(b - a == pytest.approx(expected) for a, b in pairwise(found))
    assert len(found) == 1 or 0.0 in found


def test_an_answer_has_the_tokens_that_follow_a_prompt() -> None:
    """Tokenizers such as Llama 2's put a space before whatever they are given; it must not come between a prompt and its answer."""
    words = ["<unk>", "▁", "\n", "a", "Paris", "▁Paris"]
    made = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    for prefix, spaced in (([normalizers.Prepend("▁")], [1, 5]), ([], [5])):
        made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
        assert tokenizer.encode(" Paris") == spaced
        lab = Lab(SimpleNamespace(tokenizer=tokenizer), (), "select", 1, (None,))
        assert lab.tokens(" Paris") == [5] and lab.tokens("Paris") == [4] and lab.tokens("a Paris") == [3, 5]
