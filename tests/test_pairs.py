"""Pairs: read from every form, split without a leak, and frank about what could spoil a vector."""
from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mia_lab.analysis.pairs import Pairs
from mia_lab.errors import EditError

PAIRS = [("good", "bad"), ("yes", "no")]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("pairs", [
    PAIRS, tuple(PAIRS), [list(pair) for pair in PAIRS], iter(PAIRS), zip(*zip(*PAIRS, strict=True), strict=True),
    [{"positive": a, "negative": b} for a, b in PAIRS], [{"chosen": a, "rejected": b, "more": 1} for a, b in PAIRS],
    [{"neg": b, "pos": a} for a, b in PAIRS], [PAIRS[0], {"pos": "yes", "neg": "no"}], dict(PAIRS).items(),
    datasets.Dataset.from_list([{"positive": a, "negative": b} for a, b in PAIRS]), Pairs.of(PAIRS),
])
def test_every_form_gives_the_same_pairs(pairs: object) -> None:
    found = Pairs.of(pairs)
    assert list(found) == PAIRS and len(found) == 2
    assert (found.positive, found.negative) == (("good", "yes"), ("bad", "no"))
    assert found.group == ("pair 0", "pair 1")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_files_are_read(tmp_path: Path, suffix: str) -> None:
    rows = [{"good": a, "bad": b, "topic": f"t{i}"} for i, (a, b) in enumerate(PAIRS)]
    path = tmp_path / f"pairs{suffix}"
    table = datasets.Dataset.from_list(rows)
    {".jsonl": table.to_json, ".json": lambda p: Path(p).write_text(json.dumps(rows)), ".csv": table.to_csv,
     ".parquet": table.to_parquet}[suffix](str(path))
    for source in (path, str(path)):
        found = Pairs.of(source, columns=("good", "bad"), group="topic")
        assert list(found) == PAIRS and found.group == ("t0", "t1")


def test_token_ids_and_chats_pass_through() -> None:
    assert list(Pairs.of([([1, 2], [3]), (CHAT, "bad")])) == [([1, 2], [3]), (CHAT, "bad")]


@pytest.mark.parametrize(("pairs", "says"), [
    ([], "there is no pair; give (positive, negative) prompts"),
    ([("a", "b"), ("a", "b", "c")], "pair 1 is not (positive, negative): ('a', 'b', 'c')"),
    ([("a",)], "pair 0 is not (positive, negative): ('a',)"),
    ([5], "pair 0 is not (positive, negative): 5"),
    ([{"positive": "a", "rejected": "b"}], "pair 0 has the keys ['positive', 'rejected']; a pair needs ('positive', "
                                           "'negative') or ('chosen', 'rejected') or ('pos', 'neg')"),
    (["ab"], "pair 0 is not (positive, negative): 'ab'"),
    ([("a", "b"), ("c", "c")], "the two prompts of pair 1 are equal: 'c'"),
    ("missing.jsonl", "there is no file missing.jsonl"),
    ("pairs.xls", "pairs.xls is none of .jsonl, .json, .csv, .parquet"),
])
def test_what_is_no_pair_is_an_error_that_says_which_and_why(pairs: object, says: str) -> None:
    with pytest.raises(EditError) as caught:
        Pairs.of(pairs)
    assert str(caught.value) == says


def test_a_template_is_filled_with_every_combination() -> None:
    found = Pairs.from_template("Act {how}. {suffix}", {"how": ["glad", "merry"]}, {"how": ["sad", "gloomy"]}, suffix=["I", "Today"])
    assert list(found) == [("Act glad. I", "Act sad. I"), ("Act merry. I", "Act gloomy. I"), ("Act glad. Today", "Act sad. Today"),
                           ("Act merry. Today", "Act gloomy. Today")]
    assert found.group == ("I", "I", "Today", "Today")
    with pytest.raises(EditError, match="they have 2 of"):
        Pairs.from_template("{how}", {"how": ["a", "b"]}, {"how": ["c"]})


def test_pairs_that_share_a_text_share_a_group_even_through_others() -> None:
    found = Pairs.of([("a", "b"), ("c", "d"), ("e", "f"), ("b", "c")])
    assert found.group[0] == found.group[1] == found.group[3] != found.group[2]
    named = Pairs.of([{"positive": "a", "negative": "b", "group": "x"}, {"positive": "c", "negative": "a", "group": "y"}])
    assert len(set(named.group)) == 1


@given(st.lists(st.integers(0, 9), min_size=12, max_size=60), st.integers(0, 5))
def test_a_split_divides_whole_groups_and_loses_nothing(groups: list[int], seed: int) -> None:
    pairs = Pairs.of([{"positive": f"p{i}", "negative": f"n{i}", "group": f"g{g}"} for i, g in enumerate(groups)])
    if len(set(groups)) < 3:
        with pytest.raises(EditError, match="at least three groups"):
            pairs.split()
        return
    splits = pairs.split(seed=seed)
    parts = [splits.fit, splits.select, splits.holdout]
    assert sorted(p for part in parts for p, _ in part) == sorted(pairs.positive)
    assert all(len(part) for part in parts)
    for one, other in combinations(parts, 2):
        assert not set(one.group) & set(other.group)
        assert not {text for pair in one for text in pair} & {text for pair in other for text in pair}
    assert pairs.split(seed=seed) == splits


def test_shares_are_kept_where_the_groups_allow_it_and_seeds_differ() -> None:
    pairs = Pairs.of([{"positive": f"p{i}", "negative": f"n{i}", "group": f"g{i // 5}"} for i in range(100)])
    splits = pairs.split(0.5, 0.3)
    assert [len(part) for part in (splits.fit, splits.select, splits.holdout)] == [50, 30, 20]
    assert pairs.split(seed=1) != pairs.split(seed=2)
    with pytest.raises(EditError, match="leave nothing"):
        pairs.split(0.8, 0.2)


def test_parts_and_controls() -> None:
    pairs = Pairs.of([(f"p{i}", f"n{i}") for i in range(40)])
    assert pairs[3] == ("p3", "n3") and list(pairs[1:3]) == [("p1", "n1"), ("p2", "n2")]
    assert list(pairs[[5, 2]]) == [("p5", "n5"), ("p2", "n2")]
    assert pairs.swapped()[0] == ("n0", "p0")
    mixed = pairs.shuffled(0)
    assert [set(pair) for pair in mixed] == [set(pair) for pair in pairs] and mixed.group == pairs.group
    assert 10 < sum(pair[0].startswith("p") for pair in mixed) < 30
    assert pairs.shuffled(0) == mixed != pairs.shuffled(1)


@pytest.mark.parametrize(("pairs", "says"), [
    ([(f"a rather long text number {i}", f"short {i}") for i in range(9)], "the positive prompt is nearly always the longer one"),
    ([("a", "b"), ("b", "c d")], "1 prompt stands on both sides, as 'b'"),
    ([("a", "b"), ("a", "b")], "1 pair is there more than once"),
    ([("one two", "three four"), ("five", "six")], None),
])
def test_what_could_spoil_a_vector_is_said(pairs: list, says: str | None) -> None:
    found = Pairs.of(pairs)
    assert [says in note for note in found.warnings()] == ([] if says is None else [True])
    assert (says or "Pairs: 2 in 2 groups") in repr(found)
