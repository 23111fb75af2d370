"""What taps cost: each case beside the same model without taps, in the same process, in turn.

Two engines on one set of weights run alternately, so that a machine that drifts slows both; every figure is the ratio of a
case's time to that of the native run next to it. A run is timed only once its effect is proven, from its own tokens or rows.
"""
from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from ..models import resolve
from ..running.launch import bare_engine, close_engine
from ..session import Session
from .cases import Case, Work, cases
from .drive import METRICS, Run, drive
from .profile import Account, decode_step
from .shapes import SHAPES, write
from .sharing import weights_of


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of one case: medians of the native and the case's runs, and the median of their paired ratios with an interval
    that holds the true median with probability `coverage`: 95 % or more from six rounds on, and less with fewer."""

    native: float
    case: float
    ratio: float
    low: float
    high: float
    coverage: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Figure:
        """From (native, case) pairs; the interval is between order statistics, whatever the distribution."""
        ratios = sorted(case / native for native, case in pairs)
        n, k = len(ratios), 0
        while k + 1 < n / 2 and _outside(n, k + 1) <= 0.05:
            k += 1
        native, case = (median(times) for times in zip(*pairs))
        return cls(native, case, median(ratios), ratios[k], ratios[n - 1 - k], 1 - _outside(n, k))


def _outside(n: int, k: int) -> float:
    """The probability that the median of a distribution is not between the k-th smallest and largest of n draws, from 0 on."""
    return 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n


def figures(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Figure]:
    """Each metric of a case, from (native, case) runs next to each other."""
    return {name: Figure.of([(getattr(native, name), getattr(case, name)) for native, case in pairs]) for name in METRICS}


@dataclass(frozen=True, slots=True)
class Row:
    """One case at one kind of work beside native: the median decode step, time per output token and to the first, whole runs.

    Over HTTP a decode step is what a client sees of it: the median time from token to token in a stream.
    delivered: bytes of rows a run brought to the host. gpu: a decode step's time on the GPU, where a profile was taken.
    """

    model: str
    case: str
    work: Work
    rounds: int
    step_ms: Figure
    tpot_ms: Figure
    ttft_ms: Figure
    seconds: Figure
    delivered: int = 0
    gpu: Account | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes a second that were delivered, over the whole run."""
        return self.delivered / self.seconds.case


@dataclass(frozen=True, slots=True)
class Facts:
    """What the tapped engine holds."""

    model: str
    device_bytes: int
    arena_bytes: int
    kv_tokens_lost: int
    arena_rows: int


def prepared(model: str, engine: dict[str, Any], work: Sequence[Work], layers: int | None, folder: Path) -> tuple[str, str, dict[str, Any]]:
    """A model's name in the card, its path, and the options of an engine that shares a device with another one.

    layers: how many of a shape's blocks to keep; folder: where a shape is written.
    """
    engine = dict(max_model_len=max(w.tokens_in + w.tokens_out for w in work) + 8, max_num_seqs=max(w.batch for w in work),
                  enable_prefix_caching=False, gpu_memory_utilization=0.45) | engine
    if model not in SHAPES:
        return model, str(resolve(model)), engine
    path, tokenizer = map(str, write(model, folder, layers))
    name = model if layers is None else f"{model}, {layers} layers"
    return name, path, dict(load_format="dummy", tokenizer=tokenizer, dtype="bfloat16") | engine


@dataclass(slots=True)
class Pair:
    """The same model twice in this process: without taps, and with. Where it fits only once there is no native one, and what the
    tapped one does while its taps are idle stands for it."""

    name: str
    native: Any | None
    session: Session
    vocab: int
    path: str
    engine: dict[str, Any]
    folder: tempfile.TemporaryDirectory

    @classmethod
    def load(cls, model: str, engine: dict[str, Any], work: Sequence[Work], layers: int | None = None, alone: bool = False,
             **session: Any) -> Pair:
        """Load a shape, with random weights, or any model by its name; memory must hold both engines, or the tapped one where `alone`.

        layers: how many of a shape's blocks to keep. session: arguments for the tapped engine alone.
        """
        folder = tempfile.TemporaryDirectory()  # lives as long as the pair
        name, path, engine = prepared(model, engine, work, layers, Path(folder.name))
        native = None if alone else bare_engine(path, engine)
        tapped = Session(path, in_process=True, **engine | ({} if alone else weights_of(native)), **session)
        name += ", beside itself" if alone else ""
        return cls(name, native, tapped, tapped._engine.settings.d_vocab, path, engine, folder)

    @property
    def _plain(self) -> Any:
        """The engine that cases are compared with."""
        return self.session._engine.llm if self.native is None else self.native

    def facts(self) -> Facts:
        """Memory that the taps take, and the KV tokens for which it would have been room."""
        config, found = self._plain.llm_engine.vllm_config, self.session._engine.facts
        model = config.model_config
        token = (2 * model.get_num_layers(config.parallel_config) * model.get_num_kv_heads(config.parallel_config)
                 * model.get_head_size() * self.session.dtype.itemsize)
        return Facts(self.name, found["table_bytes"], found["arena_bytes"], found["table_bytes"] // token, found["captured_tokens"])

    def run_native(self, prompts: list[list[int]], work: Work) -> Run:
        """Run the work without taps, or with idle ones where there is no engine without."""
        from vllm import SamplingParams

        return drive(self._plain, prompts, [SamplingParams(**work.sampling)] * len(prompts))

    def measure(self, work: Work, rounds: int, only: Sequence[str] = (), profiled: Sequence[str] = ()) -> Iterator[Row]:
        """Yield a Row for each case, or for those whose names are in `only`; `profiled` names those of which a profile is taken."""
        chosen = [case for case in cases(self.session, work) if not only or case.name in only]
        pairs: dict[str, list[tuple[Run, Run]]] = {case.name: [] for case in chosen}
        delivered: dict[str, int] = {}
        for turn in range(-1, rounds):  # the first one warms up
            prompts = work.prompts(self.vocab, turn + 1)
            for k, case in enumerate(chosen if turn % 2 else chosen[::-1]):
                if k % 2 == 0:
                    native = self.run_native(prompts, work)
                run, source = case.run(prompts)
                delivered[case.name] = case.prove(run, source)
                del source
                if turn >= 0:
                    pairs[case.name].append((replace(native, outputs=[]), replace(run, outputs=[])))
        for case in chosen:
            account = self._profile(case, work) if case.name in profiled else None
            yield Row(self.name, case.name, work, rounds, **figures(pairs[case.name]), delivered=delivered[case.name], gpu=account)

    def _profile(self, case: Case, work: Work) -> Account:
        def tapped(work: Work) -> None:
            next(c for c in cases(self.session, work) if c.name == case.name).run(work.prompts(self.vocab, 0))

        native = decode_step(lambda work: self.run_native(work.prompts(self.vocab, 0), work), work)
        return Account.of(native, decode_step(tapped, work))

    def close(self) -> None:
        """Shut the engines down."""
        self.session.close()
        if self.native is not None:
            close_engine(self.native)
