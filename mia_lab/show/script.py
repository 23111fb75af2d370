"""Scripts that views carry: plain files of widgets/, inlined as they are."""
from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def script(name: str) -> str:
    """Return widgets/NAME.js as a `<script>` whose names stay its own. The view must be complete without it."""
    folders = find_spec("mia_lab.widgets").submodule_search_locations  # found, not imported: the controls need ipywidgets
    source = Path(folders[0], f"{name}.js").read_text(encoding="utf-8")
    if "</script" in source:
        raise ValueError(f"widgets/{name}.js would end its own script element")
    return f"<script>(() => {{\n{source}}})();</script>"
