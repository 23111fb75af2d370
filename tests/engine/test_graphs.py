"""Graphs that leave taps out: a replay does what the whole graph does for the sites it needs, and nothing for the others."""
from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import ADDITION, DTYPES, NOTHING, ROWS, Case, chain, make, same

from mia_lab.engine import graphs, nodes
from mia_lab.engine.graphs import TappedGraph
from mia_lab.kernels.norm import norm_cuda, tap_norm, tap_norm_cuda
from mia_lab.kernels.read import read_
from mia_lab.kernels.tap import tap_

pytestmark = pytest.mark.gpu
SITES = 4


class Model:
    """A chain of taps with arithmetic between them, captured in a graph; each site has an index table of its own."""

    def __init__(self) -> None:
        self.case = make(64, torch.float32).copy("cuda")
        self.case.rows.fill_(-1)
        self.case.rows[: ROWS // 2, 0] = ADDITION
        self.index = [self.case.index.clone() for _ in range(SITES)]
        self.needs: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self.start = self.case.x.clone()
        self.graph = TappedGraph({table.data_ptr(): site for site, table in enumerate(self.index)}, lambda: self.needs)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.forward(range(SITES))
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph):
            self.forward(range(SITES))

    def forward(self, sites: range | frozenset[int]) -> None:
        case: Case = self.case
        case.x.copy_(self.start)
        for site in range(SITES):
            case.x.mul_(0.5)
            if site in sites:
                tap_(case.x, case.residual, case.rows, self.index[site], *case.args[4:])
            case.x.add_(1.0)

    def replayed(self, *needed: int) -> torch.Tensor:
        self.needs = (frozenset(needed),) * 2
        self.case.x.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()
        return self.case.x.clone()

    def eager(self, *sites: int) -> torch.Tensor:
        self.forward(frozenset(sites))
        torch.cuda.synchronize()
        return self.case.x.clone()


def test_only_what_a_step_needs_is_launched() -> None:
    model = Model()
    for sites in [(), (0,), (3,), (1, 2), (0, 1, 2, 3), (), (2,), (0, 3)]:
        assert torch.equal(model.replayed(*sites), model.eager(*sites)), sites
    assert not torch.equal(model.eager(), model.eager(1))


def test_the_taps_are_gone_from_the_copy() -> None:
    model = Model()
    model.replayed()
    whole = nodes.nodes_of(ctypes.c_void_p(model.graph.raw_cuda_graph()))
    assert sum(nodes.tap_of(node) is not None for node in whole) == SITES
    assert len(whole) == 1 + 3 * SITES  # the variants left the captured graph as it was


def test_sites_of_other_graphs_do_not_matter() -> None:
    model = Model()
    assert torch.equal(model.replayed(2, 17), model.eager(2))
    assert set(model.graph._variants) == {(frozenset(), False), (frozenset({2}), True)}


def test_what_would_need_too_many_variants_replays_the_whole_graph() -> None:
    model = Model()
    for bits in range(graphs._VARIANTS):
        model.replayed(*(site for site in range(SITES) if bits >> site & 1))
    assert len(model.graph._variants) == graphs._VARIANTS
    # Site 3 was not wanted yet. Rows that are not its business stay as they are even though its tap is launched.
    assert torch.equal(model.replayed(3), model.eager(*range(SITES)))
    assert torch.equal(model.replayed(0, 1), model.eager(0, 1))


def test_tables_may_change_between_replays() -> None:
    model = Model()
    first = model.replayed(1)
    model.case.rows.fill_(-1)
    assert torch.equal(model.replayed(1), model.eager())
    assert not torch.equal(model.replayed(1), first)


def test_a_graph_that_is_let_go_frees_its_copies() -> None:
    model = Model()
    model.replayed(), model.replayed(1)
    held = model.graph._variants
    del model
    gc.collect()
    assert not held


