"""What a tap costs inside a CUDA graph, in microseconds: `python -m mia_lab.kernels.bench`, on a GPU.

A decode step is imitated: matrix products as large as a model's, whose weights sweep the caches as they do in service,
and after each the norm that adds up the stream. Each way to tap is captured in a graph of its own and replayed in turn
with the graph that has no taps; a figure is the difference by tap, the median and the quartiles of `--repeats` pairs.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import quantiles

import torch
import triton
import triton.language as tl

from . import program as P
from .norm import tap_norm_cuda
from .tap import tap_cuda

Tensor = torch.Tensor
SHAPES = {"llama-8b": (4096, 14336, 32), "qwen-1.5b": (1536, 8960, 28)}  # d_model, d_mlp, blocks
EPS, PROGRAMS, EVERYWHERE = 1e-5, 1024, (1 << 31) - 1
PLAIN, GENERAL, ABLATE = range(3)  # edit programs: an addition, the same by the general way, a direction taken out
ASKED = {"nothing": (-1, -1), "add": (PLAIN, -1), "add, the general way": (GENERAL, -1), "ablate": (ABLATE, -1), "capture": (-1, 0),
         "add and capture": (PLAIN, 0)}


@triton.jit
def _norm(x, residual, weight, normed, whole, eps, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < d
    total = tl.load(x + row * d + cols, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + row * d + cols, mask=mask, other=0.0).to(tl.float32)
    scaled = total * tl.rsqrt(tl.sum(total * total, axis=0) / d + eps)
    w = tl.load(weight + cols, mask=mask, other=0.0)
    tl.store(whole + row * d + cols, total.to(x.dtype.element_ty), mask=mask)
    tl.store(normed + row * d + cols, (scaled.to(w.dtype).to(tl.float32) * w.to(tl.float32)).to(x.dtype.element_ty), mask=mask)


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm without a tap."""
    normed, whole, block = torch.empty_like(x), torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    _norm[(len(x),)](x, residual, weight, normed, whole, EPS, x.shape[1], BLOCK=block, num_warps=max(1, min(16, block // 256)))
    return normed, whole


class Step:
    """The imitated step, its tables, and a graph for each way to tap it."""

    def __init__(self, shape: str, rows: int) -> None:
        d, wide, self.blocks = SHAPES[shape]
        draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
        self.up, self.down = ([draw(*size) for _ in range(self.blocks)] for size in ((d, wide), (wide, d)))
        self.weight, self.x = torch.ones(d, device="cuda", dtype=torch.bfloat16), draw(rows, d)
        whole = lambda shape, fill=0: torch.full(shape, fill, dtype=torch.int32, device="cuda")  # noqa: E731
        self.rows, self.offsets = whole((rows, P.ROW_COLUMNS), -1), whole((self.blocks, 1, 2), -1)
        self.index, self.words = whole((self.blocks, PROGRAMS, P.INDEX_COLUMNS)), whole((3 * self.blocks, P.COLUMNS))
        self.numbers = torch.zeros(3 * self.blocks, P.COLUMNS, device="cuda")
        self.bank = torch.randn(self.blocks, d, device="cuda") / d
        self.arena = torch.zeros(rows * self.blocks * d, device="cuda", dtype=torch.bfloat16)
        self.gates = torch.zeros(rows, 1, device="cuda"), whole((1, 1))
        for block in range(self.blocks):
            for program, op in ((PLAIN, P.ADD), (GENERAL, P.ADD), (ABLATE, P.AFFINE)):
                line = program * self.blocks + block
                self.words[line] = torch.tensor([op, block, block, -1, 0, EVERYWHERE, 0, P.FRESH])
                self.numbers[line, : P.OFFSET] = torch.tensor([1.0, -1.0])
                place = block if program == PLAIN else -1
                self.index[block, program] = torch.tensor([line, 1, place, int(torch.tensor(1.0).view(torch.int32))])
            self.offsets[block, 0, 1] = block * d
        ways = {"no tap": lambda block, h, r: plain_norm(h, r, self.weight), "a tap before the norm": self._apart,
                "a tap in the norm": self._within}
        self.graphs = {name: self._captured(way) for name, way in ways.items()}

    def _tables(self, block: int) -> tuple[Tensor, ...]:
        return (self.rows, self.index[block], self.words, self.numbers, self.bank, self.offsets[block], self.arena, *self.gates)

    def _apart(self, block: int, h: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        tap_cuda(h, r, *self._tables(block))
        return plain_norm(h, r, self.weight)

    def _within(self, block: int, h: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        rows, index, words, numbers, bank, offsets, *rest = self._tables(block)
        return tap_norm_cuda(h, r, rows, [index], words, numbers, bank, [offsets], *rest, self.weight, EPS, False, False)

    def _captured(self, way: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]) -> torch.cuda.CUDAGraph:
        def forward() -> None:
            h, r = self.x, self.x
            for block in range(self.blocks):
                h, r = way(block, h @ self.up[block] @ self.down[block], r)

        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        return graph

    def ask(self, program: int, plan: int) -> None:
        """Let every row run a program and a capture plan, or -1 for none."""
        n, width = torch.arange(len(self.rows), device="cuda", dtype=torch.int32), self.blocks * self.x.shape[1]
        self.rows[:, P.PROGRAM], self.rows[:, P.PLAN], self.rows[:, P.BASE] = program, plan, n * width

    def time(self, name: str) -> float:
        """Microseconds of one replay."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graphs[name].replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop)


def main() -> None:
    """Print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    for shape in args.shape:
        for rows in args.rows:
            step = Step(shape, rows)
            for asked, (program, plan) in ASKED.items():
                step.ask(program, plan)
                for way in list(step.graphs)[1:]:
                    step.time("no tap"), step.time(way)
                    pairs = [(step.time("no tap"), step.time(way)) for _ in range(args.repeats)]
                    low, middle, high = quantiles([(tapped - bare) / step.blocks for bare, tapped in pairs])
                    print(f"{shape}, {rows:4} rows, {way:22}, {asked:21}: {middle:+.2f} us a tap [{low:+.2f}, {high:+.2f}]", flush=True)


if __name__ == "__main__":
    main()
