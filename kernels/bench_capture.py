"""What it costs to capture every row at the points of a block, one kernel a point or together: `python -m mia_lab.kernels.bench_capture`.

On a GPU, bfloat16, in CUDA graphs that replay in turn. The block's width is a Llama-8B's; every layer has its own part of the
arena, so that what is stored does not stay in the L2 cache. Figures are microseconds a layer: the median and the quartiles;
each with the registers that `launch.py` grants a thread, and with as many as the compiler likes.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from statistics import quantiles

import torch

from . import launch
from . import program as P
from .norm import norm_cuda, tap_norm_cuda
from .read import read_cuda
from .tap import tap_cuda

Tensor = torch.Tensor
D, KV, LAYERS, SITES, EPS = 4096, 1024, 5, 6, 1e-5  # sites: what a norm carries, then q, k and v


class Block:
    """One block's values and tables; every row captures all of its sites."""

    def __init__(self, rows: int) -> None:
        whole = lambda shape, fill=0: torch.full(shape, fill, dtype=torch.int32, device="cuda")  # noqa: E731
        draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.x, self.residual, self.weight, qkv = draw(rows, D), draw(rows, D), draw(D), draw(rows, D + 2 * KV)
        self.heads = list(qkv.split([D, KV, KV], 1))
        widths = [D, D, D, D, KV, KV]
        self.rows = whole((rows, P.ROW_COLUMNS), -1)
        self.rows[:, P.PLAN] = 0
        self.rows[:, P.BASE] = torch.arange(rows, device="cuda", dtype=torch.int32) * sum(widths) * LAYERS
        self.index, self.offsets = whole((LAYERS, SITES, 1, P.INDEX_COLUMNS)), whole((LAYERS, SITES, 1, 2), -1)
        for layer in range(LAYERS):
            for site in range(SITES):
                self.offsets[layer, site, 0, 1] = layer * sum(widths) + sum(widths[:site])
        self.arena = torch.zeros(rows * sum(widths) * LAYERS, device="cuda", dtype=torch.bfloat16)
        self.edits = whole((1, P.COLUMNS)), torch.zeros(1, P.COLUMNS, device="cuda"), torch.zeros(1, D, device="cuda")
        self.gates = torch.zeros(rows, 1, device="cuda"), whole((1, 1))

    def tap(self, layer: int, site: int, residual: Tensor | None) -> None:
        """A tap of its own."""
        tap_cuda(self.x, residual, self.rows, self.index[layer, site], *self.edits, self.offsets[layer, site], self.arena, *self.gates)

    def norm(self, layer: int, sites: tuple[int, ...], alone: bool, edits: bool = True) -> None:
        """A norm in which taps ride."""
        tap_norm_cuda(self.x, self.residual, self.rows, [self.index[layer, site] for site in sites], *self.edits,
                      [self.offsets[layer, site] for site in sites], self.arena, *self.gates, self.weight, EPS, False, alone, edits)

    def read(self, layer: int, some: tuple[int, ...]) -> None:
        """Some of q, k and v, by one kernel."""
        sites = [3 + head for head in some]
        read_cuda([self.heads[head] for head in some], self.rows, [self.index[layer, site] for site in sites],
                  [self.offsets[layer, site] for site in sites], self.arena, wide=False)

    def bare(self, layer: int) -> None:
        """The norm without a tap."""
        norm_cuda(self.x, self.residual, self.weight, EPS, False)

    def norm_apart(self, layer: int) -> None:
        """The branch and the stream by themselves, the stream behind the border in the norm."""
        self.tap(layer, 0, None)
        self.tap(layer, 1, self.residual)
        self.norm(layer, (2,), False)

    def heads_apart(self, layer: int) -> None:
        """q, k and v by themselves."""
        for head in range(3):
            self.read(layer, (head,))


def captured(forward: Callable[[int], None]) -> torch.cuda.CUDAGraph:
    """A graph of all layers."""
    forward(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            forward(layer)
    return graph


def time(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds a layer of one replay."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop) / LAYERS


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 1024, 16384])
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    for rows, registers in product(args.rows, (launch.REGISTERS, {True: 128, False: 128})):
        launch.REGISTERS = registers
        launch._loaded.clear()
        block = Block(rows)
        ways = {"norm without a tap": block.bare, "norm with the stream": lambda layer, b=block: b.norm(layer, (2,), False),
                "norm, two taps apart": block.norm_apart, "norm with all three": lambda layer, b=block: b.norm(layer, (0, 1, 2), True),
                "the same, no edits": lambda layer, b=block: b.norm(layer, (0, 1, 2), True, False),
                "q, k, v together": lambda layer, b=block: b.read(layer, (0, 1, 2)), "q, k, v apart": block.heads_apart}
        graphs = {name: captured(way) for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(args.repeats):
            for name, graph in graphs.items():
                times[name].append(time(graph))
        for name, found in times.items():
            low, middle, high = quantiles(found)
            print(f"{rows:5} rows, registers {registers[True]:3} and {registers[False]:3}, {name:21}: {middle:7.2f} us a layer "
                  f"[{low:.2f}, {high:.2f}]", flush=True)


if __name__ == "__main__":
    main()
