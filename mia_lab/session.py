"""Session: one vLLM model with taps. Everything a notebook does starts here."""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import prompts as prompts_
from .analyses import Analyses
from .cache import ActivationCache, Batch
from .edits import Add, Edit
from .engine.config import EngineOptions, Sizes, refuse_unsupported
from .engine.wire import ATTENTION, Reduce, Take
from .errors import EditError, MiaError
from .lazy import LazyTensor
from .models import resolve
from .notebook.panels import Panels
from .notebook.views import Views
from .points import Point, select
from .prompts import Prompts
from .running import logs
from .running.compile import Model
from .running.declare import EDIT_KINDS, declare
from .running.engine_like import EngineLike
from .running.launch import Engine, EngineRows, read_config
from .running.submit import Submitter, has_bos, per_prompt
from .selectors import Context

if TYPE_CHECKING:
    from .analysis.vectors import Vector
    from .notebook.point_table import PointTable
    from .recording import Recording
    from .running.proof import Verdict
    from .running.watching import Moment


class Session(Analyses, Views, Panels):
    """A loaded model that can be read and steered while vLLM serves it.

    model: "demo" (the embedded Gemma 3 270M), any Hugging Face id, or a local path.
    points: kinds, layers or points to tap, by default `resid_post` everywhere; the last block's is always tapped, since
    logits come from it. edits: the edit kinds to enable at the tapped points, by default all.
    max_captured_tokens: rows captured in one engine step at most; a longer prompt is run in chunks of it. By default as
    many as 256 MiB hold. max_biased_tokens: tokens of all running requests under an AttentionBias, whose keys and values
    are kept beside the KV cache; 0 does without such edits. in_process: run the engine in this process (the default) or in its own.
    delivery: where the engine captures faster than the host can take rows over, "complete" slows it down, "best_effort" drops
    rows, which are counted in `dropped` and raise when used.
    Every other keyword is vLLM's. Raises UnsupportedError, with the reason, for what could give wrong results.
    """

    def __init__(self, model: str, *, points: Any = ("resid_post",), edits: Sequence[str] = EDIT_KINDS,
                 max_captured_tokens: int | None = None, max_biased_tokens: int = 0, in_process: bool = True,
                 delivery: str = "complete", **engine: Any) -> None:
        unknown = [kind for kind in edits if kind not in EDIT_KINDS]
        if unknown:
            raise EditError(f"there is no edit kind {unknown[0]!r}; the kinds are {', '.join(EDIT_KINDS)}")
        if delivery not in ("complete", "best_effort"):
            raise MiaError(f'delivery is "complete" or "best_effort", not {delivery!r}')
        path = resolve(str(model))
        config = read_config(path, engine)
        kinds = tuple(kind for kind in edits if kind != "attentionbias" or max_biased_tokens)
        declared = declare(points, config.model_config.hf_text_config.num_hidden_layers, "attentionbias" in kinds)
        asked = EngineOptions(*declared, kinds, max_captured_tokens or 0, max_biased_tokens, delivery == "complete")
        sizes = Sizes.of(config, asked)
        refuse_unsupported(config, sizes)  # before minutes of loading; the engine checks again
        print(f"mia_lab: {sizes.describe(config, asked)}", file=sys.stderr)
        self._over(Engine(path, asked, in_process, engine), str(model))
        self._prove()

    def _over(self, engine: EngineLike, model: str) -> None:
        """Become a session of an engine that is up."""
        self.model, self._engine = model, engine
        facts, settings = engine.facts, engine.settings
        self.n_layers, self.d_model, self.edit_kinds = settings.n_layers, settings.d_model, settings.edits
        self.dtype, self.max_len = settings.type, settings.max_len
        self.proof: list[Verdict] = []
        self._defaults: list[Edit] = []
        self._open, self._steering = _Open(), 0  # this thread's, and how many scopes are open in all
        self._units: dict[str, torch.Tensor] = {}
        sites = [Point(kind, layer) for kind, layer in facts["sites"]]
        self._points = [p for p in sites if p.kind != ATTENTION]
        read_only = frozenset(facts["read_only"])
        editable = frozenset(p for p in sites if p.kind not in read_only) if self.edit_kinds else frozenset()
        self._submit = Submitter(engine, Model(self.n_layers, engine.shapes, editable, read_only, self.edit_kinds))
        self._dialect = dict(sandwich=facts["sandwich"], rotary=settings.rotary)

    def _prove(self) -> None:
        from .running.proof import prove

        try:
            self.proof = prove(self)
        except BaseException:
            self.close()
            raise

    # -- running ------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Any, *, max_tokens: int = 32, temperature: float = 0.0, seed: int | None = None,
                 edits: Any = None, **sampling: Any) -> str | list[str]:
        """Return the continuation of one prompt, or a list of them for a list.

        Greedy unless a temperature is given. edits: one list of edits for all prompts, or one list (or None) a prompt;
        they act together with any open `steer` scope. Other keywords are vLLM's SamplingParams, and `lora_request`.
        """
        outputs = self.completions(prompts, max_tokens=max_tokens, temperature=temperature, seed=seed, edits=edits, **sampling)
        return outputs.outputs[0].text if not isinstance(outputs, list) else [o.outputs[0].text for o in outputs]

    def completions(self, prompts: Any, *, max_tokens: int = 32, temperature: float = 0.0, seed: int | None = None,
                    edits: Any = None, **sampling: Any) -> Any:
        """As `generate`, but return vLLM's RequestOutput, or a list of them for a list."""
        read = self._read(prompts)
        params = dict(max_tokens=max_tokens, temperature=temperature, seed=seed, **sampling)
        outputs, _ = self._run(read, edits, params)
        return outputs[0] if read.one else outputs

    def run_with_cache(self, prompts: Any, names_filter: Any = None, *, max_tokens: int = 0, temperature: float = 0.0,
                       seed: int | None = None, n: int = 1, edits: Any = None, before: bool = False,
                       **sampling: Any) -> tuple[LazyTensor, ActivationCache]:
        """Return lazy logits `[batch pos d_vocab]` and the ActivationCache of the tapped points that the filter picks.

        max_tokens: tokens to generate; the positions computed for them (one fewer) follow the prompt's. n: continuations
        of each prompt, which stand one after the other on the batch axis. before: read values before the edits at their
        own point. Logits are the final norm and unembedding of the last block's stream, computed when first used
        (pos x d_vocab float32 each).
        """
        chosen = select(names_filter, self._points, self.n_layers, **self._dialect)
        read = self._read(prompts).times(n)
        seeds = [None if seed is None else seed + i % n for i in range(len(read.ids))]
        edits = per_prompt(edits, len(read.ids) // n)
        top = self._top(edits)
        normed = top.kind == "final_norm"
        rows = [((0, None if max_tokens > 1 else len(ids)),) for ids in read.ids]
        takes = [[Take(p.kind, p.layer, spans, before) for p in chosen] for spans in rows]
        for mine, spans in zip(takes, rows):
            if before or top not in chosen:
                mine.append(Take(top.kind, top.layer, spans))
        params = dict(max_tokens=max(max_tokens, 1), temperature=temperature, seed=seeds, **sampling)
        outputs, source = self._run(read, [edits[i // n] for i in range(len(read.ids))], params, takes)
        tokens = tuple(tuple([*prompt, *o.outputs[0].token_ids][:-1]) for prompt, o in zip(read.ids, outputs))
        dtypes = {p: self._engine.dtype_of(p.kind) for p in self._engine.shapes}
        batch = Batch(tokens, tuple(map(len, read.ids)), self._engine.shapes, dtypes, self.n_layers, before=before,
                      biased=self._biased(edits), mixed=before and any(self._scoped(edits)), normed=normed, **self._dialect)
        stream = ActivationCache(source, [top], replace(batch, before=False))
        logits = self._logits(stream[top], stream.mask, normed)
        return logits, ActivationCache(source, chosen, batch, logits)

    def capture(self, prompts: Any, point: str = "resid_post", *, layers: int | Iterable[int] | None = None, at: Any = -1,
                edits: Any = None, before: bool = False, reduce: Any = None) -> LazyTensor | tuple[LazyTensor, LazyTensor]:
        """Return the value at one kind of point, `[prompt layer d_model]`, lazily; only the asked rows leave the device.

        at: prompt positions, an int, a slice, a list, a Selector, or None for all; unless it is an int there is a position axis,
        `[prompt layer pos d_model]`, right-padded with NaN. An int layer drops the layer axis, one prompt the prompt axis.
        Points per head give `[... head d_head]`; "pattern" and "attn_scores" give `[... head key]`, the attention that
        each asked position pays to the prompt's positions, rebuilt from tapped q and k on the device. before: read before
        the edits at the point, not after. reduce: a reduction done on the device, of which only the result leaves it:
        `Project` `[... k]`, `Norm` `[...]`, `Mean` (no position axis), `TopK` and `SAE` (a pair of values and places
        `[... k]`), and for patterns `Mass` `[... head]`.
        """
        from .running.reading import capture

        return capture(self, prompts, point, layers, at, edits, before, reduce)

    # -- steering -----------------------------------------------------------------------------------------------------

    def record(self, prompts: Iterable[Any], folder: str | Path, point: str = "resid_post", *, layers: int | Iterable[int] | None = None,
               at: Any = None, edits: Any = None, before: bool = False, shard_bytes: int = 1 << 30, progress: bool = True) -> Recording:
        """Stream the values at one kind of point, for any number of prompts, into shards of safetensors under `folder`.

        prompts: any iterable, read as it is needed. layers, at, before: as in `capture`; edits: one list for all prompts.
        Writing goes on beside the engine; what is in memory is two shards of about `shard_bytes`. Called again with the same
        arguments, after whatever broke it off, it goes on behind the last whole shard. Raises MiaError where the folder holds
        something else.
        """
        from .recording import record

        return record(self, prompts, folder, point, layers, at, edits, before, shard_bytes, progress)

    def watch(self, prompts: Any, point: str = "resid_post", *, layers: int | Iterable[int] | None = None, max_tokens: int = 32,
              temperature: float = 0.0, seed: int | None = None, edits: Any = None, before: bool = False,
              **sampling: Any) -> Iterator[Moment]:
        """Generate, and yield each position from the last of the prompt on as soon as its values `[layer *shape]` are here.

        Prompts run as one batch, whose moments come as they are computed. Breaking off the loop ends the generation. before: values
        before the edits at the point, not after.
        """
        from .running.watching import watch

        return watch(self, prompts, point, layers, max_tokens, edits, before, dict(temperature=temperature, seed=seed) | sampling)

    @contextmanager
    def steer(self, vector: Vector | torch.Tensor | Edit | Sequence[Edit], coeff: float = 1.0, **add: Any) -> Iterator[None]:
        """Add `coeff` times a vector in everything that this thread runs inside the `with` block. Scopes add up, and end on exceptions.

        Takes the arguments of `Add`, or any edit, or several. Edits of outer scopes act first, those of a call last.
        Several layers of a vector act together.
        """
        scope = [vector] if isinstance(vector, Edit) else list(vector) if isinstance(vector, (list, tuple)) else [
            Add(vector, coeff, **add)]
        for edit in scope:  # a wrong width or an undeclared point fails here, not inside the block
            self._submit.check(edit)
        self._open.scopes.append(scope)
        self._open.own += 1
        self._steering += 1
        try:
            yield
        finally:
            self._open.scopes = [other for other in self._open.scopes if other is not scope]
            self._open.own -= 1
            self._steering -= 1

    @contextmanager
    def unsteered(self) -> Iterator[None]:
        """Suspend every open `steer` scope, and the default edits, inside the `with` block."""
        scopes, self._open.scopes = self._open.scopes, []
        self._open.muted += 1
        try:
            yield
        finally:
            self._open.scopes = scopes
            self._open.muted -= 1

    def default(self, edits: Sequence[Edit]) -> None:
        """Set the edits that act on everything from now on, before those of scopes and calls; `[]` ends them."""
        edits = list(edits)
        for edit in edits:
            self._submit.check(edit)
        self._defaults = edits

    # -- looking ------------------------------------------------------------------------------------------------------

    def points(self) -> PointTable:
        """Return a table of every point, its shape, whether it is tapped here, and what capturing a token of it costs."""
        from .notebook.point_table import PointTable

        absent = {Point(kind, layer): reason for kind, layer, reason in self._engine.facts["absent"]}
        row_bytes = lambda p: self._engine.row_bytes((p.kind, p.layer))  # noqa: E731
        return PointTable.of(self.n_layers, self._engine.shapes, row_bytes, self._points, absent)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the loaded weights: a hash over a sample of each."""
        return self._engine.rpc("sample_weights")

    @property
    def configuration(self) -> str:
        """Identity of the configuration that the model runs with, `hf_overrides` and all; not of where it lies."""
        return self._engine.settings.configuration

    @property
    def dropped(self) -> int:
        """Captured rows that were dropped since the session opened: 0 unless it delivers with best effort."""
        return self._engine.rpc("settle")

    def unembed(self, rows: torch.Tensor, normed: bool = False) -> torch.Tensor:
        """Return float32 logits `[n d_vocab]` of rows `[n d_model]` of the last block's stream, or, where `normed`, of the final
        norm's output, by the model's own norm and unembedding."""
        if not self._engine.facts["has_unembedding"]:
            raise MiaError("this model transforms its hidden states after the final norm, so logits cannot be rebuilt")
        vocab, found = self._engine.settings.d_vocab, []
        for part in rows.to(self.dtype).split(max(1, (256 << 20) // (4 * vocab))):
            data = self._engine.rpc("unembed", part.contiguous().view(torch.uint8).numpy().tobytes(), normed)
            found.append(torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, vocab))
        return torch.cat(found)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV, so that the next batch computes every row; MiaError when requests still hold some."""
        if not self._engine.reset_prefix_cache():
            raise MiaError("the prefix cache is in use and was not reset")

    @property
    def log(self) -> Path:
        """The file that vLLM's log, and what its processes print, went to."""
        return logs.path()

    @property
    def tapped(self) -> tuple[Point, ...]:
        """The points tapped in this session."""
        return tuple(self._points)

    def __repr__(self) -> str:
        from .notebook.cards import session_text

        return session_text(self)

    def _repr_html_(self) -> str:
        from .notebook.cards import as_html, session_card

        return as_html(session_card(self))

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Shut the engine down and return its memory. Values not fetched before are gone."""
        self._engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- within -------------------------------------------------------------------------------------------------------

    def _read(self, prompts: Any) -> prompts_.Prompts:
        self._engine.require_open()
        return prompts_.read(prompts, self._engine.tokenizer, self.max_len)

    @property
    def sandwich(self) -> bool:
        """Whether blocks norm what their branches add."""
        return self._dialect["sandwich"]

    def _has_bos(self, ids: Sequence[int]) -> bool:
        return has_bos(self.tokenizer, ids)

    def _has_bos_rule(self) -> bool:
        return self._has_bos(self.tokenizer.encode("a"))

    def _run(self, read: Prompts, edits: Any, params: dict[str, Any],
             takes: Sequence[Sequence[Take]] = (), reduce: Reduce | None = None,
             matrices: dict[str, torch.Tensor] | None = None) -> tuple[list, EngineRows]:
        edits = self._scoped(per_prompt(edits, len(read.ids)))
        return self._submit.run(read, edits, params, takes, reduce, matrices or {})

    def _scoped(self, edits: Sequence[Sequence[Edit]]) -> list[list[Edit]]:
        """Each request's edits, after the defaults and those of open scopes; EditError where only another thread has one open."""
        if self._steering and not (self._open.own or self._open.muted or self._open.apart):
            raise EditError("a steer scope is open in another thread, and acts in that one alone; open it in this one, or give edits= "
                            "with the call")
        return [[*self._acting, *mine] for mine in edits]

    @property
    def _acting(self) -> list[Edit]:
        """The defaults, and the edits of this thread's open scopes."""
        return [edit for scope in ([] if self._open.muted else self._defaults, *self._open.scopes) for edit in scope]

    def _top(self, edits: Sequence[Sequence[Edit]]) -> Point:
        """The point that the logits of requests are rebuilt from: the last stream, or the final norm's output where an edit acts on it."""
        normed = any(p.kind == "final_norm" for mine in self._scoped(edits) for edit in mine for p in edit.steps)
        return Point("final_norm" if normed else "resid_post", self.n_layers - 1)

    def _biased(self, edits: Sequence[Sequence[Edit]]) -> frozenset[int]:
        """The layers whose attention any of these requests biases."""
        return frozenset(p.layer for mine in self._scoped(edits) for edit in mine for p in edit.steps if p.kind == ATTENTION)

    def _context(self, read: Prompts, i: int) -> Context:
        return self._submit.context(read, i)

    def _logits(self, stream: LazyTensor, real: torch.Tensor, normed: bool) -> LazyTensor:
        vocab = self._engine.settings.d_vocab

        def load() -> torch.Tensor:
            out = torch.full((*real.shape, vocab), float("nan"))
            out[real] = self.unembed(stream.get()[real], normed)
            return out

        return LazyTensor(load, (*stream.shape[:2], vocab), torch.float32, "logits")


class _Open(threading.local):
    """The `steer` scopes and the `unsteered` blocks that one thread has open: they are of its code, not of a panel beside it.

    own: how many scopes it has open, suspended ones too. apart: whether it is known to work beside the scopes of others.
    """

    def __init__(self) -> None:
        self.scopes: list[list[Edit]] = []
        self.own = self.muted = 0
        self.apart = False
