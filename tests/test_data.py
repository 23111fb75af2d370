"""The hand-written data files: counts, lengths, groups, duplicates (json only, no network)."""

import json
from collections import Counter
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

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
    assert len(rows) >= 60
    assert len(groups) >= 12 and set(groups.values()) == {5}
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
