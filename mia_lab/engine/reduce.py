"""Reductions: captured rows become a few numbers on the device, and only these leave it."""
from __future__ import annotations

from collections import OrderedDict

import torch

from .tables import Tables
from .wire import Reduce, Site

_RESIDENT_BYTES = 1 << 30
_WORK_BYTES = 256 << 20


class Reducer:
    """Applies reductions, and keeps the matrices that they use on the device, the least recently used going first."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._resident: OrderedDict[str, torch.Tensor] = OrderedDict()

    @torch.inference_mode()
    def apply(self, how: Reduce, site: Site, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 `[n m]` for rows `[n d]` (`[1 m]`, their sum, for a mean): m is 1 for a norm, 2 k for the largest
        values followed by their places, else the matrix's rows or d."""
        sha = next((sha for kind, layer, sha in how.matrices if (kind, layer) == site), None)
        matrix = None if sha is None else self._matrix(sha)
        size = len(rows) if matrix is None else max(1, _WORK_BYTES // (8 * len(matrix)))
        found = torch.cat([self._some(how, matrix, part) for part in rows.split(size)])
        return found.sum(0, keepdim=True) if how.mean else found

    @staticmethod
    def _some(how: Reduce, matrix: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        values = rows.float()
        if matrix is not None:
            values = torch.addmm(matrix[:, -1], values, matrix[:, :-1].T)
        if how.threshold is not None:
            values = torch.where(values > how.threshold, values, 0.0)
        if how.norm:
            values = values.norm(dim=1, keepdim=True)
        if how.k:
            top = values.topk(how.k, dim=1)
            values = torch.cat([top.values, top.indices.float()], 1)
        return values

    def _matrix(self, sha: str) -> torch.Tensor:
        if sha not in self._resident:
            self._resident[sha] = self._tables.vectors[sha].to(self._tables.device)
        self._resident.move_to_end(sha)
        while len(self._resident) > 1 and sum(m.nbytes for m in self._resident.values()) > _RESIDENT_BYTES:
            self._resident.popitem(last=False)
        return self._resident[sha]
