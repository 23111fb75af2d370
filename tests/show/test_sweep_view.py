"""A sweep's texts side by side: every setting is there, against the unsteered text, within the size of a view."""
from __future__ import annotations

import re
from dataclasses import replace

import made_up
import pytest
from show.golden import check
from show.markup import parsed

from mia_lab.analysis.sweep.items import Item
from mia_lab.analysis.sweep.result import Sweep
from mia_lab.analysis.sweep.view import texts_beside
from mia_lab.show import html, text
from mia_lab.show.parts import Beside, Prose, Slides, Words

COEFFS = (-0.4, -0.3, -0.2, -0.1, 0.1, 0.2, 0.3, 0.4)


def slides_of(sweep: Sweep, room: int = 200_000) -> Slides:
    slides, told = texts_beside(sweep, room)
    assert isinstance(told, Prose)
    return slides


def texts_of(page: tuple) -> list[tuple[str, str]]:
    """The unsteered and the steered text of each prompt, put together from the pieces of the diff."""
    found = []
    for part in page:
        if isinstance(part, Beside) and isinstance(part.columns[0][0], Words):
            (base,), (words,) = part.columns
            sides = ("".join(piece for kind, piece in words.pieces if kind != other) for other in ("added", "removed"))
            one, other = sides
            assert one == base.pieces[0][1]
            found.append((one, other))
    return found


def test_the_view_looks_as_it_did() -> None:
    part = slides_of(made_up.sweep(coeffs=(-0.2, 0.2)))
    check("sweep_texts.html", html.render(part))
    check("sweep_texts.txt", text.render(part))


def test_each_page_is_one_setting_with_its_texts_and_numbers() -> None:
    sweep = made_up.sweep()
    slides = slides_of(sweep)
    assert (slides.name, slides.labels, slides.start) == ("coefficient", ("-0.4", "-0.2", "+0.2", "+0.4"), 2)
    for i, page in enumerate(slides.pages, 1):
        assert texts_of(page) == [(sweep.texts[0][at][0], sweep.texts[i][at][0]) for at in (0, 1)]
        result = sweep.table[i - 1]
        assert page[0].text == (f"sentiment {result.effect!r}, KL {result.kl:.3f}, perplexity ratio {result.perplexity_ratio:.3f}, "
                                f"placebos within ± 0.3")


def test_several_layers_have_a_slider_of_their_own_that_begins_at_the_best() -> None:
    slides = slides_of(made_up.sweep((3, 9, 6)))
    assert (slides.name, slides.labels, slides.start) == ("layer", ("3", "9", "6"), 1)
    assert all(inner.name == "coefficient" for (inner,) in slides.pages)


def test_the_first_to_be_seen_keeps_the_text_whole() -> None:
    """+0.4 has the larger effect, and a perplexity ratio above 1.1."""
    slides = slides_of(made_up.sweep())
    assert slides.labels[slides.start] == "+0.2"


@pytest.mark.parametrize(("words", "layers", "prompts"), [(20, 2, 8), (300, 1, 2)])
def test_nine_coefficients_of_twelve_layers_fit(words: int, layers: int, prompts: int) -> None:
    """Nine with 0, which is the unsteered text. Either many characters are told apart, or few: what is left out is said."""
    markup = made_up.sweep(range(12), COEFFS, 8, words)._repr_html_()
    assert 200_000 < len(markup) < 300_000
    told = re.search(r"Shown here: ([^<]*)", markup)[1]
    assert f"{layers} of 12 layers" in told and ".texts[setting][prompt]" in told
    assert (f"{prompts} of 8 prompts" in told) == (prompts < 8) and ("600 characters" in told) == (words == 300)
    assert markup.count(">layer: ") == (layers if layers > 1 else 0) and markup.count(">coefficient: ") == layers * len(COEFFS)


def test_where_one_layer_is_too_much_fewer_prompts_are_shown() -> None:
    slides, told = texts_beside(made_up.sweep(prompts=8), 15_000)
    assert "4 of 8 prompts" in told.text
    assert [len(texts_of(page)) for page in slides.pages] == [4] * 4 and len(html.render(slides).partition("<script>")[0]) < 16_000


def test_where_nothing_fits_that_is_said() -> None:
    (told,) = texts_beside(made_up.sweep(), 100)
    assert "0 of 1 layers" in told.text


def test_without_texts_the_table_stands_alone_and_says_so() -> None:
    markup = made_up.sweep(texts=False)._repr_html_()
    assert "No texts were generated" in markup and "mia-slides" not in markup and "mood layer 9, +0.4" in markup


def test_seeds_and_chat_prompts_and_recipes() -> None:
    sweep = made_up.sweep(seeds=3)
    chat = (Item([{"role": "user", "content": "x" * 300 + "end"}], "a"), sweep.bench.lab.items[1])
    swept = replace(sweep, bench=replace(sweep.bench, lab=replace(sweep.bench.lab, items=chat)))
    slides, told = texts_beside(swept, 200_000)
    assert "the first of 3 seeds" in told.text
    assert any(isinstance(part, Prose) and part.text.startswith("Prompt: … x") and part.text.endswith("xend") for part in slides.pages[0])
    recipes = {id(s): replace(s, layer=None, coeff=None, name=f"recipe {i}") for i, s in enumerate(sweep.settings)}
    table = tuple(replace(r, setting=recipes[id(r.setting)]) for r in sweep.table)
    slides = slides_of(replace(sweep, settings=tuple(recipes.values()), table=table))
    assert slides.name == "recipe" and slides.labels == ("recipe 1", "recipe 2", "recipe 3", "recipe 4")


def test_the_markup_is_well_formed_and_holds_no_text_as_markup() -> None:
    found = parsed(made_up.sweep((3, 4), words=40)._repr_html_())
    assert "<b>fine</b>" in found.text and "Prompt: Prompt <0>" in found.text
    assert not [tag for tag, _ in found.tags if tag == "b"]
    texts = made_up.sweep((3, 4), words=40).texts
    assert all(text.split()[0] in found.text for by_prompt in texts.values() for text, in by_prompt.values())


def test_a_table_of_many_settings_has_the_largest_effects_and_the_view_stays_small() -> None:
    sweep = made_up.sweep(range(80), COEFFS)
    markup = sweep._repr_html_()
    assert len(markup) < 300_000 and ">coefficient: " in markup
    assert "The 150 of 640 settings with the largest effects; all are in .data and .table" in markup
    assert "mood layer 79, +0.4" in repr(sweep) and "mood layer 79, -0.1" not in repr(sweep)


def test_lines_of_both_signs_run_through_the_unsteered_model() -> None:
    effect, cost = made_up.sweep()._plots()
    assert effect.series[0].x == cost.series[0].x == (-0.4, -0.2, 0.0, 0.2, 0.4)
    assert (effect.series[0].y[2], effect.series[0].low[2], effect.series[0].high[2], cost.series[0].y[2]) == (0.0, 0.0, 0.0, 1.0)
    assert all(0.0 not in curve.series[0].x for curve in made_up.sweep(coeffs=(0.2, 0.4))._plots())
    assert all(len(curve.series[0].x) == 2 for curve in made_up.sweep((0, 9)).by_layer(0.2)._plots())
