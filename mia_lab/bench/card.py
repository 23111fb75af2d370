"""The support card: what of mia_lab works on a model, each verdict from running it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..edits import Add
from ..errors import MiaError
from ..gates import Gate, Probe
from ..points import KINDS, Point, ranges
from ..reductions import Norm
from ..selectors import generated, window
from ..session import Session
from ..shown import Shown

if TYPE_CHECKING:
    from ..show.parts import Table

_IDS = list(range(5, 45))


@dataclass(frozen=True, slots=True)
class Line:
    """One verdict: `ok`, `absent`, `refused` or `FAILED`, with what was seen."""

    what: str
    name: str
    verdict: str
    seen: str


@dataclass(frozen=True, slots=True, repr=False)
class Card(Shown):
    """The lines of a model's card, to be iterated over, shown as a table, or printed as Markdown."""

    model: str
    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def works(self) -> bool:
        """Whether nothing failed and nothing was refused; a point may be absent."""
        return all(line.verdict in ("ok", "absent") for line in self.lines)

    @property
    def data(self) -> list[dict[str, str]]:
        """One row a line: what, name, verdict, seen."""
        return [asdict(line) for line in self.lines]

    @property
    def markdown(self) -> str:
        """The card as a Markdown table."""
        table = self._parts()[0]
        return "\n".join("| " + " | ".join(row) + " |" for row in (table.header, ("---",) * len(table.header), *table.rows))

    def _parts(self) -> list[Table]:
        from ..show.parts import Table

        said = "works" if self.works else "does not all work"
        return [Table(("", "name", "verdict", "seen"), tuple(map(astuple, self.lines)), f"What was tried on {self.model} {said}")]


def card(model: str, **engine: Any) -> Card:
    """Load a model with every point and edit, and return a verdict for each, and for vLLM features beside them."""
    try:
        session = Session(model, points=None, max_biased_tokens=256, **engine)
    except MiaError as error:
        return Card(model, (Line("model", model, "refused", str(error)),))
    with session:
        return Card(model, (*_points(session), *_edits(session), *_features(session)))


def _points(session: Session) -> list[Line]:
    lines = []
    absent = {Point(kind, layer): why for kind, layer, why in session._engine.facts["absent"]}
    errors = {v.point: max(v.prefill, v.decode) for v in session.proof if v.edit == "Add"}
    for kind in KINDS:
        layers = [p.layer for p in session.tapped if p.kind == kind]
        if kind == "attention":
            layers = sorted(p.layer for p in session._submit.model.editable if p.kind == kind)
        why = sorted({reason for p, reason in absent.items() if p.kind == kind})
        if not layers:
            lines.append(Line("point", kind, "absent", "; ".join(why)))
            continue
        worst = max((errors[p] for p in session.tapped if p.kind == kind and p in errors), default=None)
        seen = f"layers {ranges(layers)}" + (f", an edit lands within {worst:.1e}" if worst is not None else ", read only")
        lines.append(Line("point", kind, "ok", seen.replace(", read only", "") if kind == "attention" else seen))
    return lines


def _edits(session: Session) -> list[Line]:
    found: dict[str, float] = {}
    for verdict in session.proof:
        found[verdict.edit] = max(found.get(verdict.edit, 0.0), verdict.prefill, verdict.decode)
    seen = {name: f"within {error:.1e} of its formula, prefill and decode" for name, error in found.items()}
    if "AttentionBias" in seen:
        seen["AttentionBias"] = "moves the rows that see its span, prefill and decode, and none before it"
    return [Line("edit", name, "ok", text) for name, text in seen.items()]


def _features(session: Session) -> list[Line]:
    trials: dict[str, Callable[[Session], str]] = {
        "logits rebuilt from the stream": _logits, "prefix cache forks": _prefix_cache, "chunked prefill": _chunks,
        "steered beside clean": _beside, "n > 1": _samples, "gate": _gates, "reduction on the device": _reductions}
    lines = []
    for name, trial in trials.items():
        try:
            lines.append(Line("feature", name, "ok", trial(session)))
        except (MiaError, AssertionError) as error:
            lines.append(Line("feature", name, "FAILED", str(error)))
    return lines


def _push(session: Session, **rest: Any) -> Add:
    layer = session.n_layers // 2
    rows = session.capture(_IDS, layers=layer, at=slice(1, None)).float()
    vector = torch.randn(session.d_model, generator=torch.Generator().manual_seed(0))
    return Add(vector / vector.norm() * (rows - rows.mean(0)).norm(dim=1).mean(), 1.0, [layer], **rest)


