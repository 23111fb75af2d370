"""The texts of a sweep side by side: the unsteered model's, and what each setting changes in them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...show import html
from ...show.parts import Beside, Part, Prose, Slides, Words
from ...show.words import words_between

if TYPE_CHECKING:
    from .effects import Result
    from .result import Sweep

_LONGEST = 600  # characters of a text, and a third as many of a prompt
_LEAST, _FEW = 2, 4  # prompts are left out until two groups fit, but never so many that fewer than four are left
_MODEST = 1.1  # the perplexity ratio up to which a setting may be the first to be seen

Row = tuple[int, "Result"]  # a setting's place in the sweep, and its numbers
Pages = tuple[tuple[str, tuple[Part, ...]], ...]


def texts_beside(sweep: Sweep, room: int) -> list[Part]:
    """Return pages for a slider, one a setting with texts, grouped by vector, layer and selector, in about `room` characters of HTML.

    Groups with the largest effects go first; what is left out is said. One sentence where nothing was generated.
    """
    groups, prompts = _groups(sweep), sorted(sweep.texts.get(0, ()))
    if not groups or not prompts:
        return [Prose("No texts were generated: these metrics read probabilities. With a metric of texts among them, such as "
                      "mia.sentiment(), the texts stand here side by side.")]
    order = sorted(groups, key=lambda name: -max(_merit(sweep, row) for row in groups[name]))
    while True:
        shown = _fitting(sweep, {name: groups[name] for name in order}, prompts, room)
        enough = len(shown) >= min(_LEAST, len(groups)) or (shown and len(prompts) // 2 < _FEW)
        if enough or len(prompts) < 2:
            break
        prompts = prompts[: len(prompts) // 2]
    left = _left_out(sweep, len(shown), len(groups), len(prompts))
    return [_slides(sweep, groups, shown), left] if shown else [left]


def _fitting(sweep: Sweep, groups: dict[str, list[Row]], prompts: Sequence[int], room: int) -> dict[str, Pages]:
    """The pages of as many groups, from the first on, as there is room for."""
    shown: dict[str, Pages] = {}
    for name, rows in groups.items():
        pages = _pages(sweep, rows, prompts)
        room -= sum(len(html.render(*page)) for _, page in pages)
        if room < 0:
            break
        shown[name] = pages
    return shown


def _groups(sweep: Sweep) -> dict[str, list[Row]]:
    """Settings whose texts are there, by what one slider runs through: coefficients of one vector at one layer, or recipes."""
    places = {id(setting): i for i, setting in enumerate(sweep.settings)}
    found: dict[str, list[Row]] = {}
    for result in sweep.table:
        s, place = result.setting, places[id(result.setting)]
        if sweep.texts.get(place):
            found.setdefault("" if s.layer is None else f"{s.name} layer {s.layer}{s.where}", []).append((place, result))
    return found


def _merit(sweep: Sweep, row: Row) -> float:
    """How far a setting goes the way that its metric calls better; little where the text suffers."""
    ratio = row[1].perplexity_ratio
    gain = sweep.metrics[0].better * row[1].effect.mean
    return gain if ratio is None or ratio <= _MODEST else gain - 1e6


def _pages(sweep: Sweep, rows: Sequence[Row], prompts: Sequence[int]) -> Pages:
    return tuple((_label(result), tuple(_page(sweep, place, result, prompts))) for place, result in rows)


def _label(result: Result) -> str:
    return result.setting.name if result.setting.coeff is None else f"{result.setting.coeff:+g}"


def _page(sweep: Sweep, place: int, result: Result, prompts: Sequence[int]) -> list[Part]:
    costs = (("KL", result.kl, ".3f"), ("perplexity ratio", result.perplexity_ratio, ".3f"),
             ("placebos within ±", result.random and result.random.limit, ".2g"))
    numbers = [f"{sweep.metrics[0].name} {result.effect!r}"]
    numbers += [f"{name} {value:{form}}" for name, value, form in costs if value is not None]
    parts: list[Part] = [Prose(", ".join(numbers)), Beside(((Prose("Unsteered"),), (Prose(f"{result.setting.label}, against unsteered"),)))]
    for at in prompts:
        one, other = ((sweep.texts.get(i, {}).get(at) or [None])[0] for i in (0, place))
        if one is not None and other is not None:
            parts += [Prose(f"Prompt: {_prompt(sweep, at)}"),
                      Beside(((Words((("same", _cut(one)),)),), (words_between(_cut(one), _cut(other)),)))]
    return parts


def _prompt(sweep: Sweep, at: int) -> str:
    prompt: Any = sweep.bench.lab.items[at].prompt
    if not isinstance(prompt, str):
        chat = isinstance(prompt[0], dict)
        prompt = prompt[-1]["content"] if chat else sweep.bench.lab.session.tokenizer.decode(list(prompt))
    most = _LONGEST // 3
    return prompt if len(prompt) <= most else f"… {prompt[-most:]}"  # what stands last is what the text follows


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _slides(sweep: Sweep, groups: dict[str, list[Row]], shown: dict[str, Pages]) -> Part:
    """One slider over the settings of a group and, where there are several, one over groups, both at the most telling setting."""
    names = [name for name in groups if name in shown]
    inner = []
    for name in names:
        merits = [_merit(sweep, row) for row in groups[name]]
        labels, pages = zip(*shown[name])
        inner.append(Slides("coefficient" if name else "recipe", labels, pages, merits.index(max(merits))))
    if len(names) == 1:
        return inner[0]
    settings = [groups[name][0][1].setting for name in names]
    alone = len({(setting.name, setting.where) for setting in settings}) == 1
    places = tuple(str(s.layer) for s in settings) if alone else tuple(names)
    return Slides("layer" if alone else "vector", places, tuple((slides,) for slides in inner), names.index(next(iter(shown))))


def _left_out(sweep: Sweep, shown: int, groups: int, prompts: int) -> Prose:
    seeds = max(len(texts) for texts in sweep.texts[0].values())
    parts = [f"{prompts} of {len(sweep.texts[0])} prompts"] * (prompts < len(sweep.texts[0]))
    parts += [f"{shown} of {groups} layers or vectors, those with the largest effects"] * (shown < groups)
    parts += [f"the first of {seeds} seeds"] * (seeds > 1)
    parts += [f"the first {_LONGEST} characters of a text"] * any(
        len(text) > _LONGEST for by_prompt in sweep.texts.values() for texts in by_prompt.values() for text in texts)
    return Prose(f"Shown here: {', '.join(parts) or 'every text'}. All are in .texts[setting][prompt], in the order of .settings.")
