"""The request spec as it crosses to the engine: bounded JSON, nothing executable."""
from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import Counter
from dataclasses import astuple, dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter

from .segments import acting, busiest, segments

KEY = "mia_lab"  # in SamplingParams.extra_args and in VllmConfig.additional_config
VERSION = 2
MAX_BYTES = 1 << 20
_SHORT = 1 << 14  # characters of a text of which many are kept
MAX_NUMBER = 3.4e38  # the tables hold float32
MAX_TERMS = 64  # that may meet at one point of one row
MAX_GATES = 4  # of one request
MAX_NAME = 64  # characters of a request's name, and of every other name on the wire
OPS = ("add", "affine", "clip", "feature", "scale", "renorm", "measure", "bias")
ATTENTION = "attention"  # the kind of point where only "bias" acts
RULES = ("row", "mean", "max", "last", "since", "token")  # how readings decide; all but "row" hold once decided

Span = tuple[int, int | None]
Site = tuple[str, int]


class _Kept:
    """Places beside a term's fields for what is worked out of them once."""

    __slots__ = ("_bare", "_hash")


@dataclass(frozen=True, slots=True)
class Term(_Kept):
    """One step of an edit at (kind, layer) on the rows in `spans`. What it does is said beside each op in `kernels/program.py`.

    `read` and `write` are content addresses of vectors, "" for none. `gate` is an index into the spec's gates, -1 for
    none. `aligned` is how many vectors `write` holds, one a position from `origin` on; 0 for a single vector.
    """

    op: str
    kind: str
    layer: int
    spans: tuple[Span, ...]
    read: str = ""
    write: str = ""
    coeff: float = 1.0
    slope: float = 0.0
    offset: float = 0.0
    low: float = 0.0
    high: float = 0.0
    rate: float = 0.0
    threshold: float = 0.0
    gate: int = -1
    columns: tuple[int, int] = (0, (1 << 31) - 1)
    origin: int = 0
    aligned: int = 0
    fresh: bool = True
    cosine: bool = False
    vote: bool = False
    heads: tuple[int, ...] = ()  # of a bias; () is all

    def __hash__(self) -> int:  # terms stand in the keys of several tables, and have many fields
        if not hasattr(self, "_hash"):
            object.__setattr__(self, "_hash", hash(_values(self)))
        return self._hash

    @property
    def site(self) -> Site:
        """Where it acts."""
        return self.kind, self.layer

    @property
    def bare(self) -> Term:
        """The same on no rows: what tells programs apart."""
        if not hasattr(self, "_bare"):
            object.__setattr__(self, "_bare", replace(self, spans=()))
        return self._bare


_DEFAULTS = {f.name: f.default for f in fields(Term)}
_values = attrgetter(*_DEFAULTS)


@dataclass(frozen=True, slots=True)
class Gate:
    """When terms act. Rule "row": where the row's own measure passes `threshold`. The others open a request from one
    position on: once the mean, max or last of the measures over `[start, stop)` passes ("mean", "max", "last"; decided
    at `stop`), after the first row from `start` on whose measure passes ("since"), or from the first of `tokens` that is
    fed back from `start` on ("token")."""

    rule: str
    threshold: float = 0.0
    start: int = 0
    stop: int = 0
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Take:
    """Rows of one point to capture, before the edits there or after them."""

    kind: str
    layer: int
    spans: tuple[Span, ...]
    before: bool = False

    @property
    def site(self) -> Site:
        """Where it reads."""
        return self.kind, self.layer


