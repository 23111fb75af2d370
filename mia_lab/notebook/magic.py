"""`%%steer v[8] 0.2`: a cell under a steer scope, without indenting it, and its last value shown as ever."""
from __future__ import annotations

import ast
import re
from contextlib import AbstractContextManager
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class, output_can_be_silenced

from ..errors import EditError, MiaError

_USAGE = "type for example\n%%steer v[8] 0.2\n%%steer --session s 2*v[4:12] -0.1\n%%steer mia.Ablate(v[8])\nabove the lines of a cell"
_LINE = re.compile(r"(?:--session\s+(?P<session>\w+)\s+)?(?P<what>.+?)(?:\s+(?P<coeff>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))?\s*")


@magics_class
class Steering(Magics):
    """The magics that `%load_ext mia_lab` brings."""

    @cell_magic
    @output_can_be_silenced
    def steer(self, line: str, cell: str) -> Any:
        """Run a cell inside `with s.steer(WHAT, COEFF):` and show its last value.

        %%steer [--session NAME] WHAT [COEFF]

        WHAT is a vector, an edit or a list of edits, any expression; COEFF a number, by default 1. Without --session it is the one
        open Session of the notebook.
        """
        code = self.shell.transform_cell(cell)
        body = ast.parse(code, filename := self.shell.compile.cache(code))
        last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
        with self._scope(line):
            exec(compile(body, filename, "exec"), self.shell.user_ns)
            if last is not None:
                return eval(compile(ast.Expression(last.value), filename, "eval"), self.shell.user_ns)
        return None

    def _scope(self, line: str) -> AbstractContextManager:
        """The steer scope that a line names."""
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise EditError(f"%%steer needs a vector or an edit; {_USAGE}")
        session, what = self._session(found["session"]), found["what"]
        try:
            value = eval(compile(what, "%%steer", "eval"), self.shell.user_ns)
        except SyntaxError:
            raise EditError(f"%%steer cannot read {what!r}; {_USAGE}") from None
        except NameError as error:
            raise EditError(f"%%steer: {error}; {_USAGE}") from None
        return session.steer(value) if found["coeff"] is None else session.steer(value, float(found["coeff"]))

    def _session(self, name: str | None) -> Any:
        """The session of that name, or the only open one there is."""
        from ..session import Session

        open_ = {key: value for key, value in self.shell.user_ns.items()
                 if isinstance(value, Session) and not key.startswith("_") and not value._engine.closed}
        if name is not None:
            if name not in open_:
                raise MiaError(f"{name} is no open Session; there are {', '.join(open_) or 'none'}")
            return open_[name]
        if not open_:
            raise MiaError('there is no open Session in this notebook; type s = mia.Session("demo") first')
        if len({id(value) for value in open_.values()}) > 1:
            raise MiaError(f"there are several open Sessions; type %%steer --session {next(iter(open_))} or another of {', '.join(open_)}")
        return next(iter(open_.values()))
