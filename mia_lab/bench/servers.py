"""vLLM's OpenAI server as a process of its own: started on a free port of this machine, and always stopped."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from ..errors import EngineError, MiaError
from ..running.failures import logged

_HOST = "127.0.0.1"
_START_SECONDS, _STOP_SECONDS = 1200, 20
_BODY = 1 << 16  # bytes of an answer that are looked at
_TAIL = 2000  # characters of a log that an error repeats
_OWN = ("model", "served_model_name", "host", "port", "uds", "api_key")  # options that are the bench's to give


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. name: of the model in its requests; key: what they bring as authorization; log: what it prints."""

    url: str
    name: str
    key: str
    log: Path
    process: subprocess.Popen

    @property
    def said(self) -> str:
        """The cause that its log gives, where it gives one, and the log's end."""
        text = self.log.read_text(errors="replace")
        cause = logged(text)
        return f"{cause}\nIts log ends:\n{text[-_TAIL:].strip()}" if cause else f"its log ends:\n{text[-_TAIL:].strip()}"


    def wait(self) -> None:
        """Wait until it serves its model; EngineError, with what its log says, where it ends, or does not after 20 minutes."""
        direct, end = build_opener(ProxyHandler({})), time.monotonic() + _START_SECONDS
        asked = Request(f"{self.url}/v1/models", headers={"Authorization": f"Bearer {self.key}"})
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise EngineError(f"the server ended with status {self.process.returncode} before it served: {self.said}")
            with suppress(OSError, HTTPException), direct.open(asked, timeout=5) as answer:
                if self.name.encode() in answer.read(_BODY):  # and not another server at this port
                    return
            time.sleep(0.3)
        raise EngineError(f"the server does not serve after {_START_SECONDS} seconds: {self.said}")


@contextmanager
def running(model: str, engine: Mapping[str, Any], log: Path, name: str, key: str) -> Iterator[Server]:
    """A server as long as the block runs; it and all its processes end with the block, whatever ends that.

    engine: vLLM's options by their Python names.
    """
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", name, "--host", _HOST,
               "--port", str(port), *options(engine)]
    env = {word: value for word, value in os.environ.items() if word != "VLLM_API_KEY"}  # the native one would want that key
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, env=env)
    try:
        yield Server(f"http://{_HOST}:{port}", name, key, log, process)
    finally:
        _stop(process)


def options(engine: Mapping[str, Any]) -> list[str]:
    """vLLM's options as its command takes them; MiaError for those that the bench gives itself."""
    taken = [name for name in engine if name.replace("-", "_") in _OWN]
    if taken:
        raise MiaError(f"--engine has {taken[0]!r}, which bench --http chooses itself; leave it out")
    found = []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            found += [f"--{flag}", *map(str, value)]
        elif value is not None:
            found += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return found


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the block, what asks this process to end does so in order, as Ctrl-C does: what it started ends, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen) -> None:
    """End a process's whole group: kindly, then for certain, also where the wait is interrupted."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
