"""Delivery: what the taps copy out on a routed step arrives by request and absolute position, and nothing else does."""
from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mia_lab.engine.claims import Claims
from mia_lab.engine.collecting import held_of
from mia_lab.engine.config import Sizes
from mia_lab.engine.courier import Courier
from mia_lab.engine.router import Router
from mia_lab.engine.tables import Tables
from mia_lab.engine.wire import KEY, Reduce, Spec, Take, Term, encode
from mia_lab.kernels.read import read_reference
from mia_lab.kernels.tap import tap_reference

SITES = [("resid_post", 0), ("mlp_out", 1), ("resid_post", 1), ("router", 1)]
WIDTHS, TOKENS = (5, 3, 5, 4), 16
SHAPES = {site: (2, 2) if site[0] == "router" else (width,) for site, width in zip(SITES, WIDTHS)}
VECTOR = torch.arange(3).float()[None]


class Engine:
    """Steps of four taps over random streams, the last a view that is kept as float32; remembers what each row should be."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        sizes = Sizes(TOKENS, requests=8, programs=8, plans=24, terms=64, bank_bytes=4 * 4 * max(WIDTHS), captured_tokens=2 * TOKENS)
        self.tables = Tables(WIDTHS, [kind == "router" for kind, _ in SITES], sizes, dtype, torch.device("cpu"))
        self.tables.register("v", VECTOR)
        claims = Claims()
        self.router, self.courier = Router(self.tables, SITES, claims), Courier(self.tables, SITES, claims)
        self.specs: dict[str, Spec] = {}
        self.expected: dict[tuple[str, int, bool, int], torch.Tensor] = {}  # by request, site, side and position
        self.draw = torch.Generator().manual_seed(0)

    def admit(self, req_id: str, spec: Spec, uid: str | None = None) -> None:
        self.specs[req_id] = spec
        params = SimpleNamespace(extra_args={KEY: encode(uid or req_id, spec)})
        new = [SimpleNamespace(req_id=req_id, sampling_params=params)]
        self.router.admit(SimpleNamespace(finished_req_ids=[], scheduled_new_reqs=new))

    def step(self, *batch: tuple[str, int, int]) -> None:
        """Run rows (request, count, start) through routing, taps and delivery."""
        ids, counts, starts = map(list, zip(*batch, strict=True))
        step = self.router.route(ids, np.array(counts), np.array(starts), torch.zeros(TOKENS, dtype=torch.int64))
        self.courier.before_forward(step)
        for site, wide in enumerate(self.tables.wide):
            x = torch.randn(TOKENS, WIDTHS[site], generator=self.draw).to(torch.float32 if wide else self.tables.arena.dtype)
            before = x.clone()  # the last rows are padding
            if wide:
                rows, index, _, _, _, offsets, arena, _, _ = self.tables.of_site(site)
                read_reference([x], rows, [index], [offsets], arena, wide=True)
            else:
                tap_reference(x, None, *self.tables.of_site(site))
            row = 0
            for req_id, count, start in batch:
                for position in range(start, start + count):
                    for take in self.specs.get(req_id, Spec()).takes:
                        if take.site == SITES[site] and any(a <= position and (b is None or position < b) for a, b in take.spans):
                            self.expected[req_id, site, take.before, position] = (before if take.before else x)[row].clone()
                    row += 1
        if step is not None:
            self.courier.after_forward(step)

    def check(self) -> None:
        """Every request has exactly the rows that were computed for it, as they were last computed."""
        for req_id, spec in self.specs.items():
            for take in spec.takes:
                site = SITES.index(take.site)
                positions, values = self.courier.rows(req_id, site, take.before)
                known = {p: row for (*key, p), row in self.expected.items() if key == [req_id, site, take.before]}
                assert positions.tolist() == sorted(known)
                assert values.dtype == (torch.float32 if self.tables.wide[site] else self.tables.arena.dtype)
                assert torch.equal(values, torch.stack([known[p] for p in sorted(known)]) if known else values[:0])


def take(site: int, *spans: tuple, before: bool = False) -> Take:
    return Take(*SITES[site], spans or ((0, None),), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_chunks_and_decode_steps_arrive_in_order(dtype: torch.dtype) -> None:
    engine = Engine(dtype)
    engine.admit("r", Spec((Term("add", "mlp_out", 1, ((1, None),), write="v", coeff=2.0),), (take(2), take(1), take(3))))
    for batch in [[("r", 6, 0)], [("other", 3, 0), ("r", 5, 6)], [("r", 1, 11), ("other", 1, 3)], [("r", 1, 12)]]:
        engine.step(*batch)
    engine.check()
    assert engine.courier.rows("r", 1)[0].tolist() == list(range(13))
    assert engine.courier.rows("r", 1)[1].dtype == dtype


def test_a_point_is_delivered_from_before_its_edits_and_from_after_them() -> None:
    engine = Engine()
    engine.admit("r", Spec((Term("add", "mlp_out", 1, ((1, None),), write="v", coeff=2.0),), (take(1), take(1, before=True))))
    engine.step(("r", 3, 0))
    engine.check()
    moved = engine.courier.rows("r", 1)[1] - engine.courier.rows("r", 1, before=True)[1]
    torch.testing.assert_close(moved, torch.tensor([[0.0], [2.0], [2.0]]) * VECTOR)


def test_each_point_has_rows_of_its_own() -> None:
    engine = Engine()
    engine.admit("r", Spec((), (take(0, (0, 2), (4, None)), take(1, (1, 5)), take(2, (7, 9), before=True))))
    for batch in [("r", 3, 0), ("r", 3, 3), ("r", 1, 6), ("r", 1, 7)]:
        engine.step(batch)
    engine.check()
    found = [engine.courier.rows("r", site, before)[0].tolist() for site, before in ((0, False), (1, False), (2, True), (2, False))]
    assert found == [[0, 1, 4, 5, 6, 7], [1, 2, 3, 4], [7], []]


def test_a_row_that_is_computed_again_replaces_itself() -> None:
    engine = Engine()
    engine.admit("r", Spec((), (take(0),)))
    for batch in [("r", 6, 0), ("r", 1, 6), ("r", 4, 0), ("r", 4, 4)]:  # preempted after seven rows
        engine.step(batch)
    engine.check()
    assert engine.courier.rows("r", 0)[0].tolist() == list(range(8))


def test_requests_do_not_see_each_other_s_rows() -> None:
    engine = Engine()
    engine.admit("one", Spec((), (take(0, (1, 3)), take(2, (1, 3)))))
    engine.admit("two", Spec((), (take(1, (0, 1), (3, None)),)))
    engine.step(("two", 5, 0), ("one", 5, 0))
    engine.step(("one", 1, 5), ("two", 2, 5))
    engine.check()
    engine.courier.drop("one")
    assert [len(x) for x in engine.courier.rows("one", 0)] == [0, 0]
    del engine.specs["one"]
    engine.check()


def test_two_engine_requests_under_one_name_are_an_error() -> None:
    engine = Engine()
    for req_id in ("r.0", "r.1"):
        engine.admit(req_id, Spec((), (take(0),)), uid="r")
    engine.step(("r.0", 2, 0), ("r.1", 2, 0))
    with pytest.raises(RuntimeError, match="2 engine requests share the capture 'r'; capture with n=1"):
        engine.courier.rows("r", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_random_steps_deliver_each_row_once_under_its_own_name(seed: int, dtype: torch.dtype) -> None:
    rng, engine = random.Random(seed), Engine(dtype)
    done = {f"r{i}": 0 for i in range(4)}
    for req_id in list(done)[:3]:
        takes = []
        for site in rng.sample(range(4), rng.randint(1, 4)):
            start = rng.randrange(6)
            takes.append(take(site, (start, start + rng.randint(1, 5)), (start + 6, rng.choice([None, start + 9])),
                              before=rng.random() < 0.5))
        engine.admit(req_id, Spec((), tuple(takes)))
    for _ in range(20):
        batch = [(req_id, rng.randint(1, 4), done[req_id]) for req_id in rng.sample(list(done), rng.randint(1, 4))]
        engine.step(*batch)
        done |= {req_id: start + count if rng.random() < 0.9 else 0 for req_id, count, start in batch}
    engine.check()


def test_rows_that_arrive_after_their_client_let_go_are_not_kept() -> None:
    engine = Engine()
    engine.admit("r", Spec((), (take(0),)))
    engine.step(("r", 2, 0))
    engine.courier.drop("r")
    engine.step(("r", 2, 2))
    assert engine.courier.rows("r", 0)[0].tolist() == []
    assert not engine.courier._kept and not engine.courier._sent


def test_only_rows_from_a_position_on_are_returned_where_that_is_asked() -> None:
    engine = Engine()
    engine.admit("r", Spec((), (take(0), take(1, (0, 4)))))
    for batch in [("r", 4, 0), ("r", 1, 4), ("r", 3, 2), ("r", 1, 5)]:  # preempted after five rows
        engine.step(batch)
    positions, values = engine.courier.rows("r", 0, since=3)
    whole, everything = engine.courier.rows("r", 0)
    assert positions.tolist() == [3, 4, 5] and whole.tolist() == list(range(6))
    assert torch.equal(values, everything[3:])
    assert engine.courier.rows("r", 0, since=6)[0].tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_is_held_of_a_request_in_plain_values(dtype: torch.dtype) -> None:
    engine = Engine(dtype)
    spec = Spec((Term("add", *SITES[1], ((0, None),), write="v"),), (Take(*SITES[1], ((2, 4),)), Take(*SITES[1], ((0, None),), True),
                                                                      Take(*SITES[3], ((0, None),))))
    engine.admit("r", spec)
    engine.admit("other", Spec(takes=(Take(*SITES[0], ((0, None),)),)))
    assert held_of(engine.courier, "r", 0, SITES, SHAPES) == []
    engine.step(("other", 2, 0), ("r", 3, 0))
    engine.step(("r", 3, 3), ("other", 1, 2))
    assert engine.courier.captured == 9
    for since in (0, 3):
        found = held_of(engine.courier, "r", since, SITES, SHAPES)
        assert [entry[:3] for entry in found] == [["mlp_out", 1, False], ["mlp_out", 1, True], ["router", 1, False]]
        for (kind, layer, before, positions, shape, name, data), wanted in zip(found, [(2, 3), range(6), range(6)]):
            site, wanted = SITES.index((kind, layer)), [p for p in wanted if p >= since]
            assert np.frombuffer(positions, np.int64).tolist() == wanted
            assert shape == list(SHAPES[kind, layer])
            assert name == ("float32" if kind == "router" else str(dtype).removeprefix("torch."))
            values = torch.frombuffer(bytearray(data), dtype=getattr(torch, name)).view(-1, *shape)
            assert torch.equal(values.flatten(1), torch.stack([engine.expected["r", site, before, p] for p in wanted]))


def test_reduced_rows_have_a_shape_of_their_own() -> None:
    engine = Engine()
    engine.admit("r", Spec(takes=(Take(*SITES[0], ((0, None),)),), reduce=Reduce(k=2)))
    engine.step(("r", 4, 0))
    for since, rows in ((1, 3), (3, 1), (4, 0)):
        (found,) = held_of(engine.courier, "r", since, SITES, SHAPES)
        assert (found[4], found[5], len(found[6])) == ([4], "float32", rows * 4 * 4)  # two values and their places


def test_a_mean_is_of_all_rows_wherever_one_reads_from() -> None:
    engine = Engine()
    engine.admit("r", Spec(takes=(Take(*SITES[0], ((0, None),)),), reduce=Reduce(mean=True)))
    for batch in [("r", 4, 0), ("r", 1, 4), ("r", 1, 5)]:
        engine.step(batch)
    positions, values = engine.courier.rows("r", 0)
    assert positions.tolist() == list(range(6)) and len(values) == 1
    for since in (1, 5, 9):
        assert torch.equal(engine.courier.rows("r", 0, since=since)[1], values)
