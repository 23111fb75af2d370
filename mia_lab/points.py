"""Points: where in a transformer a value is read or edited. One parser for every spelling."""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index

from .errors import PointError

KINDS: dict[str, str] = {
    "resid_pre": "residual stream entering the block",
    "resid_mid": "residual stream between attention and MLP",
    "resid_post": "residual stream leaving the block",
    "attn_out": "what attention adds to the stream",
    "mlp_out": "what the MLP adds to the stream",
}

_TL_LEGACY = {f"hook_{kind}": kind for kind in KINDS}
_TL_BRIDGE = {"hook_in": "resid_pre", "hook_out": "resid_post", "ln2.hook_in": "resid_mid",
              "attn.hook_out": "attn_out", "mlp.hook_out": "mlp_out"}
_MODULES = {"input": "resid_pre", "output": "resid_post", "self_attn.output": "attn_out", "attn.output": "attn_out",
            "mlp.output": "mlp_out", "block_sparse_moe.output": "mlp_out"}
# On sandwich-norm blocks these names mean the module's own output, before the post-norm.
_RAW_ON_SANDWICH = {"attn.hook_out", "mlp.hook_out", "self_attn.output", "attn.output", "mlp.output"}
_BLOCK = re.compile(r"^(?:(?:blocks|(?:language_)?(?:model|transformer)(?:\.\w+)*?\.(?:layers|h|blocks))\.(\d+)\.)(.+)$")
_SHORT = re.compile(r"^([a-z_]+?)[._]?(-?\d+)$")


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A (kind, layer) address; layer is the 0-based block."""

    kind: str
    layer: int

    @property
    def name(self) -> str:
        """The TransformerLens name, e.g. `blocks.3.hook_resid_post`."""
        return f"blocks.{self.layer}.hook_{self.kind}"

    def __str__(self) -> str:
        return f"{self.kind}.{self.layer}"


def parse(spec: str | Point | tuple[str, int], n_layers: int, *, sandwich: bool = False) -> Point:
    """Return the Point that `spec` names on a model of `n_layers` blocks.

    Accepts `Point`, `("resid_post", 3)` (negative layers count from the end), `"resid_post.3"`, TransformerLens names
    (`"blocks.3.hook_resid_post"`, `"blocks.3.hook_out"`) and module paths (`"model.layers.3.output"`).
    `sandwich` says that the block norms its branches' outputs, where `mlp.output` and `mlp_out` are two tensors.
    Raises PointError for anything else.
    """
    if isinstance(spec, Point):
        kind, layer = kind_of(spec.kind), spec.layer
    elif isinstance(spec, str):
        kind, layer = _split(spec, sandwich)
    else:
        try:
            kind, layer = spec
        except (TypeError, ValueError):
            raise PointError(f"a point is a name or a (kind, layer) pair, not {spec!r}") from None
        kind = kind_of(kind)
    try:
        layer = index(None if isinstance(layer, bool) else layer)
    except TypeError:
        raise PointError(f"the layer of {spec!r} is not an integer") from None
    if not -n_layers <= layer < n_layers:
        raise PointError(f"layer {layer} was asked for; the model has layers 0 to {n_layers - 1}")
    return Point(kind, layer % n_layers)


def kind_of(name: str) -> str:
    """Return the canonical kind for `name` (`"resid_post"`, `"hook_resid_post"`); PointError when unknown."""
    kind = _TL_LEGACY.get(name, name) if isinstance(name, str) else None
    if kind not in KINDS:
        raise PointError(f"there is no point {name!r}; the points are {', '.join(KINDS)}")
    return kind


def _split(spec: str, sandwich: bool) -> tuple[str, int]:
    block = _BLOCK.match(spec)
    if block:
        layer, rest = int(block[1]), block[2]
        if sandwich and rest in _RAW_ON_SANDWICH:
            raise PointError(f"{spec!r} names the module's own output, before its post-norm, which is not tapped; "
                             f"the residual contribution is blocks.{layer}.hook_{'mlp' if 'mlp' in rest else 'attn'}_out")
        table = _TL_LEGACY | _TL_BRIDGE if spec.startswith("blocks.") else _MODULES
        if rest not in table:
            raise PointError(f"there is no point {spec!r}; after the block this spelling knows {', '.join(table)}")
        return table[rest], layer
    short = _SHORT.match(spec)
    if short and short[1] in KINDS:
        return short[1], int(short[2])
    if spec in KINDS or spec in _TL_LEGACY:
        raise PointError(f"{spec!r} needs a layer here: type ({kind_of(spec)!r}, 0) or 'blocks.0.hook_{kind_of(spec)}'")
    raise PointError(f"there is no point {spec!r}; type for example ('resid_post', 3); the points are {', '.join(KINDS)}")


def select(names_filter: object, declared: Iterable[Point], n_layers: int, *, sandwich: bool = False) -> list[Point]:
    """Return the declared points that `names_filter` picks, in order of layer.

    The filter is None (all), a kind (all its layers), a point in any spelling, a list of these, or a predicate on
    TransformerLens names. Raises PointError when it picks nothing or names a point that is not declared.
    """
    declared = sorted(declared, key=lambda p: (p.layer, list(KINDS).index(p.kind)))
    if names_filter is None:
        return declared
    if callable(names_filter):
        found = [p for p in declared if names_filter(p.name)]
        if not found:
            span = f", {declared[0].name} to {declared[-1].name}" if declared else ""
            raise PointError(f"names_filter picked none of the {len(declared)} declared points{span}")
        return found
    if isinstance(names_filter, (str, Point)) or (isinstance(names_filter, tuple) and len(names_filter) == 2
                                                  and not isinstance(names_filter[1], str)):
        names_filter = [names_filter]
    if not isinstance(names_filter, Iterable):
        raise PointError(f"{names_filter!r} names no points; give a kind, a point, a list of these, or a function of names")
    wanted: set[Point] = set()
    for item in names_filter:
        if isinstance(item, str) and (item in KINDS or item in _TL_LEGACY):
            found = {p for p in declared if p.kind == kind_of(item)}
            if not found:
                raise undeclared(item, declared)
            wanted |= found
        else:
            point = parse(item, n_layers, sandwich=sandwich)
            if point not in declared:
                raise undeclared(str(point), declared)
            wanted.add(point)
    if not wanted:
        raise PointError("no point was asked for")
    return [p for p in declared if p in wanted]


def undeclared(asked: str, declared: Iterable[Point]) -> PointError:
    """The error for a point that exists but that this session does not tap."""
    held = {kind: [p.layer for p in declared if p.kind == kind] for kind in KINDS}
    text = "; ".join(f"{kind} at layers {ranges(layers)}" for kind, layers in held.items() if layers) or "none"
    return PointError(f"{asked} is not tapped in this session. Tapped: {text}. "
                      f"Load with Session(..., points=[...]) that includes it")


def ranges(layers: list[int]) -> str:
    """Return ascending layers as text, a run of them as `a to b`."""
    layers = sorted(layers)
    if len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))
