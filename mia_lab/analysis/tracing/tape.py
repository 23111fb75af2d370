"""The record of a run that is still to come: changes and reads of values, made into edits and captures, and run once."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...edits import Add, Edit, Replace, Scale
from ...engine.wire import Take
from ...errors import EditError, MiaError, MissingRowsError, PointError
from ...lazy import LazyTensor
from ...points import DERIVED, Point, parse, undeclared
from ...prompts import resolve_at
from ...running.launch import EngineRows
from ...selectors import everywhere
from ...selectors import positions as at_positions
from .proxies import Index, Value

if TYPE_CHECKING:
    from ...session import Session

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Write:
    point: Point
    index: Index
    scale: float
    shift: Tensor | None


@dataclass(slots=True)
class _Read:
    point: Point
    index: Index
    version: int
    values: Tensor | None = None


@dataclass(eq=False)
class Tape:
    """What a run is to change and to keep, in the order in which it was written down.

    outputs: vLLM's, once it is `over`. sampling: further sampling arguments.
    """

    session: Session
    prompts: Any
    max_tokens: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    outputs: list = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self.prompts = self.session._read(self.prompts)
        self._writes: list[_Write] = []
        self._reads: list[_Read] = []

    # -- recording ----------------------------------------------------------------------------------------------------

    def value(self, key: Any, module: bool = False) -> Value:
        """The value at a point; PointError where the session does not tap it."""
        point = parse(key, self.session.n_layers, **self.session._dialect)
        if point.kind != "logits" and point not in self.session.tapped:
            if point.kind in DERIVED:
                raise PointError(f"{point} is rebuilt after a run; read it with session.capture(prompts, {point.kind!r})")
            raise undeclared(str(point), self.session.tapped)
        return Value(self, point, module=module)

    def version(self, point: Point) -> int:
        """How often a point was changed so far."""
        return sum(write.point == point for write in self._writes)

    def by_head(self, point: Point) -> bool:
        """Whether rows at a point are `[head d_head]`."""
        return len(self._row(point)) == 2

    def dtype(self, point: Point) -> torch.dtype:
        """The type of values at a point."""
        return torch.float32 if point.kind == "logits" else self.session._engine.dtype_of(point.kind)

    def shape(self, point: Point, index: Index) -> tuple[int, ...]:
        """The shape of an indexed value: generated positions are in it only where positions were not asked for."""
        prompts, places, row = self._prompts(index), self._places(index), self._row(point)
        axes = () if isinstance(index.prompts, int) else (len(prompts),)
        if not isinstance(index.positions, int):
            axes += (max(len(places[i]) for i in prompts) + (self._more if index.positions is None else 0),)
        return axes + (row[1:] if index.head is not None else row)

    def write(self, point: Point, index: Index, scale: float, shift: Tensor | None) -> None:
        """Record x -> scale x + shift; EditError where that cannot be an edit."""
        self._open()
        if point.kind == "logits":
            raise EditError("logits are read, not changed; change final_norm, or give vLLM logit_bias= or allowed_token_ids=")
        found = _Write(point, index, scale, shift)
        for i in self._prompts(index):
            for edit in self._edits(found, i):
                self.session._submit.check(edit)
        self._writes.append(found)

    def read(self, point: Point, index: Index) -> LazyTensor:
        """Record that a value is kept as it is now, and return the tensor that will hold it."""
        self._open()
        found = _Read(point, index, self.version(point))
        self._reads.append(found)
        return LazyTensor(partial(self._values, found), self.shape(point, index), self.dtype(point), str(point))

    def _open(self) -> None:
        if self.over:
            raise MiaError("this run is over; record in a new one, and .save() inside the block what is needed after it")

    def _values(self, read: _Read) -> Tensor:
        if read.values is None:
            raise MiaError(f"{read.point} is known once the run is over: after the with block, or in a second run")
        return read.values

    # -- what was asked, prompt by prompt -----------------------------------------------------------------------------

    @property
    def _more(self) -> int:
        """Positions that are computed beyond the prompt's, at most."""
        return max(self.max_tokens - 1, 0)

    def _row(self, point: Point) -> tuple[int, ...]:
        if point.kind == "logits":
            return (self.session._engine.settings.d_vocab,)
        return self.session._engine.shapes[point]

    def _prompts(self, index: Index) -> list[int]:
        every = range(len(self.prompts.ids))
        try:
            return resolve_at(index.prompts, len(every))
        except MiaError:
            raise EditError(f"{index.prompts!r} names none of the {len(every)} prompts; index a value as value[:, position]") from None

    def _places(self, index: Index) -> list[list[int]]:
        return [resolve_at(index.positions, len(ids)) if i in set(self._prompts(index)) else [] for i, ids in enumerate(self.prompts.ids)]

    def _edits(self, write: _Write, i: int) -> list[Edit]:
        """The edits of one prompt that a change means: a scale, then one vector, or a row for each position."""
        index, chosen = write.index, self._prompts(write.index)
        if i not in chosen:
            return []
        places = self._places(index)[i]
        if len(set(places)) < len(places):
            raise EditError(f"positions {places} name one place twice")
        if chosen.count(i) > 1:
            raise EditError(f"prompts {chosen} name prompt {i} twice")
        where = everywhere() if index.positions is None else at_positions(places)
        at = dict(layers=[write.point.layer], point=write.point.kind, where=where)
        scale = [Scale(write.scale, heads=index.head, **at)] if write.scale != 1.0 else []
        if write.shift is None:
            return scale
        rows = self._shift_rows(write, chosen.index(i), len(places))
        at["head"] = index.head
        if len(rows) == 1:
            return [Replace(rows[0], **at)] if write.scale == 0.0 else [*scale, Add(rows[0], **at)]
        if write.scale == 0.0:
            block = torch.zeros(max(places) - min(places) + 1, rows.shape[1])
            block[[p - min(places) for p in places]] = rows
            return [Replace(block, **at | dict(where=at_positions(places)), start=min(places))]
        return scale + [Add(row, **at | dict(where=at_positions([p]))) for p, row in zip(places, rows)]

    def _shift_rows(self, write: _Write, prompt: int, n: int) -> Tensor:
        """What is added in one of the chosen prompts: one row for all its positions, `[1 width]`, or one for each, `[n width]`."""
        shape, index, shift = self.shape(write.point, write.index), write.index, write.shift
        if index.positions is None and self._more:
            axis = len(shape) - len(self._row(write.point)) + (index.head is not None) - 1
            shape = (*shape[:axis], shape[axis] - self._more, *shape[axis + 1 :])  # rows are given for the prompt's positions
        try:
            wide = shift.broadcast_to(shape)
        except RuntimeError:
            raise EditError(f"a tensor of shape {list(shift.shape)} does not fit {write.point} of shape {list(shape)} there") from None
        row = len(self._row(write.point)) - (index.head is not None)
        wide = wide if isinstance(index.prompts, int) else wide[prompt]
        if isinstance(index.positions, int):
            return wide.reshape(1, -1)
        alike = shift.ndim <= row or shift.shape[-row - 1] == 1
        return wide[:1].flatten(1) if alike else wide[:n].flatten(1)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the prompts once, with all that was recorded."""
        self._open()
        self.over = True
        n = len(self.prompts.ids)
        edits = [[edit for write in self._writes for edit in self._edits(write, i)] for i in range(n)]
        top = self.session._top(edits)
        wanted = {(self._source(read, top), self._before(read)): None for read in self._reads}
        takes = [[Take(p.kind, p.layer, ((0, None if self.max_tokens > 1 else len(ids)),), before) for p, before in sorted(wanted)]
                 for ids in self.prompts.ids]
        params = dict(max_tokens=max(self.max_tokens, 1), temperature=0.0) | self.sampling
        self.outputs, source = self.session._run(self.prompts, edits, params, takes)
        for read in self._reads:
            self._fill(read, source, top, top.kind == "final_norm")

    @staticmethod
    def _source(read: _Read, top: Point) -> Point:
        return top if read.point.kind == "logits" else read.point

    def _before(self, read: _Read) -> bool:
        """Whether a read sees its point before the edits there; EditError where it stands between two of them."""
        total = self.version(read.point)
        if read.point.kind == "logits" or read.version == total:
            return False
        scoped = any(read.point in edit.steps for mine in self.session._scoped([[]]) for edit in mine)
        if read.version or scoped:
            raise EditError(f"{read.point} was saved between two changes of it; save it before the first or after the last")
        return True

    def _fill(self, read: _Read, source: EngineRows, top: Point, normed: bool) -> None:
        """Assemble what a read asked for, padded with NaN where a prompt has no such position."""
        index, point = read.index, self._source(read, top)
        chosen, places = self._prompts(index), self._places(index)
        rows = []
        for i, (positions, values) in zip(chosen, source.rows(point, chosen, self._before(read))):
            n = len(self.prompts.ids[i]) + len(self.outputs[i].outputs[0].token_ids) - 1
            if positions[positions < n].tolist() != list(range(n)):
                raise MissingRowsError(f"{read.point} of prompt {i} has rows {positions.tolist()} of {n}")
            kept = values[:n] if index.positions is None else values[places[i]]
            kept = self.session.unembed(kept, normed) if read.point.kind == "logits" else kept
            rows.append(kept if index.head is None else kept[:, index.head])
        if isinstance(index.positions, int):
            read.values = torch.stack([row[0] for row in rows])
        else:
            width = self.shape(read.point, index)[0 if isinstance(index.prompts, int) else 1]
            read.values = torch.full((len(rows), width, *rows[0].shape[1:]), float("nan"), dtype=rows[0].dtype)
            for j, row in enumerate(rows):
                read.values[j, : len(row)] = row
        read.values = read.values[0].clone() if isinstance(index.prompts, int) else read.values
