"""What stands for a value while a run is recorded: it can be indexed, saved, and changed by an affine map, and by nothing else."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from ...directions import Directions, number, rows_of
from ...errors import EditError
from ...lazy import LazyTensor
from ...points import Point

if TYPE_CHECKING:
    from .tape import Tape

Tensor = torch.Tensor
_UNKNOWN = ("is not known while the run is recorded, so Python cannot read it, compare it or branch on it. A condition is an edit's "
            "when=mia.Gate(mia.Probe(direction, layer), above=...), a limit is mia.Clamp(direction, low=..., high=...); to read it "
            "after the run, .save() it")
_LIMIT = "is no affine change. A limit is mia.Clamp(direction, low=..., high=...), one of an SAE feature mia.ClampFeature(...)"
_READS = ("reads the value, which only a declared edit can do: mia.Ablate(direction) takes a direction out, mia.Clamp(direction, "
          "value=...) sets it, mia.Affine(read, write, bias) is any low-rank map; mia.Add(..., keep_norm=True) keeps the length")
_OTHER = ("cannot be recorded. What can: + and - of tensors and numbers, * and / by one number, assignment, indexing by prompt, "
          "position and head, and .save(). Compute other values from session.run_with_cache(...) and put them in: value[:, pos] = rows "
          "(an edit mia.Replace)")
_WHY = {**dict.fromkeys(("clamp", "clip", "clamp_", "relu", "maximum", "minimum", "max", "min", "amax", "amin", "abs", "where"), _LIMIT),
        **dict.fromkeys(("matmul", "mm", "__matmul__", "__rmatmul__", "einsum", "dot", "norm", "mean", "sum", "pow", "square", "std", "var",
                         "softmax", "linear", "bmm", "cosine_similarity"), _READS),
        **dict.fromkeys(("item", "tolist", "numpy", "cpu", "any", "all", "nonzero", "argmax", "topk", "sort", "isnan", "equal", "gt", "lt",
                         "ge", "le", "eq", "ne", "__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__"), _UNKNOWN)}


@dataclass(frozen=True, slots=True)
class Index:
    """Which prompts, positions (as asked, None for all) and head a value is narrowed to."""

    prompts: Any = None
    positions: Any = None
    head: int | None = None

    @classmethod
    def of(cls, key: Any, by_head: bool) -> Index:
        """Read `value[key]`; EditError for anything but prompts, positions and, where there are heads, one head."""
        parts = list(key) if isinstance(key, tuple) else [key]
        if any(part is Ellipsis or part is None or (isinstance(part, (Tensor, Value)) and part.ndim > 1) for part in parts):
            raise EditError("index by prompt, position and head, as value[:, -1]; masks, None and ... " + _OTHER)
        parts = [None if isinstance(p, slice) and p == slice(None) else p.tolist() if isinstance(p, Tensor) else
                 int(p) if isinstance(p, Integral) and not isinstance(p, bool) else p for p in parts]
        while len(parts) > 2 and parts[-1] is None:
            parts.pop()
        if len(parts) > 3 or (len(parts) == 3 and not (by_head and isinstance(parts[2], int))):
            raise EditError("a value is [batch pos d_model], indexed by prompt and position (and by one head where it has heads). Single "
                            "components are directions: mia.Ablate, mia.Clamp or mia.Affine on a basis vector")
        return cls(*parts)


@dataclass(frozen=True, eq=False, repr=False)
class Value:
    """`scale * x + shift`, where x is the value at a point of a run that is being recorded, as it is there at this line.

    Live values are x itself: changing one in place is recorded at once. Others are results, which can be assigned.
    """

    tape: Tape
    point: Point
    index: Index | None = None
    scale: float = 1.0
    shift: Tensor | None = None
    live: bool = True
    version: int = 0  # of a result: how often x had been changed when it was computed
    module: bool = False  # spelled as a module's output, which elsewhere may be a tuple

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, `[batch pos *row]` less the axes that the index drops."""
        return self.tape.shape(self.point, self.index or Index())

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.tape.dtype(self.point)

    @property
    def device(self) -> torch.device:
        """Where tensors to add to it are taken from."""
        return torch.device("cpu")

    def save(self) -> LazyTensor:
        """Keep the value as it is at this line; the tensor can be used once the run is over."""
        if not self.live:
            raise EditError("save the value itself, and compute with it after the run")
        return self.tape.read(self.point, self.index or Index())

    def __getitem__(self, key: Any) -> Value:
        self._indexable(key)
        return replace(self, index=Index.of(key, self.tape.by_head(self.point)), module=False)

    def __setitem__(self, key: Any, other: Any) -> None:
        self[key].assign(other)

    def _indexable(self, key: Any) -> None:
        if not self.live or self.index is not None:
            raise EditError("index a value once, before computing with it, as value[:, pos]; it is a tensor [batch pos d_model], no tuple")
        if self.module and isinstance(key, int):
            raise EditError(f"output[{key}] is a tuple's first item elsewhere; here it is a tensor [batch pos d_model]. Leave it out, or "
                            f"type output[{key}:{key + 1}] for prompt {key}")

    def assign(self, other: Any) -> None:
        """Record that the value becomes another: a tensor, a number, or a result computed from it."""
        if isinstance(other, Value):
            if other.live and self._same(other):
                return
            self._must_be_same(other)
            if not other.live and other.version != self.tape.version(self.point):
                raise EditError(f"{self.point} was changed after this result was computed from it; compute it again")
            self.tape.write(self.point, self.index or Index(), other.scale, other.shift)
        else:
            self.tape.write(self.point, self.index or Index(), 0.0, self._given(other))

    def _given(self, other: Any) -> Tensor:
        """What is added or assigned, a copy as float32 values on the host; of a Vector, its row for this point."""
        if isinstance(other, Directions):
            return rows_of(other, [self.point.layer], self.point.kind)[self.point]
        try:
            return torch.as_tensor(other.get() if isinstance(other, LazyTensor) else other).detach().to("cpu", torch.float32, copy=True)
        except (TypeError, ValueError, RuntimeError):
            raise EditError(f"{type(other).__name__} cannot be put into {self.point}; give a tensor, a number or a Vector") from None

    def _same(self, other: Value) -> bool:
        return (self.tape, self.point, self.index or Index()) == (other.tape, other.point, other.index or Index())

    def _must_be_same(self, other: Value) -> None:
        if not self._same(other):
            raise EditError(f"a value at {other.point} cannot be used at {self.point}, or at other positions of it, in one run: its rows "
                            "are on their way. Run once and .save() it, then assign the saved tensor in a second run (mia.Replace)")

    def _result(self, scale: float, shift: Tensor | None) -> Value:
        version = self.tape.version(self.point) if self.live else self.version
        return replace(self, scale=scale, shift=shift, live=False, version=version)

    def _plus(self, other: Any, sign: float = 1.0) -> Value:
        if isinstance(other, Value):
            self._must_be_same(other)
            one, two = self._result(self.scale, self.shift), other._result(other.scale, other.shift)
            if one.version != two.version:
                raise EditError(f"{self.point} was changed between these two results; compute them again")
            shifts = [f * x.shift for f, x in ((1.0, one), (sign, two)) if x.shift is not None]
            both = sum(shifts[1:], shifts[0]) if shifts else None
            return self._result(self.scale + sign * other.scale, both)
        more = sign * self._given(other)
        return self._result(self.scale, more if self.shift is None else self.shift + more)

    def _times(self, other: Any) -> Value:
        if isinstance(other, Value) or getattr(other, "numel", lambda: 1)() != 1:
            raise EditError("a value is multiplied by one number (an edit mia.Scale); a product with a tensor or another value " + _READS)
        factor = number(other, "a factor")
        return self._result(self.scale * factor, None if self.shift is None else self.shift * factor)

    def _in_place(self, result: Value) -> Value:
        if not self.live:
            return result
        self.assign(result)
        return self

    def __add__(self, other: Any) -> Value:
        return self._plus(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return self._plus(other, -1.0)

    def __rsub__(self, other: Any) -> Value:
        return self._times(-1.0)._plus(other)

    def __mul__(self, other: Any) -> Value:
        return self._times(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        if isinstance(other, Value) or getattr(other, "numel", lambda: 1)() != 1:
            return self._times(other)
        return self._times(1.0 / number(other, "a divisor"))

    def __neg__(self) -> Value:
        return self._times(-1.0)

    def __iadd__(self, other: Any) -> Value:
        return self._in_place(self + other)

    def __isub__(self, other: Any) -> Value:
        return self._in_place(self - other)

    def __imul__(self, other: Any) -> Value:
        return self._in_place(self * other)

    def __itruediv__(self, other: Any) -> Value:
        return self._in_place(self / other)

    def clone(self) -> Value:
        """The value as it is at this line, as a result."""
        return self._result(self.scale, self.shift)

    detach = clone

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", str(func)).removeprefix("__").removesuffix("__")
        if name not in _TORCH or kwargs or not 1 <= len(args) <= 2:
            raise _refusal(f"torch's {name}", name)
        return _TORCH[name](*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        change = _IN_PLACE.get(name) or (_TORCH.get(name[:-1]) if name.endswith("_") else None)
        if change is not None:
            return lambda *args: self._in_place(change(self, *args))
        if name in _TORCH:
            return lambda *args: _TORCH[name](self, *args)
        raise _refusal(f"value.{name}", name)

    def __repr__(self) -> str:
        return f"<{self.point} of a run that is being recorded, {list(self.shape)}>"


_TORCH: dict[str, Callable[..., Value]] = {
    "add": lambda a, b: b + a if isinstance(b, Value) else a + b, "radd": lambda a, b: a + b,
    "sub": lambda a, b: b.__rsub__(a) if not isinstance(a, Value) else a - b, "rsub": lambda a, b: a.__rsub__(b),
    "mul": lambda a, b: b * a if isinstance(b, Value) else a * b, "rmul": lambda a, b: a * b,
    "div": lambda a, b: a / b if isinstance(a, Value) else _refuse_inverse(), "neg": lambda a: -a,
    "zeros_like": lambda a: a * 0.0, "clone": lambda a: a.clone(), "detach": lambda a: a.clone()}
_TORCH |= {"subtract": _TORCH["sub"], "multiply": _TORCH["mul"], "true_divide": _TORCH["div"], "divide": _TORCH["div"],
           "truediv": _TORCH["div"], "negative": _TORCH["neg"]}
_IN_PLACE: dict[str, Callable[..., Value]] = {
    "zero_": lambda a: a * 0.0, "fill_": lambda a, b: a * 0.0 + b, "copy_": lambda a, b: b if isinstance(b, Value) else a * 0.0 + b}


def _refuse_inverse() -> Value:
    raise _refusal("dividing by a value", "")


def _refusal(what: str, name: str) -> EditError:
    return EditError(f"{what} {_WHY.get(name, _WHY.get(f'__{name}__', _OTHER))}")


def _unknown(name: str) -> Callable:
    def method(self: Value, *args: Any) -> Any:
        raise _refusal(f"the value at {self.point}" if _WHY.get(name, _UNKNOWN) is _UNKNOWN else name.strip("_"), name)

    return method


for _name in ("bool", "float", "int", "index", "len", "iter", "contains", "gt", "lt", "ge", "le", "eq", "ne", "matmul", "rmatmul", "pow",
              "abs", "array", "rtruediv"):
    _WHY.setdefault(f"__{_name}__", _READS if _name in ("pow", "rtruediv") else _LIMIT if _name == "abs" else _UNKNOWN)
    setattr(Value, f"__{_name}__", _unknown(f"__{_name}__"))
