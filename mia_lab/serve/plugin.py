"""The vLLM general plugin: taps, and, for a server that asks for it, edits and captures by request.

An engine opts in through `additional_config["mia_lab"]`, and a server where that names a folder under "serve". Nothing else is touched.
"""
from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from ..engine import plugin as taps
from ..engine.wire import KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def register() -> None:
    """Hook the places where an engine comes to life. Safe to call many times."""
    taps.register()
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, "mia_lab", False):
        return

    @wraps(create)
    def with_points(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        config = create(self, *args, **kwargs)
        extra = config.additional_config
        said = extra.get(KEY) if isinstance(extra, dict) else None
        if said is not None and ("serve" in said or "sites" not in said):  # a Session spells its points out itself
            from .opting import opt_in

            config.additional_config = {**extra, KEY: opt_in(said, config)}
        return config

    with_points.mia_lab = True
    EngineArgs.create_engine_config = with_points
