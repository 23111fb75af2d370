"""What an engine can run of what a request asks: everything about a spec that the wire's own rules do not say."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import EditError
from .room import Room
from .vectors import Vectors
from .wire import ATTENTION, Reduce, Site, Spec, Term, addresses

_KINDS = {"add": ("add", "replace"), "renorm": ("add",), "affine": ("affine", "ablate"), "clip": ("clamp",), "feature": ("clampfeature",),
          "scale": ("scale", "replace"), "bias": ("attentionbias",)}  # by op, the edit kinds that it comes from; a reading comes from any


@dataclass(frozen=True)
class Engine:
    """What one engine taps, and the room in its tables."""

    widths: Mapping[Site, int]  # values of a row at each tapped point; 0 where attention is biased
    heads: Mapping[int, int]  # of the attention, by layer
    read_only: frozenset[str]
    edits: frozenset[str]
    captured_tokens: int
    room: Room

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Engine:
        """From what the worker says of itself."""
        shapes = {(kind, layer): tuple(shape) for kind, layer, shape in facts["shapes"]}
        sites = [(kind, layer) for kind, layer in facts["sites"]]
        widths = {site: 0 if site[0] == ATTENTION else prod(shapes[site]) for site in sites}
        heads = {site[1]: shapes[site][0] for site in sites if site[0] == ATTENTION}
        return cls(widths, heads, frozenset(facts["read_only"]), frozenset(facts["settings"]["edits"]), facts["captured_tokens"],
                   Room.of(facts))


def check(spec: Spec, length: int | None, engine: Engine, vectors: Vectors) -> None:
    """EditError, with what exists, for a spec that the engine cannot run, whatever else it runs.

    length: tokens of the request at most, prompt and generated; None where its prompt has no tokens.
    """
    for site in (*(term.site for term in spec.terms), *(take.site for take in spec.takes)):
        if site not in engine.widths:
            known = sorted({kind for kind, _ in engine.widths})
            raise EditError(f"{_shown(site)} is not tapped by this engine; it taps layers of {', '.join(known)}")
    for term in spec.terms:
        _check_term(term, engine, vectors)
    if any(take.kind == ATTENTION for take in spec.takes):
        raise EditError("attention cannot be captured; capture q and k")
    if spec.takes_twice and (engine.captured_tokens < 2 or not engine.room.chunked):
        raise EditError("a point captured both before and after its edits takes twice the room; load with enable_chunked_prefill=True "
                        "and max_captured_tokens=2 or more")
    if spec.reduce is not None:
        _check_reduce(spec, spec.reduce, engine, vectors)
    if spec.keeps_history and length is None:
        raise EditError("a prompt of embeddings cannot be run under an attention bias; send its tokens")
    engine.room.check([spec], rows_of(spec, vectors))
    engine.room.check_lengths([length] if spec.keeps_history else [])


def rows_of(spec: Spec, vectors: Vectors) -> dict[str, range]:
    """By address, as many items as there are vectors, for all that a spec's edits name."""
    return {sha: range(_known(sha, vectors)[0]) for sha in addresses(spec)}


def _check_term(term: Term, engine: Engine, vectors: Vectors) -> None:
    where, width = _shown(term.site), engine.widths[term.site]
    if term.kind in engine.read_only:
        raise EditError(f"{term.kind} can be captured but not edited")
    kinds = _KINDS.get(term.op, tuple(engine.edits))
    if not engine.edits.intersection(kinds):
        enabled = ", ".join(sorted(engine.edits)) or "none"
        raise EditError(f"{' or '.join(kinds) or 'any'} edits are not enabled in this engine; enabled: {enabled}")
    for sha, rows in ((term.read, 1), (term.write, term.aligned or 1)):
        if sha and _known(sha, vectors) != (rows, width):
            raise EditError(f"vector {sha} is {list(_known(sha, vectors))}; an edit at {where} needs [{rows}, {width}]")
    if term.op == "bias" and max(term.heads, default=0) >= engine.heads[term.layer]:
        raise EditError(f"head {max(term.heads)} was named at {where}; there are heads 0 to {engine.heads[term.layer] - 1}")


def _check_reduce(spec: Spec, how: Reduce, engine: Engine, vectors: Vectors) -> None:
    """Matrices must fit their points, and so many values there must be as are to be kept."""
    outputs = {take.site: engine.widths[take.site] for take in spec.takes}
    for kind, layer, sha in how.matrices:
        site, (rows, columns) = (kind, layer), _known(sha, vectors)
        if site not in engine.widths or columns != engine.widths[site] + 1:
            needs = f"[m, {engine.widths[site] + 1}]" if site in engine.widths else "a tapped point"
            raise EditError(f"matrix {sha} is [{rows}, {columns}]; a reduction at {_shown(site)} needs {needs}")
        if site in outputs:
            outputs[site] = rows
    if len({matrix[:2] for matrix in how.matrices}) < len(how.matrices):
        raise EditError("a reduction names two matrices at one point")
    few = [site for site, size in outputs.items() if how.k > size]
    if few:
        raise EditError(f"the {how.k} largest of {outputs[few[0]]} values were asked for at {_shown(few[0])}")


def _known(sha: str, vectors: Vectors) -> tuple[int, int]:
    found = vectors.shape(sha)
    if found is None:
        raise EditError(f"vector {sha} is not registered with this engine; register it before its request, and hold it until its end")
    return found


def _shown(site: Site) -> str:
    return f"{site[0]}.{site[1]}"
