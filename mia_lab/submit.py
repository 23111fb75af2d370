"""Submitting a batch: everything is checked first, then either all requests run as asked or none does."""
from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch

from .compile import Compiled, Model, check, compile_edits
from .edits import Edit
from .engine.wire import KEY, Reduce, Spec, Take, addresses, encode, segments
from .errors import EditError, PromptError
from .launch import Engine, EngineRows
from .lazy import human_bytes
from .prompts import Prompts
from .selectors import Context


class Submitter:
    """Turns prompts, edits and captures into engine requests."""

    def __init__(self, engine: Engine, model: Model) -> None:
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
        return Context(read.ids[i], has_bos(self._engine.tokenizer, read.ids[i]), self._engine.tokenizer, read.messages[i])

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
        """Return each prompt's SamplingParams, which carry its spec, and the name under which its rows are kept."""
        from vllm import SamplingParams

        params = dict(params)
        specs, vectors = self.specs(read, edits, takes, reduce)
        uids = [uuid.uuid4().hex for _ in specs]
        if any(takes) and params.get("n", 1) != 1:
            raise PromptError("a capture follows one continuation a prompt; use n=1 and repeat the prompt")
        self._check_tables(specs, vectors)
        self._check_memory(read.ids, specs, params.get("max_tokens") or self._max_len)
        self._check_history(read.ids, specs, params.get("max_tokens") or self._max_len, params.get("n") or 1)
        extra = dict(params.pop("extra_args", None) or {})
        try:
            wired = [{KEY: encode(uid, spec)} if spec != Spec() else {} for uid, spec in zip(uids, specs)]
        except ValueError as error:
            raise EditError(f"these edits or positions cannot be sent to the engine: {error}") from None
        seeds = params.pop("seed", None)
        seeds = seeds if isinstance(seeds, (list, tuple)) else [seeds] * len(specs)
        try:
            sampling = [SamplingParams(**params, seed=seed, extra_args=extra | wire) for wire, seed in zip(wired, seeds, strict=True)]
        except Exception as error:  # vLLM has errors of its own for these, which differ between versions
            raise PromptError(f"these sampling arguments do not work: {error}") from None
        self._engine.register({**vectors, **matrices})
        return sampling, uids

    @property
    def _max_len(self) -> int:
        return self._engine.config.model_config.max_model_len

    def specs(self, read: Prompts, edits: Sequence[Sequence[Edit]], takes: Sequence[Sequence[Take]] = (),
              reduce: Reduce | None = None) -> tuple[list[Spec], dict[str, torch.Tensor]]:
        """Return what each prompt's request asks of the engine, and the vectors that they name."""
        specs: list[Spec] = []
        vectors: dict[str, torch.Tensor] = {}
        compiled: dict[tuple, Compiled] = {}  # requests that ask the same are compiled once
        for i, ids in enumerate(read.ids):
            selectors = [s for edit in edits[i] for s in (edit.where, getattr(edit, "span", None)) if s is not None]
            text = (tuple(ids), id(read.messages[i])) if any(s.reads_text for s in selectors) else ()
            key = tuple(map(id, edits[i])), len(ids), has_bos(self._engine.tokenizer, ids), text
            if key not in compiled:
                compiled[key] = self.compile(edits[i], self.context(read, i))
                vectors |= compiled[key].vectors
            specs.append(Spec(tuple(compiled[key].terms), tuple(takes[i]) if takes else (), tuple(compiled[key].gates), reduce))
        return specs, vectors

    def _check_tables(self, specs: Sequence[Spec], vectors: dict[str, torch.Tensor]) -> None:
        """Refuse a batch whose requests, run together, would not fit the engine's tables."""
        facts, together = self._engine.facts, self._engine.config.scheduler_config.max_num_seqs
        rows = {spec: sum(len(vectors[sha]) for sha in addresses(spec)) for spec in set(specs)}
        worst = min(sum(len(v) for v in vectors.values()), sum(sorted((rows[s] for s in specs), reverse=True)[:together]))
        room = facts["bank_rows"] // (2 if any(t.aligned for spec in rows for t in spec.terms) else 1)
        if worst > room:
            raise EditError(f"this batch names {worst} different vectors; the engine holds {room} at once. "
                            f"Submit it in parts, or load with a larger max_num_seqs")
        distinct = {spec: {s.terms for s in segments(spec) if s.terms} for spec in rows}
        pieces = sum(sorted((len(found) for found in distinct.values()), reverse=True)[:together])
        lines = _room_for([len(terms) for found in distinct.values() for terms in found], pieces)
        if pieces > facts["programs"] or lines > facts["terms"]:
            raise EditError(f"these edits change {pieces} times along the positions of the requests that run together, and need room "
                            f"for {lines} terms; the engine holds {facts['programs']} and {facts['terms']}. Use fewer selectors or "
                            f"prompts, or a larger max_num_seqs")
        unchunked = not self._engine.config.scheduler_config.enable_chunked_prefill
        if unchunked and any(spec.takes_twice for spec in rows):
            raise EditError("a point captured both before and after its edits takes twice the room, for which prompts must be chunked; "
                            "load with enable_chunked_prefill=True")
        plans = {s.takes for spec in rows for s in segments(spec) if s.takes}
        plans = {tuple((take.site, take.before) for take in takes) for takes in plans}
        if len(plans) > facts["plans"]:
            raise EditError(f"this batch captures {len(plans)} different sets of points; the engine holds {facts['plans']}")

    def _check_history(self, ids: list[list[int]], specs: Sequence[Spec], max_tokens: int, n: int) -> None:
        """Refuse requests under an attention bias whose keys and values, run together, would not fit."""
        lengths = [min(len(prompt) + max_tokens, self._max_len) for prompt, spec in zip(ids, specs) for _ in range(n) if spec.keeps_history]
        wanted = _room_for(lengths, self._engine.config.scheduler_config.max_num_seqs)
        room = self._engine.facts["biased_tokens"]
        if wanted > room:
            raise EditError(f"these requests under an AttentionBias hold up to {wanted} tokens together; the engine keeps {room}. "
                            f"Load with max_biased_tokens={wanted} or more")

    def _check_memory(self, ids: list[list[int]], specs: Sequence[Spec], max_tokens: int) -> None:
        """Refuse a capture that the host could not hold."""
        wanted = 0
        for prompt, spec in zip(ids, specs):
            end = min(len(prompt) + max_tokens, self._max_len)
            for take in spec.takes:
                rows = sum(max(0, (end if b is None else min(b, end)) - a) for a, b in take.spans)
                wanted += rows * self._engine.row_bytes(take.site)
        free = psutil.virtual_memory().available
        if wanted > 0.8 * free:
            raise PromptError(f"this capture would take {human_bytes(wanted)} of the {human_bytes(free)} of memory that are free; "
                              f"ask for fewer points, layers or positions, or run it in parts")


def _room_for(lengths: Sequence[int], together: int) -> int:
    """The room in which runs of these lengths always find a place, `together` of them at a time, taken and freed in any order."""
    k = min(len(lengths), together)
    return min(sum(lengths), (2 * k - 1) * max(lengths)) if k else 0


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
    return tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


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


