"""The engine behind a session: starting vLLM with the taps declared, running requests, calling the worker."""
from __future__ import annotations

import gc
import inspect
import os
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ..directions import digest
from ..engine import turned_away
from ..engine.config import EngineOptions
from ..engine.shared import take
from ..engine.shutdown import shut_down
from ..engine.wire import KEY, Span
from ..errors import ClosedError, MiaError, MissingRowsError, PromptError, named
from ..points import Point
from ..residual import Readout
from . import failures, logs
from .engine_like import EngineLike
from .turns import Stopped

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

# Read when vLLM is imported. On a CPU, vLLM would otherwise claim nearly all of the machine's memory for the KV cache.
_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}
_CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_VECTOR_BYTES = 256 << 20  # registered vectors that the worker keeps on its host
_in_this_process: weakref.WeakSet = weakref.WeakSet()  # LLMs that share this process's distributed state


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    from vllm import envs

    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    envs.disable_envs_cache()  # an engine that is there already had vLLM remember what held when it began
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def read_config(model: str, options: dict[str, Any]) -> Any:
    """Return the VllmConfig that a model and engine options lead to, before anything is loaded."""
    _set_defaults()
    with failures.Lifted(f"vLLM does not take {model!r} with these options"), logs.quiet():
        from vllm.engine.arg_utils import EngineArgs

        failures.check_options(options, [field.name for field in fields(EngineArgs)])
        config = EngineArgs(model=model, **options).create_engine_config()
    logs.tame()
    return config


def _set_defaults() -> None:
    for key, value in (_DEFAULTS | ({} if torch.cuda.is_available() else _CPU_DEFAULTS)).items():
        os.environ.setdefault(key, value)


def bare_engine(model: str, options: dict[str, Any]) -> Any:
    """Return a vLLM LLM without taps, in this process."""
    _set_defaults()
    with logs.quiet(), _environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        from vllm import LLM

        llm = LLM(model=model, **options)
    logs.tame()
    _in_this_process.add(llm)
    return llm


def close_engine(llm: Any) -> None:
    """Shut one LLM down and return its memory; engines beside it in this process go on."""
    here = llm in _in_this_process
    _in_this_process.discard(llm)
    with logs.quiet():
        shut_down(llm.llm_engine.engine_core, alone=not here or not _in_this_process)


