"""LazyTensor: a real torch.Tensor whose values stay where they are until something needs them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map


class LazyTensor(torch.Tensor):
    """A tensor of known shape and dtype whose values are fetched on first use, then kept.

    Shape, dtype, len and repr never fetch; any operation does, and returns a plain tensor. `get()` returns the values
    as a plain tensor that owns its memory. An operation costs about 20 microseconds more than on a plain tensor.
    """

    _load: Callable[[], torch.Tensor] | None
    _held: torch.Tensor | None
    _name: str

    @staticmethod
    def __new__(cls: type, load: Callable[[], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype,
                name: str = "tensor") -> LazyTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu", requires_grad=False)
        tensor._load, tensor._held, tensor._name = load, None, name
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def get(self) -> torch.Tensor:
        """Return the values `[*shape]`, fetching them the first time."""
        if self._held is None:
            values = self._load()
            if tuple(values.shape) != tuple(self.shape) or values.dtype != self.dtype:
                raise RuntimeError(f"{self._name} announced {tuple(self.shape)} {self.dtype} "
                                   f"but its source gave {tuple(values.shape)} {values.dtype}")
            if values.untyped_storage().nbytes() != values.nbytes:  # a view would keep, and follow, a larger buffer
                values = values.clone()
            self._held, self._load = values, None
        return self._held

    @property
    def fetched(self) -> bool:
        """Whether the values are here."""
        return self._held is not None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        plain = lambda value: value.get() if isinstance(value, LazyTensor) else value  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the values as an array; bfloat16 has no array type, so it becomes float32."""
        values = self.get()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype) if copy else np.asarray(self.numpy(), dtype=dtype)

    # The wrapper has no memory of its own: whatever asks for memory gets the values'.
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.get().__dlpack__(*args, **kwargs)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values."""
        return self.get().untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.get().data_ptr()

    def share_memory_(self) -> torch.Tensor:
        """Return the values, moved to shared memory."""
        return self.get().share_memory_()

    def apply_(self, function: Callable[[float], float]) -> torch.Tensor:
        """Apply a Python function to each value, and return the values."""
        return self.get().apply_(function)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.get().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.get().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.get().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        size = self.numel() * self.dtype.itemsize
        where = "here" if self.fetched else "not fetched"
        kind = str(self.dtype).removeprefix("torch.")
        return f"<lazy {self._name} {list(self.shape)} {kind}, {human_bytes(size)}, {where}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from html import escape

        return f"<code>{escape(repr(self))}</code>"

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else format(self.get(), spec)


def human_bytes(size: float) -> str:
    """Return a size in the largest fitting binary unit, e.g. `144 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    raise AssertionError
