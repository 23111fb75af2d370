"""One set of weights for two engines: two copies of a model at two addresses differ in speed by a per cent, all else being equal."""
from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch

from ..errors import MiaError

_FORMAT = "mia_lab_shared"
_sources: weakref.WeakValueDictionary[str, torch.nn.Module] = weakref.WeakValueDictionary()


def weights_of(llm: Any) -> dict[str, Any]:
    """Return vLLM options by which another engine of this process, with the same options otherwise, runs on `llm`'s own weights.

    None are shared on a CPU, where vLLM packs weights for its kernels and lets the plain ones go.
    """
    if not torch.cuda.is_available():
        return {}
    _register()
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    _sources[str(id(model))] = model
    return {"load_format": _FORMAT, "model_loader_extra_config": {"source": str(id(model))}}


@cache
def _register() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SharedLoader(BaseModelLoader):
        """Gives a model the parameters of another that is loaded already."""

        def download_model(self, model_config: Any) -> None:
            """Nothing is downloaded."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Point every parameter at its twin's memory, and let go of its own."""
            share(model, _sources[self.load_config.model_loader_extra_config["source"]])

    register_model_loader(_FORMAT)(SharedLoader)


def share(model: torch.nn.Module, source: torch.nn.Module) -> None:
    """Let `model` use the memory of `source`'s parameters; MiaError where they are not the same ones."""
    twins = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        twin = twins.get(name)
        if twin is None or twin.shape != parameter.shape or twin.dtype != parameter.dtype:
            raise MiaError(f"the two engines differ in {name}, so their weights cannot be shared")
        parameter.data = twin.data
