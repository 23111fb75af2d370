"""A real JupyterLab server (or Notebook 7) on this machine, with a token, and what the tests ask of it over HTTP."""
from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# Cells outside the window are not drawn otherwise, and the first start asks whether to fetch news.
_SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"},
             "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}


class Lab:
    """A server whose root, settings and kernels are its own."""

    def __init__(self, folder: Path, app: str = "lab") -> None:
        self.root, self.token, self.app = folder / "root", secrets.token_hex(16), app
        self.root.mkdir(parents=True)
        for name, values in _SETTINGS.items():
            path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
        env = os.environ | own | {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "spaces"),
                                  "JUPYTER_TOKEN": self.token, "OMP_NUM_THREADS": "1"}
        self._log = (folder / "log").open("w")
        module = {"lab": "jupyterlab", "notebook": "notebook"}[app]
        options = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1", f"--port={self.url.rpartition(':')[2]}",
                   "--ServerApp.port_retries=0", f"--ServerApp.root_dir={self.root}"]
        self._process = subprocess.Popen([sys.executable, "-m", module, *options], env=env, cwd=folder, stdout=self._log, stderr=self._log)
        self._wait(60)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self.ask("GET", "/api/status")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise RuntimeError(f"the server did not start: {Path(self._log.name).read_text()[-2000:]}")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request of the server's API, which needs the token."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Authorization": f"token {self.token}"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def page(self, notebook: str) -> str:
        """Where a notebook is opened, without what was open before."""
        return f"{self.url}/{'lab/tree' if self.app == 'lab' else 'notebooks'}/{notebook}?reset&token={self.token}"

    def end_kernels(self) -> int:
        """Shut every kernel down, as someone else would; return how many there were."""
        kernels = self.ask("GET", "/api/kernels")
        for kernel in kernels:
            self.ask("DELETE", f"/api/kernels/{kernel['id']}")
        return len(kernels)

    def close(self) -> None:
        """End the server and its kernels."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
