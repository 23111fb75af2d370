"""One notebook, a cell a view, opened in each of the states in which a notebook is read."""
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, Locator, Page

from .lab import Lab

TESTS = Path(__file__).parents[1]
STATES = ("live", "dead", "reloaded", "untrusted", "offline")
SCRIPTED = ("live", "dead", "reloaded", "offline")  # untrusted notebooks run no script
_READY = """async () => {
    const app = window.jupyterapp;
    await app.restored;
    while (!app.shell.currentWidget?.sessionContext) await new Promise((done) => setTimeout(done, 50));
    await app.shell.currentWidget.context.ready;
    await app.shell.currentWidget.sessionContext.ready;
}"""


class Views:
    """Each view's output in one state: a Playwright Locator by name."""

    def __init__(self, page: Page, names: Sequence[str]) -> None:
        self.page, self._names = page, list(names)

    def __getitem__(self, name: str) -> Locator:
        cell = self.page.locator(".jp-CodeCell").nth(self._names.index(name) + 1)
        return cell.locator(".jp-OutputArea-child .jp-OutputArea-output").first


class Notebook:
    """The notebook of all views; `views(state)` opens it, each state once."""

    def __init__(self, lab: Lab, browser: Browser, names: Sequence[str], name: str = "views.ipynb") -> None:
        self.lab, self.browser, self.names, self.name = lab, browser, list(names), name
        self._views: dict[str, Views] = {}
        start = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from gallery import EXAMPLES"
        cells = [start, *(f"EXAMPLES[{name!r}].view()" for name in names)]
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(made, self.path)

    @property
    def path(self) -> Path:
        """Where the notebook lies."""
        return self.lab.root / self.name

    def views(self, state: str) -> Views:
        """The views in a state."""
        if state not in self._views:
            self._views[state] = getattr(self, f"_{state}")()
        return self._views[state]

    def run_in(self, page: Page, command: str) -> Any:
        """Run one of JupyterLab's commands and wait for its end."""
        return page.evaluate(f"window.jupyterapp.commands.execute({command!r}).then(() => null)")

    def open(self, name: str) -> Page:
        """Open a notebook and wait for its kernel."""
        page = self.browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(self.lab.page(name))
        page.wait_for_function("window.jupyterapp")
        page.evaluate(_READY)
        return page

    def _live(self) -> Views:
        page = self.open(self.name)
        self.run_in(page, "notebook:run-all-cells")
        self.run_in(page, "docmanager:save")
        return Views(page, self.names)

    def _dead(self) -> Views:
        views = self.views("live")
        assert self.lab.end_kernels() > 0
        views.page.wait_for_function("!window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel")
        return views

    def _reloaded(self) -> Views:
        self.views("live")
        return Views(self.open(self.name), self.names)

    def _untrusted(self) -> Views:
        self.views("live")
        notebook = json.loads(self.path.read_text())
        notebook["metadata"]["from"] = "elsewhere"  # its signature is another, which this server never gave
        (self.lab.root / "untrusted.ipynb").write_text(json.dumps(notebook))
        return Views(self.open("untrusted.ipynb"), self.names)

    def _offline(self) -> Views:
        self.views("live")
        subprocess.run([sys.executable, "-m", "nbconvert", "--to", "html", str(self.path)], check=True, capture_output=True)
        page = self.browser.new_context(offline=True, viewport={"width": 1400, "height": 1000}).new_page()
        page.goto(self.path.with_suffix(".html").as_uri(), wait_until="domcontentloaded")
        return Views(page, self.names)


def read(output: Locator) -> str:
    """What is to be read: the text that is shown, that of drawings, and what pictures say of themselves."""
    return output.evaluate("""(node) => [node.innerText, ...[...node.querySelectorAll('svg text')].map((each) => each.textContent),
                                       ...[...node.querySelectorAll('img')].map((each) => each.alt)].join('\\n')""")
