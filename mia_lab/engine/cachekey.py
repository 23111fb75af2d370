"""Prefix-cache identity: a block's key forks by what edits its own rows, so equal edits share KV and others do not.

vLLM chains block hashes, so keying each block by the edits on its own rows is enough: everything after the first
edited block differs through its parent, and everything before stays shared with unedited requests.
"""
from __future__ import annotations

import hashlib
import inspect
import json
from bisect import bisect_left
from dataclasses import astuple, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from .wire import Spec, of_request

if TYPE_CHECKING:
    from vllm.v1.request import Request

_HOOK = "_gen_prompt_embeds_extra_hash_keys"  # every path to a block's extra keys calls it with the block's range


@lru_cache(maxsize=8192)
def block_key(spec: Spec, start: int, end: int) -> str | None:
    """Return the identity of the edits on rows `[start, end)`, or None when there are none."""
    active = []
    for term in spec.terms:
        near = term.spans[max(bisect_left(term.spans, (start,)) - 1, 0) : bisect_left(term.spans, (end,))]  # spans ascend
        clipped = tuple((max(a, start), min(end if b is None else b, end)) for a, b in near)
        clipped = tuple((a, b) for a, b in clipped if a < b)
        if clipped and term.op != "measure":
            active.append((astuple(replace(term, spans=clipped)), _gate_key(spec, term.gate)))
    return hashlib.sha256(json.dumps(active).encode()).hexdigest() if active else None


def _gate_key(spec: Spec, gate: int) -> tuple:
    """Everything that decides a gate, or nothing where there is none."""
    if gate < 0:
        return ()
    measures = tuple(astuple(term) for term in spec.terms if term.op == "measure" and term.gate == gate)
    return astuple(spec.gates[gate]), measures


def spec_of(request: Request) -> Spec | None:
    """Return the Spec of an engine request, decoded once."""
    if not hasattr(request, "mia_spec"):
        params = request.sampling_params
        found = of_request(params.extra_args if params is not None else None)
        request.mia_spec = None if found is None else found[1]
    return request.mia_spec


def install() -> None:
    """Fork the block keys of this process's engine. Requests without a spec hash as before."""
    from vllm.v1.core import kv_cache_utils

    original = getattr(kv_cache_utils, _HOOK, None)
    if getattr(original, "mia_lab", False):
        return
    if original is None or list(inspect.signature(original).parameters) != ["request", "start_token_idx", "end_token_idx"]:
        raise UnsupportedError("this vLLM builds prefix-cache keys in an unknown way, so edited KV could be shared; "
                               "load with a vLLM from 0.25.1 to 0.33, or enable_prefix_caching=False")

    def keys(request: Request, start_token_idx: int, end_token_idx: int) -> list[Any]:
        found = original(request, start_token_idx, end_token_idx)
        spec = spec_of(request)
        key = None if spec is None else block_key(spec, start_token_idx, end_token_idx)
        return found if key is None else [*found, ("mia_lab", key)]

    keys.mia_lab = True
    setattr(kv_cache_utils, _HOOK, keys)
