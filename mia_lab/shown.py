"""A result that shows itself by its parts, the same in a terminal and in a notebook."""
from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .show.parts import Part
    from .show.plot import Figure
    from .show.progress import Bar


def progress_bar(shown: Any = True) -> AbstractContextManager[Bar]:
    """Show how far a long job inside the `with` block is; see show/progress.py. shown: whether, or a function that does it."""
    from .show.progress import bar

    return bar(shown)


class Shown:
    """Gives a result its text and its HTML. A dataclass takes `repr=False` beside it."""

    __slots__ = ()

    def _parts(self) -> Iterable[Part]:
        raise NotImplementedError

    def _brief(self) -> Iterable[Part]:
        """What of it is shown where there is only text."""
        return self._parts()

    def _plots(self) -> Iterable[Part]:
        """What of it is drawn; parts that are only told are left out."""
        return self._parts()

    @property
    def figure(self) -> Figure:
        """A plotly figure, whose output holds HTML and a PNG beside it, so that it is blank nowhere. MiaError where nothing is drawn."""
        from .show.plot import figure

        return figure(*self._plots())

    def __repr__(self) -> str:
        from .show.text import render

        return render(*self._brief())

    def _repr_html_(self) -> str:
        from .show.html import render

        return render(*self._parts())
