"""A desk that one client's vectors were registered with, and the worker that it asks."""
from __future__ import annotations

import pytest
from desks import VECTORS, Worker, facts

from mia_lab.engine.desk import Desk


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def desk(worker: Worker) -> Desk:
    made = Desk(facts(), worker)
    made.register(VECTORS, "client")
    worker.heard()
    return made