@dataclass(frozen=True, slots=True)
class Reduce:
    """What is done to captured rows on the device before they leave it.

    matrices: at each (kind, layer), the address of `[m d + 1]`, whose last column is a bias; none for the row itself.
    Then values up to `threshold` become 0, where there is one; then the norm, or the `k` largest and their places.
    mean: the sum over the rows of a step leaves, in place of the rows.
    """

    matrices: tuple[tuple[str, int, str], ...] = ()
    threshold: float | None = None
    norm: bool = False
    k: int = 0
    mean: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """What a request asks of the taps. Requests that ask the same share one, however many they are.

    keeps_history: whether the request's keys and values are kept, for a bias of its attention.
    first_row: the first position that must be computed, not read from the prefix cache; None when any may be read.
    takes_twice: whether a point is captured both before and after its edits, so that its rows take twice the room.
    spans: all the stretches of positions that are captured somewhere.
    """

    terms: tuple[Term, ...] = ()
    takes: tuple[Take, ...] = ()
    gates: tuple[Gate, ...] = ()
    reduce: Reduce | None = None
    # Worked out once: every request asks for them, and there may be hundreds of points.
    keeps_history: bool = field(init=False, repr=False, compare=False)
    first_row: int | None = field(init=False, repr=False, compare=False)
    takes_twice: bool = field(init=False, repr=False, compare=False)
    spans: frozenset[Span] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = [take.spans[0][0] for take in self.takes if take.spans]
        rows += [gate.start for gate in self.gates if gate.rule in ("mean", "max", "since")]
        object.__setattr__(self, "keeps_history", any(term.op == "bias" for term in self.terms))
        object.__setattr__(self, "first_row", 0 if self.keeps_history else min(rows, default=None))
        object.__setattr__(self, "takes_twice", len({take.site for take in self.takes}) < len(self.takes))
        object.__setattr__(self, "spans", frozenset(span for take in self.takes for span in take.spans))
        object.__setattr__(self, "_hash", hash((self.terms, self.takes, self.gates, self.reduce)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def pools(self) -> bool:
        """Whether a gate is decided by several rows together."""
        return any(gate.rule in ("mean", "max") for gate in self.gates)


NOTHING = Spec()


def shared(spec: Spec) -> Spec:
    """The one that `decode` gives for all specs equal to it: comparing hundreds of points takes time, for each request.

    ValueError where it would refuse this one.
    """
    return _read(_body(spec))


def encode(uid: str, spec: Spec) -> str:
    """Return the text that `decode` reads: the client's name for the request, a space, and JSON.

    ValueError when `decode` would refuse it, for its size or a number out of range.
    """
    text = f"{uid} {_body(spec)}"
    decode(text)
    return text


@lru_cache(maxsize=256)
def _body(spec: Spec) -> str:
    """A spec's JSON. What cannot be read is not kept: an equal spec, of other types, may be right."""
    body = json.dumps({"v": VERSION, "terms": [_sparse(t) for t in spec.terms], "takes": [astuple(t) for t in spec.takes],
                       "gates": [astuple(g) for g in spec.gates],
                       "reduce": None if spec.reduce is None else astuple(spec.reduce)}, separators=(",", ":"), allow_nan=False)
    _read(body)
    return body


def _sparse(term: Term) -> dict:
    """The fields of a term that differ from their defaults."""
    return {name: value for (name, default), value in zip(_DEFAULTS.items(), _values(term)) if value != default}


def decode(text: str) -> tuple[str, Spec]:
    """Return the request's name and Spec; ValueError when the text is not one."""
    if not isinstance(text, str) or len(text) > MAX_BYTES:
        raise ValueError(f"a spec is a string of at most {MAX_BYTES} bytes")
    uid, _, body = text.partition(" ")
    return _text(uid), _read(body)


def _read(body: str) -> Spec:
    return (_parse_short if len(body) <= _SHORT else _parse_long)(body)


def _parse(body: str) -> Spec:
    try:
        data = json.loads(body)
    except RecursionError:
        raise ValueError("the spec is nested too deeply") from None
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise ValueError(f"a spec needs v={VERSION}")
    try:
        spec = Spec(tuple(map(_term, data["terms"])),
                    tuple(Take(_text(k), _index(n), _spans(s), _truth(b)) for k, n, s, b in data["takes"]),
                    tuple(map(_gate, data["gates"])), None if data["reduce"] is None else _reduce(data["reduce"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the spec is malformed: {error!r}") from None
    _check(spec)
    return spec


# A request is decoded where it is made, where it comes in and where it runs, each time with all the others of its batch.
_parse_short, _parse_long = (lru_cache(maxsize=n)(_parse) for n in (2048, 256))


_READERS = {"op": lambda v: _choice(v, OPS), "kind": lambda v: _text(v), "layer": lambda v: _index(v), "spans": lambda v: _spans(v),
            "read": lambda v: _text(v), "write": lambda v: _text(v), "gate": lambda v: _index(v),
            "columns": lambda v: tuple(map(_index, v)), "origin": lambda v: _index(v), "aligned": lambda v: _index(v),
            "heads": lambda v: tuple(map(_index, v)),
            **dict.fromkeys(("coeff", "slope", "offset", "low", "high", "rate", "threshold"), lambda v: _number(v)),
            **dict.fromkeys(("fresh", "cosine", "vote"), lambda v: _truth(v))}


def _term(data: object) -> Term:
    if not isinstance(data, dict):
        raise ValueError(f"a term is an object, not {data!r}")
    return Term(**{name: _READERS[name](value) for name, value in data.items()})


def _gate(data: list) -> Gate:
    rule, threshold, start, stop, tokens = data
    if len(tokens) > 64:
        raise ValueError("a gate watches 64 tokens at most")
    return Gate(_choice(rule, RULES), _number(threshold), _index(start), _index(stop), tuple(map(_index, tokens)))


def _reduce(data: list) -> Reduce:
    matrices, threshold, norm, k, mean = data
    if norm and k:
        raise ValueError("rows are reduced to a norm or to their largest values, not both")
    return Reduce(tuple((_text(kind), _index(layer), _text(sha)) for kind, layer, sha in matrices),
                  None if threshold is None else _number(threshold), _truth(norm), _index(k), _truth(mean))


def _check(spec: Spec) -> None:
    if len({(take.site, take.before) for take in spec.takes}) != len(spec.takes):
        raise ValueError("a captured point is named twice")
    if len(spec.gates) > MAX_GATES:
        raise ValueError(f"a request has {MAX_GATES} gates at most, not {len(spec.gates)}")
    for term in spec.terms:
        if term.gate >= len(spec.gates) or (term.op == "measure" and term.gate < 0):
            raise ValueError(f"a term names gate {term.gate} of {len(spec.gates)}")
        if bool(term.read) != (term.op in ("affine", "clip", "feature", "measure")):
            raise ValueError(f"{term.op} {'needs' if not term.read else 'takes no'} vector to read")
        if not term.write and term.op in ("add", "affine", "clip", "feature"):
            raise ValueError(f"{term.op} needs a vector to write")
        if len(term.columns) != 2:
            raise ValueError("columns are a pair")
        if (term.op == "bias") != (term.kind == ATTENTION) or (term.op == "bias" and term.rate) or max(term.heads, default=0) > 63:
            raise ValueError("a bias acts on attention, and nothing else does; it has no schedule, and names heads below 64")
        if term.op == "measure" and (term.rate or not term.coeff):
            raise ValueError("a reading has a sign and no schedule")
        if term.rate > 0 or (term.rate and any(a < term.origin for a, _ in term.spans)):
            raise ValueError("a schedule never grows, and begins no later than its edit")
        if term.aligned and not all(term.origin <= a and b is not None and b <= term.origin + term.aligned for a, b in term.spans):
            raise ValueError(f"{term.aligned} aligned vectors from position {term.origin} on do not cover the edited rows")
    for index, gate in enumerate(spec.gates):
        _check_gate(index, gate, spec)
    for cut in acting(segments(spec)):
        if spec.keeps_history and max(Counter(term.layer for term in cut.terms if term.op == "bias").values(), default=0) > 1:
            raise ValueError("two biases meet at one layer of one row")
        if len(cut.terms) > MAX_TERMS and busiest(cut)[1] > MAX_TERMS:
            raise ValueError(f"more than {MAX_TERMS} edits meet at one point from position {cut.start} on")


def _check_gate(index: int, gate: Gate, spec: Spec) -> None:
    """A gate is decided before any row that it governs is edited, from rows that are all computed."""
    mine = [term for term in spec.terms if term.gate == index]
    measures, edits = [t for t in mine if t.op == "measure"], [t for t in mine if t.op != "measure"]
    if (not measures) != (gate.rule == "token"):
        raise ValueError(f"a gate that decides by {gate.rule} {'needs' if not measures else 'takes no'} readings")
    if len({term.spans for term in measures}) > 1:
        raise ValueError("the readings of one gate are taken on different rows")
    places = [(depth(term), term.site) for term in measures]
    if len({place for place, _ in places}) != len(set(places)):
        raise ValueError("two readings of one gate stand at points whose order is not fixed")
    read = measures[0].spans if measures else ()
    for a, b in (span for term in edits for span in term.spans):
        c, d = read[max(bisect_right(read, a, key=lambda span: span[0]) - 1, 0)] if read else (a + 1, None)
        if gate.rule == "row" and not (c <= a and (d is None or (b is not None and b <= d))):
            raise ValueError("a gated edit acts on rows that its gate does not read")
        if a < (gate.stop if gate.rule in ("mean", "max", "last") else gate.start):
            raise ValueError("a gated edit acts on rows before its gate is decided")
    last = max((place for place, _ in places), default=(0, 0))
    if gate.rule == "row" and any(depth(term) <= last for term in edits):
        raise ValueError("a gate reads at a point that comes after, or beside, the edit it governs")
    if gate.rule in ("mean", "max", "last") and read != ((gate.start, gate.stop),):
        raise ValueError("a gate pools other rows than it reads")
    if gate.rule == "since" and read != ((gate.start, None),):
        raise ValueError("a gate watches other rows than it reads")


def depth(term: Term) -> tuple[int, int]:
    """Where a term stands in the forward pass; points of a block whose order depends on the model share a place."""
    return term.layer, 0 if term.kind in ("embed", "resid_pre") else 2 if term.kind in ("resid_post", "final_norm") else 1


def addresses(spec: Spec) -> set[str]:
    """Return the content addresses of all vectors that a spec's edits name."""
    return {sha for term in spec.terms for sha in (term.read, term.write) if sha}


def of_request(extra_args: dict | None) -> tuple[str, Spec] | None:
    """Return the name and Spec that a request carries, or None."""
    text = (extra_args or {}).get(KEY)
    return None if text is None else decode(text)


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise ValueError(f"expected a short string, got {value!r}")
    return value


def _choice(value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"expected one of {', '.join(known)}, got {value!r}")
    return str(value)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return value


def _index(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError(f"expected a position, layer or count, got {value!r}")
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


def address(rows: int, data: bytes | memoryview) -> str:
    """Return the content address of `rows` vectors, given as float32 bytes: a hash of 32 hex digits."""
    found = hashlib.sha256(f"{rows}:".encode())
    found.update(data)  # which may be megabytes, and would be copied to be joined to the number
    return found.hexdigest()[:32]
