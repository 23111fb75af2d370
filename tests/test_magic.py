"""%%steer in a real IPython shell: what runs under it, what it shows, and what it says when it cannot."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import mia_lab as mia

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def session(open_tiny: Callable[..., Any]) -> Any:
    return open_tiny("llama", max_model_len=64, enforce_eager=True)


@pytest.fixture
def shell(session: Any) -> Iterator[InteractiveShell]:
    """A shell with the extension, a session, a direction and an edit."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "mia_lab")
    shell.user_ns.update(s=session, mia=mia, v=torch.ones(128), edit=mia.Add(torch.ones(128), 3.0, layers=[1]))
    yield shell
    shell.run_line_magic("unload_ext", "mia_lab")
    InteractiveShell.clear_instance()




CELL = ("answer = s.generate('abcd', max_tokens=8)", "answer")


def test_a_cell_runs_steered_and_shows_its_last_value(shell: InteractiveShell, session: Any) -> None:
    shown = shell.run_cell("\n".join(["%%steer edit", *CELL]))
    with session.steer(shell.user_ns["edit"]):
        expected = session.generate("abcd", max_tokens=8)
    plain = session.generate("abcd", max_tokens=8)
    assert shown.success and shown.result == expected == shell.user_ns["answer"] != plain
    assert shell.run_cell("\n".join(CELL)).result == plain  # and the scope is over
    assert shell.run_cell("%%steer edit\nanswer;").result is None


def test_a_coefficient_a_session_and_an_expression(shell: InteractiveShell, session: Any) -> None:
    shell.user_ns["w"] = mia.Vector("resid_post", (1,), torch.ones(1, 128), torch.ones(1), torch.ones(1), "made up")
    with session.steer(2 * shell.user_ns["w"], -1.5):
        expected = session.generate("abcd", max_tokens=8)
    assert shell.run_cell("\n".join(["%%steer --session s 2*w[1] -1.5", *CELL])).result == expected
    twice = shell.run_cell("\n".join(["%%steer [edit, edit]", *CELL])).result
    assert twice == session.generate("abcd", max_tokens=8, edits=[shell.user_ns["edit"]] * 2)


def test_an_error_is_the_cells_own_and_ends_the_scope(shell: InteractiveShell, session: Any) -> None:
    plain = session.generate("abcd", max_tokens=8)
    done = shell.run_cell("%%steer edit\n1 / 0")
    assert isinstance(done.error_in_exec, ZeroDivisionError) and session.generate("abcd", max_tokens=8) == plain


@pytest.mark.parametrize(("line", "words"), [
    ("", "needs a vector or an edit; type for example"), ("v[ 0.2", "cannot read"), ("nothing 0.2", "name 'nothing' is not defined"),
    ("--session t edit", "t is no open Session; there are s"), ("torch_name", "not defined")])
def test_what_is_wrong_is_said_with_what_to_type(shell: InteractiveShell, line: str, words: str) -> None:
    error = shell.run_cell(f"%%steer {line}\n1").error_in_exec
    assert isinstance(error, mia.MiaError) and words in str(error)


def test_none_and_several_sessions(shell: InteractiveShell, session: Any) -> None:
    shell.user_ns["t"] = session  # another name of the same is no other session
    assert shell.run_cell("%%steer edit\n1").result == 1
    shell.user_ns["t"] = other = object.__new__(mia.Session)
    other._engine = session._engine
    assert "--session s or another of s, t" in str(shell.run_cell("%%steer edit\n1").error_in_exec)
    del shell.user_ns["s"], shell.user_ns["t"]
    assert 's = mia.Session("demo")' in str(shell.run_cell("%%steer edit\n1").error_in_exec)
