"""Control vectors as llama.cpp and repeng keep them: GGUF with one 1-D float32 tensor `direction.N` a block.

N is the 0-based block whose *output* the vector is added to, in both, so it is `resid_post` N here. llama.cpp refuses a whole
file that holds `direction.0`; others write it. Strength 1 adds the tensor as it is.
"""
from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import torch

from ...errors import EditError, MiaError
from ..vectors import Vector
from .gguf_bounds import refuse_bombs
from .raw import Raw

_ARCHITECTURE = "controlvector"
_NAME = re.compile(r"direction\.([0-9]{1,9})")


def load(path: str | Path) -> Raw:
    """Read the directions of a control vector; EditError when the file is no such thing, or is not float32."""
    library = _library()
    refuse_bombs(Path(path))
    try:
        reader = library.GGUFReader(str(path))
    except Exception as error:  # its reader has no error of its own for a damaged file
        raise EditError(f"{path} cannot be read as GGUF: {error}") from None
    kind = _text(reader, "general.architecture")
    if kind != _ARCHITECTURE:
        raise EditError(f"{path} is GGUF of architecture {kind!r}, not {_ARCHITECTURE!r}")
    rows: dict[int, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _NAME.fullmatch(tensor.name)
        if name is None or len(tensor.shape) != 1 or tensor.tensor_type != library.GGMLQuantizationType.F32:
            raise EditError(f"{path} holds {tensor.name!r} of shape {list(map(int, tensor.shape))} and type {tensor.tensor_type.name}; "
                            f"a control vector holds 1-D F32 tensors direction.N")
        if int(name[1]) in rows:
            raise EditError(f"{path} names block {int(name[1])} twice")
        rows[int(name[1])] = torch.from_numpy(np.array(tensor.data, dtype=np.float32))
    hint = _text(reader, f"{_ARCHITECTURE}.model_hint")
    return Raw("resid_post", rows, f"gguf ({hint})" if hint else "gguf")


def save(vector: Vector, path: str | Path, model_hint: str) -> Path:
    """Write a Vector for llama.cpp or repeng. A strength there is what the coefficient is here; give `vector.natural` to write
    the directions at the length at which they were fitted. A file that was there is replaced once the new one is whole.

    model_hint: the architecture, as "llama" or "gemma3"; it is a label. EditError for a vector that is not at `resid_post`, or that
    has layer 0, for which llama.cpp would refuse the file.
    """
    library = _library()
    if vector.kind != "resid_post":
        raise EditError(f"llama.cpp adds control vectors to the output of blocks; this one is at {vector.kind}")
    if 0 in vector.layers:
        raise EditError("llama.cpp refuses a control vector for block 0; write the others: vector[1:]")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    writer = library.GGUFWriter(str(scratch), _ARCHITECTURE)
    writer.add_string(f"{_ARCHITECTURE}.model_hint", model_hint)
    writer.add_uint32(f"{_ARCHITECTURE}.layer_count", len(vector.layers))
    for layer, row in zip(vector.layers, vector.rows):
        writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(row.numpy(), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.replace(path)
    return path


def _library() -> object:
    try:
        import gguf
    except ImportError:
        raise MiaError("control vectors of llama.cpp need the gguf package: pip install gguf") from None
    return gguf


def _text(reader: object, name: str) -> str | None:
    field = reader.get_field(name)
    try:
        return None if field is None else str(field.contents())
    except UnicodeDecodeError as error:
        raise EditError(f"{name} is no text: {error}") from None
