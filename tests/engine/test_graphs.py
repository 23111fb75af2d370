"""Graphs that leave taps out: a replay does what the whole graph does for the sites it needs, and nothing for the others."""
from __future__ import annotations

import gc

import pytest
import torch
from programs import ADDITION, NOTHING, ROWS, Case, chain, make

from mia_lab.engine import graphs
from mia_lab.engine.graphs import TappedGraph
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
        self.needed: frozenset[int] = frozenset()
        self.start = self.case.x.clone()
        self.graph = TappedGraph({table.data_ptr(): site for site, table in enumerate(self.index)}, lambda: self.needed)
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
        self.needed = frozenset(needed)
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
    whole = graphs._nodes(graphs.ctypes.c_void_p(model.graph.raw_cuda_graph()))
    assert sum(bool(graphs._indices_of(node)) for node in whole) == SITES
    assert len(whole) == 1 + 3 * SITES  # the variants left the captured graph as it was


def test_sites_of_other_graphs_do_not_matter() -> None:
    model = Model()
    assert torch.equal(model.replayed(2, 17), model.eager(2))
    assert set(model.graph._variants) == {frozenset({2})}


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
    whole, needed = case.arena.clone(), frozenset({1})
    graph = TappedGraph({table.data_ptr(): site for site, table in enumerate(index)}, lambda: needed)
    with torch.cuda.graph(graph):
        read_(*args, wide=False)
    for needed in (frozenset({1}), frozenset(), frozenset({0, 2}), frozenset({17})):
        case.arena.fill_(NOTHING)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(case.arena, whole if needed & {0, 1, 2} else torch.full_like(whole, NOTHING)), needed
