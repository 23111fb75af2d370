"""Edits as JSON and named tensors, and back. Only the words listed here can come out of a file; nothing is executed."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..analysis.vectors import Vector
from ..edits import Ablate, Add, Affine, AttentionBias, Clamp, ClampFeature, Edit, Replace, Scale
from ..errors import BundleError, MiaError
from ..gates import After, Decay, Gate, Probe
from ..selectors import Selector

WORDS: dict[str, type] = {cls.__name__: cls for cls in (Add, Ablate, Clamp, Scale, Replace, Affine, ClampFeature, AttentionBias,
                                                        Gate, Probe, After, Decay, Selector, Vector)}
MAX_DEPTH = 24
MAX_ITEMS = 65_536  # of one list

Json = Any
Tensors = dict[str, torch.Tensor]


def encode(value: Any, tensors: Tensors, name: str) -> Json:
    """Return a word, or what words hold, as JSON; its tensors go into `tensors` as float32, under names that begin with `name`.

    An object is {"word": its class, field: value}, without fields at their defaults. Raises BundleError for what is no word.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().to("cpu", torch.float32).contiguous().clone()
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BundleError(f"{name} is {value}, which JSON cannot say")
        return value
    if isinstance(value, (list, tuple, range)):
        return [encode(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]
    if WORDS.get(type(value).__name__) is not type(value):
        raise BundleError(f"{name} is a {type(value).__name__}, which a bundle has no word for; it knows {', '.join(WORDS)}")
    found = {"word": type(value).__name__}
    for field in fields(value):
        held = getattr(value, field.name)
        if field.default is MISSING or isinstance(held, torch.Tensor) or held != field.default:
            found[field.name] = encode(held, tensors, f"{name}.{field.name}")
    return found


def decode(json: Json, tensors: Tensors, depth: int = 0) -> Any:
    """Return what `encode` was given; what it names goes from `tensors`, since a few bytes of JSON could otherwise unfold to any size.

    Raises BundleError where the JSON says something else, and for what the word itself refuses.
    """
    if depth > MAX_DEPTH:
        raise BundleError(f"the bundle nests deeper than {MAX_DEPTH}")
    if json is None or isinstance(json, (bool, int, float, str)):
        return json
    if isinstance(json, list):
        if len(json) > MAX_ITEMS:
            raise BundleError(f"the bundle has a list of {len(json)} items; {MAX_ITEMS} is the most")
        return tuple(decode(item, tensors, depth + 1) for item in json)
    if "tensor" in json:
        if set(json) != {"tensor"} or not isinstance(json["tensor"], str) or json["tensor"] not in tensors:
            raise BundleError(f"the bundle names a tensor {json['tensor']!r} that it does not hold, or twice")
        return tensors.pop(json["tensor"])
    word = json.get("word")
    cls = WORDS.get(word) if isinstance(word, str) else None
    if cls is None:
        raise BundleError(f"the bundle says {word!r}, which is no word; known are {', '.join(WORDS)}")
    known = {field.name for field in fields(cls)}
    strange = set(json) - known - {"word"}
    if strange:
        raise BundleError(f"{word} has no {sorted(strange)[0]!r}; it has {', '.join(sorted(known))}")
    try:
        return cls(**{key: decode(item, tensors, depth + 1) for key, item in json.items() if key != "word"})
    except BundleError:
        raise
    except (MiaError, TypeError, ValueError, RuntimeError) as error:
        raise BundleError(f"{word}: {error}") from None


def decode_edits(json: Json, tensors: Mapping[str, torch.Tensor]) -> list[Edit]:
    """Return a list of edits; BundleError where anything else is in it."""
    found = decode(json, dict(tensors))
    if not isinstance(found, tuple) or not all(isinstance(edit, Edit) for edit in found):
        raise BundleError("`edits` is no list of edits")
    return list(found)
