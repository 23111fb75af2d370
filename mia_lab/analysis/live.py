"""A generation shown while it goes on, with a probe's reading of each token."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ..counted import counted
from ..directions import number
from ..errors import EditError, PromptError
from ..gates import Probe
from ..shown import Shown

if TYPE_CHECKING:
    from ..session import Session
    from ..show.parts import Part

_EVERY = 0.1  # seconds between two updates of a cell
_NAMED = 12  # tokens above the threshold that are named
_NONE = float("nan")
RUNNING, DONE, BROKEN = "still running", "done", "broken off"


@dataclass(frozen=True, slots=True, repr=False)
class Readings(Shown):
    """Tokens of a prompt and what was generated after it, each with the probe's reading at its own position.

    ids, tokens and values are by position; a value is NaN where nothing was read: before the prompt's last token, and at the last one
    generated. n_prompt: tokens of the prompt. reads: what was read where. state: RUNNING, DONE or BROKEN.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    n_prompt: int
    reads: str
    threshold: float | None = None
    state: str = RUNNING

    @property
    def complete(self) -> bool:
        """Whether the generation came to its end."""
        return self.state == DONE

    @property
    def above(self) -> tuple[int, ...]:
        """The positions whose reading is above the threshold; EditError without one."""
        if self.threshold is None:
            raise EditError("these readings have no threshold; give one: s.live(prompt, probe, threshold=0.5)")
        return tuple(i for i, value in enumerate(self.values) if value > self.threshold)

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a position: token, reading (None where nothing was read), whether the model generated it."""
        return [dict(position=i, token=token, reading=None if value != value else value, generated=i >= self.n_prompt)
                for i, (token, value) in enumerate(zip(self.tokens, self.values))]

    def _parts(self) -> Iterator[Part]:
        from ..show.parts import Prose, Tokens

        read = [value for value in self.values if value == value]
        size = max(map(abs, read), default=0.0) or 1.0
        yield Prose(self._headline(len(read)))
        yield Tokens(self.tokens, self.values, low=-size, high=size, unit=self.reads, border=self.n_prompt)

    def _plots(self) -> Iterator[Part]:
        from ..show.parts import Curve, Series

        line = Series(self.reads, tuple(map(float, range(len(self.values)))), self.values)
        yield Curve((line,), "position", self.reads, self._headline(sum(value == value for value in self.values)),
                    level=self.threshold or 0.0)

    def _headline(self, n: int) -> str:
        from ..show.marks import marked

        state = "" if self.complete else f", {self.state}"
        line = f"{counted(len(self.tokens) - self.n_prompt, 'token')} generated{state}, {n} read: {self.reads}"
        if self.threshold is None:
            return line
        named = ", ".join(f"{i} {marked(self.tokens[i])}" for i in self.above[:_NAMED])
        more = f" and {len(self.above) - _NAMED} more" if len(self.above) > _NAMED else ""
        return f"{line}; {len(self.above)} above {self.threshold:g}{': ' if named else ''}{named}{more}"


def live(session: Session, prompt: Any, probe: Probe, threshold: float | None, max_tokens: int, edits: Any,
         sampling: dict[str, Any]) -> Readings:
    """Return what `Session.live` promises."""
    if not isinstance(probe, Probe):
        raise EditError(f"live reads a mia.Probe, for example mia.Probe(v[8].rows[0], 8), not {type(probe).__name__}")
    read = session._read(prompt)
    if len(read.ids) != 1:
        raise PromptError(f"one generation is shown live, not {len(read.ids)}")
    threshold = None if threshold is None else number(threshold, "the threshold")
    ids = read.ids[0]
    decode = lambda tokens: tuple(session.tokenizer.decode([token]) for token in tokens)  # noqa: E731
    shown = Readings(tuple(ids), decode(ids), (_NONE,) * len(ids), len(ids), _what(probe), threshold)
    width = prod(session._engine.shapes.get(probe.at, probe.direction.shape))
    if width != len(probe.direction):
        raise EditError(f"the probe has width {len(probe.direction)}, {probe.at} has {width}")
    moments = session.watch(prompt, probe.point, layers=probe.layer, max_tokens=max_tokens, edits=edits, before=True, **sampling)
    screen = _screen()
    try:
        with closing(moments):
            for moment in moments:
                shown = replace(shown, ids=(*shown.ids, moment.next_token), tokens=shown.tokens + decode([moment.next_token]),
                                values=(*shown.values[:-1], probe.read(moment.rows[0]), _NONE))
                screen.show(shown)
        shown = replace(shown, state=DONE)
    except KeyboardInterrupt:
        shown = replace(shown, state=BROKEN)
    screen.show(shown, last=True)
    return shown


def _what(probe: Probe) -> str:
    return f"{'cosine' if probe.cosine else 'reading'} at {probe.at}"


class _Cell:
    """A notebook's output, updated in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._next = 0.0

    def show(self, readings: Readings, last: bool = False) -> None:
        """Show readings, unless an update was shown a moment ago."""
        from IPython.display import display

        now = time.monotonic()
        if self._handle is None:
            self._handle = display(readings, display_id=True)
        elif last or now >= self._next:
            self._handle.update(readings)
        else:
            return
        self._next = now + _EVERY


class _Stream:
    """A terminal: tokens run on."""

    def show(self, readings: Readings, last: bool = False) -> None:
        """Write the token that is new."""
        print("" if last else readings.tokens[-1], end="\n" if last else "", file=sys.stdout, flush=True)


def _screen() -> _Cell | _Stream:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return _Cell() if hasattr(shell, "kernel") else _Stream()
