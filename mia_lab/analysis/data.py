"""The data sets that come with mia_lab, written for it: contrastive pairs, held-out prompts, and a capability set."""
from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import MiaError

if TYPE_CHECKING:
    from datasets import Dataset

# Where a set is of pairs, `positive` is the first of the two that its line names. Prompts share no group with their pairs.
SETS = {
    "sentiment_pairs": "glad and gloomy sentences on one topic", "sentiment_prompts": "beginnings to go on from",
    "formality_pairs": "the same said formally and informally", "formality_prompts": "beginnings to go on from",
    "honesty_pairs": "somebody tells the truth, or does not", "honesty_prompts": "situations that stop before the answer",
    "honesty_statements": "true and false statements of fact",
    "refusal_pairs": "requests that should be refused, and harmless ones in the same form", "refusal_prompts": "both kinds, labelled",
    "instruction_pairs": "tasks with an instruction on length, format or language, and without; `check` says how to test an answer",
    "instruction_prompts": "other tasks, with and without",
    "capability": "multiple-choice questions on twelve subjects",
}


def dataset(name: str) -> Dataset:
    """Return one of the shipped sets as a `datasets.Dataset`; MiaError, with their names, for another.

    `mia.Pairs.of(mia.dataset("formality_pairs"))` are pairs to fit on. Objects in `check` are JSON texts.
    """
    import datasets

    if name not in SETS:
        listed = "\n  ".join(f"{key}: {what}" for key, what in SETS.items())
        raise MiaError(f"there is no data set {name!r}; there are\n  {listed}")
    packed = [{key: json.dumps(value) if isinstance(value, dict) else value for key, value in row.items()} for row in rows(name)]
    return datasets.Dataset.from_list(packed)


def rows(name: str) -> list[dict[str, Any]]:
    """Return the lines of one of the shipped sets."""
    return [json.loads(line) for line in files("mia_lab").joinpath(f"data/{name}.jsonl").read_text("utf-8").splitlines()]
