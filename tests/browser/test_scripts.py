"""Scripts of views in plain files of HTML: their functions, and what keys and the mouse do."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import made_up
import numpy as np
import pytest

from mia_lab.show import html
from mia_lab.show.parts import Prose, Slides

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.full
WIDGETS = Path(__file__).parents[2] / "widgets"


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """An empty page, which must have met no error at the end."""
    page, errors = chromium.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert not errors


@pytest.fixture
def opened(page: Page, tmp_path: Path) -> Callable[..., Page]:
    """Opens a fragment as a file."""
    def open_(fragment: str) -> Page:
        file = tmp_path / "view.html"
        file.write_text(f"<!doctype html><meta charset='utf-8'><body>{fragment}", encoding="utf-8")
        page.goto(file.as_uri())
        return page

    return open_


# -- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "call", "expected"), [
    ("slides", "within(7, 3)", 2), ("slides", "within(-1, 3)", 0), ("slides", "within('1', 3)", 1), ("slides", "within(undefined, 3)", 0),
    ("slides", "indexOr(['a', 'b'], 'b', 0)", 1), ("slides", "indexOr(['a', 'b'], 'c', 0)", 0),
    ("heads", "weightsOf([9, 9, 9, 255, 9, 9, 9, 0, 9, 9, 9, 51, 9, 9, 9, 204], 2, 2)", [[1, 0], [0.2, 0.8]]),
    ("heads", "largest([0.1, 0.5, 0, 0.4], 2)", [1, 3]), ("heads", "largest([0.004, 0], 2)", []),
    ("heads", "number(0.5, 256)", "0.50"), ("heads", "number(0.5, 16)", "0.50 ±0.03"),
    ("heads", "told('it', 'attends to', [0.1, 0.9], ['a', '<b>'], 256)", "it attends to <b> 0.90, a 0.10"),
    ("heads", "told('it', 'attends to', [0, 0], ['a', 'b'], 256)", "it attends to nothing: every weight here is below 0.005"),
    ("heads", "['ArrowDown', 'ArrowLeft', 'End', 'Home', 'x'].map((key) => led(key, 1, 5))", [2, 0, 4, 0, -1]),
    ("heads", "[led('ArrowUp', 0, 5), led('ArrowRight', 4, 5)]", [0, 4]),
    ("heads", "[cellSide(3, 3), cellSide(20, 23), cellSide(128, 128)]", [30, 20, 14]),
    ("heads", "[labelSide(['0 <s>']), labelSide(['1 a', '2 ' + 'x'.repeat(99)]), labelSide(['猫猫猫'])]", [47, 110, 49]),
])
def test_functions_of_scripts(page: Page, name: str, call: str, expected: Any) -> None:
    page.add_script_tag(path=WIDGETS / f"{name}.js")
    assert page.evaluate(call) == expected


# -- slides -----------------------------------------------------------------------------------------------------------


def test_a_slider_shows_one_page_and_names_it(opened: Callable[..., Page]) -> None:
    page = opened(html.render(Slides("coefficient", ("-0.2", "0", "<b>"), tuple((Prose(f"page {i}"),) for i in range(3)), 1)))
    slider = page.get_by_role("slider", name="coefficient")
    for key, seen, said in (("", 1, "0"), ("ArrowRight", 2, "<b>"), ("ArrowRight", 2, "<b>"), ("Home", 0, "-0.2"), ("End", 2, "<b>")):
        if key:
            slider.press(key)
        assert [page.get_by_text(f"page {i}").is_visible() for i in range(3)] == [i == seen for i in range(3)]
        assert slider.get_attribute("aria-valuetext") == said and page.locator("output").inner_text() == said


def test_another_layer_is_shown_at_the_coefficient_that_was_chosen(opened: Callable[..., Page]) -> None:
    page = opened(made_up.sweep((3, 9))._repr_html_())
    layer, coefficients = page.get_by_role("slider", name="layer"), page.get_by_role("slider", name="coefficient")
    assert page.get_by_text("mood layer 9, +0.2, against").is_visible()
    coefficients.locator("visible=true").press("Home")
    layer.press("ArrowLeft")
    assert page.get_by_text("mood layer 3, -0.4, against").is_visible()
    assert page.get_by_text(", against unsteered").locator("visible=true").count() == 1


def test_the_unsteered_text_stays_where_it_is(opened: Callable[..., Page]) -> None:
    sweep = made_up.sweep(prompts=1)
    page = opened(sweep._repr_html_())
    slider, places = page.get_by_role("slider"), []
    for key in ("Home", "ArrowRight", "ArrowRight"):
        slider.press(key)
        mine = page.get_by_text("Unsteered", exact=True).locator("visible=true")
        places.append((mine.bounding_box()["x"], mine.bounding_box()["y"]))
        assert page.locator("ins:visible, del:visible").count() or "-0.2" not in page.locator("output").inner_text()
    assert len(set(places)) == 1


def test_without_scripts_every_page_is_there(chromium: Browser, tmp_path: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    file = tmp_path / "view.html"
    file.write_text(f"<!doctype html><meta charset='utf-8'><body>{made_up.sweep((3, 9))._repr_html_()}{made_up.attention()._repr_html_()}")
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.get_by_role("slider").count() == 0
    for label in ("-0.4", "+0.4"):
        assert page.get_by_text(f"mood layer 3, {label}, against").is_visible()
    assert page.get_by_text("layer 5 head 1, kv 0").first.is_visible() and page.locator("figure img").last.is_visible()
    context.close()


# -- heads ------------------------------------------------------------------------------------------------------------


def test_a_head_is_shown_large_and_a_token_tells_its_sources(opened: Callable[..., Page]) -> None:
    view = made_up.attention()
    page = opened(view._repr_html_())
    page.get_by_role("button", name="layer 5 head 1, kv 0").press("Enter")
    page.get_by_role("heading", name="layer 5 head 1, kv 0").wait_for()
    rows, columns = page.get_by_role("toolbar", name="queries: rows"), page.get_by_role("toolbar", name="keys: columns")
    line = page.locator("[aria-live=polite]")
    row = view.weights[1, 1, 2].numpy()
    rows.get_by_role("button").nth(2).focus()
    best = [int(i) for i in np.argsort(-row) if row[i] >= 0.01]
    assert line.inner_text().startswith(f"2 ·cat attends to {best[0]} ")
    said = [float(part.split(" ")[-1]) for part in line.inner_text().split(", ")]
    assert said[: len(best)] == pytest.approx(row[best], abs=0.5 / 255 + 0.005)
    page.keyboard.press("ArrowDown")
    assert line.inner_text().startswith("3 ·sat attends to")
    columns.get_by_role("button").nth(0).focus()
    assert line.inner_text().startswith("0 <bos> is attended to by 0 <bos> 1.00")
    columns.get_by_role("button").nth(4).hover()
    assert line.inner_text().startswith("4 ·<b> is attended to by")


def test_the_large_picture_stands_whole_under_its_labels(opened: Callable[..., Page]) -> None:
    page = opened(made_up.attention()._repr_html_())
    box, frame = (page.locator(f".mia-heads h4 ~ div{inner}").bounding_box() for inner in (" img", ""))
    label = page.get_by_role("toolbar", name="keys: columns").bounding_box()
    assert box["y"] + box["height"] + 1 < frame["y"] + frame["height"]  # with the line around it
    assert label["y"] + label["height"] == box["y"] and label["height"] < 70


def test_the_mouse_on_a_cell_reads_its_weight(opened: Callable[..., Page]) -> None:
    view = made_up.attention(at=[8, 3])
    page = opened(view._repr_html_())
    picture = page.locator("div img").last
    box = page.locator(".mia-heads h4 ~ div img").bounding_box()
    assert (box["width"], box["height"]) == (9 * 30, 2 * 30) and picture.is_visible()
    page.mouse.move(box["x"] + 2.5 * 30, box["y"] + 1.5 * 30)
    said, _, weight = page.locator("[aria-live=polite]").inner_text().rpartition(": ")
    assert said == "3 ·sat → 2 ·cat" and float(weight) == pytest.approx(float(view.weights[0, 0, 1, 2]), abs=0.5 / 255 + 0.005)


def test_one_stop_for_tab_and_arrows_between_heads(opened: Callable[..., Page]) -> None:
    page = opened(made_up.attention((4,), 4)._repr_html_())
    heads = page.locator("figure")
    assert [heads.nth(i).get_attribute("tabindex") for i in range(4)] == ["0", "-1", "-1", "-1"]
    heads.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.get_by_role("heading", name="layer 4 head 1").wait_for()
    assert [heads.nth(i).get_attribute("aria-pressed") for i in range(4)] == ["false", "true", "false", "false"]


def test_two_views_on_a_page_do_not_meet(opened: Callable[..., Page]) -> None:
    page = opened(made_up.attention()._repr_html_() + made_up.attention((2,))._repr_html_())
    page.locator(".mia-heads").nth(1).locator("figure").nth(1).click()
    page.get_by_role("heading", name="layer 2 head 1").wait_for()
    assert page.get_by_role("heading").all_inner_texts() == ["layer 4 head 0, kv 0, window 4", "layer 2 head 1, kv 0, window 4"]
