"""What tests over families share; each module says which families, in a fixture `family` of its own."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

import mia_lab as mia
from parity import scenario


@pytest.fixture
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    """A session on the tiny model with every point tapped."""
    return open_tiny(family, **scenario.EVERYTHING)


@pytest.fixture
def model(models: Path, family: str) -> Any:
    """The same model in Hugging Face, in float64."""
    return tiny.load(tiny.build(family, models)).double()
