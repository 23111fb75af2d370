"""What vLLM says goes to the log, what users print does not."""
from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mia_lab.running import logs


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A log of the test's own."""
    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path))
    for name in logs._ASKED_FOR:
        monkeypatch.delenv(name, raising=False)
    logs._path.cache_clear()
    logs._log.cache_clear()
    yield logs.path()
    logs._path.cache_clear()
    logs._log.cache_clear()


def test_all_that_is_written_below_python_and_in_this_thread_goes_to_the_log(log: Path, capfd: pytest.CaptureFixture) -> None:
    with logs.quiet():
        print("printed")
        print("warned", file=sys.stderr)
        os.write(1, b"from C\n")
        os.write(2, b"from C, an error\n")
        subprocess.run([sys.executable, "-c", "print('from a process')"], check=True)
    print("after")
    assert capfd.readouterr() == ("after\n", "")
    assert set(log.read_text().splitlines()) == {"printed", "warned", "from C", "from C, an error", "from a process"}


def test_a_process_that_was_started_inside_goes_on_writing_to_the_log(log: Path, capfd: pytest.CaptureFixture) -> None:
    with logs.quiet():
        late = subprocess.Popen([sys.executable, "-c", "input(); print('late')"], stdin=subprocess.PIPE)
    late.communicate(b"\n")
    assert log.read_text() == "late\n" and capfd.readouterr() == ("", "")


def test_other_threads_are_heard(log: Path, capfd: pytest.CaptureFixture) -> None:
    def other() -> None:
        print("a user's")
        with logs.quiet():
            print("another session's")

    with logs.quiet():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        print("still quiet")
    assert capfd.readouterr() == ("a user's\n", "")
    assert log.read_text() == "another session's\nstill quiet\n"


def test_other_threads_are_heard_in_a_terminal() -> None:
    """There, Python's own streams write to the very descriptors that lead to the log."""
    code = ("import threading\nfrom mia_lab.running import logs\nwith logs.quiet():\n"
            "    t = threading.Thread(target=print, args=('theirs',)); t.start(); t.join(); print('ours')\n"
            "print('after'); print(logs.path().read_text(), end='')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "theirs\nafter\nours\n" and done.stderr == ""


def test_streams_are_as_before_also_after_an_error_and_without_a_descriptor(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        """As a notebook's stream may be: vLLM issue 16003."""

        encoding, text = "utf-8", ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def fileno(self) -> int:
            raise OSError("no fileno")

    bare = Bare()
    monkeypatch.setattr(sys, "stdout", bare)
    held = []

    def failing() -> None:
        with logs.quiet():
            held.append(sys.stdout)
            os.write(sys.stdout.fileno(), b"low\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert sys.stdout is bare
    print("after", file=held[0])
    assert bare.text == "after\n" and log.read_text() == "low\n"


def test_vllms_logger_writes_to_the_file(log: Path, capfd: pytest.CaptureFixture) -> None:
    logger, before = logging.getLogger("vllm"), logging.getLogger("vllm").handlers[:]
    level, handler = logger.level, logging.StreamHandler()
    try:
        logger.handlers[:] = [handler]
        logger.setLevel("INFO")
        for _ in range(2):
            logs.tame()
        logging.getLogger("vllm.worker").info("loading %s", "weights")
    finally:
        logger.handlers[:], logger.level = before, level
    assert log.read_text().count("[vllm.worker] loading weights") == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", logs._ASKED_FOR)
def test_who_asks_for_vllms_logging_gets_it(name: str, log: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setenv(name, "1")
    with logs.quiet():
        os.write(1, b"as ever\n")
    assert capfd.readouterr().out == "as ever\n" and log.read_text() == ""


def test_the_log_is_private_and_old_ones_go(log: Path) -> None:
    assert log.stat().st_mode & 0o077 == 0
    for i in range(40):
        (log.parent / f"2020010{i:02}-1.log").touch()
    logs._path.cache_clear()
    assert logs.path().exists() and len(list(log.parent.glob("*.log"))) <= logs._KEPT + 1


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path / "file"))
    logs._path.cache_clear()
    start = logs.mark()
    with logs.quiet():
        os.write(1, b"kept\n")
    assert logs.since(start) == "kept\n" and tmp_path not in logs.path().parents
    logs.path().unlink()
