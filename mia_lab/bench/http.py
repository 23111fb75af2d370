"""What serving with mia_lab costs as its clients see it: two servers, without it and with it, loaded over HTTP in turn.

Each is vLLM's own server in a process of its own, with the same options; both hold the model at the same time, and never run at
the same time. Every figure is the ratio of a case's time to that of the native run next to it. Requests a second are the batch over
the seconds of a whole run.
"""
from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..errors import MiaError
from ..serve.client.client import Client
from ..serve.client.transport import Transport
from ..serve.policy import new_key
from .cases import IN_TURN, Steering, Work
from .drive import Run
from .load import Load, load
from .overhead import Row, figures, prepared
from .served import ANOTHER, NAMES, Case, cases, check_native, publish
from .servers import Server, ended_by_signals, running

_ROOM = 1 << 40  # bytes of captures and bodies, which nobody but the bench sends
_CLIENT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Servers:
    """The same model behind two servers, and a client of the one with mia_lab, whose folder holds what the cases steer with.

    only: names of the cases that are measured.
    """

    name: str
    native: Server
    tapped: Server
    client: Client
    steering: Steering
    only: Sequence[str]

    def measure(self, work: Work, rounds: int) -> Iterator[Row]:
        """Yield a Row for each case. Which server goes first alternates."""
        chosen = [case for case in cases(self.client, self.steering, work) if case.name in self.only]
        pairs: dict[str, list[tuple[Run, Run]]] = {case.name: [] for case in chosen}
        delivered: dict[str, int] = {}
        for turn in range(-1, rounds):  # the first one warms up
            prompts = work.prompts(self.client._engine.settings.d_vocab, turn + 1)
            for k, case in enumerate(chosen):
                native, ours, delivered[case.name] = self._pair(case, work, prompts, (turn + k) % 2 == 0)
                if turn >= 0:
                    pairs[case.name].append((native.times(), ours.times()))
        for case in chosen:
            yield Row(self.name, case.name, work, rounds, **figures(pairs[case.name]), delivered=delivered[case.name])

    def _pair(self, case: Case, work: Work, prompts: list[list[int]], native_first: bool) -> tuple[Load, Load, int]:
        """The native load and the case's next to each other, proven, with the bytes that were delivered."""
        runs = {}
        for native in (native_first, not native_first):
            runs[native] = load(self.native, work, prompts) if native else load(self.tapped, work, prompts, case.asks)
        check_native(runs[True].answers, work)
        return runs[True], runs[False], case.prove(runs[False].answers)


@contextmanager
def serving(model: str, engine: Mapping[str, Any], work: Sequence[Work], layers: int | None = None,
            options: Mapping[str, Any] | None = None, only: Sequence[str] = ()) -> Iterator[Servers]:
    """Start both servers of a shape, with random weights, or of any model by its name; both end with the block. Memory must hold both:
    each takes 45 % of a GPU's unless `engine` has another gpu_memory_utilization.

    layers: how many of a shape's blocks to keep. options: what additional_config says to mia_lab beside the folder, as a Session's
    points= and max_captured_tokens=. only: names of the cases to measure, by default all. EngineError where a server does not start.
    """
    only = only or NAMES
    with ExitStack() as stack:
        base = Path(stack.enter_context(TemporaryDirectory(prefix="mia_lab-")))
        stack.enter_context(ended_by_signals())
        name, path, engine = prepared(model, dict(engine), work, layers, base)
        additional, key = engine.pop("additional_config", None) or {}, new_key()
        folder = _folder(base, key[1])
        opt_in = {"mia_lab": {**(options or {}), "serve": str(folder)}}
        served = f"bench-{secrets.token_hex(8)}"  # nobody else's server at this port would know it
        both = []
        for i, config in enumerate((additional, additional | opt_in)):
            mine = engine | ({"additional_config": config} if config else {})
            both.append(stack.enter_context(running(path, mine, base / f"{i}.log", served, key[0])))
            if torch.cuda.is_available() and "kv_cache_memory_bytes" not in engine:
                both[-1].wait()  # it measures how much memory is free while it loads, so nothing else may load
        for server in both:
            server.wait()
        native, tapped = both
        client = stack.enter_context(closing(Client(tapped.url, key[0], timeout=_CLIENT_SECONDS)))
        largest = max(w.batch for w in work)
        steering = Steering(client, largest if ANOTHER in only else min(largest, IN_TURN))
        with closing(Transport(tapped.url, key[0], _CLIENT_SECONDS)) as transport:
            publish(client, transport, folder, base / "exported", steering)
        yield Servers(f"{name} over HTTP", native, tapped, client, steering, only)


def check(only: Sequence[str], options: Sequence[str] = ()) -> None:
    """MiaError, before minutes of loading, for a case that there is not, and for options that say nothing to two servers."""
    if options:
        raise MiaError(f"{options[0]} is for engines in one process; leave it out, or leave out --http")
    unknown = [name for name in only if name not in NAMES]
    if unknown:
        raise MiaError(f"there is no case {unknown[0]!r} over HTTP; there are {', '.join(map(repr, NAMES))}")


def _folder(base: Path, sha256: str) -> Path:
    """The folder of a server that one key may use for everything, as production's would have it but for the room it gives."""
    folder = base / "etc"
    (folder / "bundles").mkdir(parents=True)
    limits = "\n".join(f"{name} = {_ROOM}" for name in ("capture_bytes_per_request", "capture_bytes", "body_bytes"))
    (folder / "serve.toml").write_text(f'[limits]\n{limits}\n\n[[keys]]\nsha256 = "{sha256}"\ntenant = "bench"\n'
                                       'roles = ["generate", "steer", "capture", "administer"]\ninline = true\n')
    return folder
