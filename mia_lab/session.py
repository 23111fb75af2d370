"""Session: one vLLM model with taps. Everything a notebook does starts here."""
from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import torch

from . import prompts as prompts_
from .cache import ActivationCache, Batch
from .edits import Add, compile_edits
from .engine.config import EngineOptions, Sizes, refuse_unsupported
from .engine.wire import KEY, Spec, encode, segments
from .errors import EditError, MiaError, PointError, PromptError
from .launch import Engine, EngineRows, read_config
from .lazy import LazyTensor, human_bytes
from .models import resolve
from .points import KINDS, Point, kind_of, parse, select
from .selectors import Span, merge

if TYPE_CHECKING:
    from .analysis.vectors import Vector
    from .point_table import PointTable

EDIT_KINDS = ("add",)


class Session:
    """A loaded model that can be read and steered while vLLM serves it.

    model: "demo" (the embedded Gemma 3 270M), any Hugging Face id, or a local path.
    points: kinds, layers or points to tap, by default `resid_post` everywhere; the last block's is always tapped, since
    logits come from it. edits: the edit kinds to enable, by default additions at the tapped points.
    max_captured_tokens: rows captured in one engine step at most; a longer prompt is run in chunks of it. By default as
    many as 256 MiB hold. in_process: run the engine in this process (the default) or in its own.
    Every other keyword is vLLM's. Raises UnsupportedError, with the reason, for what could give wrong results.
    """

    def __init__(self, model: str, *, points: Any = ("resid_post",), edits: Sequence[str] = EDIT_KINDS,
                 max_captured_tokens: int | None = None, in_process: bool = True, **engine: Any) -> None:
        from .proof import prove

        unknown = [kind for kind in edits if kind not in EDIT_KINDS]
        if unknown:
            raise EditError(f"there is no edit kind {unknown[0]!r}; the kinds are {', '.join(EDIT_KINDS)}")
        self.model = str(model)
        path = resolve(self.model)
        config = read_config(path, engine)
        self.n_layers: int = config.model_config.hf_text_config.num_hidden_layers
        self.d_model: int = config.model_config.get_hidden_size()
        self._points = _declare(points, self.n_layers)
        self._editable = self._points if edits else []
        self._scopes: list[list[Add]] = []
        self._units: dict[str, torch.Tensor] = {}
        asked = EngineOptions(tuple((p.kind, p.layer) for p in self._points), tuple(edits), max_captured_tokens or 0)
        refuse_unsupported(config, Sizes.of(config, asked))  # before minutes of loading; the engine checks again
        self._engine = Engine(path, asked, in_process, engine)
        facts = self._engine.facts
        self.dtype: torch.dtype = self._engine.config.model_config.dtype
        self.max_len: int = self._engine.config.model_config.max_model_len
        self.sandwich: bool = facts["sandwich"]
        try:
            prove(self)
        except BaseException:
            self.close()
            raise

    # -- words and tokens ---------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def to_tokens(self, text: str | Sequence[str]) -> torch.Tensor:
        """Return token ids `[batch pos]`, right-padded with the pad (or EOS) token, as the model will see them."""
        ids = self._read(text).ids
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.tokenizer.eos_token_id or 0)
        width = max(map(len, ids))
        return torch.tensor([row + [pad] * (width - len(row)) for row in ids])

    def to_str_tokens(self, prompt: Any) -> list[str]:
        """Return the text of each token of one prompt."""
        ids = self._read(prompt).ids
        if len(ids) != 1:
            raise PromptError(f"to_str_tokens takes one prompt, not {len(ids)}")
        return [self.tokenizer.decode([i]) for i in ids[0]]

    def to_string(self, tokens: torch.Tensor | Sequence[int]) -> str | list[str]:
        """Return the text of token ids `[pos]`, or a list of texts for `[batch pos]`."""
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        return self.tokenizer.decode(ids) if not ids or isinstance(ids[0], int) else [self.tokenizer.decode(row) for row in ids]

    # -- running ------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Any, *, max_tokens: int = 32, temperature: float = 0.0, seed: int | None = None,
                 edits: Any = None, **sampling: Any) -> str | list[str]:
        """Return the continuation of one prompt, or a list of them for a list.

        Greedy unless a temperature is given. edits: one list of edits for all prompts, or one list (or None) a prompt;
        they act together with any open `steer` scope. Other keywords are vLLM's SamplingParams.
        """
        outputs = self.completions(prompts, max_tokens=max_tokens, temperature=temperature, seed=seed, edits=edits, **sampling)
        return outputs.outputs[0].text if not isinstance(outputs, list) else [o.outputs[0].text for o in outputs]

    def completions(self, prompts: Any, *, max_tokens: int = 32, temperature: float = 0.0, seed: int | None = None,
                    edits: Any = None, **sampling: Any) -> Any:
        """As `generate`, but return vLLM's RequestOutput, or a list of them for a list."""
        read = self._read(prompts)
        params = dict(max_tokens=max_tokens, temperature=temperature, seed=seed, **sampling)
        outputs, _ = self._run(read.ids, edits, params)
        return outputs[0] if read.one else outputs

    def run_with_cache(self, prompts: Any, names_filter: Any = None, *, max_tokens: int = 0, temperature: float = 0.0,
                       seed: int | None = None, edits: Any = None, **sampling: Any) -> tuple[LazyTensor, ActivationCache]:
        """Return lazy logits `[batch pos d_vocab]` and the ActivationCache of the tapped points that the filter picks.

        max_tokens: tokens to generate; the positions computed for them (one fewer) follow the prompt's. Logits are the
        final norm and unembedding of the last block's stream, computed when first used (pos x d_vocab float32 each).
        """
        chosen = select(names_filter, self._points, self.n_layers, sandwich=self.sandwich)
        top = Point("resid_post", self.n_layers - 1)
        held = chosen if top in chosen else [*chosen, top]
        read = self._read(prompts)
        params = dict(max_tokens=max(max_tokens, 1), temperature=temperature, seed=seed, **sampling)
        rows = [[(0, None if max_tokens > 1 else len(ids))] for ids in read.ids]
        outputs, source = self._run(read.ids, edits, params, held, rows)
        tokens = tuple(tuple([*prompt, *o.outputs[0].token_ids][:-1]) for prompt, o in zip(read.ids, outputs))
        batch = Batch(tokens, tuple(map(len, read.ids)), self.d_model, self.dtype, self.n_layers, self.sandwich)
        every = ActivationCache(source, held, batch)
        cache = ActivationCache(source, chosen, batch) if top not in chosen else every
        return self._logits(every[top], every.mask), cache

    def capture(self, prompts: Any, point: str = "resid_post", *, layers: int | Iterable[int] | None = None,
                at: Any = -1, edits: Any = None) -> LazyTensor:
        """Return the stream at one kind of point, `[prompt layer d_model]`, lazily; only the asked rows leave the device.

        at: prompt positions, an int, a slice, a list, or None for all; unless it is an int there is a position axis,
        `[prompt layer pos d_model]`, right-padded with NaN. An int layer drops the layer axis, one prompt the prompt axis.
        """
        read = self._read(prompts)
        wanted = range(self.n_layers) if layers is None else [layers] if isinstance(layers, int) else list(layers)
        asked = [parse((point, layer), self.n_layers) for layer in wanted]
        if layers is None:
            asked = select(point, self._points, self.n_layers)
        if not asked:
            raise PointError("capture was asked for no layer")
        chosen = select(asked, self._points, self.n_layers)
        at_rows = [prompts_.resolve_at(at, len(ids)) for ids in read.ids]
        rows = [merge([(p, p + 1) for p in sorted(set(places))]) for places in at_rows]
        _, source = self._run(read.ids, edits, {"max_tokens": 1, "temperature": 0.0}, chosen, rows)
        one_position = isinstance(at, int) and not isinstance(at, bool)
        width = max(map(len, at_rows))
        shape = (() if read.one else (len(read.ids),)) + (() if isinstance(layers, int) else (len(asked),)) + (
            () if one_position else (width,)) + (self.d_model,)

        def load() -> torch.Tensor:
            out = torch.full((len(read.ids), len(asked), width, self.d_model), float("nan"), dtype=self.dtype)
            for j, p in enumerate(asked):
                for i, (positions, values) in enumerate(source.rows(p, range(len(read.ids)))):
                    found = dict(zip(positions.tolist(), values))
                    out[i, j, : len(at_rows[i])] = torch.stack([_present(found, q, p, i) for q in at_rows[i]])
            return out.reshape(shape)

        return LazyTensor(load, shape, self.dtype, point)

    # -- steering -----------------------------------------------------------------------------------------------------

    @contextmanager
    def steer(self, vector: Vector | torch.Tensor | Add, coeff: float = 1.0, **add: Any) -> Iterator[None]:
        """Add `coeff` times a vector in everything that runs inside the `with` block. Scopes add up, and end on exceptions.

        Takes the arguments of `Add`, or an Add itself. Several layers of a vector act together.
        """
        edit = vector if isinstance(vector, Add) else Add(vector, coeff, **add)
        scope = [edit]
        self._compile(scope, 1 << 20)  # a wrong width or an undeclared point fails here, not inside the block
        self._scopes.append(scope)
        try:
            yield
        finally:
            self._scopes = [other for other in self._scopes if other is not scope]

    @contextmanager
    def unsteered(self) -> Iterator[None]:
        """Suspend every open `steer` scope inside the `with` block."""
        scopes, self._scopes = self._scopes, []
        try:
            yield
        finally:
            self._scopes = scopes

    def vector(self, pairs: Iterable, *, method: str = "mean_diff", point: str = "resid_post", at: Any = -1) -> Vector:
        """Fit a steering Vector over all tapped layers from (positive, negative) prompts, read at position `at`.

        Each layer is scaled to the mean centred norm there, so that an edit's coefficient 1.0 means one such norm.
        """
        from .analysis.vectors import Vector, mean_difference, read_pairs

        if method != "mean_diff":
            raise EditError(f"there is no method {method!r}; the methods are mean_diff")
        positive, negative = read_pairs(pairs)
        chosen = select(point, self._points, self.n_layers)
        rows = self.capture([*positive, *negative], point, at=at).float()
        if rows.ndim == 4:  # [prompt layer pos d_model]: one row a prompt, the mean over its positions
            lengths = [len(prompts_.resolve_at(at, len(ids))) for ids in self._read([*positive, *negative]).ids]
            rows = torch.stack([row[:, :n].mean(1) for row, n in zip(rows, lengths)])
        raw = mean_difference(rows[: len(positive)], rows[len(positive):])
        unit = self.unit(point)
        norms = raw.norm(dim=-1)
        if not norms.all():
            raise EditError("positive and negative prompts give equal means; there is no direction between them")
        return Vector(chosen[0].kind, tuple(p.layer for p in chosen), raw * (unit / norms)[:, None], norms, unit, method)

    def unit(self, point: str = "resid_post") -> torch.Tensor:
        """Return what coefficient 1.0 stands for at each tapped layer of a kind, `[layer]`: the mean centred norm of the
        stream over neutral text without BOS. Measured once a model, then read from the cache folder."""
        from .analysis.units import measure_unit

        kind = kind_of(point)
        if kind not in self._units:
            self._units[kind] = measure_unit(self, kind)
        return self._units[kind]

    # -- looking ------------------------------------------------------------------------------------------------------

    def points(self) -> PointTable:
        """Return a table of every point, its shape, whether it is tapped here, and what capturing a token of it costs."""
        from .point_table import PointTable

        return PointTable.of(self.n_layers, self.d_model, self.dtype, self._points, self._engine.facts["absent"])

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV, so that the next batch computes every row; MiaError when requests still hold some."""
        if not self._engine.llm.reset_prefix_cache():
            raise MiaError("the prefix cache is in use and was not reset")

    @property
    def tapped(self) -> tuple[Point, ...]:
        """The points tapped in this session."""
        return tuple(self._points)

    def __repr__(self) -> str:
        if self._engine.closed:
            return f"Session({self.model}): closed"
        config, facts = self._engine.config, self._engine.facts
        compilation, cache = config.compilation_config, config.cache_config
        kinds = {kind: sum(p.kind == kind for p in self._points) for kind in KINDS}
        taps = ", ".join(f"{kind} x{n}" for kind, n in kinds.items() if n)
        kv = (cache.num_gpu_blocks or 0) * cache.block_size
        dtype = str(self.dtype).removeprefix("torch.")
        return (f"Session: {self.model}, {self.n_layers} layers, d_model {self.d_model}, {dtype}, adds BOS: {self._has_bos_rule()}\n"
                f"  compile {compilation.mode.name}, graphs {compilation.cudagraph_mode.name}, runner {facts['runner']}; "
                f"taps {taps}\n"
                f"  tables {human_bytes(facts['table_bytes'])}, up to {facts['captured_tokens']} captured tokens a step; "
                f"KV room for {kv} tokens")

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
        return prompts_.read(prompts, self._engine.llm.get_tokenizer(), self.max_len)

    def _has_bos(self, ids: Sequence[int]) -> bool:
        return self.tokenizer.bos_token_id is not None and ids[0] == self.tokenizer.bos_token_id

    def _has_bos_rule(self) -> bool:
        return self._has_bos(self.tokenizer.encode("a"))

    def _compile(self, edits: Sequence[Add], n_prompt: int, has_bos: bool = True) -> tuple[list, dict[str, torch.Tensor]]:
        return compile_edits(edits, n_prompt, has_bos, self.d_model, self.n_layers, self._editable)

    def _run(self, ids: list[list[int]], edits: Any, params: dict[str, Any], points: Sequence[Point] = (),
             rows: Sequence[Sequence[Span]] | None = None) -> tuple[list, EngineRows]:
        """Check everything, then submit: either all requests run as asked or none does."""
        from vllm import SamplingParams

        per_prompt = _one_list_a_prompt(edits, len(ids))
        scoped = [edit for scope in self._scopes for edit in scope]
        specs: list[Spec] = []
        vectors: dict[str, torch.Tensor] = {}
        compiled: dict[tuple, tuple] = {}  # requests that ask the same are compiled once
        for i, prompt in enumerate(ids):
            key = tuple(map(id, per_prompt[i])), len(prompt), self._has_bos(prompt)
            if key not in compiled:
                compiled[key] = self._compile([*scoped, *per_prompt[i]], len(prompt), key[-1])
                vectors |= compiled[key][1]
            specs.append(Spec(tuple(compiled[key][0]), tuple((p.kind, p.layer) for p in points), tuple(rows[i]) if rows else ()))
        uids = [uuid.uuid4().hex for _ in specs]
        room = self._engine.facts["bank_rows"]
        if len(vectors) > room:
            raise EditError(f"this batch names {len(vectors)} different vectors; the engine holds {room} at once. "
                            f"Submit it in parts, or load with a larger max_num_seqs")
        self._check_programs(specs)
        if points and params.get("n", 1) != 1:
            raise PromptError("a capture follows one continuation a prompt; use n=1 and repeat the prompt")
        self._check_memory(ids, specs, params.get("max_tokens") or self.max_len)
        extra = dict(params.pop("extra_args", None) or {})
        try:
            wired = [{KEY: encode(uid, spec)} if spec != Spec() else {} for uid, spec in zip(uids, specs)]
        except ValueError as error:
            raise EditError(f"these edits or positions cannot be sent to the engine: {error}") from None
        try:
            sampling = [SamplingParams(**params, extra_args=extra | wire) for wire in wired]
        except Exception as error:  # vLLM has errors of its own for these, which differ between versions
            raise PromptError(f"these sampling arguments do not work: {error}") from None
        self._engine.register(vectors)
        source = EngineRows(self._engine, uids, self.d_model, self.dtype)  # lets rows go also when the run breaks off
        return self._engine.run(ids, sampling), source

    def _check_programs(self, specs: Sequence[Spec]) -> None:
        """Refuse edits that cut positions into more pieces than the tables hold for the requests that run together."""
        pieces = sorted((len({s.terms for s in segments(spec) if s.terms}) for spec in set(specs)), reverse=True)
        together, room = self._engine.config.scheduler_config.max_num_seqs, self._engine.facts["programs"]
        if sum(pieces[:together]) > room:
            raise EditError(f"these edits change {sum(pieces[:together])} times along the positions of the requests that run "
                            f"together; the engine holds {room}. Use fewer selectors or prompts, or a larger max_num_seqs")

    def _check_memory(self, ids: list[list[int]], specs: Sequence[Spec], max_tokens: int) -> None:
        """Refuse a capture that the host could not hold."""
        if not any(spec.sites for spec in specs):
            return
        row = self.d_model * self.dtype.itemsize
        wanted = 0
        for prompt, spec in zip(ids, specs):
            end = min(len(prompt) + max_tokens, self.max_len)
            rows = sum(max(0, (end if b is None else min(b, end)) - a) for a, b in spec.rows)
            wanted += rows * len(spec.sites) * row
        free = psutil.virtual_memory().available
        if wanted > 0.8 * free:
            raise PromptError(f"this capture would take {human_bytes(wanted)} of the {human_bytes(free)} of memory that are free; "
                              f"ask for fewer points, layers or positions, or run it in parts")

    def _logits(self, stream: LazyTensor, real: torch.Tensor) -> LazyTensor:
        if not self._engine.facts["has_unembedding"]:
            raise MiaError("this model transforms its hidden states after the final norm, so logits cannot be rebuilt")
        vocab = self._engine.config.model_config.get_vocab_size()

        def load() -> torch.Tensor:
            rows = stream.get()[real]
            found = []
            for part in rows.split(max(1, (256 << 20) // (4 * vocab))):
                data = self._engine.rpc("unembed", part.contiguous().view(torch.uint8).numpy().tobytes())
                found.append(torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, vocab))
            out = torch.full((*real.shape, vocab), float("nan"))
            out[real] = torch.cat(found)
            return out

        return LazyTensor(load, (*stream.shape[:2], vocab), torch.float32, "logits")


def _declare(points: Any, n_layers: int) -> list[Point]:
    every = [Point(kind, layer) for layer in range(n_layers) for kind in KINDS]
    chosen = set(select(points, every, n_layers)) | {Point("resid_post", n_layers - 1)}
    return [p for p in every if p in chosen]


def _one_list_a_prompt(edits: Any, n: int) -> list[list[Add]]:
    if edits is None:
        return [[] for _ in range(n)]
    if isinstance(edits, Add):
        return [[edits] for _ in range(n)]
    edits = list(edits)
    if edits and all(isinstance(edit, Add) for edit in edits):
        return [edits for _ in range(n)]
    if len(edits) != n or not all(e is None or isinstance(e, (list, tuple)) for e in edits):
        raise EditError(f"edits is one list of edits for all prompts, or a list with one list (or None) for each of the {n} prompts")
    return [list(e or []) for e in edits]


def _present(found: dict[int, torch.Tensor], position: int, point: Point, prompt: int) -> torch.Tensor:
    from .errors import MissingRowsError

    if position not in found:
        raise MissingRowsError(f"{point} of prompt {prompt} lacks position {position}: it was never computed")
    return found[position]
