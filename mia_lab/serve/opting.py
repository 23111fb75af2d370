"""What an engine that opted in becomes: its points and edits spelled out, and, for a server, the hooks of its process."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from .catalogue import TOML
from .declare import expand
from .disk import Disk
from .policy import MAX_BYTES, Policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def opt_in(options: Any, config: VllmConfig) -> dict[str, Any]:
    """Return what `additional_config["mia_lab"]` comes to for this engine; MiaError where it says what cannot be, or where a
    server's policy cannot be followed, before minutes of loading."""
    found = expand(options, config)
    if "serve" in found:
        from vllm import envs

        from . import hook, tracing

        if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
            raise UnsupportedError("vLLM's Rust front end lets requests past the keys and edits of \"serve\"; unset VLLM_USE_RUST_FRONTEND")
        if "smg_grpc_servicer" in sys.modules:  # which vLLM's gRPC server alone imports
            raise UnsupportedError("vLLM's gRPC server asks for no key, so it lets requests past the keys of \"serve\"; leave out --grpc")
        disk = Disk(found["serve"])
        if disk.exists(TOML):
            Policy.read(disk.read(TOML, MAX_BYTES))
        hook.install()
        tracing.install()
    return found
