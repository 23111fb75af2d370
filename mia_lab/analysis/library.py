"""A folder of saved vectors, with what each was made of, for use in later sessions."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EditError
from ..shown import Shown
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session
    from ..show.parts import Part

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


class Library(Shown, Mapping[str, Vector]):
    """Vectors by name, each a file of `Vector.save` and beside it a JSON file that says where it comes from.

    `lib["cheer"]`, `lib.save("cheer", v, session=s)`, `del lib["cheer"]`. Reading a name reads its file anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, name: str, vector: Vector, *, session: Session | None = None, note: str = "",
             presets: Mapping[str, Mapping[str, Any]] | None = None, replace: bool = False) -> Path:
        """Keep a vector under a name and return its file. session: the model it belongs to, to which it is then offered.

        EditError for a name that is not one plain word, or that is there already, unless `replace`.
        """
        path = self._path(name)
        if path.exists() and not replace:
            raise EditError(f"the library has a vector {name!r} already; choose another name, or save(..., replace=True)")
        about = {"saved": f"{datetime.now():%Y-%m-%d %H:%M}", "method": vector.method, "kind": vector.kind, "layers": list(vector.layers),
                 "width": vector.rows.shape[-1], "note": note, "presets": {key: dict(value) for key, value in (presets or {}).items()}}
        if session is not None:
            about |= {"model": session.model, "fingerprint": session.fingerprint}
        self.folder.mkdir(parents=True, exist_ok=True)
        vector.save(path)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(about, indent=1), encoding="utf-8")
        scratch.replace(path.with_suffix(".json"))
        return path

    def about(self, name: str) -> dict[str, Any]:
        """What was noted when a vector was saved; {} for a file that was put here by hand."""
        self._there(name)
        path = self._path(name).with_suffix(".json")
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise EditError(f"{path} cannot be read: {error}") from None
        return found if isinstance(found, dict) else {}

    def of(self, session: Session) -> list[str]:
        """The names of the vectors that were saved for a session's model."""
        return [name for name in self if self.about(name).get("fingerprint") == session.fingerprint]

    def __getitem__(self, name: str) -> Vector:
        self._there(name)
        return Vector.load(self._path(name))

    def __delitem__(self, name: str) -> None:
        self._there(name)
        self._path(name).unlink()
        self._path(name).with_suffix(".json").unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in self.folder.glob("*.safetensors") if _NAME.fullmatch(path.stem)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(_NAME.fullmatch(name)) and self._path(name).exists()

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a vector."""
        return [{"name": name} | {key: self.about(name).get(key, "") for key in ("model", "method", "kind", "layers", "saved", "note")}
                for name in self]

    def _parts(self) -> tuple[Part, ...]:
        from ..show.parts import Prose, Table

        if not len(self):
            return (Prose(f'{self.folder} holds no vectors; keep one with mia.library().save("name", v, session=s)'),)
        rows = tuple((row["name"], str(row["model"]), row["method"], row["kind"], _span(row["layers"]), row["saved"], row["note"])
                     for row in self.data)
        return (Table(("name", "model", "method", "point", "layers", "saved", "note"), rows, f"Vectors in {self.folder}"),)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise EditError(f"{name!r} is no name for a vector: letters, digits, '_', '-' and '.', up to 64, the first a letter or digit")
        return self.folder / f"{name}.safetensors"

    def _there(self, name: str) -> None:
        if name not in self:
            raise EditError(f"the library has no vector {name!r}; it has {', '.join(self) or 'none'} (in {self.folder})")


def library(folder: str | Path | None = None) -> Library:
    """Return the vectors kept in a folder, by default `$MIA_LAB_DATA/vectors`, or `mia_lab/vectors` in `$XDG_DATA_HOME` or
    `~/.local/share`."""
    if folder is None:
        base = os.environ.get("XDG_DATA_HOME", "")
        home = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share"  # XDG says to ignore a relative path
        folder = Path(os.environ.get("MIA_LAB_DATA") or home / "mia_lab") / "vectors"
    return Library(Path(folder).expanduser().resolve())


def _span(layers: Any) -> str:
    if not isinstance(layers, list) or not layers:
        return ""
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"
