"""One example of every view, from made-up numbers: no engine. A new view is one more entry of EXAMPLES."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any

import made_analyses
import made_curves
import made_up

from mia_lab.show.parts import Bars, Beside, Curve, Heat, Prose, Scatter, Series, Slides, Table, Tokens
from mia_lab.show.words import words_between
from mia_lab.shown import Shown


@dataclass(frozen=True, slots=True)
class Move:
    """What a key does on an element of a view: `then` is to be read after it, and not before; without scripts `instead`, as a note too."""

    on: str
    key: str
    then: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """view: makes the object that a cell shows. sees: texts to be read in every state. moves: what works where scripts run; without
    scripts what they lead to is to be read at once, or is the note (`title`) of something. The last of them must not end where the
    first one leads: the page of a live kernel is looked at again once it is dead."""

    view: Callable[[], Any]
    sees: tuple[str, ...]
    moves: tuple[Move, ...] = ()


class Parts(Shown):
    """An object that shows these parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def _parts(self) -> tuple[Any, ...]:
        return self.parts


def slides() -> Parts:
    pages = tuple((Beside(((Prose("as it was"),), (Prose(f"with {coeff}: <b>not markup</b>"),))),) for coeff in ("-0.2", "0", "0.2"))
    return Parts(Slides("coefficient", ("-0.2", "0", "0.2"), pages, 1))


def curve() -> Parts:
    return Parts(Curve((Series("mood", (0.0, 1.0, 2.0), (0.1, nan, -0.3)),), "layer", "effect", "a curve"))


def scatter() -> Parts:
    return Parts(Scatter((("glad", ((1.0, 2.0, "one"),)), ("sad", ((-1.0, 0.5, "two"),))), "first", "second", "a cloud"))


def words() -> Parts:
    return Parts(words_between("the food was good today", "the food was awful <today>"))


EXAMPLES: dict[str, Example] = {
    "prose": Example(lambda: Parts(Prose("A heading", 2), Prose("Words & <more>.")), ("A heading", "Words & <more>.")),
    "table": Example(lambda: Parts(Table(("setting", "effect"), (("layer 8 at 0.2", "+1.25"), ("layer 9 at 0.2", "-0.50")), "a sweep")),
                     ("a sweep", "layer 9 at 0.2", "-0.50")),
    "bars": Example(lambda: Parts(Bars(("joy", "grief"), (2.0, -1.0), "effect")), ("effect", "grief", "-1")),
    "heat": Example(lambda: Parts(Heat(("1", "0"), ("a", "b"), ((0.5, -0.25), (nan, 1.0)), "a map", notes=(("n1", "n2"), ("n3", "n4")))),
                    ("a map", "0.50", "-0.25", "1.00"), (
        Move("td", "ArrowRight", "n2"), Move("td:focus", "ArrowDown", "n4"), Move("td:focus", "Home", "n3"))),
    "tokens": Example(lambda: Parts(Tokens(("The", " <b>", " sat", "\n"), (nan, 0.75, -0.5, 0.1), "a probe's reading", border=2)),
                      ("a probe's reading", "·<b>", "⏎")),
    "words": Example(words, ("good", "awful", "<today>")),
    "curve": Example(curve, ("a curve", "numbers")),
    "scatter": Example(scatter, ("a cloud", "numbers")),
    "slides": Example(slides, ("as it was", "coefficient", "0"), (
        Move("input[type=range]", "Home", "with -0.2: <b>not markup</b>"),
        Move("input[type=range]", "ArrowRight", "with 0: <b>not markup</b>"),
        Move("input[type=range]", "End", "with 0.2: <b>not markup</b>"))),
    "sweep": Example(lambda: made_up.sweep(), ("Sweep of 4 settings", "mood layer 9, +0.4", "perplexity ratio"), (
        Move("input[type=range]", "Home", "sentiment -1.24 [-1.44, -1.04], KL 0.160"),
        Move("input[type=range]", "ArrowRight", "sentiment -0.618 [-0.818, -0.418], KL 0.040"),
        Move("input[type=range]", "End", "sentiment +1.24 [+1.04, +1.44], KL 0.160"))),
    "attention": Example(lambda: made_up.attention(), ("Attention of 4 heads", "layer 5 head 1, kv 0"), (
        Move("button", "ArrowRight", "1 The is attended to by", "strongest"),
        Move("button:focus", "End", "8 ·mat is attended to by", "8 ·mat"))),
    "readings": Example(lambda: made_up.readings(), ("2 tokens generated", "1 above 0.25", "<b>cat</b>")),
    "logit lens": Example(lambda: made_analyses.lens(), ("Logit lens on 2 prompts", "·Paris"), (
        Move("td", "ArrowRight", "after 1 The:", "·a rather long one 0.90"), Move("td:focus", "Home", "after 0 <bos>:", "·Paris 0.90"))),
    "patch grid": Example(lambda: made_analyses.grid(), ("PatchGrid: resid_post", "L2", "0.73")),
    "cosines": Example(lambda: made_analyses.cosines(), ("cosine of each row", "mood 1", "-0.42")),
    "attribution": Example(lambda: made_analyses.attribution(), ("Direct attribution", "1_attn_out", "-1.5")),
    "points": Example(lambda: made_analyses.points(), ("Points of this session", "resid_pre", "not tapped")),
    "cache": Example(lambda: made_analyses.cache(), ("ActivationCache", "resid_post")),
    "overhead": Example(lambda: made_analyses.overhead(), ("What taps cost", "steer every layer")),
    "card": Example(lambda: made_analyses.card(), ("router", "no experts")),
    "vector": Example(lambda: made_curves.vector(), ("Vector",)),
    "separability": Example(lambda: made_curves.judged(), ("How well the vector tells", "numbers")),
    "projection": Example(lambda: made_curves.projection(), ("layer",)),
    "reft": Example(lambda: made_curves.reft(), ("loss",)),
    "refusal": Example(lambda: made_curves.refusal(), ("directions pass", "bypass")),
    "choice": Example(lambda: made_curves.choice(), ("effect",)),
    "figure of a curve": Example(lambda: made_curves.judged().figure, ()),
    "figure of a map": Example(lambda: made_analyses.grid().figure, ()),
}
