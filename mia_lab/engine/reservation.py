"""Room that a request asks for with itself: what it captures is then kept after it has ended, until it is fetched or its time is over."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass

ROOM = "mia_lab_room"  # in SamplingParams.extra_args, beside the spec
MAX_NOTE = 1 << 16  # characters
MAX_SECONDS = 7 * 24 * 3600.0
_MAX_TEXT = 2 * MAX_NOTE + 1024  # characters; JSON doubles quotes and backslashes
_MAX_SIZE = 1 << 62


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one capture needs. note: a text that is given back with its rows; size: bytes that these may come to; seconds: how long they
    are kept, from the request's coming on. limit: bytes that all captures may take together; share: that those of its tenant may."""

    note: str
    size: int
    seconds: float
    limit: int
    share: int


def encode(asked: Reservation) -> str:
    """Return the text that `decode` reads; ValueError for what it would refuse."""
    text = json.dumps(asdict(asked), separators=(",", ":"), allow_nan=False)
    decode(text)
    return text


def decode(text: object) -> Reservation:
    """Return the Reservation of a text; ValueError for one that is none, or out of bounds."""
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise ValueError(f"a reservation is a text of at most {_MAX_TEXT} characters")
    try:
        asked = Reservation(**json.loads(text))
    except (TypeError, RecursionError):
        raise ValueError("a reservation has note, size, seconds, limit and share") from None
    if not isinstance(asked.note, str) or len(asked.note) > MAX_NOTE:
        raise ValueError(f"a capture's note is a text of at most {MAX_NOTE} characters")
    for size in (asked.size, asked.limit, asked.share):
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            raise ValueError(f"a capture's size and limits are bytes up to {_MAX_SIZE}, not {str(size)[:64]}")
    if type(asked.seconds) not in (int, float) or not 0 < asked.seconds <= MAX_SECONDS:
        raise ValueError(f"a capture is kept for up to {MAX_SECONDS:.0f} seconds, not {str(asked.seconds)[:64]}")
    return asked
