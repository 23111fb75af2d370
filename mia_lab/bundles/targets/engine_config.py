"""What stock vLLM needs to run edits with this plugin: the points that they read and write, for `vllm serve --config FILE.yaml`.

It declares points and kinds of edit, no edit: these lie in bundles, in the folder that it names. So it is written and not read.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...edits import Edit
from ...engine.config import EngineOptions
from ...engine.wire import ATTENTION, KEY
from ...running.declare import needed
from . import files

FOLDER = "/etc/mia_lab"  # of serve.toml and bundles/


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write the config: YAML for --config, or where the path ends in .json the value of --additional-config."""
    if path.suffix == ".json":
        return files.write_json(path, additional(edits))
    return files.write(path, config_yaml(edits, model).encode())


def config_yaml(edits: Sequence[Edit], model: str = "") -> str:
    """The text of a config file; with a model, the file names it."""
    said = ({"model": model} if model else {}) | {"additional-config": additional(edits)}
    return files.yaml().safe_dump(said, sort_keys=False, allow_unicode=True, width=120)


def additional(edits: Sequence[Edit]) -> dict[str, Any]:
    """The value of --additional-config. An engine whose model lacks one of the points refuses to start."""
    sites = tuple((point.kind, point.layer) for point in sorted({point for edit in edits for point in needed(edit)}))
    kinds = tuple(sorted({type(edit).__name__.lower() for edit in edits}))
    biased = 4096 if any(kind == ATTENTION for kind, _ in sites) else 0  # rows whose keys and values are kept beside the cache
    return {KEY: {"serve": FOLDER} | EngineOptions(sites, frozenset(sites), edits=kinds, max_biased_tokens=biased).as_json()}
