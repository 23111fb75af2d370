"""A tokenizer on its way to a notebook client: its files as a zip of text files, and how they are read there."""
from __future__ import annotations

import asyncio
import io
import re
import tempfile
import weakref
import zipfile
import zlib
from pathlib import Path
from typing import Any

from ..bundles.golden import tokenizer_hash
from ..errors import ServerError
from .refusing import Refused

MAX_BYTES = 256 << 20  # of all files
_MAX_FILES = 32
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.(json|txt|jinja)")
_zips: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


async def zipped(tokenizer: Any) -> bytes:
    """A tokenizer's files, of text alone; Refused (404) for one that cannot be written so, or not be read back as the same."""
    if tokenizer not in _zips:
        _zips[tokenizer] = await asyncio.to_thread(_written, tokenizer)
    return _zips[tokenizer]


def _written(tokenizer: Any) -> bytes:
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            raise Refused(404, f"this model's tokenizer cannot be sent ({type(error).__name__}: {error}); use a Session") from None
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for file in sorted(Path(folder).iterdir()):
                if file.is_file() and _NAME.fullmatch(file.name):
                    archive.write(file, file.name)
    return buffer.getvalue()


def read(data: bytes, expected: str) -> Any:
    """The tokenizer of a zip. No code is run for it. ServerError for what is none, or another than the server says that it uses.

    expected: its hash, as goldens have it: other tokens would silently give other numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            _unpack(data, Path(folder))
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError) as error:
            raise ServerError(f"the server sent no zip of a tokenizer: {error}") from None
        try:
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except ImportError:
            raise ServerError("a client needs the server's tokenizer, and transformers to read it; type pip install transformers") from None
        except Exception as error:  # transformers has many
            raise ServerError(f"the server's tokenizer cannot be read by this transformers: {error}") from None
    if tokenizer_hash(found) != expected:
        raise ServerError("the tokenizer that the server sent is not read here as the one that it uses; install the transformers version "
                          "that the server has")
    return found


def _unpack(data: bytes, folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if len(entries) > _MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
            raise ServerError("the server sent a tokenizer of too many files or bytes")
        for entry in entries:
            if not _NAME.fullmatch(entry.filename):
                raise ServerError(f"the server sent {entry.filename[:64]!r} beside a tokenizer's files")
            with archive.open(entry) as file:  # a header may lie about the size
                found = file.read(entry.file_size + 1)
            if len(found) != entry.file_size:
                raise ServerError("the server sent a zip that lies about its sizes")
            (folder / entry.filename).write_bytes(found)
