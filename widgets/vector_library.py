"""The vector library: what is kept for this model and others, to load, save and delete."""
from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as w

from mia_lab.analysis.library import Library, library
from mia_lab.analysis.vectors import Vector
from mia_lab.errors import EditError
from mia_lab.show.parts import Part, Prose

from .naming import call, name_of
from .panel import STYLE, WIDE, Panel, marked

if TYPE_CHECKING:
    from mia_lab.session import Session


class LibraryBrowser(Panel):
    """Controls over a Library. `vector` is the one loaded last, or that it was opened with, which Save keeps."""

    title = "Vector library"

    def __init__(self, session: Session, vector: Vector | None, held: Library) -> None:
        self._called = name_of(session, "s")
        given = [] if vector is None else [name_of(vector, "v")]
        given += [] if held.folder == library().folder else [f"library={name_of(held, called(held))}"]
        super().__init__(session, "library", call(session.vector_library, *given))
        self.library, self.vector, self._sure = held, vector, ""
        self.name = marked(w.Dropdown(description="vector", style=STYLE), "mia-vector")
        self.load_button = marked(w.Button(description="Load", icon="folder-open"), "mia-load")
        self.delete_button = marked(w.Button(description="Delete", icon="trash"), "mia-delete")
        self.new_name = w.Text(placeholder="name", description="save as", style=STYLE)
        self.note = w.Text(placeholder="what it was fitted on", description="note", style=STYLE, layout=WIDE)
        self.save_button = marked(w.Button(description="Save", icon="save", disabled=vector is None), "mia-save")
        self.box.children = (w.HBox([self.name, self.load_button, self.delete_button, self.status]),
                             w.HBox([marked(self.new_name, "mia-new-name"), self.save_button]), marked(self.note, "mia-note"))
        self.on_change(self.load_button, do=self.load)
        self.on_change(self.delete_button, do=self.delete)
        self.on_change(self.save_button, do=self.save)
        self._draw()

    @property
    def code(self) -> str:
        """The line that gives the chosen vector."""
        return f"v = {called(self.library)}[{self.name.value!r}]" if self.name.value else ""

    def load(self) -> None:
        """Make the chosen vector `vector`; EditError where it is of another model."""
        self._chosen()
        if self.name.value not in self.library.of(self._session):
            model = self.library.about(self.name.value).get("model", "an unknown model")
            raise EditError(f"{self.name.value!r} was saved for {model}, not for this session's model; fit it here, or read it as it is: "
                            f"{self.code}")
        self.vector = self.library[self.name.value]
        self.save_button.disabled = False
        self._draw(f"{self.name.value} is loaded; it is the panel's .vector.")

    def save(self) -> None:
        """Keep `vector` under the new name."""
        if self.vector is None:
            raise EditError(f"there is no vector to save; open this with one: {self._called}.vector_library(v)")
        self.library.save(self.new_name.value.strip(), self.vector, session=self._session, note=self.note.value)
        self._draw(f"{self.new_name.value.strip()} was saved.")

    def delete(self) -> None:
        """Delete the chosen vector, when asked a second time."""
        self._chosen()
        if self._sure != self.name.value:
            self._sure = self.name.value
            self.say(f"press Delete again to delete {self._sure}")
            return
        del self.library[self._sure]
        self._draw(f"{self._sure} was deleted.")

    def _chosen(self) -> None:
        if not self.name.value:
            raise EditError("the library holds no vector yet; save one")

    def _draw(self, line: str = "") -> None:
        names = list(self.library)
        kept = self.name.value if self.name.value in names else next(iter(names), None)
        self._sure = ""
        self.name.options = names
        self.name.value = kept
        self.say("")
        parts: list[Part] = [Prose(line)] if line else []
        self.twin.update([*parts, *self.library._parts()], self.code)


def called(held: Library) -> str:
    """What a library is called in code."""
    return "mia.library()" if held.folder == library().folder else f"mia.library({str(held.folder)!r})"
