"""The line that makes a panel again: what was given, and nothing else; without it where that would be long."""
from __future__ import annotations

from typing import Any

import pytest

from mia_lab.counted import counted
from mia_lab.widgets.naming import call


class Made:
    """Takes what a Session's methods take."""

    def panel(self, vector: Any = None, *, prompt: str = "I think", layers: Any = None, coeff: float = 0.2, **options: Any) -> None:
        """Make nothing."""


@pytest.mark.parametrize(("codes", "options", "line"), [
    ((), {}, "s.panel()"), (("v",), dict(prompt="I think", layers=None, coeff=0.2), "s.panel(v)"),
    (("v",), dict(prompt="It's", layers=[1, 2], coeff=0.0), 's.panel(v, prompt="It\'s", layers=[1, 2], coeff=0.0)'),
    (("v",), dict(layers=object()), "s.panel(v, layers=layers)"),
    (("v",), dict(method="pca", guards=()), "s.panel(v, method='pca', guards=())"),
    (("v",), dict(layers=list(range(40))), "s.panel(v, layers=layers)"), (("v", "library=kept"), dict(prompt="x" * 120), "s.panel(v)")])
def test_a_call_says_what_is_not_as_by_default(codes: tuple[str, ...], options: dict[str, Any], line: str) -> None:
    assert call(Made().panel, *codes, **options) == line


def test_one_thing_is_in_the_singular() -> None:
    assert [counted(n, "head") for n in (0, 1, 2)] == ["0 heads", "1 head", "2 heads"]
