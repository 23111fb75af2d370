"""The folder of kept vectors."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mia_lab as mia
from mia_lab.errors import EditError


@pytest.fixture
def held(tmp_path: Path) -> mia.Library:
    return mia.library(tmp_path / "vectors")


def vector() -> mia.Vector:
    return mia.Vector("resid_post", (2, 3), torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2), torch.ones(2))


def test_a_vector_comes_back_with_where_it_is_from(held: mia.Library) -> None:
    one = SimpleNamespace(model="m", fingerprint="f")
    held.save("glad", vector(), session=one, note="on <pairs>", presets={"strong": {"coeff": 0.4}})
    held.save("b.2", vector())
    assert list(held) == ["b.2", "glad"] and len(held) == 2 and "glad" in held
    assert held["glad"].rows.equal(vector().rows) and held["glad"].layers == (2, 3)
    about = held.about("glad")
    assert (about["model"], about["layers"], about["note"], about["presets"]) == ("m", [2, 3], "on <pairs>", {"strong": {"coeff": 0.4}})
    assert held.of(one) == ["glad"] and held.of(SimpleNamespace(fingerprint="g")) == []
    assert "on &lt;pairs&gt;" in held._repr_html_() and "2 to 3 (2)" in repr(held)
    del held["glad"]
    assert list(held) == ["b.2"] and sorted(p.name for p in held.folder.iterdir()) == ["b.2.json", "b.2.safetensors"]


def test_names_are_plain_words_and_not_taken_twice(held: mia.Library) -> None:
    for name in ("../out", "", "a/b", ".hidden", "x" * 65, "a\n"):
        with pytest.raises(EditError, match="is no name for a vector"):
            held.save(name, vector())
        assert name not in held
    held.save("a", vector())
    with pytest.raises(EditError, match="replace=True"):
        held.save("a", vector())
    held.save("a", -1 * vector(), replace=True)
    assert held["a"].rows.equal(-vector().rows)
    with pytest.raises(EditError, match="no vector 'b'; it has a"):
        held["b"]


def test_a_broken_note_is_said_and_a_file_without_one_is_read(held: mia.Library) -> None:
    held.save("a", vector())
    note = held.folder / "a.json"
    note.write_text("{", encoding="utf-8")
    with pytest.raises(EditError, match="cannot be read"):
        held.about("a")
    note.unlink()
    assert held.about("a") == {} and held["a"].layers == (2, 3)


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIA_LAB_DATA", str(tmp_path))
    assert mia.library().folder == tmp_path / "vectors" and "holds no vectors" in repr(mia.library())
    monkeypatch.delenv("MIA_LAB_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "x"))
    assert mia.library().folder == tmp_path / "x" / "mia_lab" / "vectors"
