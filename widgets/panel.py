"""What all panels are made of: a box of controls, a twin output, the session's worker, and what happens when something fails."""
from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as w
from IPython import get_ipython
from IPython.display import display

from mia_lab.errors import ClosedError, MiaError
from mia_lab.show.parts import Prose

from .engine_worker import Job, worker_of
from .twin import Twin

if TYPE_CHECKING:
    from mia_lab.session import Session

WIDE = w.Layout(width="auto", max_width="62em")  # 100 % and the margins beside it would be cut off at the right
_CLOSED = "This session is closed. Open another with mia_lab.Session(...) and make the panel again."
STYLE = {"description_width": "7em"}


class Panel:
    """Controls of one session. Displayed, it makes two outputs: the controls, and the twin, which holds all that they lead to."""

    title = "Panel"

    def __init__(self, session: Session, name: str, remake: str) -> None:
        session._engine.require_open()
        self._session = session
        self.twin = Twin(self.title, remake)
        self._kind = f"{name}-{self.twin.id}"
        self.status = marked(w.HTML(), "mia-status")
        self.stop_button = marked(w.Button(description="Stop", icon="stop", tooltip="End what runs", disabled=True), "mia-stop")
        self.stop_button.on_click(lambda _: self.stop())
        self.box = marked(w.VBox(layout=WIDE), "mia-panel", f"mia-{name}", f"mia-id-{self.twin.id}")
        self.frozen = self.closed = False
        self._quiet = self._asked = 0
        self._worker = worker_of(session)
        self._worker.clients.add(self)

    @property
    def code(self) -> str:
        """Lines that do what the controls are set to."""
        return ""

    # -- running ------------------------------------------------------------------------------------------------------

    def submit(self, do: Callable[[], None]) -> None:
        """Have the worker do something, in the place of what this panel asked for before."""
        if self.frozen:
            raise MiaError("this panel was frozen; make another one")
        if self.closed:
            raise ClosedError(_CLOSED)
        self.stop_button.disabled = False
        self.say("running")
        self._asked += 1
        mine = self._asked

        def ended(line: str) -> None:
            if mine == self._asked:  # a newer request runs already
                self._idle(line)

        def done() -> None:
            do()
            ended("")

        self._worker.submit(Job(self._kind, done, self._failed, lambda: ended("stopped"), self.say))

    def stop(self) -> None:
        """End what runs for this panel, at the engine's next step."""
        self._worker.stop(self._kind)

    def wait(self, timeout: float = 60.0) -> bool:
        """Return once all that was asked for is done, or False after `timeout` seconds; for scripts and cells that go on with it."""
        return self._worker.wait(timeout)

    def say(self, line: str) -> None:
        """Show a line beside the buttons."""
        self.status.value = f"<span role='status'>{escape(line)}</span>"

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Set several controls within the block without running anything."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def on_change(self, *controls: w.Widget, do: Callable[[], None]) -> None:
        """Have changes of controls do something; what it raises is shown in the twin."""

        def changed(_: Any) -> None:
            if self._quiet or self.frozen:
                return
            try:
                do()
            except Exception as error:
                self._failed(error)

        for control in controls:
            if isinstance(control, w.Button):
                control.on_click(changed)
            else:
                control.observe(changed, "value")

    def _idle(self, line: str) -> None:
        self.stop_button.disabled = True
        self.say(_CLOSED if self.closed else line)

    def _failed(self, error: BaseException) -> None:
        """Put an error where the result would stand: a callback's traceback would go where nobody looks."""
        if isinstance(error, ClosedError):
            self.session_closed()
            return
        self._idle("failed")
        kind = "" if isinstance(error, MiaError) else f"{type(error).__name__}: "
        self.twin.update([Prose(f"⚠ {kind}{error}")], self.code_or_nothing())
        if not isinstance(error, MiaError):
            traceback.print_exception(error, file=sys.__stderr__)

    def code_or_nothing(self) -> str:
        """`code`, or nothing where the controls are set to what has no code."""
        try:
            return self.code
        except MiaError:
            return ""

    def session_closed(self) -> None:
        """Say that the session is closed, and take the controls away from use; the result stays."""
        if self.frozen or self.closed:
            return
        self.closed = True
        self._idle("")
        for control in descendants(self.box):
            if hasattr(control, "disabled"):
                control.disabled = True

    # -- showing ------------------------------------------------------------------------------------------------------

    def freeze(self) -> str:
        """Take the controls away and leave the HTML of the result, which is returned, too."""
        if not self.frozen:
            self.stop()
            self.frozen = True
            if get_ipython() is not None:
                nothing = {"text/html": "", "text/plain": ""}
                display(nothing, raw=True, display_id=f"mia-controls-{self.twin.id}", update=True)
            self.box.close()
        return self.twin.freeze()

    def _ipython_display_(self) -> None:
        if not self.frozen:
            display(self.box._repr_mimebundle_(), raw=True, display_id=f"mia-controls-{self.twin.id}")
        self.twin.show()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The result only: where a widget stands beside HTML in one output, front ends show the widget, and nothing once it is dead."""
        return {"text/html": self.twin.html, "text/plain": self.twin.text}

    def __repr__(self) -> str:
        return self.twin.text


def marked(widget: w.DOMWidget, *classes: str) -> w.DOMWidget:
    """The widget, with class names that tests and style sheets find it by."""
    for name in classes:
        widget.add_class(name)
    return widget


def descendants(widget: w.Widget) -> Iterator[w.Widget]:
    """A widget and all within it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from descendants(child)

