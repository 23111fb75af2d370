"""A bundle into the folder that a server reads: whole or not at all, with the one before it kept."""
from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..errors import BundleError
from . import folder, signing
from .bundle import opened

PREVIOUS = ".previous"


def push(path: str | Path, directory: str | Path, signer: str | Path | bytes | None = None) -> Path:
    """Put a bundle into a folder as NAME.steer.zip, in one step for whoever reads it; return where it is.

    What was there is kept as .previous/NAME-SUM.steer.zip, SUM being the start of its sha256. BundleError, with nothing changed, for
    a bundle that does not load, was not signed by `signer`, or has a name that no server takes, that a folder there has already, or that
    it was not signed under.
    """
    path, directory = Path(path), Path(directory)
    if not directory.is_dir():
        raise BundleError(f"there is no folder {directory}")
    bundle, files = opened(path, signer)
    name = folder.name_of(path)
    place = directory / f"{name}.steer.zip"
    if folder.SIGNATURE in files and (signer is not None or "name" in bundle.about):
        signing.check_name(bundle.about, name, path)
    for taken in (directory / f"{name}.steer", place):
        if taken.is_dir():
            raise BundleError(f"{directory} holds {taken.name} as a folder, and two bundles of one name would not be told apart")
    data = folder.zipped(files)
    if place.is_file() and place.read_bytes() == data:
        return place
    scratch = directory / f".{name}.{os.getpid()}"
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if place.is_file():
            _keep(place, name)
        scratch.replace(place)
    finally:
        scratch.unlink(missing_ok=True)
    _flush(directory)
    return place


def _keep(place: Path, name: str) -> None:
    """A second name for the file that is there, so that it stays in its place until the new one takes it."""
    kept = place.parent / PREVIOUS / f"{name}-{hashlib.sha256(place.read_bytes()).hexdigest()[:12]}.steer.zip"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        os.link(place, kept)
    _flush(kept.parent)


def _flush(directory: Path) -> None:
    """Have a folder's names on the disk."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
