"""Delivery: what the taps copy out on a routed step arrives by request and absolute position, and nothing else does."""
from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mia_lab.engine.config import Sizes
from mia_lab.engine.courier import Courier
from mia_lab.engine.router import Router
from mia_lab.engine.tables import Tables
from mia_lab.engine.wire import KEY, Spec, Term, encode
from mia_lab.kernels.tap import tap_reference

SITES = [("resid_post", 0), ("mlp_out", 0), ("resid_post", 1)]
WIDTH, TOKENS = 5, 16
VECTOR = torch.arange(WIDTH).float()


class Engine:
    """Steps of three taps over random streams; remembers what each captured row should be."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        sizes = Sizes(TOKENS, programs=8, plans=8, bank_rows=4, captured_tokens=TOKENS, width=WIDTH)
        self.tables = Tables(len(SITES), sizes, dtype, torch.device("cpu"))
        self.tables.register("v", VECTOR)
        self.router, self.courier = Router(self.tables, SITES), Courier(self.tables)
        self.specs: dict[str, Spec] = {}
        self.expected: dict[tuple[str, int, int], torch.Tensor] = {}  # by request, site and position
        self.draw = torch.Generator().manual_seed(0)

    def admit(self, req_id: str, spec: Spec, uid: str | None = None) -> None:
        self.specs[req_id] = spec
        params = SimpleNamespace(extra_args={KEY: encode(uid or req_id, spec)})
        new = [SimpleNamespace(req_id=req_id, sampling_params=params)]
        self.router.admit(SimpleNamespace(finished_req_ids=[], scheduled_new_reqs=new))

    def step(self, *batch: tuple[str, int, int]) -> None:
        """Run rows (request, count, start) through routing, taps and delivery."""
        ids, counts, starts = map(list, zip(*batch, strict=True))
        step = self.router.route(ids, np.array(counts), np.array(starts))
        self.courier.before_forward(step)
        for site in range(len(SITES)):
            x = torch.randn(TOKENS, WIDTH, generator=self.draw).to(self.tables.arena.dtype)  # the last rows are padding
            tap_reference(x, None, *self.tables.of_site(site))
            rows = iter(x.clone())
            for req_id, count, start in batch:
                for position in range(start, start + count):
                    row, spec = next(rows), self.specs.get(req_id, Spec())
                    asked = any(a <= position and (b is None or position < b) for a, b in spec.rows)
                    if asked and SITES[site] in spec.sites:
                        self.expected[req_id, site, position] = row
        if step is not None:
            self.courier.after_forward(step)

    def check(self) -> None:
        """Every request has exactly the rows that were computed for it, as they were last computed."""
        for req_id, spec in self.specs.items():
            for site in (SITES.index(site) for site in spec.sites):
                positions, values = self.courier.rows(req_id, site)
                known = {p: row for (r, s, p), row in self.expected.items() if (r, s) == (req_id, site)}
                assert positions.tolist() == sorted(known)
                assert torch.equal(values, torch.stack([known[p] for p in sorted(known)]) if known else values[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_chunks_and_decode_steps_arrive_in_order(dtype: torch.dtype) -> None:
    engine = Engine(dtype)
    engine.admit("r", Spec((Term("mlp_out", 0, "v", 2.0, ((1, None),)),), (SITES[2], SITES[1]), ((0, None),)))
    for batch in [[("r", 6, 0)], [("other", 3, 0), ("r", 5, 6)], [("r", 1, 11), ("other", 1, 3)], [("r", 1, 12)]]:
        engine.step(*batch)
    engine.check()
    assert engine.courier.rows("r", 1)[0].tolist() == list(range(13))
    assert engine.courier.rows("r", 1)[1].dtype == dtype


def test_a_row_that_is_computed_again_replaces_itself() -> None:
    engine = Engine()
    engine.admit("r", Spec((), (SITES[0],), ((0, None),)))
    for batch in [("r", 6, 0), ("r", 1, 6), ("r", 4, 0), ("r", 4, 4)]:  # preempted after seven rows
        engine.step(batch)
    engine.check()
    assert engine.courier.rows("r", 0)[0].tolist() == list(range(8))


def test_requests_do_not_see_each_other_s_rows() -> None:
    engine = Engine()
    engine.admit("one", Spec((), (SITES[0], SITES[2]), ((1, 3),)))
    engine.admit("two", Spec((), (SITES[1],), ((0, 1), (3, None))))
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
        engine.admit(req_id, Spec((), (SITES[0],), ((0, None),)), uid="r")
    engine.step(("r.0", 2, 0), ("r.1", 2, 0))
    with pytest.raises(RuntimeError, match="2 engine requests share the capture 'r'; capture with n=1"):
        engine.courier.rows("r", 0)


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_deliver_each_row_once_under_its_own_name(seed: int) -> None:
    rng, engine = random.Random(seed), Engine()
    done = {f"r{i}": 0 for i in range(4)}
    for req_id in list(done)[:3]:
        start = rng.randrange(6)
        rows = ((start, start + rng.randint(1, 5)), (start + 6, rng.choice([None, start + 9])))
        engine.admit(req_id, Spec((), tuple(rng.sample(SITES, rng.randint(1, 3))), rows))
    for _ in range(20):
        batch = [(req_id, rng.randint(1, 4), done[req_id]) for req_id in rng.sample(list(done), rng.randint(1, 4))]
        engine.step(*batch)
        done |= {req_id: start + count if rng.random() < 0.9 else 0 for req_id, count, start in batch}
    engine.check()
