"""The five other panels in a real JupyterLab, each used as a person would: what a result then shows is what the session's verb gives."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from browser.panels import LATE, START, made, restart, shows, twin

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from browser.lab import Lab
    from browser.states import Notebook

pytestmark = pytest.mark.full
EXPECTED = """import json
norms = {kind: s.capture("One two", kind, layers=3, at=None, reduce=mia.Norm()).get().tolist() for kind in ("resid_post", "resid_pre")}
typed = s.capture("Later", "resid_pre", layers=3, at=None, reduce=mia.Norm()).get().tolist()
weights = s.attention("a day", layers=3, heads=1).weights[0, 0].tolist()
metrics = [mia.token_odds(["a"], ["b"]), mia.length()]
swept = s.sweep(v[2], mia.grid(-0.4, 0.4, 3), ["One", "Two", "Six", "Ten"], metrics[:1], placebos=0, guards=(), progress=False)
fitted = s.vector([("He won", "He lost"), ("Glad", "Grim"), ("She sang", "She wept")], method="pca")
print(json.dumps({"norms": norms, "typed": typed, "weights": weights, "effects": [r.effect.mean for r in swept.table],
                  "vector": repr(fitted).splitlines()[1].strip()}))"""
CELLS = {"layers": "s.layer_explorer(prompt='One two')", "attention": "s.attention_explorer(prompt='One two')",
         "sweep": "s.sweep_launcher(v, prompts=['One'], metrics=metrics, guards=())",
         "pairs": "s.pair_editor(pairs=[('A good day', 'A bad day')])", "library": "s.vector_library(v)"}
KEPT = {"layers": "Length of resid_pre at layer 3", "attention": "layer 3 head 1", "sweep": "broken off", "pairs": "pca at resid_post",
        "library": "cheer was deleted."}  # what the tests leave in each result
Cell = Callable[[str], "Locator"]


@pytest.fixture(scope="module")
def page(lab: Lab, notebook: Notebook) -> Iterator[Page]:
    made(lab, "others.ipynb", START, EXPECTED, *CELLS.values())
    opened = notebook.open("others.ipynb")
    notebook.run_in(opened, "notebook:run-all-cells")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def expected(page: Page) -> dict[str, Any]:
    """What the session's verbs gave."""
    return json.loads(page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea-output").inner_text())


@pytest.fixture(scope="module")
def cell(page: Page) -> Cell:
    """The cell of a panel."""
    return cells(page)


def cells(page: Page) -> Cell:
    return lambda name: page.locator(".jp-CodeCell").nth(2 + list(CELLS).index(name))


def told(where: Locator) -> list[float]:
    """The values of coloured tokens."""
    return [float(each.get_attribute("title")) for each in twin(where).locator("figure p span[title]").all()]


def fill(where: Locator, control: str, text: str) -> None:
    """Type into a field and leave it."""
    field = where.locator(f".{control}").locator("input, textarea").first
    field.fill(text)
    field.press("Tab")


def test_layers_move_with_keys_and_points_and_prompts_are_taken(cell: Cell, expected: dict[str, Any]) -> None:
    at = cell("layers")
    shows(at, "Length of resid_post at layer 2")
    at.locator(".mia-layer .noUi-handle").press("ArrowRight")
    shows(at, "Length of resid_post at layer 3", "What the stream after layer 3 would say next")
    assert told(at) == pytest.approx(expected["norms"]["resid_post"], rel=0.01)
    at.locator(".mia-point select").select_option("resid_pre")
    shows(at, "Length of resid_pre at layer 3", "choose resid_post to see")
    assert told(at) == pytest.approx(expected["norms"]["resid_pre"], rel=0.01)
    fill(at, "mia-prompt", "Later")
    twin(at).locator("figure p span[title]").get_by_text("L", exact=True).wait_for(timeout=LATE)
    assert told(at) == pytest.approx(expected["typed"], rel=0.01)


def test_attention_follows_a_drag_a_head_and_a_prompt(cell: Cell, page: Page, expected: dict[str, Any]) -> None:
    at = cell("attention")
    shows(at, "layer 0 head 3")
    at.locator(".mia-layer").scroll_into_view_if_needed()
    handle, track = (at.locator(f".mia-layer .noUi-{name}").bounding_box() for name in ("handle", "target"))
    y = handle["y"] + handle["height"] / 2
    page.mouse.move(handle["x"] + handle["width"] / 2, y)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] + 20, y, steps=8)
    page.mouse.up()
    shows(at, "layer 3 head 3")
    at.locator(".mia-head select").select_option("1")
    twin(at).get_by_text("layer 3 head 3").first.wait_for(state="hidden", timeout=LATE)
    fill(at, "mia-prompt", "a day")
    shows(at, "over 6 tokens")
    name, pair, weight, first = twin(at).locator("tbody tr").locator("th, td").all_inner_texts()
    query, key = (int(side.split()[0]) for side in pair.split(" → "))
    rows = expected["weights"]
    assert name == "layer 3 head 1, kv 0" and rows[query][key] == pytest.approx(max(max(row[1:]) for row in rows), abs=0.005)
    assert (float(weight), float(first)) == pytest.approx((rows[query][key], sum(row[0] for row in rows) / len(rows)), abs=0.01)


