"""Every view in every state of a notebook: it is drawn, its numbers are there, and it moves where scripts run."""
from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from gallery import EXAMPLES
from PIL import Image

from browser.states import SCRIPTED, STATES, read

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from browser.states import Notebook

pytestmark = pytest.mark.full
FAULTS = ("Error displaying", "model not found", "Traceback", "Loading widget")


@pytest.fixture(scope="module", params=STATES)
def state(request: pytest.FixtureRequest) -> str:
    """The states, one after the other, so that each is opened once: the dead kernel is the live one's."""
    return request.param


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_view_is_there(notebook: Notebook, state: str, name: str) -> None:
    example, output = EXAMPLES[name], notebook.views(state)[name]
    text = read(output)
    for fault in FAULTS:
        assert fault not in text
    for seen in example.sees:
        assert seen in text
    assert drawn(output) > 3
    for move in example.moves:
        if state in SCRIPTED:
            assert move.then not in read(output)
            output.locator(move.on).first.press(move.key)
            assert move.then in read(output)
        else:
            assert (move.instead or move.then) in read(output) + noted(output)


def drawn(output: Locator) -> int:
    """How many colours are seen where a view stands: one, where it is blank."""
    box = output.bounding_box()
    assert box and box["width"] > 40 and box["height"] > 12
    image = Image.open(io.BytesIO(output.screenshot()))
    return len(image.convert("RGB").getcolors(1 << 24))


def noted(output: Locator) -> str:
    """The notes of all there is."""
    return output.evaluate("(node) => [...node.querySelectorAll('[title]')].map((each) => each.title).join('\\n')")
