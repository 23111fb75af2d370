"""What a steering panel is set to, as data and as code."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mia_lab as mia
from mia_lab.analysis.vectors import Vector
from mia_lab.edits import Add
from mia_lab.errors import EditError
from mia_lab.selectors import CONTENT, Selector

SELECTORS: Mapping[str, tuple[Callable[[], Selector], str]] = {
    "text": (lambda: CONTENT, ""), "everywhere": (mia.everywhere, ", where=mia.everywhere()"),
    "prompt": (mia.prompt, ", where=mia.prompt()"), "generated": (mia.generated, ", where=mia.generated()"),
    "last": (mia.last, ", where=mia.last()")}
WHERE = (("all but BOS", "text"), ("everywhere", "everywhere"), ("the prompt", "prompt"), ("generated tokens", "generated"),
         ("the prompt's last token", "last"))
PRESETS: Mapping[str, dict[str, object]] = {
    "unsteered": {"coeff": 0.0}, "gentle": {"coeff": 0.1}, "clear": {"coeff": 0.2}, "strong": {"coeff": 0.4},
    "opposite": {"coeff": -0.2}}


@dataclass(frozen=True, slots=True)
class Setting:
    """One position of all controls. vector: a name among the panel's; layers: at which it is added; where: a key of SELECTORS."""

    vector: str
    layers: tuple[int, ...]
    coeff: float
    where: str = "text"
    prompt: str = ""
    seed: int = 16
    temperature: float = 0.0
    max_tokens: int = 24

    def edit(self, vectors: Mapping[str, Vector]) -> Add:
        """The edit that it stands for; EditError where no layer is chosen."""
        if not self.layers:
            raise EditError(f"no layer is chosen; {self.vector} has layers {list(vectors[self.vector].layers)}")
        return Add(vectors[self.vector][list(self.layers)], self.coeff, where=SELECTORS[self.where][0]())

    def code(self, session: str, vector: str) -> str:
        """The line that generates the steered text, where `session` and `vector` are what these are called."""
        layers = str(self.layers[0]) if len(self.layers) == 1 else str(list(self.layers))
        return (f"{session}.generate({self.prompt!r}, max_tokens={self.max_tokens}, temperature={self.temperature:g}, seed={self.seed}, "
                f"edits=[mia.Add({vector}[{layers}], {self.coeff:g}{SELECTORS[self.where][1]})])")
