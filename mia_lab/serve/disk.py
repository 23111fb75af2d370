"""A folder as a server reads it: regular files only, of bounded size and number, and nothing that lies outside of it."""
from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from ..errors import MiaError

MAX_ENTRIES = 1000


class DiskError(MiaError, OSError):
    """A file or folder that is not read."""


class Disk:
    """One folder. Links are followed as long as they stay inside it, as those of a mounted ConfigMap do."""

    def __init__(self, folder: str | Path) -> None:
        self.root = _real(Path(folder), f"there is no folder {folder}")
        if not self.root.is_dir():
            raise DiskError(f"{folder} is no folder")

    def names(self, part: str) -> list[str]:
        """The names in a folder within, sorted, without hidden ones; none where there is no such folder."""
        if not os.path.lexists(self.root / part):
            return []
        place = self._inside(self.root / part)
        try:
            with os.scandir(place) as entries:
                found = [entry.name for entry in islice(entries, MAX_ENTRIES + 1)]
        except OSError as error:
            raise DiskError(f"{place} cannot be listed: {error}") from None
        if len(found) > MAX_ENTRIES:
            raise DiskError(f"{place} holds more than {MAX_ENTRIES} entries")
        return sorted(name for name in found if not name.startswith("."))

    def is_folder(self, part: str) -> bool:
        """Whether a name stands for a folder."""
        return (self.root / part).is_dir()

    def exists(self, part: str) -> bool:
        """Whether there is such a name, if only as a link that leads nowhere."""
        return os.path.lexists(self.root / part)

    def read(self, part: str, limit: int) -> bytes:
        """The bytes of a file within; DiskError for anything else, and for more than `limit` bytes, of which no more are read."""
        with self.opened(part, limit) as file:
            found = file.read(limit + 1)
        if len(found) > limit:
            raise DiskError(f"{part} has more than {limit} bytes")
        return found

    @contextmanager
    def opened(self, part: str, limit: int) -> Iterator[BinaryIO]:
        """A file within, open; DiskError as for `read`."""
        place = self._inside(self.root / part)
        try:
            number = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)  # of a pipe, it would wait for a writer
        except OSError as error:
            raise DiskError(f"{part} cannot be opened: {error.strerror}") from None
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise DiskError(f"{part} is no file")
            if found.st_size > limit:
                raise DiskError(f"{part} has {found.st_size} bytes; {limit} are the most")
            with os.fdopen(number, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(number)

    def _inside(self, path: Path) -> Path:
        place = _real(path, f"{path.name} leads nowhere")
        if not place.is_relative_to(self.root):
            raise DiskError(f"{path.name} is a link that leads out of {self.root}")
        return place


def _real(path: Path, missing: str) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise DiskError(f"{missing} ({type(error).__name__})") from None
