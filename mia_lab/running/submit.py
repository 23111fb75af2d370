"""Submitting a batch: everything is checked first, then either all requests run as asked or none does."""
from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..edits import Edit
from ..engine.room import Room
from ..engine.wire import NOTHING, Reduce, Span, Spec, Take, encode, shared
from ..errors import EditError, PromptError
from ..lazy import human_bytes
from ..prompts import Prompts
from ..selectors import Context
from .compile import Compiled, Model, check, compile_edits
from .engine_like import EngineLike
from .launch import EngineRows


class Submitter:
    """Turns prompts, edits and captures into engine requests."""

    def __init__(self, engine: EngineLike, model: Model) -> None:
        self._engine, self.model = engine, model

    def compile(self, edits: Iterable[Edit], prompt: Context) -> Compiled:
        """Return what edits mean for one prompt; EditError when they do not fit the model."""
        return compile_edits(edits, prompt, self.model)

    def check(self, edit: Edit) -> None:
        """EditError when an edit does not fit the model, whatever the prompt."""
        if not isinstance(edit, Edit):
            raise EditError(f"{type(edit).__name__} is not an edit; type for example mia.Add(vector, 0.2)")
        check(edit, self.model)

    def context(self, read: Prompts, i: int) -> Context:
        """What selectors resolve against, for one of the prompts."""
        return self._context(read, i, self._engine.tokenizer.bos_token_id)

    def _context(self, read: Prompts, i: int, bos: int | None) -> Context:
        return Context(read.ids[i], _begins_with(bos, read.ids[i]), self._engine.tokenizer, read.messages[i])

    def run(self, read: Prompts, edits: Sequence[Sequence[Edit]], params: dict[str, Any],
            takes: Sequence[Sequence[Take]] = (), reduce: Reduce | None = None,
            matrices: Mapping[str, torch.Tensor] = MappingProxyType({})) -> tuple[list, EngineRows]:
        """Run prompts as one batch, each with its edits and captures; return vLLM's outputs and where the rows are.

        reduce: what captured rows become on the device, with the `matrices` that it names.

        EditError or PromptError, before anything runs, for what the engine could not do.
        """
        params = dict(params)
        lora = params.pop("lora_request", None)
        if lora is not None:
            _check_lora(lora)
        with self._engine.turns.taken():  # nobody else registers vectors, for which these might have to go, in between
            sampling, uids = self.prepare(read, edits, params, takes, reduce, matrices)
            source = EngineRows(self._engine, uids)  # lets rows go also when the run breaks off
            return self._engine.run(read.ids, sampling, lora), source

    def prepare(self, read: Prompts, edits: Sequence[Sequence[Edit]], params: dict[str, Any], takes: Sequence[Sequence[Take]] = (),
                reduce: Reduce | None = None, matrices: Mapping[str, torch.Tensor] = MappingProxyType({})) -> tuple[list, list[str]]:
        """Return each prompt's sampling parameters, which carry its spec, and the name under which its rows are kept."""
        params = dict(params)
        specs, vectors = self.specs(read, edits, takes, reduce)
        uids = [uuid.uuid4().hex for _ in specs]
        if any(takes) and params.get("n", 1) != 1:
            raise PromptError("a capture follows one continuation a prompt; use n=1 and repeat the prompt")
        room, most = Room.of(self._engine.facts), params.get("max_tokens") or self._max_len
        room.check(specs, vectors)
        self._check_memory(read.ids, specs, most)
        room.check_lengths(min(len(prompt) + most, self._max_len) for prompt, spec in zip(read.ids, specs)
                           for _ in range(params.get("n") or 1) if spec.keeps_history)
        with _sendable():
            wired = [encode(uid, spec) if spec != NOTHING else "" for uid, spec in zip(uids, specs)]
        sampling = self._sampling(params, wired)
        self._engine.register({**vectors, **matrices})
        return sampling, uids

    def _sampling(self, params: dict[str, Any], wired: Sequence[str]) -> list:
        seeds = params.get("seed")
        if not isinstance(seeds, (list, tuple)):
            return self._engine.sampling(params | {"seed": seeds}, wired)
        if len(seeds) != len(wired):
            raise PromptError(f"give one seed, or one for each of the {len(wired)} prompts; these are {len(seeds)}")
        return [one for seed, wire in zip(seeds, wired) for one in self._engine.sampling(params | {"seed": seed}, [wire])]

    @property
    def _max_len(self) -> int:
        return self._engine.settings.max_len

    def specs(self, read: Prompts, edits: Sequence[Sequence[Edit]], takes: Sequence[Sequence[Take]] = (),
              reduce: Reduce | None = None) -> tuple[list[Spec], dict[str, torch.Tensor]]:
        """Return what each prompt's request asks of the engine, and the vectors that they name."""
        specs: list[Spec] = []
        vectors: dict[str, torch.Tensor] = {}
        compiled: dict[tuple, Compiled] = {}  # requests that ask the same are compiled once
        built: dict[tuple, Spec] = {}
        bos = self._engine.tokenizer.bos_token_id  # which transformers looks up anew each time, for 16 us
        for i, ids in enumerate(read.ids):
            prompt = self._context(read, i, bos)
            selectors = [one for edit in edits[i] for one in edit.selectors]
            text = (tuple(ids), id(read.messages[i])) if any(s.reads_text for s in selectors) else ()
            key = tuple(map(id, edits[i])), prompt.n, prompt.has_bos, text
            if key not in compiled:
                compiled[key] = self.compile(edits[i], prompt)
                vectors |= compiled[key].vectors
            one = key, id(takes[i]) if takes else 0
            if one not in built:
                asked = Spec(tuple(compiled[key].terms), tuple(takes[i]) if takes else (), tuple(compiled[key].gates), reduce)
                with _sendable():
                    built[one] = shared(asked)
            specs.append(built[one])
        return specs, vectors

    def _check_memory(self, ids: list[list[int]], specs: Sequence[Spec], max_tokens: int) -> None:
        """Refuse a capture that the host could not hold."""
        alike = Counter((spec, min(len(prompt) + max_tokens, self._max_len)) for prompt, spec in zip(ids, specs))
        wanted = 0
        for (spec, end), n in alike.items():
            sizes: Counter[tuple[Span, ...]] = Counter()  # of a row at all points that are captured over the same stretches
            for take in spec.takes:
                sizes[take.spans] += self._engine.row_bytes(take.site)
            for spans, size in sizes.items():
                wanted += n * size * sum(max(0, (end if b is None else min(b, end)) - a) for a, b in spans)
        room = self._engine.capture_room()
        if wanted > room:
            raise PromptError(f"this capture would take {human_bytes(wanted)}, and there is room for {human_bytes(room)}; "
                              f"ask for fewer points, layers or positions, or run it in parts")


