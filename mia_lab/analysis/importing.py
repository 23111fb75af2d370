"""Vectors out of, and into, the files of other tools."""
from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EditError
from ..points import Point
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session

_FORMATS = {"gguf": "a control vector of repeng or llama.cpp", "steering-vectors": "a SteeringVector written by torch.save",
            "safetensors": "what Vector.save wrote"}
_SUFFIXES = {".gguf": "gguf", ".pt": "steering-vectors", ".pth": "steering-vectors", ".safetensors": "safetensors"}


def import_vector(path: str | Path, session: Session | None = None, format: str | None = None) -> Vector:
    """Read a vector from a file of repeng or llama.cpp (GGUF), steering-vectors (.pt) or `Vector.save` (.safetensors).

    With a session, each layer is scaled to the session's unit there, as a fitted vector is, and `vector.natural` adds what the file
    holds. Without one, coefficient 1.0 adds what the file holds. Nothing in a file is executed. EditError for a file of another
    kind, or one that does not fit the session's model.
    """
    path = Path(path)
    if not path.exists():
        raise EditError(f"there is no file {path}")
    if path.is_dir():
        raise EditError(f"{path} is a folder; a sparse autoencoder is read by mia.SparseAutoencoder.load({str(path)!r})")
    chosen = format or _SUFFIXES.get(path.suffix)
    if chosen not in _FORMATS:
        listed = "; ".join(f"{name!r}: {what}" for name, what in _FORMATS.items())
        raise EditError(f"{path.name} is of no known format ({format or path.suffix!r}); give format= one of {listed}")
    if chosen == "safetensors":
        return _checked(Vector.load(path), session)
    if chosen == "gguf":
        from .formats.gguf import load
    else:
        from .formats.torch_file import load
    return load(path).vector(session)


def export_vector(vector: Vector, path: str | Path, format: str | None = None, *, model_hint: str = "") -> Path:
    """Write a vector for repeng or llama.cpp (`.gguf`) or steering-vectors (`.pt`), where a strength of c then does what a
    coefficient of c does here. model_hint: the architecture's name, which GGUF keeps as a label."""
    path = Path(path)
    chosen = format or _SUFFIXES.get(path.suffix)
    if chosen == "safetensors":
        return vector.save(path)
    if chosen == "gguf":
        from .formats.gguf import save as save_gguf

        return save_gguf(vector, path, model_hint)
    if chosen == "steering-vectors":
        from .formats.torch_file import save

        return save(vector, path)
    raise EditError(f"{path.name} is of no known format ({format or path.suffix!r}); give format= one of {', '.join(_FORMATS)}")


def _checked(vector: Vector, session: Session | None) -> Vector:
    """A vector of this project's own file, which keeps its unit; EditError when a session's is another."""
    if session is not None:
        held = dict(zip((p.layer for p in session.tapped if p.kind == vector.kind), session.unit(vector.kind).tolist()))
        for layer, unit in zip(vector.layers, vector.unit.tolist()):
            here = held.get(layer, float("nan"))
            width = prod(session._engine.shapes.get(Point(vector.kind, layer), ()))
            if not abs(here - unit) <= 0.05 * unit or vector.rows.shape[-1] != width:
                raise EditError(f"at {vector.kind} {layer} the vector is {vector.rows.shape[-1]} wide with unit {unit:.4g}; here these are "
                                f"{width} and {here:.4g}, so it was made on another model")
    return vector
