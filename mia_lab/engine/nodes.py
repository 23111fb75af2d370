"""Nodes of a captured CUDA graph: which are taps, taking one out, and letting another kernel run in its place."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from mia_lab.kernels.launch import Lesser, Loaded, in_place_of

from .driver import call, parameter_sizes

NORM = "mia_tap_norm"  # the kernel that is needed with and without its taps
_INDEX_AT = {"mia_tap": (3,), "mia_read": (4, 5, 6), NORM: (3, 4, 5)}  # kernels of taps, and which arguments tell the sites they serve
_KERNEL_NODE = 0


class _Params(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of the driver's API, second version."""

    _fields_ = [("function", ctypes.c_void_p), ("launch", ctypes.c_uint * 7), ("arguments", ctypes.POINTER(ctypes.c_void_p)),
                ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p)]


def nodes_of(graph: ctypes.c_void_p) -> list[int]:
    """The handles of a graph's nodes."""
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


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap's node: its kernel, by name, the addresses of its index tables, one a site, and what may run in its place."""

    name: str
    index: frozenset[int]
    params: _Params
    lesser: Lesser | None


def tap_of(node: int) -> Tap | None:
    """What is known of a node; None where it is no tap."""
    kind = ctypes.c_int()
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    if kind.value != _KERNEL_NODE:
        return None
    params, found = _Params(), ctypes.c_char_p()
    call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
    if params.function:
        call("cuFuncGetName", ctypes.byref(found), ctypes.c_void_p(params.function))
    else:
        call("cuKernelGetName", ctypes.byref(found), ctypes.c_void_p(params.kernel))
    name = (found.value or b"").decode()
    if name not in _INDEX_AT or not params.arguments:
        return None
    index = {ctypes.cast(params.arguments[at], ctypes.POINTER(ctypes.c_uint64)).contents.value for at in _INDEX_AT[name]}
    return Tap(name, frozenset(index), params, in_place_of.get(params.function))


def exchange(node: int, tap: Tap, other: Loaded, places: Sequence[int] | None = None) -> None:
    """Let another kernel run at a tap's node, with the arguments at `places` of it, or all; and, behind these, Triton's own."""
    old, new = parameter_sizes(tap.params.function), parameter_sizes(other.function)
    places = range(len(old)) if places is None else [*places, *range(len(old) - len(new) + len(places), len(old))]
    if not new or len(new) > len(old) or max(places) >= len(old) or [old[at] for at in places] != new:
        return  # a Triton that passes its parameters in another way: the node does what is asked as it is
    values = [ctypes.create_string_buffer(ctypes.string_at(tap.params.arguments[at], size), size) for at, size in zip(places, new)]
    params = _Params.from_buffer_copy(tap.params)
    params.function, params.kernel, params.context = other.function, None, None
    params.launch[3], params.launch[6] = other.threads, other.shared
    params.arguments = (ctypes.c_void_p * len(new))(*map(ctypes.addressof, values))  # copies: the node's own go with its parameters
    call("cuGraphKernelNodeSetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))


def take_out(graph: ctypes.c_void_p, node: int) -> None:
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
