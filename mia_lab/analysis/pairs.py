"""Pairs: contrastive prompts from whatever holds them, split so that nothing leaks from fitting into judging.

A pair is (positive, negative), each a string, token ids or chat messages. Pairs that share a `group` (a topic, a template,
a question) always land in the same split: a direction that is judged on the topics it was fitted on flatters itself.
"""
from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from ..counted import counted
from ..errors import EditError

COLUMNS = (("positive", "negative"), ("chosen", "rejected"), ("pos", "neg"))
_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class Splits:
    """Three disjoint sets of pairs: to fit on, to choose settings on, and to report on, once."""

    fit: Pairs
    select: Pairs
    holdout: Pairs


@dataclass(frozen=True, slots=True)
class Pairs(Sequence):
    """Pairs of prompts, `positive[i]` beside `negative[i]`, of `group[i]`."""

    positive: tuple[Any, ...]
    negative: tuple[Any, ...]
    group: tuple[str, ...]

    @classmethod
    def of(cls, source: Any, *, columns: tuple[str, str] | None = None, group: str = "group") -> Pairs:
        """Read pairs from tuples, mappings, a `datasets.Dataset`, or a JSONL, CSV or Parquet file.

        columns: the names of the positive and the negative, where they are not among the usual ones; group: of the group, which
        may be missing: then pairs that share a text share a group. EditError for an unknown form, an empty set, or a pair of
        two equal prompts.
        """
        if isinstance(source, Pairs):
            return source
        if isinstance(source, (str, Path)):
            source = _read(Path(source))
        positive, negative, groups = [], [], []
        for i, pair in enumerate(source):
            one, other, name = _pair(pair, i, columns, group)
            if one == other:
                raise EditError(f"the two prompts of pair {i} are equal: {one!r}")
            positive.append(one)
            negative.append(other)
            groups.append(name)
        if not positive:
            raise EditError("there is no pair; give (positive, negative) prompts")
        return cls(tuple(positive), tuple(negative), _groups(positive, negative, groups))

    @classmethod
    def from_template(cls, template: str, positive: Mapping[str, Iterable[str]], negative: Mapping[str, Iterable[str]],
                      **shared: Iterable[str]) -> Pairs:
        """Fill a template with values that differ between the sides, paired in order, and with every combination of shared ones.

        `Pairs.from_template("Act {how}. {suffix}", {"how": ["glad"]}, {"how": ["sad"]}, suffix=["I", "Today"])` gives two pairs.
        The combination of shared values is the group.
        """
        sides = [list(zip(*side.values(), strict=True)) for side in (positive, negative)]
        if len(sides[0]) != len(sides[1]) or set(positive) != set(negative):
            raise EditError(f"the sides of a template name the same fields, with as many values; they have {len(sides[0])} of "
                            f"{sorted(positive)} and {len(sides[1])} of {sorted(negative)}")
        found = []
        for values in product(*shared.values()):
            common = dict(zip(shared, values))
            for own in zip(*sides):
                texts = [template.format(**dict(zip(positive, side)), **common) for side in own]
                found.append({"positive": texts[0], "negative": texts[1], "group": " / ".join(values) or "all"})
        return cls.of(found)

    def __len__(self) -> int:
        return len(self.positive)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.positive, self.negative)

    def __getitem__(self, key: int | slice | Sequence[int]) -> tuple[Any, Any] | Pairs:
        if isinstance(key, int):
            return self.positive[key], self.negative[key]
        chosen = range(len(self))[key] if isinstance(key, slice) else key
        return Pairs(*(tuple(column[i] for i in chosen) for column in (self.positive, self.negative, self.group)))

    def swapped(self) -> Pairs:
        """The same pairs with the sides exchanged: what is fitted on them is the opposite vector."""
        return Pairs(self.negative, self.positive, self.group)

    def shuffled(self, seed: int) -> Pairs:
        """The same pairs, each with its sides in random order: a control whose label means nothing."""
        draw = random.Random(seed)
        sides = [(a, b) if draw.random() < 0.5 else (b, a) for a, b in self]
        return Pairs(*(tuple(column) for column in zip(*sides)), self.group)

    def split(self, fit: float = 0.6, select: float = 0.2, seed: int = 0) -> Splits:
        """Divide whole groups at random into sets to fit on, to select on and, with the rest, to report on.

        EditError when there are fewer than three groups.
        """
        groups = sorted(set(self.group))
        if len(groups) < 3:
            raise EditError(f"three disjoint sets need at least three groups; these {len(self)} pairs have {len(groups)}")
        random.Random(seed).shuffle(groups)
        shares, filled = [fit, select, 1.0 - fit - select], [0.0, 0.0, 0.0]
        if min(shares) <= 0:
            raise EditError(f"fit={fit} and select={select} leave nothing for one of the three sets")
        sizes = {name: self.group.count(name) for name in groups}
        placed: dict[str, int] = {}
        for i, name in enumerate(sorted(groups, key=sizes.get, reverse=True)):  # stable: equal sizes stay shuffled
            empty = [k for k in range(3) if not filled[k]]
            open_ = empty if len(groups) - i <= len(empty) else range(3)
            k = max(open_, key=lambda k: shares[k] * len(self) - filled[k])
            placed[name], filled[k] = k, filled[k] + sizes[name]
        return Splits(*(self[[i for i, name in enumerate(self.group) if placed[name] == k]] for k in range(3)))

    def warnings(self) -> list[str]:
        """What could make a vector mean something else than was meant: lengths that tell the sides apart, texts that recur."""
        found = []
        lengths = [[len(_text(prompt).split()) for prompt in side] for side in (self.positive, self.negative)]
        longer = mean((a > b) - (a < b) for a, b in zip(*lengths))
        if abs(longer) > 0.5:
            side = "positive" if longer > 0 else "negative"
            found.append(f"the {side} prompt is nearly always the longer one ({mean(lengths[0]):.1f} and {mean(lengths[1]):.1f} words); "
                         f"the vector may be of length")
        both = set(map(_text, self.positive)) & set(map(_text, self.negative))
        if both:
            found.append(f"{counted(len(both), 'prompt')} {'stands' if len(both) == 1 else 'stand'} on both sides, as {next(iter(both))!r}")
        again = len(self) - len(set(zip(map(_text, self.positive), map(_text, self.negative))))
        if again:
            found.append(f"{counted(again, 'pair')} {'is' if again == 1 else 'are'} there more than once")
        return found

    def __repr__(self) -> str:
        notes = "".join(f"\n  {note}" for note in self.warnings())
        return f"Pairs: {len(self)} in {len(set(self.group))} groups, the first {self[0]!r}{notes}"


