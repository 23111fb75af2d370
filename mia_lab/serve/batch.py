"""A notebook client's batch of requests as it comes over the wire, and every bound that it must keep."""
from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from ..engine.wire import MAX_BYTES, NOTHING, Spec, address, addresses, decode
from ..points import Point
from . import frames, sampling
from .calls import SHA, UID, Engine
from .refusing import Refused, shown

MAX_PROMPTS = 8192
_JSON_BYTES = 8 << 20
_MAX_WORK = 1 << 24  # a second or two


@dataclass(frozen=True, slots=True)
class One:
    """One request: its prompt, the client's name for what it captures, what it asks of the taps, and its sampling parameters."""

    ids: list[int]
    uid: str
    spec: Spec
    params: dict[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that run together. vectors: those that came along, `[n d]` float32 by address. stream: whether outputs come as they
    grow, not once each."""

    ones: tuple[One, ...]
    vectors: Mapping[str, torch.Tensor]
    stream: bool

    @property
    def named(self) -> frozenset[str]:
        """The addresses of all vectors that its requests name."""
        return frozenset(sha for spec in {one.spec for one in self.ones} for sha in named(spec))


def named(spec: Spec) -> set[str]:
    """The addresses of the vectors and matrices that a spec names."""
    return addresses(spec) | (set() if spec.reduce is None else {sha for _, _, sha in spec.reduce.matrices})


def pack(prompts: list[list[int]], asks: list[tuple[str, str, dict[str, Any]]], vectors: Mapping[str, torch.Tensor], stream: bool) -> bytes:
    """The body that `read` reads. asks: of each prompt the uid, the spec's JSON ("" for none) and the sampling parameters."""
    specs: dict[str, int] = {}
    params: list[dict[str, Any]] = []
    rows = []
    for uid, spec, sampled in asks:
        if not params or params[-1] != sampled:
            params.append(sampled)
        rows.append([uid, specs.setdefault(spec, len(specs)) if spec else -1, len(params) - 1])
    ids = [np.asarray(prompt, "<i4").tobytes() for prompt in prompts]
    return frames.pack({"prompts": ids, "asks": rows, "params": params, "specs": [spec.encode() for spec in specs],
                        "vectors": packed(vectors), "stream": stream})


def fresh() -> str:
    """A new name for a request."""
    return uuid.uuid4().hex


def packed(vectors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Vectors as a frame holds them."""
    return {sha: [len(rows), rows.contiguous().numpy().tobytes()] for sha, rows in vectors.items()}


def read(body: bytes, engine: Engine, max_logprobs: int) -> Batch:
    """The requests of a body; Refused (400 or 413) for anything that is none or out of bounds."""
    said = _fields(body, ("prompts", "asks", "params", "specs", "vectors", "stream"))
    prompts, asks = said["prompts"], said["asks"]
    if not isinstance(asks, list) or not isinstance(prompts, list) or len(asks) != len(prompts) or not asks:
        raise Refused(400, "a batch has prompts, and for each of them what is asked")
    if len(asks) > MAX_PROMPTS:
        raise Refused(413, f"{len(asks)} prompts are too many at once; {MAX_PROMPTS} are the most. Run them in parts")
    if not isinstance(said["stream"], bool) or not all(isinstance(said[name], list) for name in ("params", "specs")):
        raise Refused(400, "this batch is malformed")
    bounds = sampling.Bounds(engine.settings.max_len, engine.settings.d_vocab, max_logprobs)
    try:
        params = [sampling.checked(one, bounds) for one in said["params"]]
        specs = [_spec(text, engine) for text in _bounded(said["specs"])]
        ones = tuple(_one(i, prompts[i], ask, specs, params, engine) for i, ask in enumerate(asks))
    except ValueError as error:
        if isinstance(error, Refused):
            raise
        raise Refused(400, str(error)) from None
    if len({one.uid for one in ones}) < len(ones):
        raise Refused(400, "two requests of a batch have one name")
    return Batch(ones, vectors_of(said["vectors"]), said["stream"])


def vectors_of(found: object) -> dict[str, torch.Tensor]:
    """Vectors that came along, `[n d]` float32 by address; Refused for what is none, or is not what its address says."""
    if not isinstance(found, dict) or len(found) > MAX_PROMPTS:
        raise Refused(400, f"vectors come by address, {MAX_PROMPTS} at most")
    vectors = {}
    for sha, item in found.items():
        rows, data = item if isinstance(item, list) and len(item) == 2 else (0, b"")
        if not SHA.fullmatch(sha) or type(rows) is not int or rows < 1 or not isinstance(data, bytes) or not data or len(data) % (4 * rows):
            raise Refused(400, f"{shown(sha)} comes with no vectors of float32")
        if address(rows, data) != sha:
            raise Refused(400, f"the vectors under {sha} are not what their address says")
        vectors[sha] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, -1)
        if not torch.isfinite(vectors[sha]).all():
            raise Refused(400, f"the vectors under {sha} hold NaN or infinity")
    return vectors


def call_of(body: bytes) -> tuple[object, dict[str, torch.Tensor]]:
    """The arguments of a call, unchecked, and the vectors that came along."""
    said = _fields(body, ("args", "vectors"))
    return said["args"], vectors_of(said["vectors"])


def capture_bytes(one: One, engine: Engine, rows: Mapping[str, int]) -> int:
    """The most that one request's captured rows come to, with their positions. rows: of each matrix that it reduces by."""
    spec, end = one.spec, min(len(one.ids) + one.params.get("max_tokens", engine.settings.max_len), engine.settings.max_len)
    size = 0
    for take in spec.takes:
        n = sum(max(0, (end if stop is None else min(stop, end)) - start) for start, stop in take.spans)
        width = prod(engine.shapes[Point(*take.site)])
        if spec.reduce is not None:
            width = next((rows[sha] for kind, layer, sha in spec.reduce.matrices if (kind, layer) == take.site), width)
            width = 1 if spec.reduce.norm else min(2 * spec.reduce.k, 2 * width) if spec.reduce.k else width
        size += n * (8 + 4 * width)
    return size


def _fields(body: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        said = frames.unpack(body, _JSON_BYTES)
    except ValueError as error:
        raise Refused(400, f"the body is no frame: {error}") from None
    if not isinstance(said, dict) or said.keys() != set(names):
        raise Refused(400, f"the body has other fields than {', '.join(names)}; is the client's mia_lab another version than the server's?")
    return said


def _bounded(specs: list[object]) -> list[str]:
    """Specs as texts; Refused where reading them would take long: each run of positions is held against every place where one ends."""
    texts, work = [], 0
    for spec in specs:
        if not isinstance(spec, bytes) or len(spec) > MAX_BYTES:
            raise Refused(400, f"a spec is a text of at most {MAX_BYTES} bytes")
        texts.append(spec.decode())
        try:
            said = json.loads(texts[-1])
            listed = [*(term.get("spans", ()) for term in said["terms"]), *(take[2] for take in said["takes"])]
            ends = {end for spans in listed for span in spans for end in span}
            work += (sum(map(len, listed)) + len(listed)) * (len(ends) + 1)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError):
            raise Refused(400, "a spec is malformed") from None
        if work > _MAX_WORK:
            raise Refused(413, "this batch names too many runs of positions at too many points; ask for positions that lie together, or "
                               "run it in parts")
    return texts


def _spec(text: str, engine: Engine) -> Spec:
    spec = decode(f"_ {text}")[1]
    strange = next((site for site in (*(t.site for t in spec.terms), *(t.site for t in spec.takes)) if site not in engine.sites), None)
    if strange is not None:
        raise Refused(400, f"{strange[0]}.{strange[1]} is not tapped by this server; GET /mia/status lists what is")
    wrong = next((sha for sha in named(spec) if not SHA.fullmatch(sha)), None)
    if wrong is not None:
        raise Refused(400, f"{shown(wrong)} is the address of no vector")
    return spec


def _one(i: int, prompt: object, ask: object, specs: list[Spec], params: list[dict[str, Any]], engine: Engine) -> One:
    longest = engine.settings.max_len
    if not isinstance(prompt, bytes) or len(prompt) % 4 or not 4 <= len(prompt) < 4 * longest:
        raise Refused(400, f"prompt {i} is no list of 1 to {longest - 1} tokens")
    ids = np.frombuffer(prompt, "<i4")
    if ids.min() < 0 or ids.max() >= engine.settings.d_vocab:
        raise Refused(400, f"prompt {i} holds a token that the model does not know; it knows {engine.settings.d_vocab}")
    if not isinstance(ask, list) or len(ask) != 3 or not isinstance(ask[0], str) or not UID.fullmatch(ask[0]):
        raise Refused(400, f"what is asked for prompt {i} is malformed")
    uid, spec, sampled = ask
    if type(spec) is not int or not -1 <= spec < len(specs) or type(sampled) is not int or not 0 <= sampled < len(params):
        raise Refused(400, f"what is asked for prompt {i} names a spec or parameters that are not there")
    found = NOTHING if spec < 0 else specs[spec]
    if found.takes and params[sampled].get("n", 1) > 1:
        raise Refused(400, "a capture follows one continuation a prompt; use n=1 and repeat the prompt")
    return One(ids.tolist(), uid, found, params[sampled])
