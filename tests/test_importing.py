"""Files of other tools: what their own libraries wrote is read as they mean it, and what cannot be read exactly is refused.

In tests/files/ are a file of repeng 0.4.0 (ControlVector.export_gguf, blocks 1 to 3) and one of steering-vectors 0.12.2 (torch.save
of a SteeringVector of type self_attn, blocks 1 and 3); their rows are those of torch.randn(3, 16) from seed 0.
"""
from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import mia_lab as mia
from mia_lab.analysis.formats import torch_file
from mia_lab.analysis.vectors import Vector
from mia_lab.errors import EditError, PointError
from mia_lab.points import Point

FILES = Path(__file__).parent / "files"
ROWS = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


def vector(layers: tuple[int, ...] = (1, 2, 3), kind: str = "resid_post") -> Vector:
    unit = torch.arange(1.0, len(layers) + 1)
    norms = ROWS[: len(layers)].norm(dim=-1)
    return Vector(kind, layers, ROWS[: len(layers)] * (unit / norms)[:, None], norms, unit)


def test_what_repeng_wrote_is_at_the_outputs_of_the_blocks_it_names() -> None:
    found = mia.import_vector(FILES / "repeng-0.4.0.gguf")
    assert (found.kind, found.layers, found.method) == ("resid_post", (1, 2, 3), "gguf (llama)")
    assert torch.equal(found.rows, ROWS)
    assert torch.equal(found.natural.rows, ROWS) and "as it stands" in repr(found)
    torch.testing.assert_close(mia.Add(found, 2.0).rows[Point("resid_post", 3)], ROWS[2])


def test_a_vector_goes_to_gguf_and_back_with_the_same_strength(tmp_path: Path) -> None:
    path = mia.export_vector(vector(), tmp_path / "v.gguf", model_hint="gemma3")
    reader = gguf.GGUFReader(path)
    assert [t.name for t in reader.tensors] == ["direction.1", "direction.2", "direction.3"]
    assert all(t.tensor_type == gguf.GGMLQuantizationType.F32 and len(t.shape) == 1 for t in reader.tensors)
    assert reader.get_field("controlvector.layer_count").contents() == 3
    assert torch.equal(mia.import_vector(path).rows, vector().rows)
    natural = mia.export_vector(vector().natural, tmp_path / "n.gguf", model_hint="gemma3")
    torch.testing.assert_close(mia.import_vector(natural).rows, ROWS)


def write(path: Path, *tensors: tuple[str, np.ndarray], arch: str = "controlvector") -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LINE = np.ones(16, np.float32)


@pytest.mark.parametrize(("tensors", "arch", "says"), [
    ([("direction.1", LINE)], "llama", "of architecture 'llama'"),
    ([("direction.1", LINE.astype(np.float16))], "controlvector", "type F16; a control vector holds"),
    ([("direction.1", np.ones((2, 16), np.float32))], "controlvector", "1-D F32 tensors"),
    ([("direction.x", LINE)], "controlvector", "holds 'direction.x'"),
    ([("direction.1", LINE), ("token_embd.weight", LINE)], "controlvector", "holds 'token_embd.weight'"),
    ([("direction.1", LINE), ("direction.2", np.ones(8, np.float32))], "controlvector", "different widths"),
    ([("direction.1", LINE * np.nan)], "controlvector", "NaN"),
    ([("direction.1", LINE * 0)], "controlvector", "no direction"),
])
def test_gguf_that_is_no_control_vector_is_refused(tmp_path: Path, tensors: list, arch: str, says: str) -> None:
    with pytest.raises(EditError, match=says):
        mia.import_vector(write(tmp_path / "v.gguf", *tensors, arch=arch))


def test_a_block_whose_direction_is_zero_is_left_out_and_block_0_is_read(tmp_path: Path) -> None:
    found = mia.import_vector(write(tmp_path / "v.gguf", ("direction.2", LINE * 0), ("direction.0", LINE), ("direction.5", 2 * LINE)))
    assert found.layers == (0, 5) and found.rows[:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("v", "name", "says"), [
    (vector((0, 1)), "v.gguf", "refuses a control vector for block 0; write the others"),
    (vector(kind="mlp_out"), "v.gguf", "at mlp_out"),
    (vector(kind="attn_out"), "v.pt", "at attn_out"),
    (vector(), "v.bin", "no known format"),
])
def test_what_another_tool_would_misread_is_not_written(tmp_path: Path, v: Vector, name: str, says: str) -> None:
    with pytest.raises(EditError, match=says):
        mia.export_vector(v, tmp_path / name)
    assert not any(tmp_path.iterdir())


