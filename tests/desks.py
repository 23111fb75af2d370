"""A desk without an engine: what its worker says of itself, requests as vLLM's core hands them over, and what was asked of the worker."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mia_lab.engine.desk import Desk
from mia_lab.engine.reservation import ROOM, Reservation
from mia_lab.engine.reservation import encode as reserve
from mia_lab.engine.wire import KEY, Spec, Take, Term, address, encode

WIDTH = 4
SITES = [["resid_post", 0], ["resid_post", 1], ["q", 0], ["attention", 0]]
SHAPES = [["resid_post", 0, [WIDTH]], ["resid_post", 1, [WIDTH]], ["q", 0, [2, WIDTH]], ["attention", 0, [2, WIDTH]], ["embed", 0, [WIDTH]]]
KINDS = ("add", "ablate", "clamp", "scale", "replace", "affine", "clampfeature", "attentionbias")
SETTINGS = {"edits": KINDS, "max_requests": 2, "chunked": True, "max_len": 16}
EVERY = ((0, None),)


def bytes_of(*shape: int, fill: float = 1.0) -> tuple[str, tuple[int, bytes]]:
    rows = torch.full(shape, fill).numpy().tobytes()
    return address(shape[0], rows), (shape[0], rows)


ONE, THREE, NARROW, MATRIX = bytes_of(1, WIDTH), bytes_of(3, WIDTH), bytes_of(1, 3), bytes_of(2, WIDTH + 1)
VECTORS = dict([ONE, THREE, NARROW, MATRIX])


class Worker:
    """What the desk asked of the worker, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def __call__(self, name: str, *args: Any) -> Any:
        self.asked.append((name, *args))
        return {"rows": [["resid_post", 0]], "counts": {"rows": 5, "dropped": 0, "gates": [1, 2]}}.get(name)

    def heard(self) -> list[tuple]:
        """What was asked since the last call."""
        asked, self.asked = self.asked, []
        return asked


def facts(**other: Any) -> dict[str, Any]:
    found = {"shapes": SHAPES, "sites": SITES, "read_only": ["q"], "captured_tokens": 8, "bank_rows": 6, "programs": 4, "terms": 8,
             "plans": 2, "biased_tokens": 20}
    return found | {"settings": SETTINGS} | other


def request(spec: Any, name: str = "r", uid: str = "t.uid", prompt: int | None = 4, max_tokens: int = 4, room: Any = None) -> Any:
    text = encode(uid, spec) if isinstance(spec, Spec) else spec
    extra = {KEY: text} | ({} if room is None else {ROOM: room})
    return SimpleNamespace(request_id=name, prompt_token_ids=None if prompt is None else list(range(prompt)), resumable=False,
                           sampling_params=SimpleNamespace(extra_args=extra, max_tokens=max_tokens))


def room(size: int = 1, note: str = "", seconds: float = 60, limit: int = 15) -> str:
    return reserve(Reservation(note, size, seconds, limit, limit))


def add(sha: str = ONE[0], layer: int = 0, spans: tuple = EVERY, **other: Any) -> Term:
    return Term("add", "resid_post", layer, spans, write=sha, **other)


def at(kind: str = "resid_post", layer: int = 0, before: bool = False) -> Take:
    return Take(kind, layer, EVERY, before)


def is_empty(desk: Desk) -> bool:
    """Whether nothing of any request is held: what the client lets go of is gone, and the tables have all their room."""
    desk.forget(list(VECTORS), "client")
    return not any(sha in desk.vectors for sha in VECTORS) and not desk._guests and not len(desk._in_flight)
