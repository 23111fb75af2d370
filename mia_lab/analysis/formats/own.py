"""A Vector in one safetensors file."""
from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import EditError
from ..vectors import Vector

FORMAT = "mia_lab vector 1"


def save(vector: Vector, path: str | Path) -> Path:
    """Write a Vector; a file that was there is replaced once the new one is whole."""
    path = Path(path)
    about = {"format": FORMAT, "kind": vector.kind, "layers": json.dumps(vector.layers), "method": vector.method}
    tensors = {"rows": vector.rows, "raw_norms": vector.raw_norms, "unit": vector.unit}
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    save_file({name: tensor.float().clone() for name, tensor in tensors.items()}, scratch, metadata=about)
    scratch.replace(path)
    return path


def load(path: str | Path) -> Vector:
    """Read a Vector; EditError when the file holds something else."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise EditError(f"{path} was not written by Vector.save; files of other tools: mia.import_vector(path)")
            tensors = [file.get_tensor(name) for name in ("rows", "raw_norms", "unit")]
    except (SafetensorError, OSError) as error:
        raise EditError(f"{path} cannot be read as a vector: {error}") from None
    return Vector(about["kind"], tuple(json.loads(about["layers"])), *tensors, about["method"])
