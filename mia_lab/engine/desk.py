"""The engine's front desk: in vLLM's core process it lets requests in, knows which are under way, and answers the clients' calls.

Every request and every call passes here, wherever the worker runs; a request that the engine could not run is turned away
before the scheduler hears of it. Requests come by the thread that reads the sockets, everything else by the engine's own.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import EditError, MiaError
from .beats import Beats
from .checking import Engine, check, rows_of
from .held import Held
from .reservation import ROOM, Reservation
from .reservation import decode as reservation
from .room import InFlight
from .vectors import Vectors, owner_of
from .wire import KEY, Spec, addresses, decode

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

_PREFIX = "mia_"
_SAID = 300  # characters of what is wrong with a text, which may be long
_BOTH = "call"  # the call that gives an error as a value: its name and message
_SETTLED = 2  # beats after which the worker has heard of every request that ended
_CALLS = ("register", "forget", "collect", "drop", "renew", "beat", "publish")


@dataclass(frozen=True, slots=True)
class _Guest:
    """A request under way. length: its tokens at most. admitted: whether it came with room for what it captures. rank: its priority,
    where these count."""

    uid: str
    spec: Spec
    length: int
    admitted: bool
    rank: int


@dataclass(slots=True)
class _Errands:
    """What the worker is to be told at the next call: nobody waits for it."""

    vectors: list[str] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)


class Desk:
    """The desk of one engine core. facts: what the worker says of itself. ask: calls one of the worker's methods. ranked: whether
    requests of higher priority (a smaller number) run first."""

    def __init__(self, facts: Mapping[str, Any], ask: Callable[..., Any], ranked: bool = False) -> None:
        self._ask, self._ranked = ask, ranked
        self._engine = Engine.of(facts)
        self._max_len: int = facts["settings"]["max_len"]
        self._lock = threading.Lock()
        self._guests: dict[str, _Guest] = {}
        self._in_flight = InFlight(self._engine.room)
        self.vectors, self.held, self.beats = Vectors(), Held(), Beats()
        self._errands = _Errands()
        self._counts: dict[str, Any] = {}
        self._unsettled = _SETTLED  # beats for which the worker is still asked what it counted

    # -- requests -----------------------------------------------------------------------------------------------------

    def enter(self, request: EngineCoreRequest) -> None:
        """Let a request in, hold the vectors that it names, and give it the room that it asks for. MiaError, and nothing is held, where
        it cannot be run."""
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        text, room = extra.get(KEY), extra.get(ROOM)
        if text is None and room is None:
            return
        try:
            uid, spec = decode(text)
            asked = None if room is None else reservation(room)
        except ValueError as error:
            raise EditError(f"what this request asks of mia_lab cannot be read: {str(error)[:_SAID]}") from None
        self._let_in(request, uid, spec, asked)

    def _let_in(self, request: EngineCoreRequest, uid: str, spec: Spec, room: Reservation | None) -> None:
        name, tokens = request.request_id, request.prompt_token_ids
        if getattr(request, "resumable", False):
            raise EditError("a prompt that is streamed in cannot be edited or captured; send it whole")
        if name in self._guests:
            raise EditError(f"request {name!r} is under way already")
        length = None if tokens is None else min(len(tokens) + request.sampling_params.max_tokens, self._max_len)
        missing = self.vectors.hold(_named(spec), ("request", name))
        try:
            if missing:
                raise EditError(f"vector {missing[0]} is not registered with this engine; register it before its request")
            guest = _Guest(uid, spec, length or 0, room is not None, request.priority if self._ranked else 0)
            with self._lock:
                known = not spec.keeps_history and spec in self._in_flight
                if known:  # what such a request asks for was checked, and costs no room in the tables
                    self._seat(name, guest, {}, room)
            if not known:
                check(spec, length, self._engine, self.vectors)
                with self._lock:
                    self._seat(name, guest, rows_of(spec, self.vectors), room)
        except BaseException:
            with self._lock:
                self._errands.vectors += self.vectors.release(("request", name))
            raise

    def _seat(self, name: str, guest: _Guest, rows: Mapping[str, Sized], room: Reservation | None) -> None:
        self._in_flight.enter(guest.spec, rows, guest.length, guest.rank)
        try:
            if room is not None:
                self.held.admit(guest.uid, room)
        except MiaError:
            self._in_flight.leave(guest.spec, guest.length, guest.rank)
            raise
        self._guests[name] = guest
        self._unsettled = _SETTLED

    def undo(self, request_id: str) -> None:
        """Let a request out that was let in, and that the engine then did not take: nothing of it is held any more."""
        guest = self._guests.get(request_id)
        if guest is not None and guest.admitted:
            self.held.drop([guest.uid])
        self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """Let a request out that has ended, however it ended."""
        with self._lock:
            guest = self._guests.pop(request_id, None)
            if guest is None:
                return
            self._in_flight.leave(guest.spec, guest.length, guest.rank)
            self._errands.vectors += self.vectors.release(("request", request_id))
            if guest.admitted:
                self.held.end(guest.uid)
                if guest.uid not in self.held:  # it ended before the request did, which may have captured since
                    self._errands.uids.append(guest.uid)

    # -- calls --------------------------------------------------------------------------------------------------------

    def answer(self, method: str, args: Sequence[Any]) -> list[Any] | None:
        """What a call gives, as `collective_rpc` does, or None where it is one that the worker answers alone."""
        name = method.removeprefix(_PREFIX)
        if name == _BOTH and len(args) == 2 and args[0] in _CALLS:
            try:
                return [("", self._call(args[0], args[1]))]
            except MiaError as error:
                return [(type(error).__name__, str(error))]
        return [self._call(name, args)] if method.startswith(_PREFIX) and name in _CALLS else None

    def _call(self, name: str, args: Sequence[Any]) -> Any:
        with self._lock:
            errands, self._errands = self._errands, _Errands()
        errands.uids += self.held.expire()
        if errands.uids:
            self._ask("drop", errands.uids)
        if errands.vectors:
            self._forget(errands.vectors)
        return getattr(self, name)(*args)

    def register(self, vectors: Mapping[str, Sequence[Any]], owner: str = "") -> None:
        """Have the worker hold vectors, `[n width]` float32 as (n, bytes), under their content address, which is checked.

        A vector stays while any owner holds it, or any request that names it is under way. ValueError where one is not what its
        address says.
        """
        holder = owner_of(owner)
        shapes = {sha: (rows, len(data) // (4 * max(rows, 1))) for sha, (rows, data) in vectors.items()}
        new = {sha: tuple(found) for sha, found in vectors.items() if sha not in self.vectors}
        if new:
            self._ask("register", new)
        self.vectors.add({sha: self.vectors.shape(sha) or shape for sha, shape in shapes.items()}, holder)

    def forget(self, shas: Iterable[str], owner: str = "") -> None:
        """End an owner's hold on vectors."""
        self._forget(self.vectors.release(owner_of(owner), list(shas)))

    def _forget(self, shas: list[str]) -> None:
        gone = [sha for sha in shas if sha not in self.vectors]
        if gone:
            self._ask("forget", gone)

    def collect(self, uid: str, since: int = 0) -> dict[str, Any] | None:
        """All that is held of one capture that has room from position `since` on; None where there is no such capture.

        "rows": [kind, layer, before, int64 positions as bytes, shape of one row, dtype's name, values as bytes]; see `held_of`.
        "running": whether its request has yet to end.
        """
        found = self.held.look(uid)
        if found is None:
            return None
        return {"note": found[0], "running": found[1], "rows": self._ask("rows", uid, int(since))}

    def renew(self, uids: Iterable[str], seconds: float) -> list[str]:
        """Keep captures for so long from now, at least; return those that are gone."""
        return self.held.renew(uids, seconds)

    def drop(self, uids: Iterable[str]) -> None:
        """Let go of requests' rows, and of the room reserved for them."""
        uids = list(uids)
        self.held.drop(uids)
        self._ask("drop", uids)

    def beat(self, owner: str, adopted: str) -> dict[str, Any]:
        """Say which catalogue a process serves; return what others serve (see `Beats.beat`) and what was counted since the start:
        captured "rows" and "dropped" ones, [opened, closed] "gates" of requests that ended, and [captures, bytes] "held"."""
        return self.beats.beat(owner, adopted) | self._counted() | {"held": [len(self.held), self.held.bytes]}

    def _counted(self) -> dict[str, Any]:
        """What the worker counted. It is let be where nothing can have changed: waiting for the next call, it would keep a core busy."""
        if self._guests or self._unsettled:
            self._unsettled = _SETTLED if self._guests else self._unsettled - 1
            self._counts = self._ask("counts")
        return self._counts

    def publish(self, digest: str) -> int:
        """Say which catalogue all processes should serve; return its version."""
        return self.beats.publish(digest)


@lru_cache(maxsize=256)
def _named(spec: Spec) -> frozenset[str]:
    """The addresses of all vectors that a request needs: those of its edits, and matrices."""
    return frozenset(addresses(spec)) | {sha for *_, sha in (spec.reduce.matrices if spec.reduce else ())}
