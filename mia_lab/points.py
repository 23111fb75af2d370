"""Points: where in a transformer a value is read or edited. One parser for every spelling."""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index

from .errors import PointError

KINDS: dict[str, str] = {
    "embed": "token embedding as it enters the stream, scaled",
    "resid_pre": "residual stream entering the block",
    "q": "queries per head, as the attention kernel sees them: normed and rotated",
    "k": "keys per head, as the attention kernel sees them: normed and rotated",
    "v": "values per head",
    "z": "what each head gives, before the output projection",
    "attention": "how each head shares its attention out; AttentionBias edits it, and `pattern` is it without a bias",
    "attn_out_raw": "attention's own output, where a norm follows it",
    "attn_out": "what attention adds to the stream",
    "resid_mid": "residual stream between attention and MLP",
    "mlp_act": "the MLP's neurons, after their nonlinearity",
    "router": "logits over the experts",
    "mlp_out_raw": "the MLP's own output, where a norm follows it",
    "mlp_out": "what the MLP adds to the stream",
    "resid_post": "residual stream leaving the block",
    "final_norm": "the last block's stream after the final norm",
}
STREAM = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
DERIVED: dict[str, tuple[str, ...]] = {"pattern": ("q", "k"), "attn_scores": ("q", "k"), "logits": ("resid_post",)}  # from these
_ENDS = {"embed": 0, "final_norm": -1, "logits": -1}  # points that a model has once, and at which layer they count

_NAMES = {"embed": "hook_embed", "final_norm": "ln_final.hook_normalized", "logits": "logits", "q": "attn.hook_rot_q",
          "k": "attn.hook_rot_k", "v": "attn.hook_v", "z": "attn.hook_z", "pattern": "attn.hook_pattern",
          "attn_scores": "attn.hook_attn_scores", "mlp_act": "mlp.hook_post", "router": "mlp.hook_router"}
_NAMES = {kind: _NAMES.get(kind, f"hook_{kind}") for kind in (*KINDS, *DERIVED)}
_UNROTATED = {"attn.hook_q": "q", "attn.hook_k": "k"}  # the same values where nothing rotates them
_TL_LEGACY = {name: kind for kind, name in _NAMES.items()}
_TL_BRIDGE = {"hook_in": "resid_pre", "hook_out": "resid_post", "ln2.hook_in": "resid_mid", "attn.hook_out": "attn_out_raw",
              "mlp.hook_out": "mlp_out_raw", "attn.hook_hidden_states": "attn_out_raw"}
_MODULES = {"input": "resid_pre", "output": "resid_post", "self_attn.output": "attn_out_raw", "attn.output": "attn_out_raw",
            "mlp.output": "mlp_out_raw", "block_sparse_moe.output": "mlp_out_raw", "self_attn.o_proj.input": "z",
            "attn.c_proj.input": "z", "mlp.down_proj.input": "mlp_act", "mlp.c_proj.input": "mlp_act", "mlp.gate.output": "router",
            "block_sparse_moe.gate.output": "router"}
_WHOLE = {"hook_embed": "embed", "embed.hook_out": "embed", "model.embed_tokens.output": "embed", "transformer.wte.output": "embed",
          "ln_final.hook_normalized": "final_norm", "ln_final.hook_out": "final_norm", "model.norm.output": "final_norm",
          "transformer.ln_f.output": "final_norm", "unembed.hook_out": "logits", "lm_head.output": "logits"}
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
        return _NAMES[self.kind] if self.kind in _ENDS else f"blocks.{self.layer}.{_NAMES[self.kind]}"

    def __str__(self) -> str:
        return f"{self.kind}.{self.layer}"


