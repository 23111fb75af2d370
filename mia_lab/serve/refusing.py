"""Refusals: what a server does not do, with the HTTP status and the words that say why."""
from __future__ import annotations

from typing import Any

from ..errors import MiaError, MissingRowsError, RoomError

TYPES = {400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 409: "ConflictError",
         413: "RequestTooLargeError", 429: "RateLimitError", 503: "ServiceUnavailableError"}
MAX_MESSAGE = 1000  # characters


class Refused(MiaError, ValueError):
    """A request that is not served. status: the HTTP status, one of `TYPES`; message: what was asked, what exists, what to type."""

    def __init__(self, status: int, message: str) -> None:
        if status not in TYPES:
            raise ValueError(f"{status} is the status of no refusal")
        message = printable(message)
        super().__init__(message)
        self.status, self.message = status, message

    @property
    def type(self) -> str:
        """The name that OpenAI's clients know the status by."""
        return TYPES[self.status]

    def body(self) -> dict[str, Any]:
        """The answer as JSON."""
        return {"error": {"message": self.message, "type": self.type, "param": None, "code": self.status}}


def refused(error: MiaError) -> Refused:
    """What a client is told of an error: 429 where there may be room later, 409 for what was let go of, else 400."""
    if isinstance(error, Refused):
        return error
    return Refused(429 if isinstance(error, RoomError) else 409 if isinstance(error, MissingRowsError) else 400, str(error))


def printable(text: str) -> str:
    """A text that any answer or log can hold: bounded, and without what UTF-8 cannot say."""
    text = text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object) -> str:
    """What a client sent, as a refusal repeats it: ASCII, and its beginning only."""
    text = ascii(value)
    return text if len(text) <= 64 else text[:61] + "..."
