"""A compose file for `vllm serve` with this plugin: the model, the points that a bundle's edits need, and the bundle, mounted."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...edits import Edit
from ...errors import BundleError
from .. import folder
from ..bundle import Bundle
from . import files
from .engine_config import FOLDER, config_yaml
from .kubernetes import CONFIG, bundle_key


def export_to(edits: Sequence[Edit], path: Path, *, bos: str | None = None, model: str = "") -> Path:
    """Write the file; `docker compose up` asks for MIA_LAB_IMAGE, an image with vLLM and mia_lab. The bundle is named relative to it."""
    if not isinstance(edits, Bundle):
        raise BundleError("a compose file mounts a bundle: give mia.load('NAME.steer'), or type mia-lab convert NAME.steer ...")
    folder.get(edits.path)  # a bundle may come out of a manifest, which is none to mount
    config = config_yaml(edits, model or edits.about["model"]["name"])
    source = edits.path.resolve()
    base = path.parent.resolve()
    named = f"./{source.relative_to(base)}" if source.is_relative_to(base) else str(source)
    service = {"image": "${MIA_LAB_IMAGE:?name an image with vllm and mia_lab}", "entrypoint": ["vllm", "serve"],
               "command": ["--config", f"{FOLDER}/{CONFIG}", "--host", "0.0.0.0"], "ports": ["8000:8000"], "ipc": "host",
               "configs": [{"source": "vllm", "target": f"{FOLDER}/{CONFIG}"}],
               "volumes": [f"{named}:{FOLDER}/bundles/{bundle_key(source)}:ro"]}
    said = {"services": {"vllm": service}, "configs": {"vllm": {"content": config.replace("$", "$$")}}}
    return files.write(path, files.yaml().safe_dump(said, sort_keys=False, allow_unicode=True, width=120).encode())