def test_a_kernel_that_reads_for_several_sites_stays_while_one_of_them_is_needed() -> None:
    case, index, offsets = chain(make(64, residual=False), 3)
    case, index, offsets = case.copy("cuda"), [t.cuda() for t in index], [t.cuda() for t in offsets]
    args = [case.x] * 3, case.rows, index, offsets, case.arena
    read_(*args, wide=False)
    whole, needs = case.arena.clone(), (frozenset({1}), frozenset())
    graph = TappedGraph({table.data_ptr(): site for site, table in enumerate(index)}, lambda: needs)
    with torch.cuda.graph(graph):
        read_(*args, wide=False)
    for needed in (frozenset({1}), frozenset(), frozenset({0, 2}), frozenset({17})):
        needs = needed, frozenset()
        case.arena.fill_(NOTHING)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(case.arena, whole if needed & {0, 1, 2} else torch.full_like(whole, NOTHING)), needed


class Norm:
    """A norm in which three taps ride, in a graph, whose rows edit and capture whatever is said to be needed."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        case, self.index, self.offsets = chain(make(width, dtype), 3)
        self.case, self.index, self.offsets = case.copy("cuda"), [t.cuda() for t in self.index], [t.cuda() for t in self.offsets]
        self.how = torch.rand(width, device="cuda").to(dtype), 1e-5, False, True
        self.start = self.case.copy("cuda")
        self.needs: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self.launched()  # vLLM runs a model before it captures it
        torch.cuda.synchronize()
        self.graph = TappedGraph({table.data_ptr(): site for site, table in enumerate(self.index)}, lambda: self.needs)
        with torch.cuda.graph(self.graph):
            self.out = self.launched()

    def launched(self, run: Callable[..., Any] = tap_norm, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, rows, _, words, numbers, bank, _, arena, measures, opens = self.case.args
        return run(x, residual, rows, self.index, words, numbers, bank, self.offsets, arena, measures, opens, *self.how, **how)

    def fresh(self) -> None:
        self.case.arena.copy_(self.start.arena)
        self.case.measures.copy_(self.start.measures)

    def replayed(self, needed: set[int], edited: set[int]) -> list[torch.Tensor]:
        self.needs = frozenset(needed), frozenset(edited)
        self.fresh()
        for some in self.out:
            some.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()
        return [some.clone() for some in (*self.out, self.case.arena, self.case.measures)]

    def eager(self, **how: bool) -> list[torch.Tensor]:
        self.fresh()
        out = self.launched(tap_norm_cuda, **how)
        return [*out, self.case.arena.clone(), self.case.measures.clone()]


@pytest.mark.parametrize("width", [64, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_without_work_for_its_taps_is_the_norm_alone(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged, call = [], nodes.call
    monkeypatch.setattr(nodes, "call", lambda name, *args: (exchanged.append(name), call(name, *args)))
    model = Norm(dtype, width)
    assert exchanged.count("cuGraphKernelNodeSetParams_v2") == 1
    x, residual, *_ = model.case.args
    plain = [*norm_cuda(x, residual, *model.how[:3]), model.start.arena, model.start.measures]
    reading, editing = model.eager(edits=False), model.eager()
    assert not any(map(same, plain[:3], editing[:3])) and not same(plain[2], reading[2])
    for needed, edited, expected in (((), (), plain), ({1}, {1}, editing), ({0, 2}, (), reading), ({17}, {17}, plain),
                                     ({0, 2}, {2}, editing), ((), (), plain), ({1}, (), reading)):
        found = model.replayed(set(needed), set(edited))
        assert all(map(same, found, expected)), (needed, edited)
    assert exchanged.count("cuGraphKernelNodeSetParams_v2") == 2 and len(model.graph._variants) == 3
    assert exchanged.count("cuGraphDestroyNode") == 0


def test_a_tap_of_steps_that_edit_nowhere_only_reads() -> None:
    model = Model()
    model.case.rows[:, 1] = 0
    model.needs = frozenset({1, 2}), frozenset()
    model.graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(model.case.x, model.eager()) and not torch.equal(model.eager(), model.eager(1, 2))
