"""The request spec as it crosses to the engine: bounded JSON, nothing executable."""
from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

KEY = "mia_lab"  # in SamplingParams.extra_args and in VllmConfig.additional_config
VERSION = 1
MAX_BYTES = 1 << 20
MAX_NUMBER = 3.4e38  # the tables hold float32
MAX_TERMS = 4  # vectors that may meet at one point of one row

Span = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Term:
    """`coeff` times the vector with content address `vector`, added at (kind, layer) on the rows in `spans`."""

    kind: str
    layer: int
    vector: str
    coeff: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a request asks of the taps. Requests that ask the same share one, however many they are."""

    terms: tuple[Term, ...] = ()
    sites: tuple[tuple[str, int], ...] = ()  # captured (kind, layer) pairs
    rows: tuple[Span, ...] = ()  # captured positions


def encode(uid: str, spec: Spec) -> str:
    """Return the text that `decode` reads: the client's name for the request, a space, and JSON.

    ValueError when `decode` would refuse it, for its size or a number out of range.
    """
    text = f"{uid} {_body(spec)}"
    decode(text)
    return text


@lru_cache(maxsize=256)
def _body(spec: Spec) -> str:
    return json.dumps({"v": VERSION, "sites": spec.sites, "rows": spec.rows,
                       "terms": [[t.kind, t.layer, t.vector, t.coeff, t.spans] for t in spec.terms]},
                      separators=(",", ":"), allow_nan=False)


def decode(text: str) -> tuple[str, Spec]:
    """Return the request's name and Spec; ValueError when the text is not one."""
    if not isinstance(text, str) or len(text) > MAX_BYTES:
        raise ValueError(f"a spec is a string of at most {MAX_BYTES} bytes")
    uid, _, body = text.partition(" ")
    return _text(uid), _parse(body)


@lru_cache(maxsize=256)
def _parse(body: str) -> Spec:
    try:
        data = json.loads(body)
    except RecursionError:
        raise ValueError("the spec is nested too deeply") from None
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise ValueError(f"a spec needs v={VERSION}")
    try:
        spec = Spec(tuple(Term(_text(k), _index(n), _text(v), _number(c), _spans(s)) for k, n, v, c, s in data["terms"]),
                    tuple((_text(k), _index(n)) for k, n in data["sites"]), _spans(data["rows"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the spec is malformed: {error!r}") from None
    if len(set(spec.sites)) != len(spec.sites):
        raise ValueError("a captured point is named twice")
    crowded = next((cut.start for cut in segments(spec) if busiest(cut)[1] > MAX_TERMS), None)
    if crowded is not None:
        raise ValueError(f"more than {MAX_TERMS} edits meet at one point from position {crowded} on")
    return spec


def of_request(extra_args: dict | None) -> tuple[str, Spec] | None:
    """Return the name and Spec that a request carries, or None."""
    text = (extra_args or {}).get(KEY)
    return None if text is None else decode(text)


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions from `start` up to the next segment's: the terms that act there, and whether they are captured."""

    start: int
    terms: tuple[Term, ...]
    captured: bool


@lru_cache(maxsize=256)
def segments(spec: Spec) -> tuple[Segment, ...]:
    """Cut the positions of a request where anything changes; the last segment has no end."""
    edges = {0} | {edge for spans in (spec.rows, *(t.spans for t in spec.terms)) for span in spans for edge in span
                   if edge is not None}
    return tuple(Segment(at, tuple(t for t in spec.terms if _covers(t.spans, at)), bool(spec.sites) and _covers(spec.rows, at))
                 for at in sorted(edges))


def busiest(segment: Segment) -> tuple[tuple[str, int], int]:
    """Return the point where most terms of a segment meet, and how many."""
    counts = Counter((term.kind, term.layer) for term in segment.terms)
    return counts.most_common(1)[0] if counts else (("", 0), 0)


def _covers(spans: tuple[Span, ...], at: int) -> bool:
    return any(start <= at and (stop is None or at < stop) for start, stop in spans)


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 64:
        raise ValueError(f"expected a short string, got {value!r}")
    return value


def _index(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError(f"expected a position or layer, got {value!r}")
    return value


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= MAX_NUMBER:
        raise ValueError(f"expected a number that float32 holds, got {value!r}")
    return float(value)


def _spans(value: object) -> tuple[Span, ...]:
    spans = tuple((_index(a), None if b is None else _index(b)) for a, b in value)
    ends = [-1]
    for start, stop in spans:
        if start < ends[-1] or (stop is not None and stop <= start):
            raise ValueError(f"spans must ascend and not overlap: {value!r}")
        ends.append(math.inf if stop is None else stop)
    return spans
