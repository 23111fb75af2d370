"""What vLLM says goes to a file, not into the cell: its log, what C++ and worker processes print, whole tracebacks.

Where `VLLM_LOGGING_LEVEL` or a logging configuration of vLLM's own is set, that was asked for, and all stays where vLLM puts it.
"""
from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from ..models import cache_dir

_KEPT = 30  # log files of earlier processes
_ASKED_FOR = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")
_lock = threading.RLock()
_quiet: dict[int, int] = {}  # threads that are inside `quiet`, and how deep


@cache
def _path(pid: int) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{pid}.log"
    try:
        folder = cache_dir() / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("*.log"))[:-_KEPT]:
            old.unlink(missing_ok=True)
        os.close(os.open(folder / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        return folder / name
    except OSError:  # a cache that cannot be written is no reason not to load a model
        handle, path = tempfile.mkstemp("-mia_lab.log")
        os.close(handle)
        return Path(path)


def path() -> Path:
    """The log file of this process, shared by its sessions and their workers."""
    return _path(os.getpid())


def mark() -> int:
    """Where the log ends now."""
    return path().stat().st_size


def since(start: int) -> str:
    """What was logged since a mark."""
    with path().open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def keep(error: BaseException) -> None:
    """Put an error's whole traceback into the log."""
    with path().open("a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)


def as_vllm_would() -> bool:
    """Whether someone asked for vLLM's own logging."""
    return any(name in os.environ for name in _ASKED_FOR)


def tame() -> None:
    """Lead vLLM's logger to the file: what stops a run is raised, too. vLLM sets its logger up at import and again for a configuration."""
    if as_vllm_would():
        return
    logger = logging.getLogger("vllm")
    others = [handler for handler in logger.handlers if not isinstance(handler, _File)]
    for handler in others:
        handler.setLevel(logging.CRITICAL)
    if len(others) < len(logger.handlers):
        return
    file = _File(path(), delay=True, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S"))
    logger.addHandler(file)


class _File(logging.FileHandler):
    """The handler that `tame` adds."""


@contextmanager
def quiet() -> Iterator[None]:
    """Lead what this thread prints, and what anything below Python prints, to the file while the block runs.

    Processes started inside keep writing there. What other threads print meanwhile comes to where it did.
    """
    if as_vllm_would():
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


_saved: list[Any] = []  # while redirected: copies of descriptors 1 and 2, and the streams in place of those that were there


@cache
def _log(pid: int) -> TextIO:
    return _path(pid).open("a", encoding="utf-8", buffering=1)


def _enter() -> None:
    with _lock:
        me = threading.get_ident()
        _quiet[me] = _quiet.get(me, 0) + 1
        if _saved:
            return
        streams = sys.stdout, sys.stderr
        for stream in streams:
            _flush(stream)
        copies = os.dup(1), os.dup(2)
        for number in (1, 2):
            os.dup2(_log(os.getpid()).fileno(), number)
        splits = [_Split(stream, _beyond(stream, number, copy)) for stream, number, copy in zip(streams, (1, 2), copies)]
        sys.stdout, sys.stderr = splits
        _saved[:] = copies, splits


def _leave() -> None:
    with _lock:
        me = threading.get_ident()
        _quiet[me] -= 1
        if not _quiet[me]:
            del _quiet[me]
        if _quiet:
            return
        copies, splits = _saved
        _saved.clear()
        for name, split in zip(("stdout", "stderr"), splits):
            split.end()
            if getattr(sys, name) is split:  # else someone has put another in its place, and it stays
                setattr(sys, name, split.stream)
        for number, copy in zip((1, 2), copies):
            os.dup2(copy, number)
            os.close(copy)


def _flush(stream: Any) -> None:
    with suppress(AttributeError, OSError, ValueError):  # none, or a closed one
        stream.flush()


def _beyond(stream: Any, number: int, copy: int) -> Any:
    """Where other threads' prints go: to the stream itself, unless it writes to the descriptor that leads to the log now."""
    try:
        same = stream.fileno() == number
    except (AttributeError, OSError, ValueError):
        return stream
    return open(copy, "w", encoding=stream.encoding, errors="replace", buffering=1, closefd=False) if same else stream


class _Split:
    """A stream that sends the prints of quiet threads to the log, and those of others, or of later, where they belong."""

    def __init__(self, stream: Any, beyond: Any) -> None:
        self.stream, self._beyond, self._over = stream, beyond, False

    def _to(self) -> Any:
        if threading.get_ident() in _quiet:
            return _log(os.getpid())
        return self.stream if self._over else self._beyond  # vLLM's logger holds this stream also when the block is over

    def end(self) -> None:
        """From now on it is the stream that it stands for."""
        _flush(self._beyond)
        _flush(_log(os.getpid()))
        self._over = True

    def write(self, text: str) -> int:
        return self._to().write(text)

    def flush(self) -> None:
        _flush(self._to())

    def fileno(self) -> int:
        """The log's descriptor: a notebook's own stream may have none (vLLM issue 16003)."""
        return self.stream.fileno() if self._over else _log(os.getpid()).fileno()

    def isatty(self) -> bool:
        return self._over and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
