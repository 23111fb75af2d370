"""Headless Chromium, a JupyterLab server, and the notebook of all views. A test on Playwright's thread may not run an event loop."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from browser.lab import Lab
    from browser.states import Notebook

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, headless."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab server with a token, on a port of its own."""
    from browser.lab import Lab

    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture(scope="package")
def notebook(lab: Lab, chromium: Browser) -> Notebook:
    """The notebook of all views."""
    from gallery import EXAMPLES

    from browser.states import Notebook

    return Notebook(lab, chromium, list(EXAMPLES))
