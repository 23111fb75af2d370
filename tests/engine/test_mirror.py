"""Mirrored tables: the device has what was written once it is flushed, the latest where a place was written twice."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from mia_lab.engine.mirror import Mirror

SHAPES = {"lines": (5, 3), "numbers": (4, 2), "grid": (3, 4, 2)}


def made() -> Mirror:
    return Mirror(SHAPES, {"grid": -1}, torch.device("cpu"))


def test_tables_begin_as_asked_and_do_not_overlap() -> None:
    mirror = made()
    assert not mirror.table("lines").any() and (mirror.table("grid") == -1).all()
    assert {name: tuple(mirror.table(name).shape) for name in SHAPES} == SHAPES
    for name in SHAPES:
        mirror.table(name).fill_(7)
    mirror.table("numbers").fill_(3)
    assert (mirror.table("lines") == 7).all() and (mirror.table("grid") == 7).all()


def test_nothing_reaches_the_device_before_it_is_flushed() -> None:
    mirror = made()
    address = mirror.table("lines").data_ptr()
    mirror.write_lines("lines", 1, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert not mirror.table("lines").any()
    mirror.flush()
    assert mirror.table("lines").tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert mirror.table("lines").data_ptr() == address
    assert not mirror.table("numbers").any() and (mirror.table("grid") == -1).all()


def test_a_column_goes_to_its_place_in_every_row() -> None:
    mirror = made()
    mirror.write_column("grid", 2, np.arange(6, dtype=np.int32).reshape(3, 2))
    mirror.flush()
    grid = mirror.table("grid")
    assert grid[:, 2].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (grid[:, [0, 1, 3]] == -1).all()


def test_floats_arrive_bit_by_bit() -> None:
    mirror, values = made(), np.array([[0.1, -0.0], [float("inf"), 1e-40]], np.float32)
    mirror.write_lines("numbers", 2, values)
    mirror.flush()
    assert mirror.table("numbers", torch.float32)[2:].numpy().tobytes() == values.tobytes()


def test_of_two_writes_to_a_place_the_latest_counts() -> None:
    mirror = made()
    for value in (1, 2):
        mirror.write_lines("lines", value, np.full((2, 3), value, np.int32))
    mirror.flush()
    assert mirror.table("lines")[:, 0].tolist() == [0, 1, 2, 2, 0]
    mirror.table("lines").fill_(9)
    mirror.flush()  # nothing was written since
    assert (mirror.table("lines") == 9).all()


def test_a_flush_that_is_interrupted_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = made()
    mirror.write_lines("lines", 0, np.ones((1, 3), np.int32))
    with monkeypatch.context() as patch:
        patch.setattr("mia_lab.engine.mirror.send", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            mirror.flush()
    mirror.flush()
    assert mirror.table("lines")[0].tolist() == [1, 1, 1]
