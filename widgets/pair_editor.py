"""The pair editor: rows of positive and negative text, pasted or typed, and the vector that they give."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from mia_lab.analysis.fitting import METHODS
from mia_lab.analysis.pairs import Pairs
from mia_lab.analysis.vectors import Vector
from mia_lab.errors import EditError
from mia_lab.show.parts import Part, Prose, Table

from .naming import call, name_of
from .panel import STYLE, WIDE, Panel, marked

if TYPE_CHECKING:
    from mia_lab.session import Session

_MOST = 200  # rows, each of which is three widgets
_HALF = w.Layout(width="46%")


class PairEditor(Panel):
    """Rows to edit. `pairs` is what they hold, and `vector` what the last fit gave, at `point`."""

    title = "Pairs"

    def __init__(self, session: Session, pairs: Any, point: str, method: str) -> None:
        given = Pairs.of(pairs) if len(pairs) else None
        if given is not None and not all(isinstance(text, str) for pair in given for text in pair):
            raise EditError("the editor holds pairs of texts; fit others with s.vector(pairs)")
        self._called = name_of(session, "s")
        super().__init__(session, "pairs", call(session.pair_editor, pairs=pairs, point=point, method=method))
        self.vector: Vector | None = None
        self._point = point
        self._groups = {} if given is None else dict(zip(given, given.group))
        self.rows = marked(w.VBox(layout=WIDE), "mia-rows")
        self.add_button = marked(w.Button(description="Add a row", icon="plus"), "mia-add")
        self.pasted = w.Textarea(rows=3, placeholder="positive⇥negative, one pair a line, or lines of JSON", description="paste",
                                 continuous_update=False, style=STYLE, layout=WIDE)
        self.paste_button = marked(w.Button(description="Take over", icon="paste"), "mia-take-over")
        self.method = marked(w.Dropdown(options=list(METHODS), value=method, description="method", style=STYLE), "mia-method")
        self.fit_button = marked(w.Button(description="Fit", icon="play"), "mia-fit")
        self.box.children = (self.rows, w.HBox([self.add_button]), marked(self.pasted, "mia-paste"), w.HBox([self.paste_button]),
                             w.HBox([self.method, self.fit_button, self.stop_button, self.status]))
        self.on_change(self.add_button, do=self.add)
        self.on_change(self.paste_button, do=self._take_over)
        self.on_change(self.fit_button, do=self.fit)
        self._extend(list(given or [("", "")]))
        self.draw()

    @property
    def pairs(self) -> Pairs:
        """The pairs in the rows, without empty rows; EditError for a row with one side only."""
        found = [(one.value.strip(), other.value.strip()) for one, other in self._fields()]
        half = [i for i, pair in enumerate(found) if bool(pair[0]) != bool(pair[1])]
        if half:
            raise EditError(f"row {half[0] + 1} has only one side; fill in the other or remove it")
        return Pairs.of([{"positive": a, "negative": b} | ({"group": self._groups[a, b]} if (a, b) in self._groups else {})
                         for a, b in found if a])

    @property
    def code(self) -> str:
        """The lines that fit the same vector."""
        pairs = self.pairs
        records = [dict(positive=a, negative=b, group=group) for (a, b), group in zip(pairs, pairs.group)]
        return (f"pairs = mia.Pairs.of({records!r})\n"
                f"v = {self._called}.vector(pairs, method={self.method.value!r}, point={self._point!r})")

    def add(self, positive: str = "", negative: str = "") -> None:
        """Add a row."""
        self._extend([(positive, negative)])

    def remove(self, index: int) -> None:
        """Remove a row."""
        rows = list(self.rows.children)
        rows.pop(index)
        self.rows.children = rows
        self.draw()

    def fit(self) -> None:
        """Fit a vector to the pairs."""
        pairs, method, code = self.pairs, self.method.value, self.code
        self.submit(lambda: self._fit(pairs, method, code))

    def draw(self) -> None:
        """Show the pairs as they are, with what could make a vector mean something else."""
        if any(field.value.strip() for fields in self._fields() for field in fields):
            self.twin.update(parts_of(self.pairs, None), self.code)
        else:
            self.twin.update([Prose("No pairs yet: type into the rows, or paste.")])

    def _fit(self, pairs: Pairs, method: str, code: str) -> None:
        self.vector = self._session.vector(pairs, method=method, point=self._point)
        self.twin.update(parts_of(pairs, self.vector), code)

    def _fields(self) -> list[tuple[w.Text, w.Text]]:
        return [row.children[:2] for row in self.rows.children]

    def _extend(self, pairs: list[tuple[str, str]]) -> None:
        if len(self.rows.children) + len(pairs) > _MOST:
            raise EditError(f"the editor holds {_MOST} pairs; keep more in a file, and read it with mia.Pairs.of(path)")
        made = []
        for positive, negative in pairs:
            one = marked(w.Text(positive, placeholder="positive", layout=_HALF, continuous_update=False), "mia-positive")
            other = marked(w.Text(negative, placeholder="negative", layout=_HALF, continuous_update=False), "mia-negative")
            gone = marked(w.Button(icon="trash", tooltip="Remove this row", layout=w.Layout(width="3em")), "mia-remove")
            row = w.HBox([one, other, gone])
            self.on_change(one, other, do=self.draw)
            self.on_change(gone, do=lambda row=row: self.remove(self.rows.children.index(row)))
            made.append(row)
        self.rows.children = (*self.rows.children, *made)

    def _take_over(self) -> None:
        pairs = read_pasted(self.pasted.value)
        kept = [row for row, (one, other) in zip(self.rows.children, self._fields()) if one.value.strip() or other.value.strip()]
        self.rows.children = kept
        self._extend(pairs)
        self.pasted.value = ""
        self.draw()


def read_pasted(text: str) -> list[tuple[str, str]]:
    """Pairs from lines of `positive<tab>negative`, as a spreadsheet copies them, or of JSON; EditError for another line."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise EditError("nothing was pasted; give lines of positive, a tab, negative")
    found = []
    for i, line in enumerate(lines, 1):
        sides = line.split("\t")
        if line.lstrip().startswith(("{", "[")):
            try:
                sides = Pairs.of([json.loads(line)])[0]
            except (ValueError, TypeError, AttributeError) as error:
                raise EditError(f"line {i} is no pair in JSON: {error}") from None
        if len(sides) != 2 or not all(isinstance(side, str) and side.strip() for side in sides):
            raise EditError(f"line {i} is no pair: {line[:60]!r}; give positive, a tab, negative")
        found.append((sides[0].strip(), sides[1].strip()))
    return found


def parts_of(pairs: Pairs, vector: Vector | None) -> list[Part]:
    """The pairs, what to mind about them, and the vector where one was fitted."""
    rows = tuple((str(i + 1), a, b, group) for i, ((a, b), group) in enumerate(zip(pairs, pairs.group)))
    fitted = [] if vector is None else list(vector._parts()) if hasattr(vector, "_parts") else [Prose(repr(vector))]
    return [*fitted, *(Prose(f"Mind: {note}") for note in pairs.warnings()), Table(("", "positive", "negative", "group"), rows)]
