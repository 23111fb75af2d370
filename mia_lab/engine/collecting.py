"""All that the courier holds of one request, as plain values and bytes."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .courier import Courier
from .wire import Site


def held_of(courier: Courier, uid: str, since: int, sites: Sequence[Site], shapes: Mapping[Site, tuple[int, ...]]) -> list[list[Any]]:
    """Return, for each point captured of a request before its edits or after: kind, layer, before, int64 positions `[n]` from
    `since` on, the shape of one row, the name of its type, and values `[n *shape]`.

    The shape is the point's own, or `[k]` where rows were reduced to k float32 values. A mean has one row for all positions.
    """
    found = []
    for (site, before), reduced, positions, values in courier.held(uid, since):
        shape = [values.shape[1]] if reduced else list(shapes[sites[site]])
        data = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.append([*sites[site], before, positions.tobytes(), shape, str(values.dtype).removeprefix("torch."), data])
    return found
