"""Other tools on the same work, where they are installed.

They patch vLLM as soon as it is imported, so each runs in a process of its own, in turn with the native engine of this one.
`vllm` itself is among them: what it differs from the native engine here is what two processes differ by.
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..errors import MiaError, ProofError
from .cases import Steering, Work, lead_to
from .overhead import Figure, Pair

_VECTOR = "far"


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool by its distribution: the vLLM plugin it comes as, and by case what a request says to it, given the layers."""

    distribution: str
    plugin: str
    cases: dict[str, Callable[[int], dict[str, Any] | None]]


def _hotwire(layers: Sequence[int]) -> dict[str, Any]:
    return {"hotwire": json.dumps([{"id": _VECTOR, "layer": layer, "scale": 1.0} for layer in layers])}


PEERS = {peer.distribution: peer for peer in (
    Peer("vllm", "", {"idle": lambda n: None}),
    Peer("hotwire-vllm", "hotwire", {"idle": lambda n: None, "steer one layer": lambda n: _hotwire([n - 1]),
                                     "steer every layer": lambda n: _hotwire(range(n))}),
    Peer("vllm-lens", "activations", {"idle": lambda n: None,
                                      "capture every token, one layer": lambda n: {"output_residual_stream": [n - 1]},
                                      "capture every token, all layers": lambda n: {"output_residual_stream": list(range(n))}}))}


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Whole runs of one peer's case beside native: seconds, in pairs."""

    model: str
    peer: str
    version: str
    case: str
    work: Work
    rounds: int
    seconds: Figure


def installed() -> dict[str, str]:
    """The peers that are installed, and their versions."""
    from vllm import __version__

    found = {"vllm": __version__}  # its distribution has another name where it was built for CPUs
    for name in PEERS:
        try:
            found[name] = found.get(name) or version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(pair: Pair, work: Work, rounds: int, names: Sequence[str]) -> Iterator[PeerRow]:
    """Yield a row for each case of each named peer; ProofError where one did not do what is timed, MiaError where it broke."""
    versions = installed()
    steering = Steering(pair.session, 1)
    for name in names:
        with TemporaryDirectory() as folder, _started(PEERS[name], pair, steering, Path(folder)) as peer:
            for case, asked in PEERS[name].cases.items():
                pairs = []
                for turn in range(-1, rounds):
                    prompts = work.prompts(pair.vocab, turn + 1)
                    native = _timed(pair.native, prompts, work, None)[0]
                    peer.send((prompts, work, asked(pair.session.n_layers)))
                    seconds, tokens, rows = _answer(peer, name)
                    _prove(f"{name}: {case}", case, work, tokens, rows, steering, pair)
                    if turn >= 0:
                        pairs.append((native, seconds))
                yield PeerRow(pair.name, name, versions[name], case, work, rounds, Figure.of(pairs))


@contextmanager
def _started(peer: Peer, pair: Pair, steering: Steering, folder: Path) -> Iterator[Connection]:
    torch.save(steering.rows(0), folder / f"{_VECTOR}.pt")
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(there, peer.plugin, pair.path, pair.engine, str(folder)), daemon=True)
    process.start()
    there.close()
    try:
        _answer(here, peer.distribution)
        yield here
    finally:
        here.close()
        process.join(30)
        process.kill()


def _answer(peer: Connection, name: str) -> Any:
    try:
        found = peer.recv()
    except EOFError:
        raise MiaError(f"{name}: its process ended; what it wrote to stderr says why") from None
    if isinstance(found, str):
        raise MiaError(f"{name}: {found}")
    return found


def _serve(parent: Connection, plugin: str, path: str, engine: dict[str, Any], folder: str) -> None:
    os.environ.update(VLLM_PLUGINS=plugin, VLLM_ENABLE_V1_MULTIPROCESSING="0", HOTWIRE_VECTORS=folder, HOTWIRE_SLOTS="1024")
    try:
        from vllm import LLM

        llm = LLM(model=path, **engine)
        parent.send(())
        while True:
            prompts, work, asked = parent.recv()
            parent.send(_timed(llm, prompts, work, asked))
    except EOFError:
        return
    except BaseException as error:
        parent.send(f"{type(error).__name__}: {error}")
        raise


def _timed(llm: Any, prompts: list[list[int]], work: Work,
           asked: dict[str, Any] | None) -> tuple[float, list[list[int]], torch.Tensor | None]:
    """Run the work once: seconds, the tokens said, and the first request's rows at the last layer where they were asked for."""
    from vllm import SamplingParams

    params = [SamplingParams(**work.sampling, extra_args=None if asked is None else dict(asked)) for _ in prompts]
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    kept = getattr(outputs[0], "activations", None)
    rows = None if not kept else kept["residual_stream"][-1].float().cpu()
    return seconds, [list(output.outputs[0].token_ids) for output in outputs], rows


def _prove(what: str, case: str, work: Work, tokens: list[list[int]], rows: torch.Tensor | None, steering: Steering, pair: Pair) -> None:
    if case.startswith("steer") and any(said != steering.tokens * work.tokens_out for said in tokens):
        raise ProofError(f"{what}: it was to say token {steering.tokens[0]} only, and said {tokens[0][:8]}")
    if case.startswith("capture"):
        wanted = work.tokens_in + work.tokens_out - 1
        if rows is None or len(rows) < wanted or not rows.isfinite().all():
            raise ProofError(f"{what}: no rows, or fewer than {wanted}")
        lead_to(pair.session.unembed(rows[work.tokens_in - 1 : wanted]), tokens[0], what)
