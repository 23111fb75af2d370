"""One HTTP request, as everything that serves it sees it."""
from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .refusing import Refused

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .policy import Key
    from .service import Service


@dataclass(slots=True)
class Call:
    """Who asks, the one catalogue that answers from beginning to end, and what came of it: handles of captures, one a prompt,
    the edits that acted, and why it was refused. messages: of a chat, where an edit may act on the tokens of a role. asks: whether its
    body speaks of mia_lab. began: whether a request of its runs, so that what acts is known. running: the engine's names of captures
    whose requests have not ended; ended: those of the others."""

    key: Key
    catalogue: Catalogue
    service: Service
    handles: list[str] = field(default_factory=list)
    acted: list[tuple[str, float]] = field(default_factory=list)
    refusal: Refused | None = None
    messages: list[dict[str, str]] | None = None
    asks: bool = False
    began: bool = False
    running: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def refuse(self, refusal: Refused) -> Refused:
        """Note why the call is not served, and return it to be raised."""
        self.refusal = self.refusal or refusal
        return refusal


CALL: ContextVar[Call | None] = ContextVar("mia_lab_call", default=None)
