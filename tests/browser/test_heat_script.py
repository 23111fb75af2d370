"""The script of grids in a plain file: where keys lead, what is said of a cell, and labels that stay in sight."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import made_analyses
import pytest

from mia_lab.show import html
from mia_lab.show.parts import Heat

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.full
SCRIPT = Path(__file__).parents[2] / "widgets" / "heat.js"
WIDE = Heat(("r0", "r1"), tuple(f"c{j}" for j in range(80)), tuple(tuple(j / 80 for j in range(80)) for _ in range(2)),
            notes=tuple(tuple(f"note {i},{j}" for j in range(80)) for i in range(2)))


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """An empty page, which must have met no error at the end."""
    page, errors = chromium.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert not errors


def shown(page: Page, tmp_path: Path, fragment: str) -> Callable[[], str]:
    """Open a fragment as a file on a dark page; return what reads the line below its first grid."""
    file = tmp_path / "view.html"
    file.write_text(f"<!doctype html><meta charset='utf-8'><body style='background:rgb(17,17,17)'>{fragment}", encoding="utf-8")
    page.goto(file.as_uri())
    return lambda: page.locator(".mia-note").first.inner_text()


@pytest.mark.parametrize(("call", "expected"), [
    ("['ArrowUp', 'ArrowDown', 'ArrowLeft', 'ArrowRight', 'Enter'].map((key) => led(key, [1, 1], 3, 5))",
     [[0, 1], [2, 1], [1, 0], [1, 2], None]),
    ("['Home', 'End', 'PageUp', 'PageDown'].map((key) => led(key, [1, 1], 3, 5))", [[1, 0], [1, 4], [0, 1], [2, 1]]),
    ("[led('ArrowUp', [0, 0], 3, 5), led('ArrowLeft', [0, 0], 3, 5)]", [[0, 0], [0, 0]]),
    ("[led('ArrowDown', [2, 4], 3, 5), led('ArrowRight', [2, 4], 3, 5)]", [[2, 4], [2, 4]]),
    (r"told(['layer', 'after'], ['17', '3 ·in'], '·Paris', '·Paris 0.52\n·Rome 0.11')", "layer 17, after 3 ·in: ·Paris 0.52 | ·Rome 0.11"),
    ("told(['layer', 'head'], ['L1', 'H2'], '0.25', '')", "layer L1, head H2: 0.25"),
    ("[axesOf('layer ↓position →'), axesOf('layer ↓ position →'), axesOf('other')]",
     [["layer", "position"], ["layer", "position"], ["row", "column"]])])
def test_functions_of_the_script(page: Page, call: str, expected: Any) -> None:
    page.add_script_tag(path=SCRIPT)
    assert page.evaluate(call) == expected


def test_arrows_walk_from_the_one_stop_for_tab(page: Page, tmp_path: Path) -> None:
    found = made_analyses.lens((4,))
    line = shown(page, tmp_path, found._repr_html_())
    page.keyboard.press("Tab")
    for key, layer, token in (("", "2", "0 <bos>"), ("ArrowRight", "2", "1 The"), ("ArrowDown", "1", "1 The"), ("End", "1", "3 ·sat"),
                              ("PageDown", "embed", "3 ·sat"), ("ArrowDown", "embed", "3 ·sat")):
        if key:
            page.keyboard.press(key)
        cell = page.locator("td:focus")
        assert line() == f"layer {layer}, after {token}: {(cell.get_attribute('title') or '').replace(chr(10), ' | ')}"
        assert page.locator("td[tabindex='0']").count() == 1 and cell.get_attribute("tabindex") == "0"


def test_the_pointer_tells_the_cell_below_it(page: Page, tmp_path: Path) -> None:
    line = shown(page, tmp_path, html.render(WIDE))
    page.locator("td").nth(3).hover()
    assert line() == "layer r0, position c3: note 0,3"
    page.locator("td").nth(82).hover()
    assert line() == "layer r1, position c2: note 1,2"


def test_a_resting_pointer_does_not_speak_for_the_cell_in_focus(page: Page, tmp_path: Path) -> None:
    line = shown(page, tmp_path, html.render(WIDE))
    page.locator("td").nth(3).click()
    page.keyboard.press("End")
    page.wait_for_timeout(200)  # what scrolls below the pointer is told of by events after the frame
    assert line() == "layer r0, position c79: note 0,79"


def test_labels_of_rows_stay_in_sight_on_the_colour_of_the_page(page: Page, tmp_path: Path) -> None:
    shown(page, tmp_path, html.render(WIDE))
    label = page.locator("tbody th").nth(1)
    before = label.bounding_box()["x"]
    page.locator("td").nth(3).click()
    page.keyboard.press("End")
    page.wait_for_timeout(200)
    assert label.bounding_box()["x"] == pytest.approx(before, abs=2)
    assert page.locator("td").nth(3).bounding_box()["x"] < 0
    assert label.evaluate("(cell) => getComputedStyle(cell).backgroundColor") == "rgb(17, 17, 17)"


def test_two_grids_on_a_page_do_not_meet(page: Page, tmp_path: Path) -> None:
    line = shown(page, tmp_path, made_analyses.grid()._repr_html_() + made_analyses.cosines()._repr_html_())
    first = line()
    page.locator(".mia-heat").nth(1).locator("td").nth(1).click()
    assert page.locator(".mia-note").nth(1).inner_text() == "direction mood 0, direction mood 1: 0.54"
    assert line() == first and page.locator(".mia-note").count() == 2