@contextmanager
def _sendable() -> Iterator[None]:
    """EditError for what the wire has no words for."""
    try:
        yield
    except ValueError as error:
        raise EditError(f"these edits or positions cannot be sent to the engine: {error}") from None


def _check_lora(lora: Any) -> None:
    """PromptError for an adapter of the embedding or unembedding: logits are rebuilt from the stream without it."""
    config = Path(lora.lora_path) / "adapter_config.json"
    wanted = json.loads(config.read_text()) if config.exists() else {}
    touched = {str(name).rpartition(".")[2] for key in ("target_modules", "modules_to_save") for name in wanted.get(key) or ()}
    ends = sorted(touched & {"lm_head", "embed_tokens", "wte", "embed_out"})
    if ends:
        raise PromptError(f"the adapter {lora.lora_name!r} changes {', '.join(ends)}, with which logits cannot be rebuilt; "
                          f"use one of the blocks' projections only")


def has_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a prompt begins with BOS."""
    return _begins_with(tokenizer.bos_token_id, ids)


def _begins_with(bos: int | None, ids: Sequence[int]) -> bool:
    return bos is not None and ids[0] == bos


def per_prompt(edits: Any, n: int) -> list[list[Edit]]:
    """Return one list of edits for each of `n` prompts, from one list for all, or one list (or None) each."""
    if edits is None:
        return [[] for _ in range(n)]
    if isinstance(edits, Edit):
        return [[edits] for _ in range(n)]
    edits = list(edits)
    if all(isinstance(edit, Edit) for edit in edits):
        return [edits for _ in range(n)]
    if len(edits) != n or not all(e is None or isinstance(e, (list, tuple)) for e in edits):
        raise EditError(f"edits is one list of edits for all prompts, or a list with one list (or None) for each of the {n} prompts")
    return [list(e or []) for e in edits]


