"""The worker's methods that a notebook client may call, and what their arguments may be: all is bounded before anything runs."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..engine.settings import Settings
from ..points import Point
from .refusing import Refused, shown

RESULT_BYTES = 1 << 30  # of what one call may compute
LOGIT_BYTES = 256 << 20
MAX_UIDS = 16_384
UID = re.compile(r"[0-9a-f]{32}")
SHA = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Engine:
    """What arguments are held against. sites: the (kind, layer) that are tapped; shapes: of one row at each point."""

    settings: Settings
    shapes: Mapping[Point, tuple[int, ...]]
    sites: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that may be made: its arguments, and the requests and vectors that they name."""

    args: list[Any]
    uids: list[str]
    shas: frozenset[str] = frozenset()


def checked(method: str, args: object, engine: Engine) -> Asked:
    """Return a call's arguments as the worker takes them; Refused (400, 404 or 413) for another method, or what is out of bounds.

    uids, where there are any, are the first argument, as the client names them.
    """
    if method not in METHODS:
        raise Refused(404, f"a client calls {', '.join(sorted(METHODS))}; not {shown(method)}")
    if not isinstance(args, list):
        raise Refused(400, f"{method}: its arguments are a list")
    try:
        return METHODS[method](engine, *args)
    except TypeError as error:
        raise Refused(400, f"{method}: these are not its arguments ({error})") from None


def _none(engine: Engine) -> Asked:
    return Asked([], [])


def _drop(engine: Engine, uids: Any) -> Asked:
    uids = _uids(uids)
    return Asked([uids], uids)


def _fetch(engine: Engine, uids: Any, kind: Any, layer: Any, before: Any, here: Any, since: Any = 0) -> Asked:
    uids = _uids(uids)
    return Asked([uids, *_site(engine, kind, layer), _flag(before), False, _index(since, "since", 1 << 31)], uids)


