"""What metrics and spans say of one request that an edit acts on or rows are captured from."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import tracing

if TYPE_CHECKING:
    from .call import Call

INLINE = "(inline)"  # stands for edits that came with a request: no bundle has this name


@dataclass(frozen=True, slots=True)
class Noted:
    """edits: names, each once; dose: the largest at one point, in mean residual norms, None where it is not known."""

    edits: tuple[str, ...]
    dose: float | None
    captures: bool


@contextmanager
def noted(call: Call, request_id: str, what: Noted) -> Iterator[None]:
    """Count a request, and have vLLM's span of it say what acts, while it runs."""
    said = {"mia_lab.config": call.catalogue.digest, "mia_lab.capture": what.captures, "mia_lab.edits": list(what.edits)}
    if what.dose is not None:
        said["mia_lab.dose"] = what.dose
    metrics = call.service.metrics
    metrics.began(what)
    try:
        with tracing.said(request_id, said):
            yield
    finally:
        metrics.ended(what)
