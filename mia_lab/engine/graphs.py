"""CUDA graphs without the taps that a step does not need: what nobody uses is not launched.

A tap in a replayed graph costs about a microsecond even where every row is neutral. So each graph that vLLM captures is
kept, and instantiated once for each set of sites that steps turn out to need: a copy of it from which the other taps'
nodes were taken out. All copies work on the same memory; which one is replayed is chosen per step, on the host.
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
from .tables import Tables

_VARIANTS = 8  # of one graph; a step that would need one more replays the whole graph
_KERNEL_NODE = 0
_REMOVABLE = {"mia_tap": (3,), "mia_read": (4, 5, 6)}  # kernels, and which arguments tell the sites that they serve

Sites = frozenset[int]


class _Params(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of the driver's API, second version."""

    _fields_ = [("function", ctypes.c_void_p), ("launch", ctypes.c_uint * 7), ("arguments", ctypes.POINTER(ctypes.c_void_p)),
                ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p)]


def _nodes(graph: ctypes.c_void_p) -> list[int]:
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return list(nodes)


def _neighbours(name: str, node: int) -> list[int]:
    """The nodes before or after one; edges may be programmatic, which only these second versions can tell."""
    count = ctypes.c_size_t()
    call(name, ctypes.c_void_p(node), None, None, ctypes.byref(count))
    nodes, edges = (ctypes.c_void_p * max(count.value, 1))(), (ctypes.c_uint64 * max(count.value, 1))()
    if count.value:
        call(name, ctypes.c_void_p(node), nodes, edges, ctypes.byref(count))
    return list(nodes)[: count.value]


def _indices_of(node: int) -> set[int]:
    """The addresses of a tap's index tables, one a site; none for a node that is no tap that could be left out."""
    kind = ctypes.c_int()
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    if kind.value != _KERNEL_NODE:
        return set()
    params, name = _Params(), ctypes.c_char_p()
    call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
    if params.function:
        call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.function))
    else:
        call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kernel))
    places = _REMOVABLE.get((name.value or b"").decode(), ()) if params.arguments else ()
    return {ctypes.cast(params.arguments[place], ctypes.POINTER(ctypes.c_uint64)).contents.value for place in places}


def _take_out(graph: ctypes.c_void_p, node: int) -> None:
    """Remove a node; what waited for it waits for what it waited for."""
    before = _neighbours("cuGraphNodeGetDependencies_v2", node)
    after = _neighbours("cuGraphNodeGetDependentNodes_v2", node)
    call("cuGraphDestroyNode", ctypes.c_void_p(node))
    for later in after:
        held = set(_neighbours("cuGraphNodeGetDependencies_v2", later))
        for earlier in before:
            if earlier not in held:
                call("cuGraphAddDependencies_v2", graph, (ctypes.c_void_p * 1)(earlier), (ctypes.c_void_p * 1)(later), None,
                      ctypes.c_size_t(1))


def _free(executables: dict[Sites, ctypes.c_void_p]) -> None:
    while executables:
        call("cuGraphExecDestroy", executables.popitem()[1])


class TappedGraph(torch.cuda.CUDAGraph):
    """A captured graph that replays with the taps of the sites in `needed()` and without the others.

    sites: which site an index table's address belongs to. needed: returns one and the same set for as long as it stays the
    same. The forward draws no random numbers, so that a replay is a launch.
    """

    def __new__(cls, sites: dict[int, int], needed: Callable[[], Sites]) -> TappedGraph:
        """Make a graph whose capture is kept."""
        return super().__new__(cls, keep_graph=True)

    def __init__(self, sites: dict[int, int], needed: Callable[[], Sites]) -> None:
        super().__init__(keep_graph=True)
        self._site_of, self._needed = sites, needed
        self._device = torch.cuda.current_device()
        self._whole: Sites | None = None  # every site with a tap in this graph, once that is known
        self._last: Sites | None = None
        self._chosen = ctypes.c_void_p()
        self._variants: dict[Sites, ctypes.c_void_p] = {}
        weakref.finalize(self, _free, self._variants).atexit = False

    def replay(self) -> None:
        """Launch the variant that this step needs on the current stream, making it where it is new."""
        if self._whole is None:
            self._whole = frozenset().union(*self._taps(ctypes.c_void_p(self.raw_cuda_graph())).values())
        if not self._whole:
            super().replay()
            return
        needed = self._needed()
        if needed is not self._last:
            self._choose(needed & self._whole)
            self._last = needed
        call("cuGraphLaunch", self._chosen, ctypes.c_void_p(streams.raw(self._device)))

    def _choose(self, wanted: Sites) -> None:
        if wanted not in self._variants and len(self._variants) >= _VARIANTS:
            wanted = self._whole
        if wanted not in self._variants:
            self._variants[wanted] = self._with(wanted)
        self._chosen = self._variants[wanted]

    def reset(self) -> None:
        """Free the graph and its variants."""
        self._whole = self._last = None
        _free(self._variants)
        super().reset()

    def _taps(self, graph: ctypes.c_void_p) -> dict[int, Sites]:
        """The nodes of taps, and the sites of each."""
        found = {node: _indices_of(node) for node in _nodes(graph)}
        return {node: frozenset(self._site_of[index] for index in indices) for node, indices in found.items() if indices}

    def _with(self, wanted: Sites) -> ctypes.c_void_p:
        """A copy from which the taps of none of these sites were taken out."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuGraphClone", ctypes.byref(graph), ctypes.c_void_p(self.raw_cuda_graph()))
        try:
            for node, sites in self._taps(graph).items():
                if not sites & wanted:
                    _take_out(graph, node)
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        finally:
            call("cuGraphDestroy", graph)
        return executable


def install(runner: Any, tables: Tables, needed: Callable[[], Sites]) -> None:
    """Let a runner capture graphs that leave out what a step does not need. Without NVIDIA's CUDA there are none."""
    if tables.device.type != "cuda" or torch.version.cuda is None:
        return
    sites = {tables.index[site].data_ptr(): site for site in range(len(tables.widths))}
    capture_model = runner.capture_model

    def capture(*args: Any, **kwargs: Any) -> Any:
        with _graphs_made_by(partial(TappedGraph, sites, needed)):
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
