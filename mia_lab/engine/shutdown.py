"""Ending one engine of several in a process."""
from __future__ import annotations

from typing import Any


def shut_down(client: Any, alone: bool) -> None:
    """Stop an engine behind its core client. Unless it is `alone` in this process, leave what engines share.

    vLLM's own shutdown also destroys the process's distributed state, on which every other in-process engine runs.
    """
    core = getattr(client, "engine_core", None)
    if alone or core is None:
        client.shutdown()
    else:
        finalizer = getattr(client, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