def _tolerance(session: Session) -> float:
    return 1e-3 if session.dtype == torch.float32 else 0.15


def _require(error: float, limit: float, what: str) -> str:
    if not error <= limit:
        raise AssertionError(f"{what}: {error:.2e}, more than {limit:.0e}")
    return f"{what} {error:.1e}"


def _logits(session: Session) -> str:
    logits, _ = session.run_with_cache(_IDS)
    output = session.completions(_IDS, max_tokens=1, logprobs=5)
    ours = logits[0, -1].log_softmax(-1)
    error = max(abs(float(ours[token]) - step.logprob) for token, step in output.outputs[0].logprobs[0].items())
    return _require(error, _tolerance(session), "worst log-probability difference to the engine's own")


def _prefix_cache(session: Session) -> str:
    if not session._engine.settings.prefix_caching:
        return "off in this engine"
    session.reset_prefix_cache()
    ids = _IDS * max(1, 3 * session._engine.settings.block_size // len(_IDS) + 1)
    ids, push = ids[: session.max_len - 2], _push(session)
    fresh = session.capture(ids, edits=[push], at=-1).float()
    cached = [session.completions(ids, max_tokens=1, edits=edits).num_cached_tokens for edits in (None, None, [push])]
    again = session.capture(ids, edits=[push], at=-1).float()
    if cached[0] and cached[0] >= session._engine.settings.block_size * 2:
        raise AssertionError(f"a clean request read {cached[0]} tokens that an edited one had left")
    error = float((again - fresh).norm() / fresh.norm())
    return _require(error, _tolerance(session), f"clean read {cached[0]} then {cached[1]} tokens, edited {cached[2]}; rows differ by")


def _chunks(session: Session) -> str:
    chunk = session._engine.facts["captured_tokens"]
    n = min(session.max_len - 2, 2 * chunk + 3)
    ids = (_IDS * (n // len(_IDS) + 1))[:n]
    every = session.capture(ids, layers=session.n_layers - 1, at=None).float()
    last = session.capture(ids, layers=session.n_layers - 1, at=-1).float()
    error = float((every[-1] - last).norm() / last.norm())
    return _require(error, _tolerance(session), f"{n} rows in steps of {chunk}; the last differs by")


def _beside(session: Session) -> str:
    push = _push(session)
    both = session.capture([_IDS, _IDS], edits=[[push], None], at=-1).float()
    alone = torch.stack([session.capture(_IDS, edits=edits, at=-1).float() for edits in ([push], None)])
    return _require(float((both - alone).norm() / alone.norm()), _tolerance(session), "each as when alone, within")


def _samples(session: Session) -> str:
    output = session.completions(_IDS, max_tokens=4, temperature=1.0, n=3, edits=[_push(session)])
    if len(output.outputs) != 3:
        raise AssertionError(f"{len(output.outputs)} samples of 3")
    return "3 samples of one edited prompt"


def _gates(session: Session) -> str:
    layer = session.n_layers // 2
    direction = session.capture(_IDS, layers=layer, at=-1).float()
    reading = float(direction @ direction)
    clean = session.completions(_IDS, max_tokens=6).outputs[0].token_ids
    probe = Probe(direction, layer)
    push = _push(session).scaled(5.0)
    runs = [session.completions(_IDS, max_tokens=6, edits=[Add(push.vector, push.coeff, [layer], where=generated(), when=gate)])
            for gate in (Gate(probe, above=2 * reading, over="prompt_last"), Gate(probe, above=0.5 * reading, over="prompt_last"))]
    closed, opened = (run.outputs[0].token_ids for run in runs)
    if list(closed) != list(clean):
        raise AssertionError("a closed gate changed the text")
    if list(opened) == list(clean):
        raise AssertionError("an edit of five times the stream's spread left the text as it was although its gate was open")
    return "closed: the clean text; open: another text"


def _reductions(session: Session) -> str:
    at = slice(1, 20)
    rows = session.capture(_IDS, at=at, edits=[_push(session, where=window(5))]).float()
    norms = session.capture(_IDS, at=at, edits=[_push(session, where=window(5))], reduce=Norm())
    return _require(float(((norms - rows.norm(dim=-1)) / rows.norm(dim=-1)).abs().max()), _tolerance(session), "norms within")
