"""A result that shows itself by its parts, the same in a terminal and in a notebook."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .show.parts import Part


class Shown:
    """Gives a result its text and its HTML. A dataclass takes `repr=False` beside it."""

    __slots__ = ()

    def _parts(self) -> Iterable[Part]:
        raise NotImplementedError

    def _brief(self) -> Iterable[Part]:
        """What of it is shown where there is only text."""
        return self._parts()

    def __repr__(self) -> str:
        from .show.text import render

        return render(*self._brief())

    def _repr_html_(self) -> str:
        from .show.html import render

        return render(*self._parts())
