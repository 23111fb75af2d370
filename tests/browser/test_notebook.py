"""The notebook around the views: Notebook 7, progress, logs and magic as a user meets them."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from browser.lab import Lab
from browser.panels import made
from browser.states import TESTS, Notebook, read

if TYPE_CHECKING:

    from playwright.sync_api import Browser

pytestmark = pytest.mark.full
JOB = """
import time
from mia_lab.shown import progress_bar
def job():
    with progress_bar() as bar:
        bar.stage(40, "runs")
        try:
            for _ in range(40):
                time.sleep(PAUSE)
                bar.add(1, 1000)
        except KeyboardInterrupt:
            bar.broken_off("what is done is kept")
"""


@pytest.fixture(scope="module")
def notebook_7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("notebook"), "notebook")
    yield server
    server.close()


def test_notebook_7_shows_and_moves_them_too(notebook_7: Lab, chromium: Browser) -> None:
    views = Notebook(notebook_7, chromium, ["heat", "slides"]).views("live")
    assert "1.00" in read(views["heat"]) and "with 0: " in read(views["slides"])
    views["slides"].locator("input[type=range]").press("End")
    views["heat"].locator("td").first.press("ArrowRight")
    assert "with 0.2: " in read(views["slides"]) and "n2" in read(views["heat"])


def test_a_job_shows_a_bar_and_leaves_a_line(lab: Lab, chromium: Browser, notebook: Notebook) -> None:
    path = made(lab, "progress.ipynb", JOB.replace("PAUSE", "0.05"), "job()", JOB.replace("PAUSE", "1"), "job()")
    page = notebook.open(path.name)
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    first, _, last = (page.locator(".jp-CodeCell").nth(i).locator(".jp-OutputArea") for i in (1, 2, 3))
    first.locator("progress").wait_for(timeout=20_000)
    first.get_by_text("40 runs, 2.").wait_for(timeout=20_000)
    last.locator("progress").wait_for(timeout=20_000)
    page.evaluate("window.jupyterapp.commands.execute('notebook:interrupt-kernel').then(() => null)")
    last.get_by_text("interrupted; what is done is kept").wait_for(timeout=20_000)
    assert page.locator(".jp-CodeCell progress").count() == 0
    notebook.run_in(page, "docmanager:save")
    outputs = [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]
    assert [len(each) for each in outputs] == [0, 1, 0, 1]
    assert set(outputs[1][0]["data"]) == {"text/plain", "text/html"}
    page.close()


def test_a_session_says_a_line_and_an_error_its_cause(lab: Lab, notebook: Notebook) -> None:
    start = (f"import sys; sys.path.insert(0, {str(TESTS)!r}); import tempfile, pathlib, tiny, mia_lab as mia, torch\n"
             "folder = pathlib.Path(tempfile.mkdtemp())\n"
             "path, tokenizer = str(tiny.build('llama', folder)), str(tiny.tokenizer(folder))")
    path = made(lab, "session.ipynb", start,
                "s = mia.Session(path, tokenizer=tokenizer, dtype='float32', max_model_len=64, enforce_eager=True)",
                "%load_ext mia_lab\nedit = mia.Add(torch.ones(128), 3.0, layers=[1])",
                "%%steer edit\ns.generate('abcd', max_tokens=8)",
                "plain, steered = (s.generate('abcd', max_tokens=8, edits=edits) for edits in (None, [edit]))\nOut[4] == steered != plain",
                "mia.Session('/no/such')")
    page = notebook.open(path.name)
    notebook.run_in(page, "notebook:run-all-cells")
    notebook.run_in(page, "docmanager:save")
    outputs = [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]
    assert [output["name"] for output in outputs[1]] == ["stderr"]
    assert [line[:9] for output in outputs[1] for line in "".join(output["text"]).splitlines()] == ["mia_lab: "]
    assert outputs[4][0]["data"]["text/plain"] in ("True", ["True"])
    assert outputs[5][0]["evalue"].startswith("There is no model at /no/such. Give a folder")
    page.close()
