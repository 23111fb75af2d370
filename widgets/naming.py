"""Names of objects in the notebook, so that the code a panel shows is code that runs there."""
from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from IPython import get_ipython

_LONGEST = 120  # characters of a line that is shown within a sentence


def name_of(value: Any, otherwise: str) -> str:
    """The name under which the notebook knows an object, or another one where it has none."""
    shell = get_ipython()
    found = [name for name, held in (shell.user_ns if shell else {}).items() if held is value and name.isidentifier() and name[0] != "_"]
    return min(found, key=len) if found else otherwise


def call(method: Callable[..., Any], /, *codes: str, **options: Any) -> str:
    """The line that calls a session's method with `codes`, then with the options that are not as by default; with the first code
    alone where that would be long.

    Numbers and texts stand as they are, other values under the name that the notebook has for them, or else that of the option.
    """
    defaults = {name: parameter.default for name, parameter in signature(method).parameters.items()}
    verb = f"{name_of(method.__self__, 's')}.{method.__name__}"
    given = [f"{name}={_said(value, name)}" for name, value in options.items() if _is_not(value, defaults.get(name, ...))]
    line = f"{verb}({', '.join([*codes, *given])})"
    return line if len(line) <= _LONGEST else f"{verb}({', '.join(codes[:1])})"


def _said(value: Any, name: str) -> str:
    if isinstance(value, int | float | str):
        return repr(value)
    return name_of(value, repr(value) if _plain(value) and len(repr(value)) <= _LONGEST // 2 else name)


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str) or (type(value) in (list, tuple) and all(map(_plain, value)))


def _is_not(value: Any, default: Any) -> bool:
    return value != default if isinstance(value, int | float | str) else value is not default
