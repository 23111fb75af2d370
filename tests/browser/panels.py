"""What tests of controls have in common: a notebook with a tiny session, and what a panel's result shows."""
from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat

from browser.states import TESTS

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Locator, Page

    from browser.lab import Lab

LATE = 60_000  # ms
START = f"""import os, pathlib, sys, tempfile; sys.path.insert(0, {str(TESTS)!r}); import tiny, mia_lab as mia
folder = pathlib.Path(tempfile.mkdtemp())
os.environ["MIA_LAB_DATA"] = str(folder / "kept")
s = mia.Session(str(tiny.build("llama", folder)), tokenizer=str(tiny.tokenizer(folder)), dtype="float32", max_model_len=512,
                points=["q", "k", "resid_pre", "resid_post"], enforce_eager=True, max_num_seqs=8)
v = s.vector([("What a lovely day, I am so happy", "What an awful day, I am so sad"), ("They laughed", "They cried")])"""


def made(lab: Lab, name: str, *cells: str) -> Path:
    """Write a notebook of these cells."""
    path = lab.root / name
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
                                            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}), path)
    return path


def twin(where: Page | Locator) -> Locator:
    """The result of a page's or a cell's panel."""
    return where.locator(".mia-twin")


def shows(where: Page | Locator, *texts: str) -> None:
    """Wait until the result shows each of some texts."""
    for text in texts:
        twin(where).get_by_text(text).first.wait_for(timeout=LATE)


def restart(page: Page) -> None:
    """Restart the kernel of the notebook that is open."""
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.restartKernel().then(() => null)")
