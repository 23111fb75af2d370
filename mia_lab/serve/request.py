"""A request's "mia_lab" JSON, read within bounds: nothing in it is looked up yet."""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..bundles.folder import NAME
from ..engine.wire import MAX_NUMBER
from .policy import Limits, Named
from .refusing import Refused, shown

WORDS = ("last", "prompt", "generated", "all")
MAX_PLACES = 64  # positions listed one by one
MAX_CAPTURES = 64
MAX_MONITORS = 16

At = str | int | tuple[int, ...]  # one of WORDS, a Python index into the prompt, or several


@dataclass(frozen=True, slots=True)
class Captured:
    """Points to capture, as asked: any spelling, layers where the spelling has none (None is all), which positions."""

    point: str
    layers: tuple[int, ...] | None = None
    at: At = "last"
    before: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's "mia_lab" JSON. defaults: whether the server's default edits act."""

    edits: tuple[Named, ...] = ()
    defaults: bool = True
    captures: tuple[Captured, ...] = ()
    monitors: tuple[str, ...] = ()
    monitor_at: At = "all"


def parse(text: object, limits: Limits) -> Asked:
    """Read the "mia_lab" string of a request's vllm_xargs; Refused (400, or 413 for its length) for anything else."""
    if not isinstance(text, str):
        raise Refused(400, f'"mia_lab" is a string that holds JSON, not {type(text).__name__}; put json.dumps(...) there')
    if len(text) > limits.request_bytes or len(text.encode("utf-8", "surrogatepass")) > limits.request_bytes:
        raise Refused(413, f'"mia_lab" takes more than {limits.request_bytes} bytes')
    try:
        said = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f'"mia_lab" is no JSON: {str(error)[:200]}') from None
    said = _object(said, '"mia_lab"', ("edits", "defaults", "capture", "monitor", "monitor_at"))
    edits = tuple(map(_named, _list(said.get("edits", []), "edits", limits.edits_per_request)))
    captures = tuple(map(_captured, _list(said.get("capture", []), "capture", MAX_CAPTURES)))
    monitors = tuple(_name(one, "monitor") for one in _list(said.get("monitor", []), "monitor", MAX_MONITORS))
    if "monitor_at" in said and not monitors:
        raise Refused(400, "monitor_at is given without monitor, so there is nothing that it says the positions of")
    if len(set(monitors)) < len(monitors):
        raise Refused(400, "monitor names a bundle twice")
    defaults = _truth(said.get("defaults", True), "defaults")
    return Asked(edits, defaults, captures, monitors, _at(said.get("monitor_at", "all"), "monitor_at"))


def _named(value: object) -> Named:
    if isinstance(value, str):
        return Named(_name(value, "edits"))
    said = _object(value, "an edit", ("name", "coeff"))
    coeff = said.get("coeff", 1.0)
    if isinstance(coeff, bool) or not isinstance(coeff, (int, float)) or not abs(coeff) <= MAX_NUMBER:
        raise Refused(400, f"coeff is {shown(coeff)}; it is a finite number that float32 holds")
    return Named(_name(said.get("name"), "edits"), float(coeff) + 0.0)


def _captured(value: object) -> Captured:
    said = _object(value, "a capture", ("point", "layers", "at", "before"))
    point, layers = said.get("point"), said.get("layers")
    if not isinstance(point, str) or not 0 < len(point) <= 128:
        raise Refused(400, f"a capture needs its point, such as \"resid_post\", and has {shown(point)}")
    if layers is not None:
        listed = [layers] if isinstance(layers, int) else _list(layers, "layers", 1024)
        layers = tuple(_whole(layer, "layers") for layer in listed)
        if not layers:
            raise Refused(400, "layers is empty; leave it out for all that are tapped")
    return Captured(point, layers, _at(said.get("at", "last"), "at"), _truth(said.get("before", False), "before"))


def _at(value: object, what: str) -> At:
    if isinstance(value, str) and value in WORDS:
        return value
    if isinstance(value, list):
        places = tuple(_whole(one, what) for one in _list(value, what, MAX_PLACES))
        if places:
            return places
    if isinstance(value, (str, list)) or value is None:
        raise Refused(400, f"{what} is {shown(value)}; it is one of {', '.join(WORDS)}, a position, or a list of positions")
    return _whole(value, what)


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Refused(400, f"{what}: {shown(value)} is no name of a bundle; GET /mia/edits lists them")
    return value


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
        raise Refused(400, f"{what} has {shown(value)}, which is no position or layer")
    return value


def _truth(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise Refused(400, f"{what} is {shown(value)}; it is true or false")
    return value


def _list(value: object, what: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise Refused(400, f"{what} is a list of at most {most}" + (f", not of {len(value)}" if isinstance(value, list) else ""))
    return value


def _object(value: object, what: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(400, f"{what} is {shown(value)}; it is an object with {', '.join(known)}")
    strange = next((name for name in value if name not in known), None)
    if strange is not None:
        raise Refused(400, f"{what} has {shown(strange)}; it may have {', '.join(known)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
