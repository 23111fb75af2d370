"""The steering panel: one vector, its layers and coefficient, and what a prompt leads to without and with it."""
from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from mia_lab.analysis.library import library
from mia_lab.analysis.vectors import Vector
from mia_lab.counted import counted
from mia_lab.edits import Add
from mia_lab.errors import EditError
from mia_lab.show.parts import Prose

from .comparing import Comparison, Side, compare
from .effect import parts_of
from .naming import name_of
from .panel import STYLE, WIDE, Panel, marked
from .setting import PRESETS, WHERE, Setting

if TYPE_CHECKING:
    from mia_lab.session import Session


class SteeringPanel(Panel):
    """Controls over one `Add`, and default and steered text side by side, streamed as they are generated.

    vectors: by name. A coefficient of 1 is one mean centred norm of the stream. start: what the controls are set to at first;
    presets: settings of some of the controls, by name. The setting is code at any time: `edit`, `code`.
    """

    title = "Steering"

    def __init__(self, session: Session, vectors: Mapping[str, Vector], start: Setting, presets: Mapping[str, Mapping[str, Any]] = PRESETS,
                 names: Mapping[str, str] | None = None, remake: str = "") -> None:
        self.vectors, self.presets = dict(vectors), dict(presets)
        self._names = dict(names or {}) or {name: name_of(vector, "v") for name, vector in self.vectors.items()}
        self._called = name_of(session, "s")
        super().__init__(session, "steering", remake or f"{self._called}.panel({', '.join(list(self._names.values())[:1])})")
        self._units = session.unit("resid_post")
        self._default: tuple[Any, Side] | None = None
        self.last: Comparison | None = None
        self._build(start)
        self.on_change(self.vector, do=self._other_vector)
        self.on_change(self.coefficient, self.layers, self.where, self.prompt, self.seed, self.temperature, self.max_tokens,
                       self.run_button, do=self.run)
        self.on_change(self.preset, do=self._preset)
        self.on_change(self.code_button, do=self._show_code)
        self.on_change(self.keep_button, do=self.keep)
        self.twin.update([Prose("Move a control, or press Run.")], self.code_or_nothing())

    # -- the setting --------------------------------------------------------------------------------------------------

    @property
    def setting(self) -> Setting:
        """What the controls are set to."""
        return Setting(self.vector.value, tuple(self.layers.value), round(self.coefficient.value, 4), self.where.value, self.prompt.value,
                       self.seed.value, self.temperature.value, self.max_tokens.value)

    @property
    def edit(self) -> Add:
        """The edit that the controls are set to; EditError where no layer is chosen."""
        return self.setting.edit(self.vectors)

    @property
    def code(self) -> str:
        """The line that generates the steered text."""
        setting = self.setting
        setting.edit(self.vectors)
        return setting.code(self._called, self._names[setting.vector])

    def set(self, **changes: Any) -> None:
        """Set several controls at once, by the names of Setting's fields, and run once."""
        known = {field.name for field in fields(Setting)}
        if changes.keys() - known:
            raise EditError(f"there is no control {min(changes.keys() - known)!r}; there are {', '.join(sorted(known))}")
        with self.quietly():
            self._put(changes)
        self._refresh()
        self.run()

    def keep(self) -> None:
        """Save the vector in `mia.library()` under the name beside the button, with what the controls are set to as its preset."""
        setting = self.setting
        preset = {"layers": list(setting.layers), "coeff": setting.coeff, "where": setting.where}
        library().save(self.keep_name.value.strip(), self.vectors[setting.vector], session=self._session, presets={"kept": preset},
                       note=f"kept from a panel, on {setting.prompt!r}")
        self.say(f"kept as mia.library()[{self.keep_name.value.strip()!r}]")

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Generate with what the controls are set to; an older run that is still going on ends."""
        self._refresh()
        asked_at, setting, edit = time.perf_counter(), self.setting, self.edit
        self.submit(lambda: self._generate(setting, edit, asked_at))

    def _generate(self, setting: Setting, edit: Add, asked_at: float) -> None:
        session, mine = self._session, self._asked
        base = (setting.prompt, setting.seed, setting.temperature, setting.max_tokens, tuple(session._defaults))
        known = self._default[1] if self._default is not None and self._default[0] == base else None
        params = dict(max_tokens=setting.max_tokens, temperature=setting.temperature, seed=setting.seed)
        head, code = self._head(setting, edit), setting.code(self._called, self._names[setting.vector])
        vector = self.vectors[setting.vector]

        def told(found: Comparison) -> None:
            self.last = found
            if found.stopped and mine != self._asked:  # not Stop, but a newer request, which draws soon
                return
            ends = found.stopped or (found.default.done and found.steered.done)
            first = len(found.steered.tokens) == 1
            self.twin.update(parts_of(found, head, vector, setting.layers, self._units), code, growing=not (ends or first))

        found = compare(session, setting.prompt, [edit], params, known, told, asked_at)
        self._default = (base, found.default)

    def _head(self, setting: Setting, edit: Add) -> str:
        also = f"; the session's {len(self._session._defaults)} default edits act on both" if self._session._defaults else ""
        layers = ", ".join(map(str, setting.layers))
        return f"“{setting.prompt}” with {setting.coeff:+g} × {setting.vector} at layer {layers}{also}"

    # -- the controls -------------------------------------------------------------------------------------------------

    def _build(self, start: Setting) -> None:
        vector, short = self.vectors[start.vector], w.Layout(width="13em")
        self.vector = marked(w.Dropdown(options=list(self.vectors), value=start.vector, description="vector", style=STYLE), "mia-vector")
        self.layers = w.SelectMultiple(options=vector.layers, value=start.layers, rows=5, description="layers", style=STYLE)
        self.coefficient = w.FloatSlider(start.coeff, min=-1.0, max=1.0, step=0.01, continuous_update=False, readout_format="+.2f",
                                         description="coefficient", style=STYLE, layout=w.Layout(width="32em"))
        self.dose = marked(w.HTML(), "mia-dose")
        self.where = marked(w.Dropdown(options=WHERE, value=start.where, description="where", style=STYLE), "mia-where")
        self.prompt = w.Textarea(start.prompt, rows=2, continuous_update=False, description="prompt", style=STYLE, layout=WIDE)
        self.seed = marked(w.IntText(start.seed, description="seed", style=STYLE, layout=short), "mia-seed")
        self.temperature = w.BoundedFloatText(start.temperature, min=0.0, max=2.0, step=0.1, description="temperature", style=STYLE,
                                              layout=short)
        self.max_tokens = w.BoundedIntText(start.max_tokens, min=1, max=self._session.max_len - 1, description="max tokens", style=STYLE,
                                           layout=short)
        for control, name in ((self.layers, "layers"), (self.coefficient, "coefficient"), (self.prompt, "prompt"),
                              (self.temperature, "temperature"), (self.max_tokens, "max-tokens")):
            marked(control, f"mia-{name}")
        self.preset = w.Dropdown(options=[("choose", ""), *((name, name) for name in self.presets)], description="preset", style=STYLE)
        self.run_button = marked(w.Button(description="Run", icon="play"), "mia-run")
        self.code_button = marked(w.Button(description="Show code", icon="code"), "mia-code")
        self.code_view = marked(w.HTML(), "mia-code-view")
        self.keep_name = marked(w.Text(placeholder="name", description="keep as", style=STYLE), "mia-keep-name")
        self.keep_button = marked(w.Button(description="Keep", icon="save", tooltip="Save vector and setting in mia.library()"), "mia-keep")
        self.box.children = (w.HBox([self.vector, marked(self.preset, "mia-preset")]), w.HBox([self.layers, self.where]),
                             w.HBox([self.coefficient, self.dose]), self.prompt, w.HBox([self.seed, self.temperature, self.max_tokens]),
                             w.HBox([self.run_button, self.stop_button, self.code_button, self.status]), self.code_view,
                             w.HBox([self.keep_name, self.keep_button]))
        self._refresh()

    def _put(self, changes: Mapping[str, Any]) -> None:
        controls = {"vector": self.vector, "layers": self.layers, "coeff": self.coefficient, "where": self.where, "prompt": self.prompt,
                    "seed": self.seed, "temperature": self.temperature, "max_tokens": self.max_tokens}
        for name in sorted(changes, key=list(controls).index):  # the vector first: it says which layers there are
            if name == "vector":
                self.vector.value = changes[name]
                self._fit_layers()
            else:
                controls[name].value = tuple(changes[name]) if name == "layers" else changes[name]

    def _fit_layers(self) -> None:
        """Offer the vector's own layers, and keep those that were chosen where it has them."""
        there = self.vectors[self.vector.value].layers
        kept = tuple(layer for layer in self.layers.value if layer in there) or (there[len(there) // 2],)
        if tuple(self.layers.options) != there:
            self.layers.options = there
        self.layers.value = kept

    def _other_vector(self) -> None:
        with self.quietly():
            self._fit_layers()
        self.run()

    def _preset(self) -> None:
        if self.preset.value:
            self.set(**self.presets[self.preset.value])

    def _refresh(self) -> None:
        """Write beside the slider what its number means."""
        vector, lines = self.vectors[self.vector.value], []
        for layer in self.layers.value[:4]:
            i = vector.layers.index(layer)
            unit, raw, long = float(vector.unit[i]), float(vector.raw_norms[i]), float(vector.rows[i].norm())
            lines.append(f"layer {layer}: adds {abs(self.coefficient.value) * long:.3g} (mean centred norm {unit:.3g}); "
                         f"{self.coefficient.value * long / raw:+.3g} × what was fitted, {raw:.3g}")
        more = len(self.layers.value) - len(lines)
        lines += [f"and {counted(more, 'layer')} more"] if more > 0 else []
        self.dose.value = f"<div style='line-height:1.4;padding-top:4px'>{'<br>'.join(lines)}</div>"

    def _show_code(self) -> None:
        self.code_view.value = "" if self.code_view.value else f"<pre style='white-space:pre-wrap'>{escape(self.code)}</pre>"
