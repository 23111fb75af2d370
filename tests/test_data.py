"""The hand-written data files: counts, lengths, groups, duplicates (json only, no network)."""

import json
import math
import statistics
from collections import Counter
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

import pytest

from mia_lab.analysis.data import SETS, dataset, rows
from mia_lab.analysis.pairs import Pairs
from mia_lab.errors import MiaError

DATA = Path(__file__).resolve().parents[1] / "mia_lab" / "data"


def read_jsonl(name, keys):
    rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        assert set(row) == set(keys)
        assert all(isinstance(v, str) and v and v == v.strip() for v in row.values())
    return rows


def words(text):
    return len(text.split())


def near_duplicates(texts, limit=0.8):
    """Pairs whose difflib ratio reaches the limit; the quick upper bounds skip most pairs."""
    found = []
    for a, b in combinations(texts, 2):
        m = SequenceMatcher(None, a, b, autojunk=False)
        if m.real_quick_ratio() >= limit and m.quick_ratio() >= limit and m.ratio() >= limit:
            found.append((a, b))
    return found


def test_sentiment_pairs():
    rows = read_jsonl("sentiment_pairs.jsonl", ["positive", "negative", "group"])
    groups = Counter(row["group"] for row in rows)
    assert len(rows) >= 100
    assert len(groups) >= 20 and set(groups.values()) == {5}
    for row in rows:
        n_pos, n_neg = words(row["positive"]), words(row["negative"])
        assert 8 <= n_pos <= 18 and 8 <= n_neg <= 18 and abs(n_pos - n_neg) <= 2, row
    assert not near_duplicates([row[k] for row in rows for k in ("positive", "negative")])


def test_sentiment_prompts():
    rows = read_jsonl("sentiment_prompts.jsonl", ["prompt", "group"])
    prompts = [row["prompt"] for row in rows]
    assert len(rows) >= 40
    assert not any(p.endswith((".", "!", "?")) for p in prompts)  # beginnings, to be continued
    assert not near_duplicates(prompts)


def test_prompts_are_held_out():
    pairs = read_jsonl("sentiment_pairs.jsonl", ["positive", "negative", "group"])
    prompts = read_jsonl("sentiment_prompts.jsonl", ["prompt", "group"])
    assert not {r["group"] for r in pairs} & {r["group"] for r in prompts}
    sentences = [r[k].lower() for r in pairs for k in ("positive", "negative")]
    assert not any(s.startswith(r["prompt"].lower()) for s in sentences for r in prompts)


def test_neutral():
    paragraphs = (DATA / "neutral.txt").read_text(encoding="utf-8").splitlines()
    assert len(paragraphs) >= 110
    for p in paragraphs:
        assert p == p.strip() and 40 <= words(p) <= 70, (words(p), p)
    assert len({" ".join(p.split()[:3]).lower() for p in paragraphs}) >= 0.95 * len(paragraphs)
    assert not near_duplicates([p.lower().split() for p in paragraphs], limit=0.5)  # by words


PAIRS = {"sentiment": (8, 18), "formality": (8, 18), "honesty": (12, 26), "refusal": (8, 18)}  # words of a prompt


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_differ_in_their_label_and_in_little_else(name):
    rows = read_jsonl(f"{name}_pairs.jsonl", ["positive", "negative", "group"])
    groups, (least, most) = Counter(row["group"] for row in rows), PAIRS[name]
    assert len(rows) >= 100 and len(groups) >= 10 and len(set(groups.values())) == 1
    for row in rows:
        lengths = [words(row[side]) for side in ("positive", "negative")]
        assert least <= min(lengths) and max(lengths) <= most and abs(lengths[0] - lengths[1]) <= 2, row
    for side in ("positive", "negative"):
        assert not near_duplicates([row[side] for row in rows])
    assert not Pairs.of(rows).warnings()


@pytest.mark.parametrize("name", ["sentiment", "formality", "honesty"])
def test_beginnings_share_no_group_and_no_text_with_their_pairs(name):
    pairs = read_jsonl(f"{name}_pairs.jsonl", ["positive", "negative", "group"])
    prompts = read_jsonl(f"{name}_prompts.jsonl", ["prompt", "group"])
    assert len(prompts) >= 40 and not {row["group"] for row in prompts} & {row["group"] for row in pairs}
    assert not any(row["prompt"].endswith((".", "!", "?")) for row in prompts)
    assert not near_duplicates([row["prompt"] for row in prompts])
    assert not any(row[side].lower().startswith(p["prompt"].lower()) for row in pairs for side in ("positive", "negative") for p in prompts)


