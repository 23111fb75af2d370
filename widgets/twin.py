"""Twin outputs: what a panel found, as HTML in an output of its own, which stays when kernel and controls are gone."""
from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from html import escape

from IPython import get_ipython
from IPython.display import display

from mia_lab.show import html, text
from mia_lab.show.parts import Part, Prose
from mia_lab.show.script import script

_FRAME = 0.08  # seconds between two updates of a result that is still growing
_QUIET = "font-size:12px;opacity:0.75;margin:0 0 6px"
_WARNING = "display:none;padding:4px 8px;border-left:4px solid rgba(230,126,34,0.9);background:rgba(230,126,34,0.15)"


class Twin:
    """One result that is replaced in place. It is shown where `show` was called, by all front ends that know display ids."""

    def __init__(self, title: str, remake: str) -> None:
        self.title, self.remake = title, remake
        self.id = uuid.uuid4().hex[:12]
        self.parts: tuple[Part, ...] = (Prose("Nothing was run yet."),)
        self.code = ""
        self.live = True  # whether there are controls that could change it
        self.updates = 0
        self._changed = datetime.now()
        self._drawn = 0.0
        self._shown = False
        self._lock = threading.Lock()

    def update(self, parts: Sequence[Part], code: str | None = None, growing: bool = False) -> None:
        """Replace the result, unless it is frozen. growing: more will follow soon, so that this one may be passed over."""
        with self._lock:
            if not self.live or (growing and time.monotonic() - self._drawn < _FRAME):
                return
            self.parts, self._changed = tuple(parts), datetime.now()
            self.code = self.code if code is None else code
            self._publish(update=True)

    def show(self) -> None:
        """Make it an output of the running cell."""
        self._shown = True
        self._publish(update=False)

    def freeze(self) -> str:
        """Return the HTML of a result that nothing changes any more, and show it so."""
        with self._lock:
            self.live = False
            self._publish(update=True)
        return self.html

    @property
    def html(self) -> str:
        """The result with its heading, and the code that makes it again."""
        made = f"<details style='{_QUIET}'><summary>code</summary><pre style='white-space:pre-wrap'>{escape(self.code)}</pre></details>"
        return (f"<div class='mia-twin' data-controls='{self.id}'>{self._heading()}{html.render(*self.parts)}{made if self.code else ''}"
                f"</div>{script('twin') if self.live else ''}")

    @property
    def text(self) -> str:
        """The same as plain text."""
        return text.render(Prose(self.title, 3), *self.parts, *([Prose(self.code)] if self.code else []))

    def _heading(self) -> str:
        title = f"<strong>{escape(self.title)}</strong>"
        if not self.live:
            return f"<p class='mia-heading' style='{_QUIET}'>{title}</p>"
        back = f"run <code>{escape(self.remake)}</code> to get them back"
        gone = (f"<p class='mia-gone' role='status' style='{_WARNING}'><span class='mia-why'></span> This is the last result; {back}.</p>")
        return (f"<p class='mia-heading' style='{_QUIET}'>{title} · controls live, last change {self._changed:%H:%M:%S}. If they say "
                f"“model not found”, or do not answer, their kernel is gone: {back}.</p>{gone}")

    def _publish(self, update: bool) -> None:
        self._drawn = time.monotonic()
        self.updates += update
        if self._shown and get_ipython() is not None:
            display({"text/html": self.html, "text/plain": self.text}, raw=True, display_id=f"mia-twin-{self.id}", update=update)
