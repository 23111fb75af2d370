"""What the driver is given when another kernel is to run at a tap's node, without a driver."""
from __future__ import annotations

import ctypes

import pytest

from mia_lab.engine import nodes
from mia_lab.engine.nodes import Tap, _Params, exchange
from mia_lab.kernels.launch import Loaded

VALUES = [ctypes.c_uint64(7 << 40), ctypes.c_uint64(9), ctypes.c_float(0.5), ctypes.c_int32(-3), ctypes.c_uint64(11)]
SIZES = [8, 8, 4, 4, 8]  # the last is Triton's own
OTHER = Loaded(None, None, 5, None, (), 256, 64)


def tap() -> Tap:
    arguments = (ctypes.c_void_p * len(VALUES))(*map(ctypes.addressof, VALUES))
    return Tap("mia_tap_norm", frozenset(), _Params(3, (1, 1, 1, 512, 1, 1, 32), arguments, None, None, 77), None)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    found: list[tuple] = []

    def call(name: str, node: ctypes.c_void_p, params: object) -> None:
        given = params._obj
        values = [ctypes.string_at(given.arguments[at], size) for at, size in enumerate(nodes.parameter_sizes(given.function))]
        for value in VALUES:
            assert not any(given.arguments[at] == ctypes.addressof(value) for at in range(len(values)))  # copies
        found.append((name, node.value, given.function, given.kernel, given.context, list(given.launch), values))

    monkeypatch.setattr(nodes, "call", call)
    return found


@pytest.mark.parametrize(("places", "own"), [(None, [0, 1, 2, 3, 4]), ((0, 2), [0, 2, 4]), ((3,), [3, 4])])
def test_the_other_kernel_gets_its_own_arguments(places: tuple[int, ...] | None, own: list[int], told: list[tuple],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "parameter_sizes", lambda function: SIZES if function == 3 else [SIZES[i] for i in own])
    exchange(42, tap(), OTHER, places)
    wanted = [bytes(VALUES[i]) for i in own]
    assert told == [("cuGraphKernelNodeSetParams_v2", 42, 5, None, None, [1, 1, 1, 256, 1, 1, 64], wanted)]


@pytest.mark.parametrize(("old", "new", "places"), [(SIZES, [8, 4, 8], (0, 1)), ([], [], None), ([], [], (0, 2)), (SIZES, [], None),
                                                    (SIZES[:2], [8, 8], (0, 4)), (SIZES, [*SIZES, 8], None),
                                                    ([], [8], None), (SIZES[:2], SIZES, (1,))])
def test_a_kernel_with_other_parameters_leaves_the_node_as_it_is(old: list[int], new: list[int], places: tuple[int, ...] | None,
                                                                 told: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "parameter_sizes", lambda function: old if function == 3 else new)
    exchange(42, tap(), OTHER, places)
    assert told == []
