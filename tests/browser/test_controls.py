"""The steering panel in a real JupyterLab: drag, type, Stop, a restarted kernel, a reload; the result stays."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from browser.panels import LATE, START, made, restart, shows, twin

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from browser.lab import Lab
    from browser.states import Notebook

pytestmark = pytest.mark.full
PANEL = "s.panel(v, prompt='I went to the market and', layers=1)"


@pytest.fixture(scope="module")
def page(lab: Lab, notebook: Notebook) -> Iterator[Page]:
    made(lab, "controls.ipynb", START, PANEL, "s.generate('One two', max_tokens=3)")
    opened = notebook.open("controls.ipynb")
    notebook.run_in(opened, "notebook:run-all-cells")
    yield opened
    opened.close()


def test_a_drag_streams_both_texts(page: Page) -> None:
    page.locator(".mia-panel").wait_for(timeout=LATE)
    shows(page, "Move a control, or press Run.")
    page.locator(".mia-run").click()
    shows(page, "24 and 24 tokens")
    handle = page.locator(".mia-coefficient .noUi-handle")
    box = handle.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] / 2, steps=12)
    page.mouse.up()
    value = page.locator(".mia-coefficient .widget-readout").inner_text()
    assert value not in ("+0.20", "")
    shows(page, f"with {float(value):+g} × v at layer 1", "ms to the first steered token", "(edited)")
    handle.press("ArrowRight")
    shows(page, f"with {float(value) + 0.01:+g} × v at layer 1")


def test_typed_text_and_choices_are_taken(page: Page) -> None:
    prompt = page.locator(".mia-prompt textarea")
    prompt.fill("The weather today is")
    prompt.press("Tab")
    shows(page, "“The weather today is”")
    page.locator(".mia-preset select").select_option("opposite")
    shows(page, "with -0.2 × v", "24 and 24 tokens")
    page.locator(".mia-code").click()
    page.locator(".mia-code-view").get_by_text("mia.Add(v[1], -0.2)").wait_for(timeout=LATE)


def test_stop_ends_the_text_and_the_notebook_goes_on(page: Page, notebook: Notebook) -> None:
    field = page.locator(".mia-max-tokens input")
    field.fill("450")
    field.press("Enter")
    shows(page, "tokens so far")
    page.locator(".mia-stop").click()
    shows(page, "Stopped after")
    page.locator(".jp-CodeCell").nth(2).click()
    notebook.run_in(page, "notebook:run-cell")
    assert page.locator(".jp-CodeCell").nth(2).locator(".jp-OutputArea-output").inner_text().strip()


def test_a_restarted_kernel_is_said_and_the_result_stays(page: Page, notebook: Notebook, lab: Lab) -> None:
    assert not twin(page).locator(".mia-gone").is_visible()
    notebook.run_in(page, "docmanager:save")
    restart(page)
    twin(page).locator(".mia-gone").wait_for(timeout=20_000)
    assert "no longer answer" in twin(page).locator(".mia-gone").inner_text()
    assert f"run {PANEL} to get them back" in twin(page).locator(".mia-gone").inner_text()
    assert "Stopped after" in twin(page).inner_text()
    saved = json.loads((lab.root / "controls.ipynb").read_text())["cells"][1]["outputs"]
    assert [sorted(output["data"]) for output in saved] == [["application/vnd.jupyter.widget-view+json", "text/plain"],
                                                          ["text/html", "text/plain"]]


def test_after_a_reload_the_line_says_how_to_get_them_back(page: Page, notebook: Notebook) -> None:
    again = notebook.open("controls.ipynb")
    twin(again).wait_for(timeout=LATE)
    again.get_by_text("model not found").first.wait_for(timeout=20_000)
    twin(again).locator(".mia-gone").wait_for(timeout=20_000)
    assert "Stopped after" in twin(again).inner_text() and PANEL in twin(again).locator(".mia-heading").inner_text()
    again.close()