def _unembed(engine: Engine, rows: Any, normed: Any) -> Asked:
    width = engine.settings.d_model * engine.settings.type.itemsize
    if not isinstance(rows, bytes) or len(rows) % width:
        raise Refused(400, f"rows to unembed are bytes, {width} a row")
    most = max(1, LOGIT_BYTES // (4 * engine.settings.d_vocab))
    if len(rows) // width > most:
        raise Refused(413, f"{len(rows) // width} rows are too many to unembed at once; {most} are the most")
    return Asked([rows, _flag(normed)], [])


def _readout(engine: Engine, tokens: Any) -> Asked:
    return Asked([_tokens(engine, tokens)], [])


def _pattern(engine: Engine, uids: Any, layer: Any, at: Any, scores: Any, spans: Any) -> Asked:
    uids = _uids(uids)
    at, settings = _at(engine, at, len(uids)), engine.settings
    layer = _site(engine, "q", layer)[1]
    heads = engine.shapes[Point("q", layer)][0]
    _small(sum(len(places) * heads * 4 * (max(places, default=0) + 1) for places in at), "attention")
    if spans is not None:
        spans = [[_span(span, settings.max_len) for span in _list(one, "spans", 64)] for one in _list(spans, "spans", MAX_UIDS)]
        if len(spans) != len(uids):
            raise Refused(400, f"there are {len(spans)} lists of spans for {len(uids)} requests")
    return Asked([uids, layer, at, _flag(scores), spans], uids)


def _experts(engine: Engine, uids: Any, layer: Any) -> Asked:
    uids = _uids(uids)
    return Asked([uids, _site(engine, "router", layer)[1]], uids)


def _lens(engine: Engine, uids: Any, at: Any, sites: Any, before: Any, top: Any, k: Any, tokens: Any, shifts: Any) -> Asked:
    uids = _uids(uids)
    at = _rows(engine, at, len(uids))
    sites = [_site(engine, *_list(site, "a site", 2)) for site in _list(sites, "sites", len(engine.sites))]
    shifts = [None if sha is None else _sha(sha) for sha in _list(shifts, "shifts", len(engine.sites))]
    if len(shifts) != len(sites):
        raise Refused(400, f"there are {len(shifts)} shifts for {len(sites)} sites")
    tokens = None if tokens is None else _tokens(engine, tokens)
    k = _index(k, "k", engine.settings.d_vocab)
    _small(8 * len(sites) * sum(map(len, at)) * (2 + k + 2 * len(tokens or ())), "readings of the lens")
    args = [uids, at, sites, _flag(before), _site(engine, *_list(top, "a site", 2)), k, tokens, shifts]
    return Asked(args, uids, frozenset(sha for sha in shifts if sha is not None))


def _split(engine: Engine, uids: Any, kind: Any, layer: Any, at: Any, before: Any, parts: Any) -> Asked:
    uids = _uids(uids)
    if kind not in ("z", "mlp_act"):
        raise Refused(400, f"the parts of z or mlp_act are told apart, not of {shown(kind)}")
    kind, layer = _site(engine, kind, layer)
    shape, at = engine.shapes[Point(kind, layer)], _rows(engine, at, len(uids))
    n = shape[0] if len(shape) == 2 else prod(shape)
    if parts is not None:
        parts = [_index(part, "a part", n - 1) for part in _list(parts, "parts", n)]
    _small(4 * sum(map(len, at)) * ((n if parts is None else len(parts)) + 1) * engine.settings.d_model, "parts")
    return Asked([uids, kind, layer, at, _flag(before), parts], uids)


METHODS: dict[str, Callable[..., Asked]] = {
    "describe": _none, "sample_weights": _none, "settle": _none, "drop": _drop, "fetch": _fetch, "unembed": _unembed, "readout": _readout,
    "pattern": _pattern, "experts": _experts, "lens": _lens, "split": _split}


def _uids(value: Any) -> list[str]:
    uids = _list(value, "requests", MAX_UIDS)
    wrong = [uid for uid in uids if not isinstance(uid, str) or not UID.fullmatch(uid)]
    if wrong:
        raise Refused(400, f"a request is named by 32 hexadecimal digits, not by {shown(wrong[0])}")
    if len(set(uids)) < len(uids):
        raise Refused(400, "a call names a request twice, whose rows it would give twice")
    return uids


def _at(engine: Engine, value: Any, n: int) -> list[list[int]]:
    longest = engine.settings.max_len
    at = [[_index(place, "a position", longest) for place in _list(places, "positions", longest)]
          for places in _list(value, "positions", MAX_UIDS)]
    if len(at) != n:
        raise Refused(400, f"there are positions of {len(at)} requests, and {n} requests")
    return at


def _rows(engine: Engine, value: Any, n: int) -> list[list[int]]:
    """Positions whose rows are copied: no more of them than were captured."""
    at = _at(engine, value, n)
    if any(len(set(places)) < len(places) for places in at):
        raise Refused(400, "a call names a position of one request twice; name it once")
    return at


def _site(engine: Engine, kind: Any, layer: Any) -> tuple[str, int]:
    if not isinstance(kind, str) or type(layer) is not int or (kind, layer) not in engine.sites:
        raise Refused(400, f"{shown(kind)} of layer {shown(layer)} is not tapped by this server; GET /mia/status lists what is")
    return kind, layer


def _tokens(engine: Engine, value: Any) -> list[int]:
    tokens = [_index(token, "a token", engine.settings.d_vocab - 1) for token in _list(value, "tokens", engine.settings.d_vocab)]
    _small(4 * len(tokens) * engine.settings.d_model, "rows of the unembedding")
    return tokens


def _span(value: Any, longest: int) -> list[int]:
    span = _list(value, "a span", 2)
    if len(span) != 2:
        raise Refused(400, "a span is a pair of positions")
    return [_index(place, "a position", longest) for place in span]


def _list(value: Any, what: str, most: int) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Refused(400, f"{what} come as a list, not as {shown(value)}")
    if len(value) > most:
        raise Refused(413, f"{len(value)} {what} are too many at once; {most} are the most")
    return value


def _index(value: Any, what: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise Refused(400, f"{what} is a whole number from 0 to {most}, not {shown(value)}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused(400, f"a flag is true or false, not {shown(value)}")
    return value


def _sha(value: Any) -> str:
    if not isinstance(value, str) or not SHA.fullmatch(value):
        raise Refused(400, f"a vector is named by 32 hexadecimal digits, not by {shown(value)}")
    return value


def _small(size: int, what: str) -> None:
    if size > RESULT_BYTES:
        raise Refused(413, f"these {what} would take {size} bytes; one call gives {RESULT_BYTES} at most. Ask for fewer positions at once")