def parse(spec: str | Point | tuple[str, int], n_layers: int, *, sandwich: bool = False, rotary: bool = False) -> Point:
    """Return the Point that `spec` names on a model of `n_layers` blocks.

    Accepts `Point`, `("resid_post", 3)` (negative layers count from the end), `"resid_post.3"`, TransformerLens names
    (`"blocks.3.hook_resid_post"`, `"blocks.3.hook_out"`) and module paths (`"model.layers.3.output"`).
    `sandwich` says that the block norms its branches' outputs, where `mlp.output` and `mlp_out` are two tensors;
    `rotary` that queries and keys are rotated, where `hook_q` and `hook_rot_q` are. Raises PointError for anything else.
    """
    if isinstance(spec, Point):
        kind, layer = kind_of(spec.kind), spec.layer
    elif isinstance(spec, str):
        kind, layer = _split(spec, sandwich, rotary)
    else:
        try:
            kind, layer = spec
        except (TypeError, ValueError):
            raise PointError(f"a point is a name or a (kind, layer) pair, not {spec!r}") from None
        kind = kind_of(kind)
    layer = _ENDS[kind] if layer is None and kind in _ENDS else layer
    try:
        layer = index(None if isinstance(layer, bool) else layer)
    except TypeError:
        raise PointError(f"the layer of {spec!r} is not an integer") from None
    if not -n_layers <= layer < n_layers:
        raise PointError(f"layer {layer} was asked for; the model has layers 0 to {n_layers - 1}")
    layer %= n_layers
    if kind in _ENDS and layer != _ENDS[kind] % n_layers:
        raise PointError(f"{kind} is not in every layer; the model has it once: type {kind!r}")
    return Point(kind, layer)


def every(n_layers: int) -> list[Point]:
    """All points that a model of `n_layers` blocks could have, in the order of the forward pass."""
    found = [Point(kind, layer) for layer in range(n_layers) for kind in KINDS]
    return [p for p in found if p.kind not in _ENDS or p.layer == _ENDS[p.kind] % n_layers]


def kind_of(name: str) -> str:
    """Return the canonical kind for `name` (`"resid_post"`, `"hook_resid_post"`); PointError when unknown."""
    kind = _TL_LEGACY.get(name, name) if isinstance(name, str) else None
    if kind not in _NAMES:
        raise PointError(f"there is no point {name!r}; the points are {', '.join(_NAMES)}")
    return kind


def _split(spec: str, sandwich: bool, rotary: bool) -> tuple[str, int | None]:
    if spec in _WHOLE or (spec in _ENDS):
        return _WHOLE.get(spec, spec), None
    block = _BLOCK.match(spec)
    if block:
        layer, rest = int(block[1]), block[2]
        if rest in _UNROTATED and spec.startswith("blocks."):
            if rotary:
                raise PointError(f"{spec!r} names {_UNROTATED[rest]} before it is rotated, which is not tapped; "
                                 f"as the kernel sees it, it is {Point(_UNROTATED[rest], layer).name!r}")
            return _UNROTATED[rest], layer
        table = _TL_LEGACY | _TL_BRIDGE if spec.startswith("blocks.") else _MODULES
        if rest not in table:
            raise PointError(f"there is no point {spec!r}; after the block this spelling knows {', '.join(table)}")
        kind = table[rest]  # a module's own output is what it adds, unless a norm follows it
        return (kind if sandwich or rest == _NAMES[kind] else kind.removesuffix("_raw")), layer
    short = _SHORT.match(spec)
    if short and short[1] in _NAMES:
        return short[1], int(short[2])
    if spec in _NAMES or spec in _TL_LEGACY:
        raise PointError(f"{spec!r} needs a layer here: type ({kind_of(spec)!r}, 0) or {Point(kind_of(spec), 0).name!r}")
    raise PointError(f"there is no point {spec!r}; type for example ('resid_post', 3); the points are {', '.join(_NAMES)}")


def select(names_filter: object, declared: Iterable[Point], n_layers: int, *, sandwich: bool = False, rotary: bool = False) -> list[Point]:
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
        if isinstance(item, str) and (item in KINDS or item in _TL_LEGACY) and kind_of(item) in KINDS:
            found = {p for p in declared if p.kind == kind_of(item)}
            if not found:
                raise undeclared(item, declared)
            wanted |= found
        else:
            point = parse(item, n_layers, sandwich=sandwich, rotary=rotary)
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
