"""What a server's folder holds, read once and as one: policy and bundles, each checked against the model, or set aside with a reason."""
from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from ..analysis.vectors import Vector
from ..bundles import folder as bundle_folder
from ..bundles.bundle import Bundle, of_files
from ..bundles.folder import NAME
from ..bundles.model import ModelFacts, bounded, check_model
from ..bundles.signing import check_name, public_key
from ..edits import Add, Edit
from ..engine.wire import Spec, encode
from ..errors import EditError, MiaError
from ..points import Point
from ..running.compile import check, compile_edits
from ..running.declare import needed
from ..selectors import Context
from .disk import Disk
from .policy import MAX_BYTES, Policy, PolicyError
from .refusing import Refused, printable

if TYPE_CHECKING:
    from .readings import Plan

__all__ = ["Catalogue", "ModelFacts", "Served", "bundles_in"]

TOML, BUNDLES = "serve.toml", "bundles"
MAX_HELD = 2 << 30  # bytes of all bundles together
_KEPT = 256  # coefficients of one bundle whose edits are kept
_ZIP_ROOM = 1 << 16
_TRIAL = Context((0,) * 32)  # a prompt to find out whether edits can be compiled at all

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A bundle as it is served: its edits, the bytes that they were read from, and the sha256 of these bytes.

    doses: at coefficient 1, by point; None where one of its additions has no known dose.
    """

    name: str
    bundle: Bundle
    sha256: str
    files: Files = field(repr=False)
    doses: Mapping[Point, float] | None
    _scaled: OrderedDict[float, tuple[Edit, ...]] = field(default_factory=OrderedDict, repr=False)

    def edits(self, coeff: float) -> tuple[Edit, ...]:
        """Its edits with their additions times `coeff`: equal calls give the same objects. Refused (400) where that means nothing."""
        found = self._scaled.get(coeff)
        if found is None:
            fixed = [] if coeff == 1.0 else [type(edit).__name__ for edit in self.bundle if not isinstance(edit, Add)]
            if fixed:
                raise Refused(400, f"{self.name} has {fixed[0]}, which no coefficient multiplies; ask for it with coeff 1")
            try:
                found = tuple(self.bundle) if coeff == 1.0 else tuple(edit.scaled(coeff) for edit in self.bundle)
            except EditError as error:
                raise Refused(400, f"{self.name} with coeff {coeff:g}: {error}") from None
            self._scaled[coeff] = found
            if len(self._scaled) > _KEPT:
                self._scaled.popitem(last=False)
        return found

    def zipped(self) -> bytes:
        """The bundle as a zip, of the very bytes that were checked."""
        return bundle_folder.zipped(self.files)


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """One reading of a folder. digest: 16 hex digits of all that was accepted; quarantined: reason by file name."""

    digest: str
    policy: Policy
    bundles: Mapping[str, Served]
    quarantined: Mapping[str, str]
    model: ModelFacts
    plans: OrderedDict[tuple[str, ...], Plan] = field(default_factory=OrderedDict, repr=False)  # of monitors, by names, as asking made them

    @classmethod
    def read(cls, folder: str | Path, model: ModelFacts, before: Catalogue | None = None) -> Catalogue:
        """Read a folder; a bundle that cannot be served is set aside.

        before: the catalogue that this one would follow; what did not change is taken from it. MiaError, in words for its operator,
        for a policy that cannot be followed, for a default edit that is not there, and where the last key would go, which would let
        everyone in.
        """
        disk = Disk(folder)
        text = disk.read(TOML, MAX_BYTES) if disk.exists(TOML) else None
        policy = Policy.open() if text is None else Policy.read(text)
        if before is not None and before.policy.keys and not policy.keys:
            raise PolicyError(f"there are no [[keys]] in {TOML} any more, which would let everyone in; restart the server if that is meant")
        signer, known = _signer(policy.signer, disk), before.bundles if before is not None and before.model is model else {}
        same_signer = before is not None and before.policy.signer == policy.signer == ""
        raw, quarantined = bundles_in(disk)
        bundles = {}
        for name, files in raw.items():
            old, sum_ = known.get(name), _sum(files)
            try:
                reuse = old is not None and old.sha256 == sum_ and same_signer
                bundles[name] = old if reuse else _served(name, files, sum_, model, signer)
            except Exception as error:  # whatever a file makes its reader do, the others are served
                quarantined[name] = _reason(error)
        found = cls(_digest(text, bundles), policy, MappingProxyType(bundles), MappingProxyType(quarantined), model)
        found._check_defaults()
        return found

    def _check_defaults(self) -> None:
        """An edit that is to act on every request must be there: without it, requests would run as nobody meant them to."""
        for default in self.policy.defaults:
            served = self.bundles.get(default.name)
            if served is None:
                reason = self.quarantined.get(default.name, f"there is no {default.name}.steer.zip in {BUNDLES}")
                raise PolicyError(f"{TOML}: the default edit {default.name!r} is not served: {reason}")
            try:
                served.edits(default.coeff)
            except Refused as error:
                raise PolicyError(f"{TOML}: [defaults]: {error}") from None


def bundles_in(disk: Disk) -> tuple[dict[str, Files], dict[str, str]]:
    """The files of each bundle by its name, and by name why others are set aside. Nothing is parsed; at most `MAX_HELD` bytes are kept."""
    found: dict[str, Files] = {}
    quarantined: dict[str, str] = {}
    held, places = 0, [(place.removesuffix(".zip").removesuffix(".steer"), place) for place in disk.names(BUNDLES)]
    names = [name for name, place in places if place.endswith((".steer", ".steer.zip"))]
    for name, place in places:
        is_bundle = place.endswith((".steer", ".steer.zip"))
        try:
            if not is_bundle:
                raise EditError("it is no bundle: a bundle is NAME.steer.zip, or a folder NAME.steer")
            if not NAME.fullmatch(name):
                raise EditError("its name is none for a bundle: 1 to 64 letters, digits, dots, dashes and underscores, of which the first "
                                "is a letter or digit")
            if names.count(name) > 1:
                raise EditError("it is there as a folder and as a zip, and these would not be told apart")
            files = _files(disk, f"{BUNDLES}/{place}", MAX_HELD - held)
        except Exception as error:  # whatever a file makes its reader do, the others are served
            quarantined[name if is_bundle and NAME.fullmatch(name) else printable(place)[:200]] = _reason(error)
        else:
            found[name], held = files, held + sum(map(len, files.values()))
    return found, quarantined


def _files(disk: Disk, place: str, room: int) -> Files:
    """A bundle's files, whichever form it has."""
    limits = bundle_folder.LIMITS | {bundle_folder.SIGNATURE: bundle_folder.MAX_SIGNATURE}
    if disk.is_folder(place):
        names = [name for name in limits if name != bundle_folder.SIGNATURE or disk.exists(f"{place}/{name}")]
        return {name: disk.read(f"{place}/{name}", min(limits[name], room)) for name in names}
    with disk.opened(place, min(sum(limits.values()) + _ZIP_ROOM, room + _ZIP_ROOM)) as file:
        found = bundle_folder.unzip(file, place)
    if sum(map(len, found.values())) > room:
        raise EditError(f"the folder's bundles take more than {MAX_HELD} bytes together")
    return found


