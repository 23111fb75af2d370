"""Names of objects in the notebook, so that the code a panel shows is code that runs there."""
from __future__ import annotations

from typing import Any

from IPython import get_ipython


def name_of(value: Any, otherwise: str) -> str:
    """The name under which the notebook knows an object, or another one where it has none."""
    shell = get_ipython()
    found = [name for name, held in (shell.user_ns if shell else {}).items() if held is value and name.isidentifier() and name[0] != "_"]
    return min(found, key=len) if found else otherwise