class Engine(EngineLike):
    """One vLLM engine with taps. `in_process` keeps it in this process; otherwise vLLM starts its own."""

    def __init__(self, model: str, asked: EngineOptions, in_process: bool, options: dict[str, Any]) -> None:
        from ..engine.plugin import register

        super().__init__()
        register()
        options = {"use_tqdm_on_load": False} | options
        additional = dict(options.pop("additional_config", None) or {}) | {KEY: asked.as_json()}
        self._mark = logs.mark()  # since when the log is about what runs now
        with (failures.Lifted(f"vLLM could not load {model!r}", self._mark), logs.quiet(), warnings.catch_warnings(),
              _environment({"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))})):
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's own, of torch
            from vllm import LLM

            self._llm: Any = LLM(model=model, additional_config=additional, **options)
        logs.tame()
        self._broken, self.in_process = "", in_process
        if in_process:
            _in_this_process.add(self._llm)
        self._known: dict[str, None] = {}  # vectors that the worker holds, by address, least recently used first
        self.tokenizer = self._llm.get_tokenizer()
        self._learn(self.rpc("describe"))

    @property
    def llm(self) -> Any:
        """vLLM's LLM object; ClosedError after `close`."""
        if self._llm is None:
            raise ClosedError("this session is closed; open a new one with mia_lab.Session(...)")
        if self._broken:
            raise ClosedError(f"this session cannot go on: {self._broken}. Close it and open a new one")
        return self._llm

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._llm is None

    def require_open(self) -> None:
        """ClosedError where no request can be run any more."""
        self.llm  # noqa: B018  says why

    def capture_room(self) -> int:
        """Bytes of captured rows that the memory which is free has room for."""
        return int(0.8 * psutil.virtual_memory().available)

    def rpc(self, method: str, *args: Any) -> Any:
        """Call one of the worker's `mia_*` methods and return what it gives."""
        with self.turns.taken(), self._living():
            if self.in_process:
                return self.llm.collective_rpc(f"mia_{method}", args=args)[0]
            error, found = self.llm.collective_rpc("mia_call", args=(method, args))[0]
            if error:
                raise named(error, found)
            return found

    def sampling(self, params: Mapping[str, Any], wires: Sequence[str]) -> list[SamplingParams]:
        """The SamplingParams of requests that differ in their specs only, which they carry. PromptError for what cannot be."""
        from vllm import SamplingParams

        params = dict(params)
        extra = dict(params.pop("extra_args", None) or {})
        try:
            checked = SamplingParams(**params, extra_args=extra)
        except Exception as error:  # vLLM has errors of its own for these, which differ between versions
            raise PromptError(f"these sampling arguments do not work: {error}") from None
        found = [copy(checked) for _ in wires]
        for one, wire in zip(found, wires):
            one.extra_args = extra | ({KEY: wire} if wire else {})
        return found

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], lora: Any = None) -> list[RequestOutput]:
        """Run token prompts as one continuous batch, with a LoRA or without. Whatever interrupts it, no request is left."""
        with self.turns.taken(), self._living():
            self._begin()
            try:
                outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], list(params), use_tqdm=False,
                                            lora_request=lora)
            except BaseException:
                self._recover()
                raise
            self._check(enumerate(outputs))
            return outputs

    def steps(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Iterator[list[tuple[int, RequestOutput]]]:
        """Run token prompts as one batch and yield, after each engine step, the outputs that it moved on, with whose they are.

        Let go before its end, it leaves no request behind. Stopped after the step in which its turn was asked to end.
        """
        with self.turns.taken(), self._living():
            self._begin()
            names, engine = {uuid.uuid4().hex: i for i in range(len(prompts))}, self.llm.llm_engine
            try:
                for (name, i), asked in zip(names.items(), params, strict=True):
                    engine.add_request(name, {"prompt_token_ids": prompts[i]}, asked)
                while engine.has_unfinished_requests():
                    self.turns.go_on()
                    moved = [(names[output.request_id], output) for output in engine.step()]
                    self._check(moved)
                    yield moved
            except (GeneratorExit, Stopped):  # between two steps: nothing is half done, and cached blocks hold what they say
                self._abort()
                raise
            except BaseException:
                self._recover()
                raise

    @contextmanager
    def _living(self) -> Iterator[None]:
        """EngineError, with the cause, where the engine's process dies; the session is then over."""
        try:
            yield
        except Exception as error:
            if self.closed or not failures.died(self._llm.llm_engine.engine_core):
                raise
            self._broken = "its engine died"
            raise failures.explained(error, "the engine of this session died", self._mark, elsewhere=True) from None

    def _begin(self) -> None:
        self._mark = logs.mark()
        if self.llm.llm_engine.has_unfinished_requests():
            raise MiaError("this session is in the midst of a generation that is being watched; go through it to its end, or close() it")
        self.let_go()

    def _check(self, outputs: Iterable[tuple[int, RequestOutput]]) -> None:
        """MiaError where the engine gave up on a request."""
        for i, output in outputs:
            if output.outputs[0].finish_reason in ("error", "abort"):
                self._recover()
                raise turned_away.reason(output) or MiaError(
                    f"the engine gave up on prompt {i} ({output.outputs[0].finish_reason}); see its log")

    def register(self, vectors: dict[str, torch.Tensor]) -> None:
        """Make vectors `[n d]` float32 known to the worker under their content addresses."""
        new = {sha: (len(v), v.contiguous().numpy().tobytes()) for sha, v in vectors.items() if sha not in self._known}
        if new:
            self.rpc("register", new)
        for sha in vectors:  # the most recently used go last
            self._known.pop(sha, None)
            self._known[sha] = None
        room = max(len(vectors), _VECTOR_BYTES // max((v.nbytes for v in vectors.values()), default=1))
        surplus = list(self._known)[: max(0, len(self._known) - room)]
        if surplus:
            self.rpc("forget", surplus)
            for sha in surplus:
                del self._known[sha]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False when requests still hold some."""
        return self.llm.reset_prefix_cache()

    def _recover(self) -> None:
        """Leave nothing of a broken-off run: no request, no half step, and no cached block that was never computed."""
        if self.closed:
            return
        try:
            self._abort()
            self.rpc("recover")
            # vLLM names blocks when it schedules them, so after a broken-off step some are named and empty.
            if not self._llm.reset_prefix_cache():
                self._broken = "an interrupted run left blocks in the prefix cache that may be wrong"
        except BaseException:
            self._broken = "an interrupted run could not be cleaned up"
            raise

    def _abort(self) -> None:
        """End the requests that are left, as vLLM ends those of a client that went away."""
        if self.closed:
            return
        engine = self._llm.llm_engine
        left = list(engine.output_processor.request_states)
        if left:
            internal = {"internal": True} if "internal" in inspect.signature(engine.abort_request).parameters else {}
            engine.abort_request(left, **internal)

    def close(self) -> None:
        """Shut the engine down and return its memory; what another thread runs on it is stopped first."""
        if self._llm is None:
            return
        self.turns.end()
        with self.turns.taken():
            llm, self._llm = self._llm, None
            close_engine(llm)
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class EngineRows:
    """Rows that the worker holds for a batch of requests; let go when this object is."""

    def __init__(self, engine: EngineLike, uids: Sequence[str]) -> None:
        self._engine, self._uids = engine, list(uids)
        weakref.finalize(self, engine.drop_later, list(uids))

    def rows(self, point: Point, prompts: Sequence[int], before: bool = False,
             form: tuple[tuple[int, ...], torch.dtype] | None = None, since: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return per request the positions `[n]` and values `[n *shape]`; MissingRowsError once the session is closed.

        form: the shape and type of one row, where it is not the point's own. since: the first position to return.
        """
        here = self._engine.in_process
        found = self._call("fetch", point, [self._uids[i] for i in prompts], point.kind, point.layer, before, here, since)
        shape, dtype = form or (self._engine.shapes[point], self._engine.dtype_of(point.kind))
        flat = found if here else [(take(p, torch.int64), take(v, dtype)) for p, v in found]
        rows = [(positions, values.reshape(-1, *shape)) for positions, values in flat]
        if any(len(values) not in (len(positions), 1) for positions, values in rows):
            raise MissingRowsError(f"{point} gave rows of another shape than {list(shape)}")
        return rows

    def wait(self) -> None:
        """Return once all that was captured is on the host."""
        self._engine.rpc("settle")

    def pattern(self, point: Point, prompts: Sequence[int], at: Sequence[Sequence[int]],
                spans: Sequence[Sequence[Span]] | None = None) -> list[torch.Tensor]:
        """Return per request the attention `[pos head key]` float32 of its positions `at`, or its sum over keys in `spans`,
        `[pos head]`; MissingRowsError without their q or k."""
        found = self._call("pattern", point, [self._uids[i] for i in prompts], point.layer, [list(at[i]) for i in prompts],
                           point.kind == "attn_scores", None if spans is None else [list(spans[i]) for i in prompts])
        return [take(data, torch.float32).view(shape) for shape, data in found]

    def experts(self, point: Point, prompts: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return per request the positions `[n]`, and the weights `[n k]` float32 and ids `[n k]` of the experts chosen there."""
        found = self._call("experts", point, [self._uids[i] for i in prompts], point.layer)
        return [(take(at, torch.int64), take(w, torch.float32).view(-1, k), take(ids, torch.int64).view(-1, k)) for at, k, w, ids in found]

    def readout(self, tokens: Sequence[int]) -> Readout:
        """Return how the model's final norm and unembedding read some tokens."""
        self._known(tokens)
        width = self._engine.settings.d_model
        vectors, bias, centred, eps = self._call("readout", "the unembedding", list(tokens))
        return Readout(take(vectors, torch.float32).view(-1, width), take(bias, torch.float32), centred, eps)

    def split(self, point: Point, prompts: Sequence[int], at: Sequence[Sequence[int]], before: bool = False,
              parts: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return per request what each part (head or neuron) at a point adds to the stream at its positions `at`, and, last, what
        none of them does: `[pos part + 1 d_model]` float32. parts: those to return, by default all."""
        places = [list(at[i]) for i in prompts]
        size, data = self._call("split", point, [self._uids[i] for i in prompts], point.kind, point.layer, places, before,
                                None if parts is None else list(parts))
        rows = take(data, torch.float32).view(sum(map(len, places)), size, -1)
        return list(rows.split([len(found) for found in places]))

    def lens(self, points: Sequence[Point], at: Sequence[Sequence[int]], top: Point, k: int, tokens: Sequence[int] | None,
             before: bool = False, shifts: Sequence[torch.Tensor | None] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the streams at `points` would say next at positions `at` of every request, as engine/lens.py gives it:
        float32 `[point row 2 + k + m]` and int64 `[point row k + 2 m]`, rows of one request after those of another."""
        vocab = self._engine.settings.d_vocab
        if not 0 < k <= vocab:
            raise PromptError(f"the {k} likeliest tokens were asked for; the model knows {vocab}")
        self._known(tokens or ())
        named = [None if shift is None else digest(shift) for shift in shifts or [None] * len(points)]
        self._engine.register({sha: shift for sha, shift in zip(named, shifts or []) if sha is not None})
        values, places = self._call("lens", top, self._uids, [list(found) for found in at], [(p.kind, p.layer) for p in points], before,
                                    (top.kind, top.layer), k, None if tokens is None else list(tokens), named)
        shape = (len(points), sum(map(len, at)), -1)
        return take(values, torch.float32).view(shape), take(places, torch.int64).view(shape)

    def token_text(self, token: int) -> str:
        """Return the text of one token."""
        return self._engine.tokenizer.decode([token])

    def token_id(self, text: str) -> int:
        """Return the id of a text that is one token."""
        ids = self._engine.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise PromptError(f"{text!r} is {len(ids)} tokens of this model; give one token, or its id")
        return ids[0]

    def _known(self, tokens: Sequence[int]) -> None:
        """PromptError for an id that the model has no logit for."""
        vocab = self._engine.settings.d_vocab
        wrong = [token for token in tokens if not 0 <= token < vocab]
        if wrong:
            raise PromptError(f"{wrong[0]} is no token id of this model (0 to {vocab - 1})")

    def _call(self, method: str, point: Point | str, *args: Any) -> Any:
        try:
            return self._engine.rpc(method, *args)
        except ClosedError:
            raise MissingRowsError(f"{point} was not fetched before its session closed; "
                                   f"call cache.fetch() first to keep values") from None
