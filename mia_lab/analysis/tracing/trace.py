"""Traces and hooks: a run written down as if its values were here, then made into edits and captures and run once.

`with session.trace(prompt) as t:` in the words of nnsight, `session.run_with_hooks` in those of TransformerLens. The body of the
block, or of a hook, runs once, before the model does: it records. What it cannot record is refused, with the edit that says it.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import EditError, MiaError, PointError
from ...lazy import LazyTensor
from ...points import KINDS, parse
from .proxies import Value
from .tape import Tape

if TYPE_CHECKING:
    from ...session import Session

_INNER = ("self_attn", "attn", "mlp", "block_sparse_moe", "ln2", "o_proj", "c_proj", "down_proj", "gate")  # on the way to a point


class Trace:
    """What `session.trace` gives: points by name, `t["resid_post", 3]`, `t.layers[3].output`, `t.blocks[3].hook_resid_post`."""

    def __init__(self, tape: Tape) -> None:
        self.__dict__["_tape"] = tape

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is None:
            self._tape.run()

    def __getitem__(self, key: Any) -> Value:
        return self._tape.value(key)

    def __setitem__(self, key: Any, other: Any) -> None:
        self._tape.value(key).assign(other)

    @property
    def layers(self) -> Blocks:
        """The blocks, in the words of Hugging Face's modules."""
        return Blocks(self._tape, "model.layers")

    h = layers

    @property
    def model(self) -> Trace:
        """The trace itself, so that `t.model.layers[3]` and `t.transformer.h[3]` read as they do elsewhere."""
        return self

    transformer = model

    @property
    def blocks(self) -> Blocks:
        """The blocks, in TransformerLens's words."""
        return Blocks(self._tape, "blocks")

    @property
    def logits(self) -> Value:
        """The logits `[batch pos d_vocab]`, which can be saved."""
        return self._tape.value("logits")

    @property
    def text(self) -> str | list[str]:
        """What was generated, once the run is over."""
        if not self._tape.outputs:
            raise MiaError("nothing was generated yet; read the text after the with block")
        texts = [output.outputs[0].text for output in self._tape.outputs]
        return texts[0] if self._tape.prompts.one else texts

    def __setattr__(self, name: str, other: Any) -> None:
        raise EditError(f't.{name} cannot be set; type for example t["resid_post", 3] = rows')


@dataclass(frozen=True, slots=True)
class Blocks:
    """A model's blocks, by number."""

    tape: Tape
    path: str

    def __getitem__(self, layer: int) -> Node:
        return Node(self.tape, self.path, parse(("resid_post", layer), self.tape.session.n_layers).layer)


class Node:
    """A block, or a module inside it; its attributes are points or modules further in."""

    def __init__(self, tape: Tape, path: str, layer: int, inner: tuple[str, ...] = ()) -> None:
        self.__dict__.update(_tape=tape, _path=path, _layer=layer, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in KINDS and not self._inner:
            return self._tape.value((name, self._layer))
        if name in _INNER:
            return Node(self._tape, self._path, self._layer, (*self._inner, name))
        try:
            return self._tape.value(".".join((self._path, str(self._layer), *self._inner, name)), module=name == "output")
        except PointError as error:
            raise AttributeError(str(error)) from None

    def __setattr__(self, name: str, other: Any) -> None:
        found = getattr(self, name)
        if not isinstance(found, Value):
            raise EditError(f"{'.'.join((*self._inner, name))} is a module; set its output")
        found.assign(other)


@dataclass(frozen=True, slots=True)
class Hook:
    """What a hook is told of its point: its name and layer, and a place for its own notes."""

    name: str
    _layer: int
    ctx: dict[str, Any] = field(default_factory=dict)

    def layer(self) -> int:
        """The block it stands at."""
        return self._layer


def run_with_hooks(session: Session, prompts: Any, fwd_hooks: Iterable[tuple[Any, Callable]]) -> LazyTensor:
    """Return what `Session.run_with_hooks` promises."""
    tape = Tape(session, prompts)
    for name, function in fwd_hooks:
        named = [p for p in session.tapped if name(p.name)] if callable(name) else [name]
        if not named:
            raise PointError("a hook's function of names picked none of the tapped points")
        for key in named:
            value = tape.value(key)
            known = inspect.signature(function).parameters.values()
            told = any(p.name == "hook" or p.kind is p.VAR_KEYWORD for p in known)
            hook = {"hook": Hook(value.point.name, value.point.layer)} if told else {}
            found = function(value, **hook)
            if found is not None:
                value.assign(found)
    logits = tape.value("logits").save()
    tape.run()
    return logits
