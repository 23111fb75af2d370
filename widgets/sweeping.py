"""The sweep launcher: layers, coefficients, prompts and metrics, run beside the notebook with progress; Stop keeps what is done."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as w

import mia_lab as mia
from mia_lab.analysis.data import rows
from mia_lab.analysis.vectors import Vector
from mia_lab.errors import EditError

from .naming import call, name_of
from .panel import STYLE, WIDE, Panel, marked

if TYPE_CHECKING:
    from mia_lab.analysis.sweep.result import Sweep
    from mia_lab.session import Session


class SweepLauncher(Panel):
    """Controls over `Session.sweep`; `sweep` is the last result. Prompts stand one a line; one that was edited is a group of its own."""

    title = "Sweep"

    def __init__(self, session: Session, vector: Vector, prompts: Any, metrics: Sequence[Any], pairs: Any, options: dict[str, Any]) -> None:
        if not isinstance(vector, Vector):
            raise EditError(f"the launcher sweeps one Vector, not {type(vector).__name__}; several: s.sweep({{name: vector, ...}}, ...)")
        self._names = [name_of(session, "s"), name_of(vector, "v")]
        remake = call(session.sweep_launcher, self._names[1], prompts=prompts, metrics=metrics, pairs=pairs, **options)
        super().__init__(session, "sweep", remake)
        self.vector, self._pairs, self._options = vector, pairs, options
        self._metrics = {metric.name: metric for metric in metrics or (mia.sentiment(), mia.distinct(), mia.length())}
        self._named_metrics = bool(metrics)
        self.sweep: Sweep | None = None
        self._build(prompts)
        self.on_change(self.run_button, do=self.run)

    @property
    def coeffs(self) -> tuple[float, ...]:
        """The coefficients, evenly from minus the largest to it."""
        return mia.grid(-self.largest.value, self.largest.value, 2 * self.steps.value + 1)

    @property
    def code(self) -> str:
        """The lines that run the same sweep."""
        metrics = "metrics" if self._named_metrics else f"[{', '.join(f'mia.{name}()' for name in self.metrics.value)}]"
        more = "".join(f", {name}={value!r}" for name, value in self._options.items())
        more += "" if self._pairs is None else ", pairs=pairs"
        return (f"prompts = {self._lines()!r}\n{self._names[0]}.sweep({self._names[1]}[{list(self.layers.value)}], "
                f"mia.grid({-self.largest.value:g}, {self.largest.value:g}, {2 * self.steps.value + 1}), prompts=prompts, "
                f"metrics={metrics}, placebos={self.placebos.value}, max_tokens={self.max_tokens.value}{more})")

    def run(self) -> None:
        """Start the sweep that the controls are set to."""
        if not self.layers.value or not self.metrics.value:
            raise EditError("choose at least one layer and one metric")
        vector, metrics = self.vector[list(self.layers.value)], [self._metrics[name] for name in self.metrics.value]
        told = dict(prompts=self._lines(), metrics=metrics, pairs=self._pairs, placebos=self.placebos.value,
                    max_tokens=self.max_tokens.value, progress=self._progress) | self._options
        coeffs, code = self.coeffs, self.code
        self.submit(lambda: self._sweep(vector, coeffs, told, code))

    def _sweep(self, vector: Vector, coeffs: tuple[float, ...], told: dict[str, Any], code: str) -> None:
        self.sweep = self._session.sweep(vector, coeffs, **told)
        self.twin.update(list(self.sweep._parts()), code)

    def _progress(self, line: str, part: float | None, over: bool) -> None:
        self.say(line)
        self.bar.value = part or 0.0

    def _lines(self) -> list[Any]:
        """The prompts, with their groups where they still are what was given."""
        return [self._rows.get(line, line) for line in self.prompts.value.splitlines() if line.strip()]

    def _build(self, prompts: Any) -> None:
        self._rows = _texts(rows("sentiment_prompts") if prompts is None else prompts)
        short = w.Layout(width="15em")
        there = self.vector.layers
        self.layers = w.SelectMultiple(options=there, value=there, rows=6, description="layers", style=STYLE)
        self.metrics = w.SelectMultiple(options=list(self._metrics), value=list(self._metrics)[:1], rows=4, description="metrics",
                                        style=STYLE)
        self.largest = w.BoundedFloatText(0.3, min=0.01, max=4.0, step=0.05, description="largest ±", style=STYLE, layout=short)
        self.steps = w.BoundedIntText(2, min=1, max=20, description="steps a side", style=STYLE, layout=short)
        self.placebos = w.BoundedIntText(20, min=0, max=200, description="placebos", style=STYLE, layout=short)
        self.max_tokens = w.BoundedIntText(24, min=1, max=self._session.max_len - 1, description="max tokens", style=STYLE, layout=short)
        self.prompts = w.Textarea("\n".join(self._rows), rows=5, continuous_update=False, description="prompts", style=STYLE, layout=WIDE)
        self.bar = marked(w.FloatProgress(0.0, min=0.0, max=1.0), "mia-progress")
        self.run_button = marked(w.Button(description="Run", icon="play"), "mia-run")
        for name in ("layers", "metrics", "largest", "steps", "placebos", "prompts"):
            marked(getattr(self, name), f"mia-{name}")
        marked(self.max_tokens, "mia-max-tokens")
        self.box.children = (w.HBox([self.layers, self.metrics]), w.HBox([self.largest, self.steps, self.placebos, self.max_tokens]),
                             self.prompts, w.HBox([self.run_button, self.stop_button, self.bar, self.status]))


def _texts(prompts: Any) -> dict[str, Any]:
    """Prompts, or lines of a data set, by their text; EditError for those that do not fit on a line."""
    found = {row["prompt"] if isinstance(row, dict) and "prompt" in row else row if isinstance(row, str) else "": row for row in prompts}
    wrong = [row for text, row in found.items() if not text.strip() or "\n" in text]
    if wrong:
        raise EditError(f"the launcher holds prompts one a line, and {wrong[0]!r} is none; run them with s.sweep(..., prompts=prompts)")
    return found
