"""The direction that a refusal hangs on: one mean difference among many, chosen by what taking it out and putting it in does.

Source: arXiv:2406.11717. Candidates are the differences of means between harmful and harmless requests at each block and each of
some last positions. Three scores, on requests that no direction was fitted on: bypass, the log-odds of a refusal to harmful ones
with the direction taken out everywhere; induce, those to harmless ones with it added where it was found; kl, what taking it out
does to harmless ones. The paper reads and adds at a block's input; here that is `resid_post` of the block before.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from ..edits import Ablate, Add
from ..errors import EditError
from ..points import Point
from ..shown import Shown, progress_bar
from .fitting import mean_difference
from .pairs import Pairs
from .vectors import Vector

if TYPE_CHECKING:
    from ..session import Session

Tensor = torch.Tensor
_SITES = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-odds of a refusal in nats, before (`harmful`, `harmless`) and after (`bypass`, `induce`), and the KL divergence in nats."""

    harmful: float
    harmless: float
    bypass: float
    induce: float
    kl: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RefusalSearch(Shown):
    """Candidates by layer and position, and their scores on the set to select on, all `[layer position]`.

    directions `[layer position d_model]`, raw differences; units `[layer]`: what coefficient 1.0 stands for; sites: the kinds of
    point at which a direction is taken out, at each tapped layer, BOS aside. Where what attention writes is not among them
    (`attn_out` or `resid_mid`), the MLP of each block still reads it. holdout: the chosen one's scores on requests used for nothing else.
    """

    layers: tuple[int, ...]
    positions: tuple[int, ...]
    directions: Tensor
    units: Tensor
    bypass: Tensor
    induce: Tensor
    kl: Tensor
    passes: Tensor
    harmful: float
    harmless: float
    sites: tuple[Point, ...]
    holdout: Scores | None

    @property
    def best(self) -> tuple[int, int]:
        """The (layer, position) of the lowest bypass among those that pass; EditError where none does, with what stands against them."""
        if not self.passes.any():
            raise EditError(f"no direction passes: adding one leaves the log-odds of a refusal at {float(self.induce.max()):+.2f} at most "
                            f"(above 0 is asked for), and taking one out costs harmless requests {float(self.kl.min()):.3g} nats at least. "
                            f"Unsteered they are {self.harmful:+.2f} for harmful and {self.harmless:+.2f} for harmless requests: does this "
                            f"model refuse, and are its refusals' first tokens those given as says=?")
        at = int(self.bypass.masked_fill(~self.passes, torch.inf).argmin())
        return self.layers[at // len(self.positions)], self.positions[at % len(self.positions)]

    @property
    def vector(self) -> Vector:
        """The chosen direction as a Vector at its layer, in the session's unit."""
        layer, position = self.best
        i = self.layers.index(layer)
        raw = self.directions[i, self.positions.index(position)]
        norm, unit = raw.norm(), self.units[i]
        return Vector("resid_post", (layer,), (raw * unit / norm)[None], norm[None], unit[None], "refusal")

    @property
    def edits(self) -> list[Ablate]:
        """The edits that take the chosen direction out at all sites."""
        return ablations(self.vector.rows[0], self.sites)

    @property
    def data(self) -> list[dict[str, Any]]:
        """One record a candidate, ready for pandas."""
        return [{"layer": layer, "position": at, "bypass": float(self.bypass[i, j]), "induce": float(self.induce[i, j]),
                 "kl": float(self.kl[i, j]), "passes": bool(self.passes[i, j])}
                for i, layer in enumerate(self.layers) for j, at in enumerate(self.positions)]

    def _parts(self) -> list[Any]:
        about, *rest = self._brief()
        return [about, *self._plots(), *rest]

    def _brief(self) -> list[Any]:
        from ..show.parts import Prose, Table

        lines = sorted(self.data, key=lambda r: (not r["passes"], r["bypass"]))[:8]
        body = tuple((str(r["layer"]), str(r["position"]), f"{r['bypass']:+.2f}", f"{r['induce']:+.2f}", f"{r['kl']:.3f}",
                      "yes" if r["passes"] else "no") for r in lines)
        sites = ", ".join(dict.fromkeys(p.kind for p in self.sites))
        about = Prose(f"{int(self.passes.sum())} of {self.passes.numel()} directions pass. Log-odds of a refusal, unsteered: harmful "
                      f"{self.harmful:+.2f}, harmless {self.harmless:+.2f}. Taken out at {sites}.")
        held = self.holdout
        late = [] if held is None else [Prose(
            f"On held-out requests: harmful {held.harmful:+.2f} to {held.bypass:+.2f} without it, harmless {held.harmless:+.2f} to "
            f"{held.induce:+.2f} with it, KL {held.kl:.3f}.")]
        return [about, Table(("layer", "position", "bypass", "induce", "KL", "passes"), body), *late]

    def _plots(self) -> list[Any]:
        """Each score over layers, a curve a position."""
        from ..show.parts import Curve, Series

        unsteered = f"log-odds of a refusal, unsteered {self.harmful:+.2f} to harmful requests and {self.harmless:+.2f} to harmless ones"
        told = {"bypass": (f"Harmful requests with the direction taken out; {unsteered}", "log-odds"),
                "induce": ("Harmless requests with the direction added", "log-odds"),
                "kl": ("What taking the direction out does to harmless requests", "KL, nats")}
        at = tuple(map(float, self.layers))
        return [Curve(tuple(Series(f"position {p}", at, tuple(getattr(self, name)[:, j].tolist())) for j, p in enumerate(self.positions)),
                      "layer", unit, caption) for name, (caption, unit) in told.items()]


def ablations(direction: Tensor, sites: Sequence[Point]) -> list[Ablate]:
    """Edits that take a direction `[d_model]` out at points, a kind each."""
    kinds = {kind: [p.layer for p in sites if p.kind == kind] for kind in dict.fromkeys(p.kind for p in sites)}
    return [Ablate(direction, layers=layers, point=kind) for kind, layers in kinds.items()]


def passing(layers: Sequence[int], n_layers: int, induce: Tensor, kl: Tensor, max_kl: float, skip_last: float) -> Tensor:
    """Which candidates `[layer position]` may be chosen: not in the last blocks, harmless when out, a refusal when in."""
    early = torch.tensor([layer < (1 - skip_last) * n_layers for layer in layers])[:, None]
    return early & (kl <= max_kl) & (induce > 0)


def log_odds(logits: Tensor, refusals: Sequence[int]) -> Tensor:
    """The log-odds `[n]` that the next token is one of `refusals`, from logits `[n d_vocab]`."""
    found = torch.zeros(logits.shape[-1], dtype=torch.bool)
    found[list(refusals)] = True
    return logits[:, found].double().logsumexp(-1) - logits[:, ~found].double().logsumexp(-1)


def search(session: Session, pairs: Any, at: Iterable[int], says: Sequence[int | str], layers: Iterable[int] | None, max_kl: float,
           skip_last: float, seed: int, progress: bool) -> RefusalSearch:
    """Return what `Session.refusal_direction` promises."""
    splits, places = Pairs.of(pairs).split(seed=seed), tuple(int(p) for p in at)
    if not places or max(places) >= 0:
        raise EditError(f"at={places}: positions count from the prompt's end, as at=(-1, -2)")
    tapped = [p.layer for p in session.tapped if p.kind == "resid_post"]
    chosen = tapped if layers is None else [int(layer) for layer in layers]
    sites = tuple(p for p in session.tapped if p.kind in _SITES)
    judge = _Judge(session, _tokens(session, says), sites)
    with session.unsteered():
        fit = splits.fit
        rows = session.capture([*fit.positive, *fit.negative], layers=chosen, at=list(places)).float()  # [prompt layer pos d_model]
        directions = mean_difference(rows[: len(fit)], rows[len(fit) :])
        base = judge.base(splits.select)
        found = torch.zeros(len(chosen), len(places), 3)
        with progress_bar(progress) as bar:
            bar.stage(len(chosen) * len(places), "directions")
            for i, j in product(range(len(chosen)), range(len(places))):
                found[i, j] = torch.tensor(judge.scores(base, directions[i, j], chosen[i])[2:])
                bar.add()
        bypass, induce, kl = found.unbind(-1)
        passes = passing(chosen, session.n_layers, induce, kl, max_kl, skip_last)
        held = None
        if passes.any():
            i, j = divmod(int(bypass.masked_fill(~passes, torch.inf).argmin()), len(places))
            held = Scores(*judge.scores(judge.base(splits.holdout), directions[i, j], chosen[i]))
        units = session.unit()[[tapped.index(layer) for layer in chosen]]
    harmful, harmless = (float(log_odds(logits, judge.refusals).mean()) for logits in base[1:])
    return RefusalSearch(tuple(chosen), places, directions, units, bypass, induce, kl, passes, harmful, harmless, sites, held)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Runs a set of requests under the edits of a candidate, and scores what comes next."""

    session: Session
    refusals: tuple[int, ...]
    sites: tuple[Point, ...]

    def base(self, pairs: Pairs) -> tuple[Pairs, Tensor, Tensor]:
        """The pairs, and the unsteered logits of harmful and harmless requests, `[n d_vocab]`."""
        return pairs, self._logits(pairs.positive, []), self._logits(pairs.negative, [])

    def scores(self, base: tuple[Pairs, Tensor, Tensor], direction: Tensor, layer: int) -> tuple[float, ...]:
        """The five numbers of `Scores`, in their order."""
        pairs, harmful, harmless = base
        out = ablations(direction, self.sites)
        cleaned, added = self._logits(pairs.negative, out), self._logits(pairs.negative, [Add(direction, 1.0, [layer])])
        p, q = (x.double().log_softmax(-1) for x in (harmless, cleaned))
        means = [float(log_odds(x, self.refusals).mean()) for x in (harmful, harmless, self._logits(pairs.positive, out), added)]
        return *means, float((p.exp() * (p - q)).sum(-1).mean())

    def _logits(self, prompts: Sequence[Any], edits: list[Any]) -> Tensor:
        rows = self.session.capture(list(prompts), layers=self.session.n_layers - 1, at=-1, edits=edits)
        return self.session.unembed(rows.get())


def _tokens(session: Session, says: Sequence[int | str]) -> tuple[int, ...]:
    found = []
    for text in [says] if isinstance(says, (int, str)) else says:
        ids = [text] if isinstance(text, int) else session.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise EditError(f"{text!r} is {len(ids)} tokens of this model; says= takes the first tokens of its refusals")
        found.append(ids[0])
    if not found:
        raise EditError("says= names no token")
    return tuple(dict.fromkeys(found))
