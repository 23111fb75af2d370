"""Captures as files: what the safetensors library reads of them is what was put in."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save

from mia_lab.serve.captures import _tensors
from mia_lab.serve.container import Values, pack

DRAWN = torch.Generator().manual_seed(0)
TENSORS = {
    "z.1": torch.randn(3, 5, generator=DRAWN).bfloat16(), "z.1.positions": torch.arange(3),
    "monitor.calm.0": torch.randn(7, generator=DRAWN),
    "q.0": torch.randn(1, 2, 3, generator=DRAWN).half(), "none": torch.empty(0, 4), "\u00e9 \"quoted\"": torch.tensor([-(1 << 62)]),
}
SERVICE = SimpleNamespace(dtype_of=lambda kind: torch.bfloat16)
METADATA = {"config": "abc", "monitors": "[]", "running": "false"}


def values(tensor: torch.Tensor) -> Values:
    return Values(str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def packed(tensors: dict[str, torch.Tensor]) -> bytes:
    return pack(((name, values(tensor)) for name, tensor in tensors.items()), METADATA)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(a, other[name]) and a.dtype == other[name].dtype for name, a in one.items())


def test_the_library_reads_what_was_packed(tmp_path: Path) -> None:
    path = tmp_path / "found.safetensors"
    path.write_bytes(packed(TENSORS))
    assert same(load(path.read_bytes()), TENSORS) and same(load_file(path), TENSORS)
    with safe_open(path, "pt") as found:
        assert found.metadata() == METADATA
        assert torch.equal(found.get_slice("z.1")[1:, 2:], TENSORS["z.1"][1:, 2:])


def test_the_library_would_have_written_as_much() -> None:
    some = {name: tensor for name, tensor in TENSORS.items() if tensor.numel()}
    assert abs(len(packed(some)) - len(save(some, METADATA))) < 16


def test_no_tensors_are_a_file_too() -> None:
    assert load(packed({})) == {}


def test_a_type_without_a_name_in_the_format_is_an_error() -> None:
    with pytest.raises(KeyError):
        pack([("x", Values("float13", [1], b"x"))], {})


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_each_number_of_a_monitor_is_a_column_of_its_rows(rows: int) -> None:
    drawn, place = torch.randn(rows, 2, generator=DRAWN), torch.arange(3, 3 + rows)
    labels = [dict(name="calm", index=i, kind="resid_post", layer=0, before=False, column=i) for i in range(2)]
    given = ["resid_post", 0, False, place.numpy().tobytes(), [2], "float32", drawn.numpy().tobytes()]
    found = load(pack(_tensors(SERVICE, [given], labels), {}))
    assert same(found, {f"monitor.calm.{i}{end}": value for i in range(2) for end, value in (("", drawn[:, i]), (".positions", place))})


def test_rows_beside_monitors_are_of_their_points_type_again() -> None:
    drawn, place = torch.randn(3, 4, generator=DRAWN).bfloat16(), torch.arange(3)
    given = ["z", 1, True, place.numpy().tobytes(), [2, 2], "float32", drawn.float().numpy().tobytes()]
    assert same(load(pack(_tensors(SERVICE, [given], []), {})), {"z.1.before": drawn.view(3, 2, 2), "z.1.before.positions": place})