def test_requests_to_refuse_and_harmless_ones_are_balanced():
    pairs = read_jsonl("refusal_pairs.jsonl", ["positive", "negative", "group"])
    prompts = read_jsonl("refusal_prompts.jsonl", ["prompt", "label", "group"])
    assert Counter(row["label"] for row in prompts) == {"harmful": 30, "harmless": 30}
    assert set(Counter((row["group"], row["label"]) for row in prompts).values()) == {5}
    assert not {row["group"] for row in prompts} & {row["group"] for row in pairs}
    assert not near_duplicates([row["prompt"] for row in prompts])
    kinds = [{row[side].split()[0] for row in pairs} for side in ("positive", "negative")]  # the form tells nothing
    assert len(kinds[0] & kinds[1]) > 0.6 * len(kinds[0] | kinds[1])


def test_statements_are_half_true_in_every_subject():
    rows = [json.loads(line) for line in (DATA / "honesty_statements.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 80 and all(isinstance(row["label"], bool) for row in rows)
    assert set(Counter((row["group"], row["label"]) for row in rows).values()) == {5}
    assert not near_duplicates([row["statement"] for row in rows], limit=0.85)


CHECKS = {"length": {"max_words", "min_words", "max_sentences"}, "language": {"language"},
          "format": {"bullets", "json", "uppercase", "lowercase", "no_commas", "numbered", "quoted"}}


@pytest.mark.parametrize(("name", "with_it", "without", "least"), [("instruction_pairs", "positive", "negative", 100),
                                                                ("instruction_prompts", "prompt", "plain", 40)])
def test_instructions_name_the_check_that_tests_them(name, with_it, without, least):
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= least and len(set(Counter(row["group"] for row in rows).values())) == 1
    for row in rows:
        assert set(row) == {with_it, without, "group", "check"} and row[with_it] != row[without]
        assert row["check"]["kind"] in CHECKS[row["group"]], row
        assert words(row[with_it]) > words(row[without])
    assert not near_duplicates([row[without] for row in rows])


def test_instruction_tasks_are_held_out():
    tasks = [{json.loads(line)[key].lower() for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()}
             for name, key in (("instruction_pairs", "negative"), ("instruction_prompts", "plain"))]
    assert not tasks[0] & tasks[1]


def test_capability_questions_have_one_right_choice_in_no_pattern():
    rows = [json.loads(line) for line in (DATA / "capability.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 200 and len({row["subject"] for row in rows}) >= 10
    for row in rows:
        assert len(row["choices"]) == len(set(row["choices"])) == 4 and row["answer"] in range(4)
    assert set(Counter((row["subject"], row["answer"]) for row in rows).values()) == {5}
    longest = [all(len(row["choices"][row["answer"]]) > len(c) for i, c in enumerate(row["choices"]) if i != row["answer"]) for row in rows]
    assert 0.1 < sum(longest) / len(rows) < 0.3  # length does not give it away
    assert not near_duplicates([row["question"] for row in rows])


def test_answers_that_can_be_computed_are_right():
    computed = {
        "What do you get when you add 7 and 8?": 7 + 8, "What is 9 times 6?": 9 * 6, "How much is 25 percent of 80?": 0.25 * 80,
        "Taking 37 away from 100 leaves which number?": 100 - 37, "Which number is exactly half of 46?": 46 / 2,
        "What remainder is left when 50 is divided by 7?": 50 % 7, "Written as a decimal, the fraction 3/8 is equal to:": 3 / 8,
        "What is the greatest common divisor of 18 and 24?": math.gcd(18, 24),
        "Which is the smallest positive number that both 4 and 6 divide evenly?": math.lcm(4, 6),
        "The arithmetic mean of the numbers 4, 8 and 15 is:": statistics.mean([4, 8, 15]),
        "For which value of x is 3x + 5 equal to 20?": (20 - 5) / 3,
        "Fifteen rows of fourteen seats make how many seats in total?": 15 * 14,
        "What is the area of a triangle with base 10 and height 6?": 10 * 6 / 2,
        "The legs of a right triangle measure 3 and 4; how long is the hypotenuse?": math.hypot(3, 4),
        "How many diagonals can be drawn in a convex pentagon?": 5 * 2 / 2}
    found = {row["question"]: float(row["choices"][row["answer"]]) for row in rows("capability") if row["question"] in computed}
    assert found == computed


@pytest.mark.parametrize("name", SETS)
def test_every_set_loads_through_datasets(name):
    found = dataset(name)
    assert len(found) == len(rows(name)) > 40
    if name.endswith("_pairs"):
        pairs = Pairs.of(found)
        assert len(pairs) == len(found)
        if len(set(pairs.group)) >= 3:
            assert all(len(part) >= 10 for part in (pairs.split().fit, pairs.split().select, pairs.split().holdout))


def test_another_set_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(MiaError, match="formality_pairs: the same said formally"):
        dataset("formalty")
