"""HTTP to one server, over connections that are kept. What was sent is never sent again: a request may have run."""
from __future__ import annotations

import http.client
import json
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ...errors import MiaError, ServerError, named

KEY_NAME = "MIA_LAB_API_KEY"
_IDLE_SECONDS = 3.0  # after which a server may be closing a kept connection
_ANSWER = 1 << 32  # bytes, the most of one answer
_LINE = 1 << 28  # and of one line of a stream
_MESSAGE = 1000  # characters of a server's own words


class Missing(ServerError):
    """The server holds some of the vectors that a request names no more; nothing ran."""

    def __init__(self, message: str, shas: list[str]) -> None:
        super().__init__(message, 409)
        self.shas = shas


class Transport:
    """One server. api_key: sent with every request; by default what the environment's MIA_LAB_API_KEY holds.

    timeout: seconds without a sign of life after which a request is given up; a server says every few seconds that it still runs one.
    Any number of threads may use it. ServerError where the address is none.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0) -> None:
        self.url, (self._secure, self._host, self._port, self._base) = _shown(url), _parts(url)
        key = api_key if api_key is not None else os.environ.get(KEY_NAME, "")
        if not (key.isascii() and key.isprintable()):
            raise ServerError("an API key is printable ASCII; this one holds other characters, as a line break")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout, self._context = timeout, ssl.create_default_context() if self._secure else None
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes:
        """What a path holds."""
        return self._whole("GET", path, None, "")

    def post(self, path: str, body: bytes = b"", kind: str = "application/octet-stream") -> bytes:
        """What a path answers to a body."""
        return self._whole("POST", path, body, kind)

    @contextmanager
    def lines(self, path: str, body: bytes) -> Iterator[Iterator[Any]]:
        """Within the block, the JSON of each line that a path answers, as they come. Leaving it early ends the request."""
        with self._answer("POST", path, body, "application/octet-stream") as answer:
            yield self._lines(answer)

    def close(self) -> None:
        """Close what is kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _whole(self, method: str, path: str, body: bytes | None, kind: str) -> bytes:
        with self._answer(method, path, body, kind) as answer:
            found = answer.read(_ANSWER)
            if not answer.isclosed() and answer.read(1):
                raise ServerError(f"{self.url} answered with more than {_ANSWER} bytes")
            return found

    def _lines(self, answer: http.client.HTTPResponse) -> Iterator[Any]:
        while text := answer.readline(_LINE):
            if not text.endswith(b"\n"):
                raise ServerError(f"the answer of {self.url} broke off in the middle of a line")
            if text.strip():
                try:
                    yield json.loads(text)
                except (ValueError, RecursionError):
                    raise ServerError(f"{self.url} answered with a line that is no JSON") from None

    @contextmanager
    def _answer(self, method: str, path: str, body: bytes | None, kind: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to one request. A connection whose answer was not read to its end is closed, which tells the server."""
        connection = self._connection()
        try:
            with self._explained():
                headers = self._headers | ({"Content-Type": kind} if body is not None else {})
                connection.request(method, self._base + path, body, headers)
                answer = connection.getresponse()
                if answer.status >= 300:
                    raise self._refusal(answer, path)
                yield answer
                kept = answer.isclosed() and not answer.will_close
            if kept:
                with self._lock:
                    self._idle.append((time.monotonic(), connection))
                connection = None
        finally:
            if connection is not None:
                connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
            if time.monotonic() - since < _IDLE_SECONDS and _lives(connection):
                return connection
            connection.close()
        if self._context is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ssl.SSLError as error:
            raise ServerError(f"no secure connection to {self.url}: {error.reason or error}. Is it an http:// server, or its certificate "
                              f"one that this machine does not trust?") from None
        except (ConnectionRefusedError, socket.gaierror) as error:
            raise ServerError(f"there is no server at {self.url}: {error.strerror or error}") from None
        except TimeoutError:
            raise ServerError(f"{self.url} gave no sign of life for {self._timeout:g} seconds; what was asked may still run") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection to {self.url} broke off: {str(error) or type(error).__name__}. Is the server still "
                              f"running?") from None

    def _refusal(self, answer: http.client.HTTPResponse, path: str) -> MiaError:
        """The error that a refusal, or what another server says, comes to."""
        status, text = answer.status, answer.read(1 << 20)
        try:
            said = json.loads(text)["error"]
            message, name = str(said["message"])[:_MESSAGE], said.get("name")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            message, name, said = "", None, {}
        foreign = not message or message in ("Not Found", "Method Not Allowed")
        if status == 401:
            return ServerError(f"{self.url} refuses this key: {message or 'it gives no reason'}. Give api_key=, or set {KEY_NAME}", 401)
        if 300 <= status < 400:
            return ServerError(f"{self.url} sends elsewhere, to {str(answer.headers.get('Location'))[:200]!r}; give that address", status)
        if foreign:
            return ServerError(f"{self.url} answers {status} to {path}: it is no server with mia_lab, or serves without it. Start vllm "
                               f"serve with --additional-config '{{\"mia_lab\": {{\"serve\": \"/etc/mia_lab\"}}}}'", status)
        shas = said.get("missing")
        if status == 409 and isinstance(shas, list) and all(isinstance(sha, str) for sha in shas):
            return Missing(message, shas)
        return named(name, message) if isinstance(name, str) else ServerError(f"{self.url} refuses: {message}", status)


def _lives(connection: http.client.HTTPConnection) -> bool:
    """Whether an idle connection is still good: what could be read from it is its end."""
    try:
        return not select.select([connection.sock], [], [], 0)[0]
    except (OSError, ValueError):
        return False


def _parts(url: str) -> tuple[bool, str, int | None, str]:
    """Whether an address is secure, its host, port and the path that others go below."""
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError:
        found, port = urlsplit(""), None
    if found.scheme not in ("http", "https") or not found.hostname or found.query or found.fragment or not url.isprintable():
        raise ServerError(f'{_shown(url)!r} is no address of a server; type for example mia.Client("http://localhost:8000")')
    if found.username or found.password:
        raise ServerError("a server's address holds no user or password; give the key as api_key=")
    return found.scheme == "https", found.hostname, port, found.path.rstrip("/").removesuffix("/v1")


def _shown(url: str) -> str:
    """An address as messages repeat it, without what stands before an @."""
    scheme, mark, rest = str(url).partition("://")
    return (f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else scheme)[:200]