def _served(name: str, files: Files, sum_: str, model: ModelFacts, signer: str | bytes | None) -> Served:
    def fits(found: bundle_folder.Contents, path: str) -> None:
        if signer is not None:
            check_name(found.about, name, path)
        check_model(found.about, model, path)
        bounded(found, model.n_layers, model.widest, path)

    bundle = of_files(files, name, signer, fits)
    for edit in bundle:
        _check_tapped(edit, model)
        check(edit, model.check)
    _try_out(bundle, model)
    return Served(name, bundle, sum_, MappingProxyType(dict(files)), _doses(bundle))


def _check_tapped(edit: Edit, model: ModelFacts) -> None:
    """The same as `compile.check` would find, in words for whoever starts the server."""
    kind = type(edit).__name__.lower()
    if kind not in model.check.edit_kinds:
        raise EditError(f'it has {type(edit).__name__}, which this server was not started for; add {kind!r} to "edits" in '
                        f"--additional-config's mia_lab and start it again")
    absent = sorted(needed(edit) - model.check.editable)
    if absent:
        raise EditError(f'it needs {absent[0]}, which this server does not tap, or not for edits; add it to "points" (or "sites") in '
                        f"--additional-config's mia_lab, or leave these out, and start it again")


def _try_out(bundle: Bundle, model: ModelFacts) -> None:
    """Compile the edits for some prompt. A selector may not fit that one, but no prompt makes another error go away."""
    try:
        compiled = compile_edits(bundle, Context(_TRIAL.ids, tokenizer=model.tokenizer), model.check)
    except EditError:
        return
    encode("trial", Spec(tuple(compiled.terms), (), tuple(compiled.gates)))


def _doses(bundle: Bundle) -> Mapping[Point, float] | None:
    found: dict[Point, float] = {}
    for edit in bundle:
        if not isinstance(edit, Add):
            continue
        if not isinstance(edit.vector, Vector):
            return None
        unit = edit.vector.unit
        if not isinstance(unit, torch.Tensor) or unit.shape != (len(edit.vector.layers),) or not (unit > 0).all():
            return None
        for point, row in edit.rows.items():
            dose = abs(edit.coeff) * float(row.double().norm()) / float(unit[edit.vector.layers.index(point.layer)])
            found[point] = found.get(point, 0.0) + dose
    return MappingProxyType(found) if all(map(math.isfinite, found.values())) else None


def _signer(named: str, disk: Disk) -> str | bytes | None:
    """The public key that serve.toml names: its hexadecimal digits, or the bytes of its file, read once."""
    if not named:
        return None
    key: str | bytes = named if len(named) == 64 and not Path(named).suffix else _file(disk.root / named)
    public_key(key)
    return key


def _file(path: Path) -> bytes:
    return Disk(path.parent).read(path.name, bundle_folder.MAX_SIGNATURE)


def _sum(files: Files) -> str:
    """The sha256 of a bundle's files with their names, whether they lie in a folder or a zip."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return found.hexdigest()


def _digest(text: bytes | None, bundles: Mapping[str, Served]) -> str:
    lines = ["none" if text is None else hashlib.sha256(text).hexdigest(), *(f"{name} {bundles[name].sha256}" for name in sorted(bundles))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _reason(error: Exception) -> str:
    return printable(str(error) if isinstance(error, (MiaError, ValueError)) else f"it cannot be read: {error!r}")
