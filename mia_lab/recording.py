"""Recordings: activations of whole data sets, streamed to shards of safetensors that an interrupted run goes on with.

A folder holds `index.json` and shards. A shard has, for each of its rows, `request`, `position` and `token` (int64
`[rows]`), and under each point's name its values `[rows *shape]` in the type in which the model computes.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .counted import counted
from .edits import Edit
from .engine.wire import Take, encode
from .errors import EditError, MiaError, MissingRowsError, PointError, PromptError
from .points import DERIVED, Point, kind_of
from .prompts import Prompts
from .running.launch import EngineRows
from .running.reading import asked_points, positions_at
from .running.submit import per_prompt
from .selectors import merge
from .shown import progress_bar

if TYPE_CHECKING:
    from .session import Session

VERSION = 1
_KEYS = ("request", "position", "token")


class Recording:
    """A recorded folder, read lazily. MiaError where there is none."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "index.json"
        if not path.exists():
            raise MiaError(f"{self.folder} holds no recording: it has no index.json")
        self._about = json.loads(path.read_text())
        if self._about.get("version") != VERSION:
            raise MiaError(f"{path} is of version {self._about.get('version')}; this release reads version {VERSION}")

    @property
    def points(self) -> list[str]:
        """The names of the points that were recorded."""
        return list(self._about["points"])

    @property
    def complete(self) -> bool:
        """Whether the run came to its end; otherwise record again, with the same arguments, and it goes on."""
        return bool(self._about["complete"])

    @property
    def n_requests(self) -> int:
        """Prompts whose rows are there."""
        return self._about["shards"][-1]["stop"] if self._about["shards"] else 0

    def __len__(self) -> int:
        return sum(shard["rows"] for shard in self._about["shards"])

    def __getitem__(self, name: str) -> torch.Tensor:
        """All rows of one point, `[rows *shape]`, or of "request", "position" or "token", int64 `[rows]`, in memory."""
        if name not in (*_KEYS, *self.points):
            raise KeyError(f"{name!r} was not recorded; there are {', '.join((*_KEYS, *self.points))}")
        parts = [shard[name] for shard in self.shards(name)]
        return torch.cat(parts) if parts else torch.empty(0)

    def shards(self, *names: str) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the shards one after the other, all their tensors or those of these names, mapped from disk."""
        for shard in self._about["shards"]:
            with safe_open(self.folder / shard["file"], framework="pt") as opened:
                yield {name: opened.get_tensor(name) for name in names or opened.keys()}

    def __repr__(self) -> str:
        state = "complete" if self.complete else "not complete"
        return (f"<Recording {self.folder}: {counted(len(self), 'row')} of {counted(self.n_requests, 'prompt')}, {', '.join(self.points)}; "
                f"{state}>")


def record(session: Session, prompts: Iterable[Any], folder: str | Path, point: str, layers: int | Iterable[int] | None, at: Any,
           edits: Any, before: bool, shard_bytes: int, progress: bool) -> Recording:
    """Run prompts and write what `Session.record` promises."""
    kind, folder, edits = kind_of(point), Path(folder), _one_list(edits)
    if isinstance(prompts, str):
        raise PromptError("record takes an iterable of prompts; put a single one into a list")
    if kind in DERIVED:
        raise PointError(f"{kind} is rebuilt from other points when it is asked for; record {' and '.join(DERIVED[kind])}")
    asked = asked_points(session, kind, layers)
    writer = _Writer(folder, {"version": VERSION, "model": session.fingerprint, "points": [str(p) for p in asked], "shards": [],
                              "complete": False})
    rows = max(1, shard_bytes // sum(session._engine.row_bytes((p.kind, p.layer)) for p in asked))
    rest, first, size = iter(prompts), 0, 8
    with progress_bar(progress) as bar, writer:
        bar.stage(len(prompts) if isinstance(prompts, Sized) else None, "prompts")
        for shard in list(writer.about["shards"]):
            batch = _Batch(session, list(islice(rest, shard["stop"] - first)), first, asked, at, edits, before)
            if batch.sha != shard["sha"]:
                raise MiaError(f"{folder} was recorded with other prompts, positions or edits from prompt {first} on; record into "
                               f"another folder")
            bar.add(shard["stop"] - first)
            first = shard["stop"]
        while some := list(islice(rest, size)):
            batch = _Batch(session, some, first, asked, at, edits, before)
            source, tokens = batch.run()
            writer.write(batch, source)
            bar.add(len(some), tokens)
            first += len(some)
            size = max(1, rows * len(some) // sum(map(len, batch.at)))  # prompts that fill a shard, if they go on like these
        writer.finish()
    return Recording(folder)


def _one_list(edits: Any) -> list[Edit]:
    edits = [edits] if isinstance(edits, Edit) else list(edits or ())
    if not all(isinstance(edit, Edit) for edit in edits):
        raise EditError("a recording takes one list of edits for all prompts")
    return edits


class _Batch:
    """Some prompts that become one shard, and what identifies it."""

    def __init__(self, session: Session, prompts: list[Any], first: int, asked: Sequence[Point], at: Any, edits: Any,
                 before: bool) -> None:
        self._session, self.first, self.asked, self._before = session, first, asked, before
        self.read: Prompts = session._read(prompts)
        self._edits = per_prompt(edits, len(prompts))
        self.at = [sorted(set(positions_at(session, self.read, i, at))) for i in range(len(prompts))]
        self._takes = [[Take(p.kind, p.layer, tuple(merge([(q, q + 1) for q in places])), before) for p in asked] for places in self.at]
        digest = hashlib.sha256()
        for ids, spec in zip(self.read.ids, session._submit.specs(self.read, session._scoped(self._edits), self._takes)[0]):
            digest.update(f"{ids}{encode('_', spec)}".encode())
        self.sha = digest.hexdigest()

    def run(self) -> tuple[EngineRows, int]:
        """Run the prompts; their rows are then on the host. Also return how many tokens were computed."""
        outputs, source = self._session._run(self.read, self._edits, {"max_tokens": 1, "temperature": 0.0}, self._takes)
        return source, sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs)

    def tensors(self, source: EngineRows) -> dict[str, torch.Tensor]:
        """What the shard holds."""
        found = {"request": [], "position": [], "token": []}
        for i, places in enumerate(self.at):
            found["request"] += [self.first + i] * len(places)
            found["position"] += places
            found["token"] += [self.read.ids[i][q] for q in places]
        held = {name: torch.tensor(values, dtype=torch.int64) for name, values in found.items()}
        for p in self.asked:
            rows = source.rows(p, range(len(self.at)), self._before)
            for i, (positions, _) in enumerate(rows):
                if positions.tolist() != self.at[i]:
                    raise MissingRowsError(f"{p} of prompt {self.first + i} came with {len(positions)} of {len(self.at[i])} rows")
            held[str(p)] = torch.cat([values for _, values in rows]).contiguous()
        return held


class _Writer:
    """Writes shards on a thread while the engine goes on with the next; the index names a shard once it is whole on disk."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.about = folder, about
        path = folder / "index.json"
        if path.exists():
            self.about = json.loads(path.read_text())
            differ = [name for name in ("version", "model", "points") if self.about.get(name) != about[name]]
            if differ:
                raise MiaError(f"{folder} holds a recording of another {' and '.join(differ)}; record into another folder")
        self.about["complete"] = False
        self._pool = ThreadPoolExecutor(1, "mia-recording")
        self._writing: Future | None = None

    def write(self, batch: _Batch, source: EngineRows) -> None:
        """Write one shard; returns once the one before it is written."""
        tensors = batch.tensors(source)
        self._wait()
        self._writing = self._pool.submit(self._save, batch, tensors)

    def finish(self) -> None:
        """Mark the recording as complete."""
        self._wait()
        self.about["complete"] = True
        self._save_index()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _save(self, batch: _Batch, tensors: dict[str, torch.Tensor]) -> None:
        name = f"shard-{len(self.about['shards']):05d}.safetensors"
        part = self._folder / f".{name}.part"
        save_file(tensors, part)
        os.replace(part, self._folder / name)
        self.about["shards"].append({"file": name, "first": batch.first, "stop": batch.first + len(batch.at),
                                     "rows": len(tensors["request"]), "sha": batch.sha})
        self._save_index()

    def _save_index(self) -> None:
        part = self._folder / ".index.json.part"
        part.write_text(json.dumps(self.about, indent=1))
        os.replace(part, self._folder / "index.json")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()  # what is being written is finished, also when the run was interrupted
