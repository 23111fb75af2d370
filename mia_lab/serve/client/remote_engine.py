"""The engine of a server, as a Session sees one: everything goes over HTTP."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.wire import decode
from ...errors import ClosedError, MiaError, PromptError, ServerError, UnsupportedError
from ...running.engine_like import EngineLike
from .. import batch, frames, sampling, vocabulary
from .outputs import Output
from .transport import Missing, Transport

_VECTOR_BYTES = 256 << 20  # of vectors that are kept to be sent again
_BYTES_ALONE = ("fetch", "lens", "split")  # whose answers hold no text; a Session would take one for the name of a file


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request's sampling parameters and its spec, "" for none, as `EngineLike.run` takes them."""

    params: dict[str, Any]
    wire: str


class RemoteEngine(EngineLike):
    """One server's engine. served: what the server says of itself and of what it allows: model, capture_seconds, body_bytes, ...

    ServerError where there is no such server, it refuses the key, or has no mia_lab.
    """

    remote = True

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._http, self._closed = transport, False
        self._vectors: dict[str, torch.Tensor] = {}  # by address, least recently used first
        self._sent: set[str] = set()  # those that the server may still hold
        self._captured: set[str] = set()  # requests whose rows it may hold
        facts = self.rpc("describe")
        try:
            self.served: dict[str, Any] = facts.pop("served")
            self._learn(facts)
            self._bounds = sampling.Bounds(self.settings.max_len, self.settings.d_vocab, self.served["max_logprobs"])
            room, tokens = int(self.served["capture_bytes"]), str(self.served["tokenizer"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"{transport.url} describes itself otherwise than this mia_lab reads ({error!r}); install its version "
                              f"here") from None
        self._room = room
        self.tokenizer = vocabulary.read(transport.get("/mia/tokenizer"), tokens)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def require_open(self) -> None:
        """ClosedError where no request can be run any more."""
        if self._closed:
            raise ClosedError("this client is closed; open a new one with mia_lab.Client(...)")

    def capture_room(self) -> int:
        """Bytes of captured rows that the server keeps at once."""
        return self._room

    def rpc(self, method: str, *args: Any) -> Any:
        """Call one of the worker's methods and return what it gives."""
        named = [sha for sha in args[-1] if sha is not None] if method == "lens" else []
        with self.turns.taken():
            self.require_open()
            answer = self._with_vectors(named, lambda vectors: self._http.post(
                f"/mia/call/{method}", frames.pack({"args": list(args), "vectors": batch.packed(vectors)})))
        if method == "drop":
            self._captured.difference_update(args[0])
        try:
            found = frames.unpack(answer)
        except ValueError as error:
            raise ServerError(f"{self._http.url} answered {method} with no frame: {error}") from None
        if method in _BYTES_ALONE and _holds_text(found):
            raise ServerError(f"{self._http.url} answered {method} with a text, where there are only bytes")
        return found

    def sampling(self, params: Mapping[str, Any], wires: Sequence[str]) -> list[Sampled]:
        """The sampling parameters of requests that differ in their specs only; PromptError for what the server would not take."""
        given = {name: value for name, value in params.items() if value is not None}
        try:
            checked = sampling.checked(given, self._bounds)
        except ValueError as error:
            raise PromptError(f"these sampling arguments do not work: {error}") from None
        return [Sampled(checked, wire) for wire in wires]

    def run(self, prompts: Sequence[list[int]], params: Sequence[Sampled], lora: Any = None) -> list[Output]:
        """Run token prompts as one batch. Interrupted, it ends on the server, too."""
        if lora is not None:
            raise UnsupportedError("a server's adapters are chosen where it starts; a client cannot bring one")
        with self.turns.taken():
            outputs: dict[int, Output] = {}
            with closing(self._outputs(prompts, params, stream=False)) as found:
                outputs.update(found)
            return [outputs[i] for i in range(len(prompts))]

    def steps(self, prompts: Sequence[list[int]], params: Sequence[Sampled]) -> Iterator[list[tuple[int, Output]]]:
        """Run token prompts as one batch and yield outputs as they grow, with whose they are. Let go, it ends on the server, too."""
        with self.turns.taken(), closing(self._outputs(prompts, params, stream=True)) as found:
            for moved in found:
                self.turns.go_on()
                yield [moved]

    def register(self, vectors: dict[str, torch.Tensor]) -> None:
        """Keep vectors, which go along with the first request that names them."""
        for sha, rows in vectors.items():
            self._vectors.pop(sha, None)
            self._vectors[sha] = rows
        over = sum(rows.nbytes for rows in self._vectors.values()) - _VECTOR_BYTES
        for sha in [sha for sha in self._vectors if sha not in vectors]:
            if over <= 0:
                break
            over -= self._vectors.pop(sha).nbytes
        self._sent &= self._vectors.keys()

    def reset_prefix_cache(self) -> bool:
        """UnsupportedError: others use the server's."""
        raise UnsupportedError("a server's prefix cache is not a client's to reset; pass skip_reading_prefix_cache=True to read none of it")

    def close(self) -> None:
        """Let go of all rows on the server, which may be gone itself, and of its connections."""
        if self._closed:
            return
        self.turns.end()
        with self.turns.taken():
            try:
                if self._captured:
                    self.rpc("drop", sorted(self._captured))
            except MiaError:  # they expire there
                pass
            self._closed = True
            self._http.close()

    def _outputs(self, prompts: Sequence[list[int]], params: Sequence[Sampled], stream: bool) -> Iterator[tuple[int, Output]]:
        """Run a batch, and yield each output whenever something came of it."""
        self.require_open()
        self.let_go()
        asks, named = [], set()
        for one in params:
            uid, _, spec = one.wire.partition(" ")
            asks.append((uid or batch.fresh(), spec, one.params))
            wanted = decode(one.wire)[1] if one.wire else None
            named |= batch.named(wanted) if wanted is not None else set()
            self._captured |= {uid} if wanted is not None and wanted.takes else set()
        outputs = [Output(uid, list(ids)) for ids, (uid, _, _) in zip(prompts, asks)]
        begun, lines = self._with_vectors(named, lambda vectors: self._begin(batch.pack(list(prompts), asks, vectors, stream)))
        with begun:
            yield from self._read(lines, outputs)

    def _begin(self, body: bytes) -> tuple[ExitStack, Iterator[Any]]:
        """Send a batch; return what ends it, and its lines."""
        if len(body) > self.served["body_bytes"]:
            raise PromptError(f"these prompts and vectors take {len(body)} bytes; the server reads {self.served['body_bytes']} at once. "
                              f"Run them in parts")
        stack = ExitStack()
        return stack, stack.enter_context(self._http.lines("/mia/run", body))

    def _with_vectors(self, named: Iterable[str], post: Any) -> Any:
        """Send something that names vectors, and those of them that the server does not hold; once more where it held fewer than known."""
        named = set(named)
        absent = named - self._sent
        for last in (False, True):
            gone = sorted(absent - self._vectors.keys())
            if gone:
                raise MiaError(f"{len(gone)} vectors of this request are kept no more, since too many came after it; make it anew")
            try:
                found = post({sha: self._vectors[sha] for sha in sorted(absent)})
            except Missing as error:
                if last or not named.issuperset(error.shas):
                    raise
                absent = named  # another of its processes may lack others
            else:
                self._sent |= named
                return found
        raise AssertionError

    def _read(self, lines: Iterator[Any], outputs: list[Output]) -> Iterator[tuple[int, Output]]:
        for line in lines:
            if not isinstance(line, dict):
                raise ServerError(f"{self._http.url} answered with a line that is no output")
            if "done" in line:
                break
            if "error" in line:
                raise ServerError(f"{self._http.url} broke this off: {_message(line['error'])}")
            try:
                i = int(line["at"])
                outputs[i if i >= 0 else len(outputs)].grow(line)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise ServerError(f"{self._http.url} answered with an output that is none: {error!r}") from None
            self._check(i, outputs[i])
            yield i, outputs[i]
        unfinished = sum(not output.finished for output in outputs)
        if unfinished:
            raise ServerError(f"the answer of {self._http.url} ended before {unfinished} of {len(outputs)} prompts did")

    def _check(self, i: int, output: Output) -> None:
        reasons = {one.finish_reason for one in output.outputs} & {"error", "abort"}
        if reasons:
            raise MiaError(f"the server gave up on prompt {i} ({reasons.pop()}); its log says why")


def _message(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:1000]


def _holds_text(found: Any) -> bool:
    return isinstance(found, str) or (isinstance(found, list) and any(map(_holds_text, found)))
