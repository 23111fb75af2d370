"""One demanding batch: mixed lengths, chunked prefill, shared prefixes, preemption, other edits in each request."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import mia_lab as mia
from mia_lab.engine.wire import Take
from mia_lab.points import STREAM, Point
from mia_lab.prompts import Prompts
from mia_lab.selectors import CONTENT
from parity import reference

TIGHT = dict(max_model_len=256, max_num_batched_tokens=64, max_num_seqs=8, max_captured_tokens=48, block_size=32,
 num_gpu_blocks_override=12, enable_prefix_caching=True, disable_log_stats=False)
NEW_TOKENS = 40
# Every point, on CUDA compiled and in graphs; room enough to leave preemption out.
EVERYTHING = TIGHT | dict(num_gpu_blocks_override=64, points=None, enforce_eager=not torch.cuda.is_available())
_INSTEAD = {"resid_mid": ("attn_out",), "attn_out": ("resid_mid",)}  # where a family lacks a point


@dataclass(frozen=True)
class Request:
    """Token ids and the edits that act on them."""

    ids: list[int]
    edits: list[mia.Edit]


def requests(session: mia.Session, dose: float = 0.7, seed: int = 0) -> list[Request]:
    """Eight requests over three prompts: each point kind edited in one of them, clean twins beside edited ones.

    An edit is `dose` of the mean centred norm of the stream at its layer.
    """
    units = {kind: session.unit(kind) for kind in ("resid_pre", "resid_post")}
    draw = torch.Generator().manual_seed(seed)
    low, high = (3, 320) if session.d_model < 256 else (1000, 20000)
    bos = session.tokenizer.bos_token_id
    long = [bos, *torch.randint(low, high, (139,), generator=draw).tolist()]
    short = [bos, *torch.randint(low, high, (40,), generator=draw).tolist()]
    tapped = set(session.tapped)

    def add(kind: str, layer: int, where: Any = CONTENT) -> mia.Add:
        kind = next(k for k in (kind, *_INSTEAD.get(kind, ()), "resid_post") if Point(k, layer) in tapped)
        vector = torch.randn(session.d_model, generator=draw)
        unit = units["resid_pre" if kind == "resid_pre" else "resid_post"]
        return mia.Add(vector / vector.norm() * unit[layer] * dose, 1.0, [layer], kind, where)

    last = session.n_layers - 1
    return [
        Request(long, [add("resid_post", 1)]),
        Request(long, []),
        Request(long, [add("resid_pre", 0, mia.prompt()), add("resid_mid", 2, mia.generated())]),
        Request(long[:100], [add("attn_out", 1, mia.window(70)), add("mlp_out", last, mia.generated())]),
        Request(long[:100] + short[1:], [add("mlp_out", 0, mia.positions([3, 50, 77, -1]))]),
        Request(short, [add("resid_mid", 1), add("resid_post", 1), add("resid_post", last)]),
        Request(short, []),
        Request(short[:9], [add("resid_post", 0, mia.generated()), add("resid_post", 0, mia.last())]),
    ]


def all_kinds(absent: tuple[str, ...] = ()) -> list[str]:
    """Every kind of point of the stream but those a family lacks."""
    return [kind for kind in STREAM if kind not in absent]


@dataclass
class Outcome:
    """What the engine gave for one request: all token ids, how many are the prompt's, log-probabilities, rows."""

    request: Request
    ids: list[int]
    logprobs: list[float]
    rows: dict[Point, torch.Tensor]


def submit(session: mia.Session, batch: list[Request], params: dict[str, Any], rows: Any = ((0, None),),
           before: bool = False) -> tuple[list, Any]:
    """Run requests that each capture every tapped point on the rows given; return outputs and the source of rows."""
    takes = [Take(p.kind, p.layer, rows, before) for p in session.tapped]
    return session._run(Prompts.of([r.ids for r in batch]), [r.edits for r in batch], params, [takes] * len(batch))


def run(session: mia.Session, batch: list[Request], max_tokens: int = NEW_TOKENS) -> list[Outcome]:
    """Generate and capture every point of every request in one batch, log-probabilities of the chosen tokens included."""
    params = dict(max_tokens=max_tokens, temperature=0.0, logprobs=1, ignore_eos=True)
    outputs, source = submit(session, batch, params)
    outcomes = []
    for i, (request, output) in enumerate(zip(batch, outputs)):
        tokens = list(output.outputs[0].token_ids)
        logprobs = [step[t].logprob for step, t in zip(output.outputs[0].logprobs, tokens)]
        n = len(request.ids) + len(tokens) - 1
        rows = {}
        for point in session.tapped:
            positions, values = source.rows(point, [i])[0]
            kept = positions < n
            assert positions[kept].tolist() == list(range(n)), f"{point} of request {i} has rows {positions.tolist()}"
            rows[point] = values[kept].flatten(1)
        outcomes.append(Outcome(request, request.ids + tokens, logprobs, rows))
    return outcomes


def compare(outcomes: list[Outcome], model: Any, points: tuple[Point, ...], shapes: Any = None) -> tuple[float, float]:
    """Return the worst row error and the worst log-probability difference against Hugging Face."""
    worst_row = worst_logprob = 0.0
    for outcome in outcomes:
        n_prompt = len(outcome.request.ids)
        logits, values = reference.run(model, outcome.ids[:-1], points, outcome.request.edits, n_prompt, shapes)
        alike = any(isinstance(edit, (mia.Replace, mia.Clamp, mia.Ablate, mia.Scale)) for edit in outcome.request.edits)
        clean = reference.run(model, outcome.ids[:-1], points)[1] if alike else {}
        for point in points:
            few = values[point].shape[1] < 16  # a router's row of a few numbers may lie close to the mean by chance
            typical = clean[point] if alike else values[point]
            floor = float(reference.centred(typical.double())[1:].mean()) if alike or few else 0.0
            worst_row = max(worst_row, float(reference.row_errors(outcome.rows[point].float(), values[point], floor).max()))
        theirs = logits.log_softmax(-1)[n_prompt - 1:]
        chosen = theirs[torch.arange(len(theirs)), torch.tensor(outcome.ids[n_prompt:])]
        worst_logprob = max(worst_logprob, float((chosen.cpu() - torch.tensor(outcome.logprobs)).abs().max()))
    return worst_row, worst_logprob


def preemptions(session: mia.Session) -> int:
    """How many times the engine preempted a request so far."""
    return sum(m.value for m in session._engine.llm.get_metrics() if m.name == "vllm:num_preemptions")


def check(session: mia.Session, model: Any, batch: list[Request], tokens: int = 12) -> list[Outcome]:
    """Run a batch and compare every row of every point with Hugging Face."""
    outcomes = run(session, batch, tokens)
    points = tuple(p for p in session.tapped if p.kind != "router")
    row, logprob = compare(outcomes, model, points, session._submit.model.shapes)
    print(f"worst row {row:.2e}, worst log-probability {logprob:.2e} in {len(batch)} requests")
    assert row <= 1e-5
    assert logprob <= 1e-4
    return outcomes


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 10 to 100 tokens that begin with BOS."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(10, 100, (n,), generator=draw).tolist()
    return [[1, *torch.randint(3, 320, (length - 1,), generator=draw).tolist()] for length in lengths]
