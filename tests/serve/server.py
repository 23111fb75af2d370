"""A real server on the demo model, in a process of its own on a free port, and short ways to talk to it."""
from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mia_lab.models import resolve

MODEL = "demo"  # as requests name it
CHAT = Path(__file__).with_name("chat.jinja")  # the demo model has no template of its own
_START_SECONDS = 200


@dataclass(frozen=True)
class Answer:
    """One HTTP answer. Header names are in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The words of a refusal."""
        return self.json["error"]["message"]


@dataclass(frozen=True)
class Server:
    """Where a server listens, and what it printed."""

    url: str
    log: Path
    process: subprocess.Popen

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None, headers: dict[str, str] | None = None) -> Answer:
        """Send one request. body: bytes, or what is sent as JSON; the path goes out as it is."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sent = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {}) | (headers or {})
            connection.request(method, path, data, sent)
            found = connection.getresponse()
            return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())
        finally:
            connection.close()

    def complete(self, prompt: Any, mia: Any = None, key: str | None = None, **fields: Any) -> Answer:
        """A greedy completion; mia: what "mia_lab" is to say, a str as it is."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return self.ask("POST", "/v1/completions", body | xargs(mia) | fields, key)

    def text(self, prompt: Any, mia: Any = None, **fields: Any) -> str:
        """The text of a greedy completion."""
        found = self.complete(prompt, mia, **fields)
        assert found.status == 200, found.body
        return found.json["choices"][0]["text"]

    def stop(self) -> None:
        """End the server and all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def xargs(mia: Any) -> dict[str, Any]:
    """The field of a request's body that says what mia_lab is to do."""
    return {} if mia is None else {"vllm_xargs": {"mia_lab": mia if isinstance(mia, str) else json.dumps(mia)}}


def launch(folder: Path, said: dict[str, Any] | None, *args: str, processes: int = 1, model: Path | None = None,
           env: dict[str, str] | None = None) -> Server:
    """Start a server of a model, by default the demo's, without waiting for it. said: what additional_config has of mia_lab, None for
    an engine that does not opt in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [] if said is None else ["--additional-config", json.dumps({"mia_lab": said})]
    here, model = Path(sys.executable), model or resolve("demo")
    entry = ([here, "-m", "vllm.entrypoints.openai.api_server", "--model", model] if processes == 1 else
             [here.with_name("vllm"), "serve", model, "--api-server-count", processes])
    command = [*map(str, entry), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
               "--max-num-seqs", "16", "--max-model-len", "512", "--chat-template", str(CHAT), *options, *args]
    small = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_CI_ENV": "1"}
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
                                   env=os.environ | small | (env or {}))
    return Server(f"http://127.0.0.1:{port}", log, process)


def wait(server: Server) -> Server:
    """Return a server once it takes traffic; AssertionError, with what it printed, where it does not."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if server.ask("GET", "/health").status == 200:
                return server
        except OSError:
            time.sleep(0.3)
    server.stop()
    raise AssertionError(f"the server did not start:\n{server.log.read_text()[-6000:]}")


@contextmanager
def running(folder: Path, said: dict[str, Any] | None, *args: str, **options: Any) -> Iterator[Server]:
    """A server as long as the block runs."""
    server = launch(folder, said, *args, **options)
    try:
        yield wait(server)
    finally:
        server.stop()
