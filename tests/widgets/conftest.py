"""One engine and one shell for all tests of panels; what would go to a notebook is kept in a list."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

import mia_lab as mia


@pytest.fixture(scope="session")
def session() -> Iterator[mia.Session]:
    with mia.Session("demo", enforce_eager=True, max_model_len=512, max_num_seqs=64) as opened:
        yield opened


@pytest.fixture(scope="session")
def vector(session: mia.Session) -> mia.Vector:
    from mia_lab.demo import sentiment_pairs

    return session.vector(sentiment_pairs())


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Everything displayed within the test: data, and whether it updates an output, and which."""
    shell = InteractiveShell.instance()
    publisher = CapturingDisplayPublisher()
    monkeypatch.setattr(shell, "display_pub", publisher)
    yield publisher.outputs
    InteractiveShell.clear_instance()


@pytest.fixture(autouse=True)
def own_library(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIA_LAB_DATA", str(tmp_path))
