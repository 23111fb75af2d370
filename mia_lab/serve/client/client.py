"""Client: a Session on a server's model."""
from __future__ import annotations

from pathlib import Path

from ...errors import UnsupportedError
from ...session import Session
from .library import ServedLibrary
from .remote_engine import RemoteEngine
from .transport import Transport


class Client(Session):
    """A Session whose engine is a server's: `vllm serve` with mia_lab and a folder of bundles. vLLM need not be installed here.

    url: as "http://localhost:8000". api_key: one that may generate, steer and capture, with inline edits; by default what the
    environment's MIA_LAB_API_KEY holds. timeout: seconds without a sign of life after which the server is given up.
    The server's default edits do not act on what is run here. Captured values stay on the server until they are used, at most as long as
    it keeps them: `client.served["capture_seconds"]` after they were last asked for.
    Raises ServerError, with what to do, where the server cannot be reached, refuses the key, or has no mia_lab.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float = 60.0) -> None:
        self._http = Transport(url, api_key, timeout)
        try:
            engine = RemoteEngine(self._http)
        except BaseException:
            self._http.close()
            raise
        self.served = engine.served
        self._over(engine, str(engine.served["model"]))

    def library(self) -> ServedLibrary:
        """Return the bundles in the server's folder that this key may use: shown as a table, `[name]` fetches one."""
        return ServedLibrary(self._http)

    @property
    def log(self) -> Path:
        """UnsupportedError: the log is the server's."""
        raise UnsupportedError("the engine's log is on its server")
