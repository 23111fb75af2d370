"""CUDA graphs without the taps that a step does not need: what nobody uses is not launched.

A tap in a replayed graph costs about a microsecond even where every row is neutral. So each graph that vLLM captures is
kept, and instantiated once for each set of sites that steps turn out to need: a copy of it from which the other taps'
nodes were taken out. A norm in which taps ride stays: a lesser kernel runs in its place, the norm alone where nothing is
asked of its taps, and one that cannot edit, which leaves room for more rows beside it, where nothing is edited. All copies
work on the same memory; which one is replayed is chosen per step, on the host.
"""
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import streams
from .driver import call
from .nodes import NORM, Tap, exchange, nodes_of, take_out, tap_of
from .router import Router
from .tables import Tables

_VARIANTS = 8  # of one graph; a step that would need one more replays the whole graph

Sites = frozenset[int]
Needs = tuple[Sites, Sites]  # where rows do something, and where of these they are edited


def _free(executables: dict[tuple[Sites, bool], ctypes.c_void_p]) -> None:
    while executables:
        call("cuGraphExecDestroy", executables.popitem()[1])


class TappedGraph(torch.cuda.CUDAGraph):
    """A captured graph that replays with what the taps of this step's sites do, and without the others.

    sites: which site an index table's address belongs to. needs: returns one and the same pair for as long as it stays the
    same. The forward draws no random numbers, so that a replay is a launch.
    """

    def __new__(cls, sites: dict[int, int], needs: Callable[[], Needs]) -> TappedGraph:
        """Make a graph whose capture is kept."""
        return super().__new__(cls, keep_graph=True)

    def __init__(self, sites: dict[int, int], needs: Callable[[], Needs]) -> None:
        super().__init__(keep_graph=True)
        self._site_of, self._needs = sites, needs
        self._device = torch.cuda.current_device()
        self._removable: Sites = frozenset()
        self._norms: Sites = frozenset()
        self._last: Needs | None = None
        self._chosen = ctypes.c_void_p()
        self._variants: dict[tuple[Sites, bool], ctypes.c_void_p] = {}
        weakref.finalize(self, _free, self._variants).atexit = False

    def capture_end(self) -> None:
        """End the capture, and make the variant in which no tap does anything: the first step is not to wait for it."""
        super().capture_end()
        for tap, sites in self._taps(ctypes.c_void_p(self.raw_cuda_graph())).values():
            if tap.name == NORM:
                self._norms |= sites
            else:
                self._removable |= sites
        if self._norms or self._removable:
            self._choose(frozenset(), frozenset())

    def replay(self) -> None:
        """Launch the variant that this step needs on the current stream, making it where it is new."""
        if not self._variants:
            super().replay()
            return
        needs = self._needs()
        if needs is not self._last:
            self._choose(*needs)
            self._last = needs
        call("cuGraphLaunch", self._chosen, ctypes.c_void_p(streams.raw(self._device)))

    def _choose(self, sites: Sites, edited: Sites) -> None:
        """Norms do what they do together, lest each set of edited layers is a variant of its own."""
        whole = self._removable | self._norms
        wanted = sites & self._removable | (self._norms if sites & self._norms else frozenset())
        key = wanted, bool(edited & whole)
        if key not in self._variants and len(self._variants) >= _VARIANTS:
            key = whole, True
        if key not in self._variants:
            self._variants[key] = self._with(*key)
        self._chosen = self._variants[key]

    def reset(self) -> None:
        """Free the graph and its variants."""
        self._last, self._removable, self._norms = None, frozenset(), frozenset()
        _free(self._variants)
        super().reset()

    def _taps(self, graph: ctypes.c_void_p) -> dict[int, tuple[Tap, Sites]]:
        """The nodes of taps, and the sites of each."""
        found = {node: tap_of(node) for node in nodes_of(graph)}
        return {node: (tap, frozenset(self._site_of[index] for index in tap.index)) for node, tap in found.items() if tap is not None}

    def _with(self, wanted: Sites, edits: bool) -> ctypes.c_void_p:
        """A copy in which the taps of none but these sites do anything, and edit only where `edits`."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuGraphClone", ctypes.byref(graph), ctypes.c_void_p(self.raw_cuda_graph()))
        try:
            for node, (tap, sites) in self._taps(graph).items():
                if not sites & wanted and tap.name != NORM:
                    take_out(graph, node)
                elif not sites & wanted and tap.lesser is not None:
                    exchange(node, tap, tap.lesser.plain, tap.lesser.places)
                elif not edits and tap.lesser is not None:
                    exchange(node, tap, tap.lesser.reading)
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        finally:
            call("cuGraphDestroy", graph)
        return executable


def install(runner: Any, tables: Tables, router: Router) -> None:
    """Let a runner capture graphs that leave out what a step does not need. Without NVIDIA's CUDA there are none."""
    if tables.device.type != "cuda" or torch.version.cuda is None:
        return
    sites = {tables.index[site].data_ptr(): site for site in range(len(tables.widths))}
    capture_model = runner.capture_model

    def capture(*args: Any, **kwargs: Any) -> Any:
        router.wake()  # requests that warm vLLM up may have run before
        with _graphs_made_by(partial(TappedGraph, sites, lambda: router.needs)):
            return capture_model(*args, **kwargs)

    runner.capture_model = capture


@contextmanager
def _graphs_made_by(make: Callable[[], TappedGraph]) -> Iterator[None]:
    plain = torch.cuda.CUDAGraph
    torch.cuda.CUDAGraph = make
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = plain