def test_steering_vectors_files_in_each_form(tmp_path: Path) -> None:
    blocks = {1: ROWS[0], 3: ROWS[2]}
    torch.save(blocks, tmp_path / "plain.pt")
    torch.save({"layer_activations": blocks, "layer_type": "decoder_block"}, tmp_path / "fields.pt")
    for name in ("plain.pt", "fields.pt"):
        found = mia.import_vector(tmp_path / name)
        assert (found.kind, found.layers) == ("resid_post", (1, 3)) and torch.equal(found.rows, ROWS[[0, 2]])
    path = mia.export_vector(vector(), tmp_path / "out.pt")
    assert torch.equal(mia.import_vector(path).rows, vector().rows)
    raw = torch_file.load(FILES / "steering-vectors-0.12.2.pt")
    assert raw.own and torch.equal(raw.rows[1], ROWS[0]) and torch.equal(raw.rows[3], ROWS[2])
    with pytest.raises(EditError, match="give the session"):  # the library's own file is of attention's own output
        mia.import_vector(FILES / "steering-vectors-0.12.2.pt")


class Evil:
    def __reduce__(self) -> tuple:
        return (Path("/nonexistent/was_run").write_text, ("x",))


@pytest.mark.parametrize(("value", "says"), [
    (Evil(), "without running what is in it"), ([1, 2], "holds a list"), ({}, "were expected"), ({-1: ROWS[0]}, "names a block -1"),
    ({1: ROWS}, "no single direction"), ({"layer_activations": {1: ROWS[0]}, "layer_type": "input_layernorm"}, "no point here")])
def test_a_torch_file_that_is_no_vector_is_refused_and_never_run(tmp_path: Path, value: Any, says: str) -> None:
    if isinstance(value, Evil):
        (tmp_path / "v.pt").write_bytes(pickle.dumps(value))
    else:
        torch.save(value, tmp_path / "v.pt")
    with pytest.raises(EditError, match=says):
        mia.import_vector(tmp_path / "v.pt")


@pytest.mark.parametrize(("path", "says"), [
    (FILES / "nothing.gguf", "there is no file"), (FILES / "sae-lens-6.54.12-topk", "mia.SparseAutoencoder.load"),
    (Path(__file__), "of no known format")])
def test_a_path_that_holds_no_vector_says_what_to_type(path: Path, says: str) -> None:
    with pytest.raises(EditError, match=says):
        mia.import_vector(path)


@pytest.mark.full
def test_imports_in_a_session_have_its_unit_and_do_what_the_other_tool_does(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    s = open_tiny("gemma3", max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32, enforce_eager=True,
                  points=["resid_post", "attn_out", "attn_out_raw"])
    ids = [[1, 40, 50, 60, 70], [1, 9, 8, 7, 6, 5, 4]]
    raw = {layer: 0.5 * torch.randn(128, generator=torch.Generator().manual_seed(layer)) for layer in (1, 3)}
    path = write(tmp_path / "v.gguf", *((f"direction.{layer}", row.numpy()) for layer, row in raw.items()))
    v = mia.import_vector(path, s)
    torch.testing.assert_close(v.rows.norm(dim=-1), s.unit()[[1, 3]])
    clean, moved = (s.capture(ids, layers=[1, 3], at=-1, edits=edits).get() for edits in (None, [mia.Add(v.natural[1], 1.0)]))
    torch.testing.assert_close(moved[:, 0] - clean[:, 0], raw[1].expand(2, -1), rtol=0, atol=1e-5)
    assert (moved[:, 1] - clean[:, 1]).norm() > 0.1

    torch.save({"layer_activations": {1: raw[1]}, "layer_type": "self_attn"}, tmp_path / "v.pt")
    assert mia.import_vector(tmp_path / "v.pt", s).kind == "attn_out_raw"  # before the norm, as the library adds it

    for bad, says in (({9: raw[1]}, "block 9; the model has blocks 0 to 3"), ({1: torch.ones(64)}, "hold 64 values")):
        torch.save(bad, tmp_path / "bad.pt")
        with pytest.raises(EditError, match=says):
            mia.import_vector(tmp_path / "bad.pt", s)
    torch.save({"layer_activations": {1: raw[1]}, "layer_type": "mlp"}, tmp_path / "mlp.pt")
    with pytest.raises(PointError, match=r"mlp_out_raw\.1 is not tapped"):
        mia.import_vector(tmp_path / "mlp.pt", s)
    v.save(tmp_path / "own.safetensors")
    assert torch.equal(mia.import_vector(tmp_path / "own.safetensors", s).rows, v.rows)
    (2 * v).normalised().save(tmp_path / "own.safetensors")
    Vector(v.kind, v.layers, v.rows, v.raw_norms, 2 * v.unit).save(tmp_path / "other.safetensors")
    with pytest.raises(EditError, match="made on another model"):
        mia.import_vector(tmp_path / "other.safetensors", s)
