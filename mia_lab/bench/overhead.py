"""The cost of idle taps, of steering and of capture, beside the same model without taps in the same process.

    python -m mia_lab.bench.overhead --shape llama-8b --batch 1 32 128 --out overhead.json

Both engines are loaded together and run in turn, so that a drifting machine slows both; each case is the ratio of
its time to the native run next to it, with the median and a bootstrap interval over the rounds.
"""
from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..edits import Add
from ..engine.wire import Take
from ..launch import bare_engine, close_engine
from ..prompts import Prompts
from ..session import Session
from .shapes import SHAPES, write

TOKENS_IN = TOKENS_OUT = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One case at one batch size: milliseconds a step, and the ratio to native with its 95 % interval."""

    shape: str
    case: str
    batch: int
    native_ms: float
    case_ms: float
    ratio: float
    low: float
    high: float
    rounds: int


def _prompts(batch: int, vocab: int, turn: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(turn)
    return torch.randint(10, vocab, (batch, TOKENS_IN), generator=draw).tolist()


def _cases(session: Session, batch: int) -> dict[str, Callable[[list[list[int]]], None]]:
    draw = torch.Generator().manual_seed(0)
    layers = range(session.n_layers)
    sampling = dict(max_tokens=TOKENS_OUT, temperature=0.0, ignore_eos=True)
    shared = torch.randn(session.n_layers, session.d_model, generator=draw) * 1e-3
    own = torch.randn(batch, session.d_model, generator=draw) * 1e-3

    def captured(prompts: list[list[int]], rows: Callable[[int], tuple]) -> None:
        takes = [[Take(p.kind, p.layer, rows(len(ids))) for p in session.tapped] for ids in prompts]
        _, source = session._run(Prompts.of(prompts), None, sampling, takes)
        source.rows(session.tapped[0], [0])

    return {
        "idle": lambda p: session._run(Prompts.of(p), None, sampling),
        "steer all layers": lambda p: session._run(Prompts.of(p), [Add(shared, 1.0, layers)], sampling),
        "different edit in each": lambda p: session._run(
            Prompts.of(p), [[Add(v, 1.0, [session.n_layers // 2])] for v in own], sampling),
        "capture last token, all layers": lambda p: captured(p, lambda n: ((n - 1, n),)),
        "capture every token, all layers": lambda p: captured(p, lambda n: ((0, None),)),
    }


def measure(shape: str, batches: list[int], rounds: int, engine: dict[str, Any]) -> list[Row]:
    """Return the rows of one shape. Loads two engines; needs memory for both."""
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = write(shape, Path(folder))
        engine = dict(load_format="dummy", tokenizer=str(tokenizer), dtype="bfloat16", max_model_len=TOKENS_IN + TOKENS_OUT + 8,
                      max_num_seqs=max(batches), enable_prefix_caching=False) | engine
        native = bare_engine(str(model), engine)
        session = Session(str(model), **engine)
        print(session, flush=True)
        rows = []
        for batch in batches:
            rows += _measure_batch(shape, native, session, batch, rounds)
            for row in rows[-5:]:
                print(f"{row.case:32} batch {row.batch:4}: {row.native_ms:7.3f} -> {row.case_ms:7.3f} ms a step, "
                      f"{(row.ratio - 1) * 100:+.2f} % [{(row.low - 1) * 100:+.2f}, {(row.high - 1) * 100:+.2f}]", flush=True)
        session.close()
        close_engine(native)
    return rows


def _measure_batch(shape: str, native: Any, session: Session, batch: int, rounds: int) -> list[Row]:
    from vllm import SamplingParams

    plain = SamplingParams(max_tokens=TOKENS_OUT, temperature=0.0, ignore_eos=True)
    run_native = lambda prompts: native.generate([{"prompt_token_ids": p} for p in prompts], plain, use_tqdm=False)  # noqa: E731
    cases = _cases(session, batch)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for turn in range(-1, rounds):  # the first turn warms up
        prompts = _prompts(batch, SHAPES[shape]["vocab_size"], turn + 1)
        for name, run in cases.items():
            order = (run_native, run) if turn % 2 else (run, run_native)
            took = {which: _timed(which, prompts) for which in order}
            if turn >= 0:
                times[name].append((took[run_native], took[run]))
    return [_row(shape, name, batch, pairs) for name, pairs in times.items()]


def _timed(run: Callable[[list[list[int]]], Any], prompts: list[list[int]]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(prompts)
    return (time.perf_counter() - start) / TOKENS_OUT * 1e3


def _row(shape: str, name: str, batch: int, pairs: list[tuple[float, float]]) -> Row:
    ratios = np.array([case / native for native, case in pairs])
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Row(shape, name, batch, statistics.median(n for n, _ in pairs), statistics.median(c for _, c in pairs),
               float(np.median(ratios)), float(low), float(high), len(pairs))


def main() -> None:
    """Run from the command line and write the raw rows as JSON."""
    import vllm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["llama-8b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU for each of the two engines")
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    args = parser.parse_args()
    engine = dict(gpu_memory_utilization=args.memory, compilation_config={"cudagraph_capture_sizes": sorted({1, 8, *args.batch})})
    rows = [row for shape in args.shape for row in measure(shape, args.batch, args.rounds, engine)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    about = {"device": device, "vllm": vllm.__version__, "torch": torch.__version__, "tokens_in": TOKENS_IN, "tokens_out": TOKENS_OUT}
    args.out.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