def _read(path: Path) -> Any:
    import datasets

    if path.suffix not in _READERS:
        raise EditError(f"{path.name} is none of {', '.join(_READERS)}")
    if not path.exists():
        raise EditError(f"there is no file {path}")
    return datasets.load_dataset(_READERS[path.suffix], data_files=str(path), split="train")


def _pair(pair: Any, i: int, columns: tuple[str, str] | None, group: str) -> tuple[Any, Any, str | None]:
    if isinstance(pair, Mapping):
        known = COLUMNS if columns is None else (columns,)
        names = next((names for names in known if set(names) <= set(pair)), None)
        if names is None:
            raise EditError(f"pair {i} has the keys {sorted(pair)}; a pair needs {' or '.join(map(str, known))}")
        return pair[names[0]], pair[names[1]], None if pair.get(group) is None else str(pair[group])
    try:
        if isinstance(pair, str):
            raise TypeError
        one, other = pair
    except (TypeError, ValueError):
        raise EditError(f"pair {i} is not (positive, negative): {pair!r}") from None
    return one, other, None


def _groups(positive: Sequence[Any], negative: Sequence[Any], named: Sequence[str | None]) -> tuple[str, ...]:
    """Groups closed under sharing: pairs of one name, or with a text in common, even through others, are one group."""
    parent = list(range(len(named)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    seen: dict[tuple[str, str], int] = {}
    for i, (one, other, name) in enumerate(zip(positive, negative, named)):
        for key in [("text", _text(one)), ("text", _text(other)), *([] if name is None else [("group", name)])]:
            parent[root(i)] = root(seen.setdefault(key, i))
    names = {root(i): name for i, name in reversed(list(enumerate(named))) if name is not None}
    return tuple(names.get(root(i), f"pair {root(i)}") for i in range(len(named)))


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return " ".join(part["content"] if isinstance(part, Mapping) else str(part) for part in prompt)
