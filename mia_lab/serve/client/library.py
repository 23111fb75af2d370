"""The bundles that a server holds, as a notebook sees them."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...bundles.bundle import Bundle, load
from ...bundles.folder import NAME
from ...errors import BundleError, ServerError
from ...show import html, text
from ...show.parts import Part, Table
from .transport import Transport


@dataclass(frozen=True, slots=True)
class Entry:
    """A bundle that a server holds. doses: at coefficient 1, by point, in mean centred residual norms; those that are known."""

    name: str
    kinds: tuple[str, ...]
    points: tuple[str, ...]
    doses: dict[str, float]
    sha256: str
    model: str


class ServedLibrary(Mapping):
    """What a server's folder held when this was made, as far as the key may use it: `library[name]` fetches that Bundle."""

    def __init__(self, transport: Transport) -> None:
        self._http = transport
        try:
            said = json.loads(transport.get("/mia/edits"))
            self.digest, self.quarantined = str(said["digest"]), dict(said.get("quarantined", {}))
            self.entries = {one["name"]: _entry(one) for one in said["edits"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"{transport.url} lists its edits otherwise than this mia_lab reads: {error!r}") from None

    def __getitem__(self, name: str) -> Bundle:
        """The bundle of a name, as its server has it now. BundleError for one that is not listed, or was changed since."""
        if name not in self.entries:
            raise BundleError(f"the server holds no {name!r} for this key; it holds {', '.join(self.entries) or 'none'}")
        data = self._http.get(f"/mia/edits/{quote(name, safe='')}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.steer.zip"
            path.write_bytes(data)
            return load(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def parts(self) -> list[Part]:
        """The table that is shown, and what was set aside, where the key may know."""
        rows = tuple((one.name, ", ".join(one.kinds), ", ".join(one.points), _dose(one.doses), one.sha256[:12], one.model)
                     for one in self.entries.values())
        found: list[Part] = [Table(("name", "edits", "points", "dose", "sha256", "made with"), rows, f"catalogue {self.digest}")]
        if self.quarantined:
            found.append(Table(("set aside", "reason"), tuple((name, str(why)) for name, why in self.quarantined.items())))
        return found

    def __repr__(self) -> str:
        return text.render(*self.parts)

    def _repr_html_(self) -> str:
        return html.render(*self.parts)


def _entry(said: Mapping[str, Any]) -> Entry:
    name = said["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:64]!r} is no name of a bundle")
    return Entry(name, tuple(map(str, said["kinds"])), tuple(map(str, said["points"])),
                 {str(p): float(dose) for p, dose in said["doses"].items() if dose is not None}, str(said["sha256"]), str(said["model"]))


def _dose(doses: Mapping[str, float]) -> str:
    return f"{max(doses.values()):.3g}" if doses else "unknown"