def test_a_sweep_is_set_up_run_and_stopped(cell: Cell, expected: dict[str, Any]) -> None:
    at = cell("sweep")
    at.locator(".mia-layers select").select_option([])
    at.locator(".mia-run").click()
    shows(at, "choose at least one layer and one metric")
    at.locator(".mia-layers select").select_option("2")
    for control, text in (("mia-largest", "0.4"), ("mia-steps", "1"), ("mia-placebos", "0"), ("mia-prompts", "One\nTwo\nSix\nTen")):
        fill(at, control, text)
    at.locator(".mia-run").click()
    shows(at, "Sweep of 2 settings on 2 prompts")
    rows = [row.split("\t") for row in twin(at).locator("table").last.inner_text().splitlines()[1:]]
    assert [row[0] for row in rows] == ["mean_diff layer 2, -0.4", "mean_diff layer 2, +0.4"]
    assert [float(row[1].split()[0]) for row in rows] == pytest.approx(expected["effects"], rel=0.02, abs=1e-3)
    at.locator(".mia-layers select").select_option(["0", "1", "2", "3"])
    at.locator(".mia-metrics select").select_option("length")  # which generates, and so takes its time
    fill(at, "mia-steps", "20")
    fill(at, "mia-max-tokens", "200")
    at.locator(".mia-run").click()
    at.locator(".mia-status").get_by_text(re.compile(r"^(\d\d|\d{3}) of ")).wait_for(timeout=LATE)
    at.locator(".mia-stop").click()
    shows(at, "broken off")
    kept, asked = map(int, re.search(r"(\d+) of (\d+) settings have all their numbers", twin(at).inner_text()).groups())
    assert 0 < kept < asked == 160


def test_pairs_are_typed_pasted_removed_and_fitted(cell: Cell, expected: dict[str, Any]) -> None:
    at = cell("pairs")
    shows(at, "A good day")
    at.locator(".mia-add").click()
    second = at.locator(".mia-rows > .widget-hbox").nth(1)
    fill(second, "mia-positive", "He won")
    shows(at, "row 2 has only one side")
    fill(second, "mia-negative", "He lost")
    shows(at, "He lost")
    fill(at, "mia-paste", 'Glad\tGrim\n{"chosen": "She sang", "rejected": "She wept"}')
    at.locator(".mia-take-over").click()
    shows(at, "She wept")
    at.locator(".mia-remove").first.click()
    twin(at).get_by_role("cell", name="A good day").wait_for(state="hidden", timeout=LATE)
    assert at.locator(".mia-rows > .widget-hbox").count() == 3
    at.locator(".mia-method select").select_option("pca")
    at.locator(".mia-fit").click()
    shows(at, "Vector: pca at resid_post, 4 layers (0 to 3)", expected["vector"])


def test_a_vector_is_saved_loaded_and_deleted(cell: Cell) -> None:
    at = cell("library")
    shows(at, "holds no vectors")
    fill(at, "mia-new-name", "cheer")
    fill(at, "mia-note", "two pairs")
    at.locator(".mia-save").click()
    shows(at, "cheer was saved.", "two pairs")
    at.locator(".mia-save").click()
    shows(at, "has a vector 'cheer' already")
    fill(at, "mia-new-name", "other")
    at.locator(".mia-save").click()
    shows(at, "other was saved.")
    at.locator(".mia-vector select").select_option("cheer")
    at.locator(".mia-load").click()
    shows(at, "cheer is loaded; it is the panel's .vector.")
    at.locator(".mia-delete").click()
    at.locator(".mia-status").get_by_text("press Delete again to delete cheer").wait_for(timeout=LATE)
    assert "cheer is loaded" in twin(at).inner_text()
    at.locator(".mia-delete").click()
    shows(at, KEPT["library"])
    assert at.locator(".mia-vector option").all_inner_texts() == ["other"] and "two pairs" in twin(at).inner_text()


def gone(cell: Cell, why: str) -> None:
    """Each panel says why its controls are gone and how to get them back, and shows what it showed."""
    for name, line in CELLS.items():
        said = twin(cell(name)).locator(".mia-gone")
        said.get_by_text(why).wait_for(timeout=20_000)
        assert f"run {line} to get them back" in said.inner_text()
        assert KEPT[name] in twin(cell(name)).inner_text()


def test_a_restarted_kernel_is_said_by_each_and_results_stay(page: Page, cell: Cell, notebook: Notebook) -> None:
    assert not any(twin(cell(name)).locator(".mia-gone").is_visible() for name in CELLS)
    notebook.run_in(page, "docmanager:save")
    restart(page)
    gone(cell, "The kernel was restarted")


def test_a_kernel_that_was_shut_down_is_said_by_each(page: Page, cell: Cell, lab: Lab) -> None:
    lab.ask("DELETE", f"/api/kernels/{page.evaluate('window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.id')}")
    gone(cell, "The kernel is gone")


def test_after_a_reload_each_result_is_there(notebook: Notebook) -> None:
    again = notebook.open("others.ipynb")
    gone(cells(again), "the page was loaded anew")
    again.close()
