"""Golden files: what is shown, held to the character. `MIA_GOLDEN=write pytest tests/show` writes them anew."""
from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("golden")


def check(name: str, found: str) -> None:
    """Fail unless a view is what the golden file of this name holds: a tag a line, scripts and images left out."""
    found = _plain(found) if name.endswith(".html") else found
    path = FOLDER / name
    if os.environ.get("MIA_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found.rstrip("\n") + "\n", encoding="utf-8")
    assert path.is_file(), f"there is no {path}; MIA_GOLDEN=write writes it"
    assert found.rstrip("\n") + "\n" == path.read_text(encoding="utf-8"), f"{name} differs: look at the view, then MIA_GOLDEN=write"


def _plain(html: str) -> str:
    html = re.sub(r"<script>.*?</script>", "<script></script>", html, flags=re.DOTALL)
    html = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "PNG", html)
    return html.replace("><", ">\n<")
