"""One bar a long job, and one line where it was once the job is over. Nothing of it is a widget, so nothing of it dies on reload."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

_EVERY = 0.2  # seconds between two updates at least; a job that is over before the first shows its line only

# What is said, the part that is done (None where nobody knows of how much), and whether it is over.
Paint = Callable[[str, float | None, bool], None]


@contextmanager
def bar(shown: bool | Paint = True) -> Iterator[Bar]:
    """Show how far what runs inside is: in a notebook as a `<progress>` element, in a terminal as a line of stderr, else not at all.

    An error or an interrupt that leaves the block ends the bar with how far it came. Without `shown`, only what `broken_off` is
    told is said. A function is called in the place of all this, as a panel's.
    """
    made = Bar(shown if callable(shown) else _painter() if shown else None)
    try:
        yield made
    except BaseException as error:
        made.end(f"broken off by {type(error).__name__}")
        raise
    made.end()


class Bar:
    """How far a job is. It may have several stages; its last line is about the first, over the time of all."""

    def __init__(self, paint: Paint | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._paint, self._clock = paint, clock
        self._start = self._painted = clock()
        self._stages: list[_Stage] = []
        self._tokens, self._note, self._over = 0, "", False

    def stage(self, total: int | None, noun: str) -> None:
        """Begin with `total` more things, None where nobody knows how many; noun: what they are, in the plural."""
        last = self._stages[-1] if self._stages else None
        if last and last.noun == noun and last.total is not None and total is not None:
            last.total += total
        else:
            self._stages.append(_Stage(total, noun))

    def add(self, n: int = 1, tokens: int = 0) -> None:
        """Count things that are done, and the tokens that were computed for them."""
        now, stage = self._clock(), self._stages[-1]
        stage.done += n
        self._tokens += tokens
        if self._paint and now - self._painted >= _EVERY:
            self._painted = now
            self._paint(f"{stage}, {self._pace(now)}", stage.done / stage.total if stage.total else None, False)

    def broken_off(self, kept: str) -> None:
        """Say at the end that the job was interrupted, and what is kept of it."""
        self._note = f"interrupted; {kept}"

    def end(self, why: str = "") -> None:
        """Put one line in the bar's place. A second call does nothing."""
        if self._over or not self._stages:
            return
        self._over = True
        note = self._note or why
        line = f"{self._stages[0]}, {self._pace(self._clock())}" + (f"; {note}" if note else "")
        if self._paint:
            self._paint(line, 1.0, True)
        elif self._note:
            print(f"mia_lab: {line}", file=sys.stderr)

    def _pace(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        return f"{seconds:.1f} s" + (f", {short(self._tokens / seconds)} tok/s" if self._tokens else "")


class _Stage:
    def __init__(self, total: int | None, noun: str) -> None:
        self.total, self.noun, self.done = total, noun, 0

    def __str__(self) -> str:
        part = "" if self.total in (None, self.done) else f" of {self.total:,}"
        return f"{self.done:,}{part} {self.noun}"


def short(number: float) -> str:
    """A positive number in two or three digits, as 41k."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.{1 if number < 10 * unit else 0}f}{name}"
    return f"{number:.0f}"


def _painter() -> Paint | None:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        return _in_a_cell()
    return _on_a_line if sys.stderr is not None and sys.stderr.isatty() else None


def _on_a_line(text: str, part: float | None, over: bool) -> None:
    print(f"\r\x1b[Kmia_lab: {text}", end="\n" if over else "", file=sys.stderr, flush=True)


def _in_a_cell() -> Paint:
    from IPython.display import display

    held: list[Any] = []

    def paint(text: str, part: float | None, over: bool) -> None:
        bundle = {"text/plain": text, "text/html": as_html(text, part, over)}
        if held:
            held[0].update(bundle, raw=True)
        else:
            held.append(display(bundle, raw=True, display_id=True))

    return paint


def as_html(text: str, part: float | None, over: bool) -> str:
    """The bar with its text, or the line that is left of it."""
    if over:
        return f"<small>{escape(text)}</small>"
    value = "" if part is None else f" value='{part:.3f}'"
    bar = f"<progress{value} max='1' style='width:240px;vertical-align:middle' aria-label='progress'></progress>"
    return f"<label>{bar} {escape(text)}</label>"
