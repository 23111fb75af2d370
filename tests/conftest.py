"""Settings for every test: offline, small, and one engine at a time in this process."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", TRITON_F32_DEFAULT="ieee")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where tiny models are made."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def open_tiny(models: Path) -> Iterator[Callable[..., Any]]:
    """Open a Session on a tiny model; the last one opened stays open until another is asked for."""
    import tiny

    import mia_lab as mia

    held: dict[str, Any] = {}

    def open_(family: str, **options: Any) -> Any:
        key = repr((family, sorted(options.items(), key=str)))
        if key not in held:
            while held:
                held.popitem()[1].close()
            device = dict(attention_backend="TRITON_ATTN", kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.05,
                          compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}) if CUDA else {}
            if options.get("enforce_eager"):
                device.pop("compilation_config", None)
            held[key] = mia.Session(str(tiny.build(family, models)), tokenizer=str(tiny.tokenizer(models)),
                                    **({"dtype": "float32"} | device | options))
        return held[key]

    yield open_
    while held:
        held.popitem()[1].close()
