"""The headless tour: fit a mood vector on the embedded model, steer with it, and write what happened as one HTML page."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .analysis.data import rows
from .analysis.vectors import Vector
from .edits import Add
from .session import Session
from .show.html import page
from .show.parts import Bars, Part, Prose, Table

LAYER, COEFF, MAX_TOKENS = 9, 0.2, 28


def sentiment_pairs() -> list[dict[str, str]]:
    """Return the shipped pairs of cheerful and gloomy sentences."""
    return rows("sentiment_pairs")


def sentiment_prompts() -> list[str]:
    """Return the shipped held-out prompts, neutral beginnings of sentences."""
    return [row["prompt"] for row in rows("sentiment_prompts")]


def run(path: Path, say: Callable[[str], None] = print) -> Path:
    """Run the tour on the embedded model and write it to `path`; return the absolute path."""
    say("loading the embedded model and compiling it with taps (about a minute on two cores) ...")
    with Session("demo", max_model_len=512, max_num_seqs=64) as session:
        say(repr(session))
        parts = _report(session, say)
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page("mia_lab: first look", *parts), encoding="utf-8")
    return path


def _report(session: Session, say: Callable[[str], None]) -> list[Part]:
    pairs, prompts = sentiment_pairs(), sentiment_prompts()[:8]
    say(f"fitting a vector on {len(pairs)} pairs ...")
    vector = session.vector(pairs)
    say("steering both ways, in one batch with the unsteered prompts ...")
    plain, cheerful, gloomy = _three_ways(session, vector[LAYER], prompts)
    _, cache = session.run_with_cache(prompts[0])
    last = cache["resid_post", LAYER][0, -1].float()
    unit = vector[LAYER].rows[0] / vector[LAYER].rows[0].norm()
    reading = [float(row.float() @ unit / vector[LAYER].unit[0]) for row in cache["resid_post", LAYER][0][1:]]
    return [
        Prose("mia_lab: first look", 1),
        Prose(f"{session!r}".replace("\n  ", " · ")),
        Prose("Steering", 2),
        Prose(f"One vector, fitted as the mean difference of {len(pairs)} pairs of cheerful and gloomy sentences and added to the "
              f"stream after block {LAYER} with coefficient ±{COEFF} (of the mean centred norm there). The prompts are held out."),
        Table(("prompt", "unsteered", f"+{COEFF}", f"−{COEFF}"), tuple(zip(prompts, plain, cheerful, gloomy))),
        Prose("Where the direction lives", 2),
        Bars(tuple(f"layer {layer}" for layer in vector.layers), tuple((vector.raw_norms / vector.unit).tolist()),
             "Length of the mean difference at each layer, in units of the mean centred norm"),
        Prose("Reading it", 2),
        Bars(tuple(session.to_str_tokens(prompts[0])[1:]), tuple(reading),
             f"Projection of the unsteered prompt on the vector after block {LAYER}, in the same units; "
             f"the last token's stream has norm {float(last.norm()):.0f}"),
        Prose("Points", 2),
        Table(tuple(session.points().data[0]), tuple(tuple(row.values()) for row in session.points().data)),
    ]


def _three_ways(session: Session, vector: Vector, prompts: list[str]) -> tuple[list[str], list[str], list[str]]:
    edits = [None] * len(prompts) + [[Add(vector, COEFF)]] * len(prompts) + [[Add(vector, -COEFF)]] * len(prompts)
    texts = [text.replace("\n", " ").strip() for text in session.generate(prompts * 3, max_tokens=MAX_TOKENS, edits=edits)]
    n = len(prompts)
    return texts[:n], texts[n: 2 * n], texts[2 * n:]
