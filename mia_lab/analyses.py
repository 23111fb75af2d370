"""What a Session can find out about a model: vectors, lenses, patches, sweeps. The work is done in `analysis/`."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .points import kind_of
from .texts import Texts

if TYPE_CHECKING:
    from .analysis.judging import Separability
    from .analysis.lens.attribution import LogitAttribution
    from .analysis.lens.result import LogitLens
    from .analysis.lens.tuned import TunedLens
    from .analysis.patching.grids import PatchGrid
    from .analysis.projection import Projection
    from .analysis.reft import ReftFit
    from .analysis.refusal import RefusalSearch
    from .analysis.sweep.result import Sweep
    from .analysis.tracing.trace import Trace
    from .analysis.vectors import Vector
    from .lazy import LazyTensor
    from .selectors import Selector


class Analyses(Texts):
    """The methods of a Session that an analysis stands behind."""

    _units: dict[str, torch.Tensor]

    # -- from data to vectors -----------------------------------------------------------------------------------------

    def vector(self, pairs: Iterable, *, method: str = "mean_diff", point: str = "resid_post", at: Any = -1) -> Vector:
        """Fit a steering Vector over all tapped layers from (positive, negative) prompts (see Pairs.of), read at position `at`.

        method: "mean_diff", "pca", "pca_centred", "lat", "logistic" or "lda", see analysis/fitting.py. Each layer is scaled to
        the mean centred norm there, so that an edit's coefficient 1.0 means one such norm.
        """
        from .analysis.vectors import fit

        return fit(self, pairs, method, point, at)

    def separability(self, vector: Vector, pairs: Any, *, at: int = -1, draws: int = 1000) -> Separability:
        """Return how well a vector tells the sides of pairs apart at each of its layers, AUROC with intervals over groups.

        Give it pairs that it was not fitted on: `pairs.split()` keeps some.
        """
        from .analysis.judging import judge

        return judge(self, vector, pairs, at, draws)

    def pca(self, pairs: Any, *, layers: int | Iterable[int] | None = None, point: str = "resid_post", at: int = -1,
            vector: Vector | None = None) -> Projection:
        """Return pairs in the plane of their first two principal components, at each layer, with the direction between the sides.

        Both sides are taken together, about their common mean. vector: whose direction to draw, by default the difference of the
        sides' means. `projection[layer]` is one layer; a view draws up to three.
        """
        from .analysis.projection import pca

        return pca(self, pairs, layers, point, at, vector)

    def unit(self, point: str = "resid_post") -> torch.Tensor:
        """Return what coefficient 1.0 stands for at each tapped layer of a kind, `[layer]`: the mean centred norm of the
        stream over neutral text without BOS. Measured once a model, then read from the cache folder."""
        from .analysis.units import measure_unit

        kind = kind_of(point)
        if kind not in self._units:
            self._units[kind] = measure_unit(self, kind)
        return self._units[kind]

    def reft(self, examples: Iterable[tuple[Any, Any]], layer: int, *, rank: int = 4, where: Selector | None = None, steps: int = 100,
             batch: int = 8, learning_rate: float = 1e-3, seed: int = 0, model: Any = None, progress: bool = True) -> ReftFit:
        """Train a LoReFT edit at `resid_post` of one layer, so that prompts are answered as in (prompt, answer) examples.

        where: the edited positions, by default the prompt's; a selector that takes in generated ones is trained on the answer's too.
        model: Hugging Face's float32 model where it is loaded already; by default the session's own folder is loaded, which takes
        4 bytes a weight of the host's memory. MiaError when the engine does not find the loss that training did.
        """
        from .analysis.reft import fit_reft

        return fit_reft(self, examples, layer, rank, where, steps, batch, learning_rate, seed, model, progress)

    def refusal_direction(self, pairs: Any, *, at: Iterable[int] = (-1,), says: Sequence[int | str] = ("I",),
                          layers: Iterable[int] | None = None, max_kl: float = 0.1, skip_last: float = 0.2, seed: int = 0,
                          progress: bool = True) -> RefusalSearch:
        """Find the direction that refusals hang on, among mean differences of (harmful, harmless) requests by layer and position.

        `mia.dataset("refusal_pairs")` is such a set; chat models want chat messages. at: last positions, those after the request in
        a chat template. says: the first tokens of the model's refusals. The pairs are divided by group into those to fit on, to
        select on and to report on. Each candidate takes four runs of a set. Tap `resid_pre` and `resid_mid`, or `attn_out` and
        `mlp_out`, too, so that it is taken out of all that is read.
        """
        from .analysis.refusal import search

        return search(self, pairs, at, says, layers, max_kl, skip_last, seed, progress)

    # -- what a model computes ----------------------------------------------------------------------------------------

    def logit_lens(self, prompts: Any, *, layers: int | str | Iterable[int | str] | None = None, top_k: int = 5, tokens: Any = None,
                   tuned: TunedLens | None = None, edits: Any = None, at: Any = None) -> LogitLens:
        """Return what the stream after each tapped block would say next, by the model's own norm and unembedding.

        layers: block numbers, and "embed" for what enters the first block (tapped as `resid_pre` 0); by default all of these.
        tokens: one token, as an id or text, or several, followed through the layers by rank and probability; by default what the
        model itself finds likeliest at each position. tuned: a TunedLens of this model. at: prompt positions, by default all.
        Logits stay on the device; values for a layer and position take some 100 bytes.
        """
        from .analysis.lens.reading import logit_lens

        return logit_lens(self, prompts, layers, top_k, tokens, tuned, edits, at)

    def direct_logit_attribution(self, prompt: Any, answer: int | str, wrong: int | str | None = None, *, heads: bool = False,
                                 at: int = -1, edits: Any = None) -> LogitAttribution:
        """Return what the embedding, each attention (or head, `heads=True`), each MLP and the biases add to a token's logit at
        one position of a prompt, or to its difference to a wrong answer's.

        Logits are those before a soft cap; the parts sum to them. Needs `resid_pre` 0, `attn_out` (or `z`) and `mlp_out` tapped.
        Under edits there is one more part, what edits between the branches added. One position of each point leaves the device.
        """
        from .analysis.lens.attribution import attribute

        return attribute(self, prompt, answer, wrong, heads, at, edits)

    def patch(self, clean: Any, corrupt: Any, point: str = "resid_post", metric: Any = None, *, layers: int | Iterable[int] | None = None,
              positions: Any = None, heads: Any = None, direction: str = "denoise", batch: int | None = None,
              progress: bool = True) -> PatchGrid:
        """Put values of the clean run into the corrupt one, one place at a time, and return how far each carries the metric back.

        clean, corrupt: one prompt each, or several pairs; the two of a pair have as many tokens. point: a kind of the stream, a
        branch, or `z`. metric: `mia.logit_diff(" Paris", " Rome")`, `mia.log_prob(" Paris")`, or a function of the logits
        `[d_vocab]` at the last position. positions: "each" (the default without heads), "all" together (the default with heads),
        or a list of positions, slices and lists of positions, each patched as one. heads: "all" or a list, patched apart at `z`.
        direction: "noise" puts corrupt values into the clean run. Cells are requests of one batch, `batch` handed over at a
        time; an interrupt keeps those that are done. PromptError shows both tokenisations where they do not fit.
        """
        from .analysis.patching.activation import patch

        return patch(self, clean, corrupt, point, metric, layers, positions, heads, direction, batch, progress)

    def path_patch(self, clean: Any, corrupt: Any, receiver: Any = "logits", sender: str = "z", metric: Any = None, *,
                   layers: int | Iterable[int] | None = None, positions: Any = None, heads: Any = None, through_mlps: bool = False,
                   direction: str = "denoise", batch: int | None = None, progress: bool = True) -> PatchGrid:
        """Send one part's value from the clean run into the corrupt one along its direct paths to `receiver` only; see `patch`.

        sender: "z" (with heads="all" or a list, each apart), "attn_out" or "mlp_out", one layer at a time. receiver: "logits", or
        one or several of ("z", 9, 3), ("z", 9), ("attn_out", 9), ("mlp_out", 4). Every attention and MLP output after the sender is
        held at the corrupt run's value; through_mlps lets MLPs pass the change on. Then the receivers' new outputs are put into
        the corrupt run. Needs attn_out and mlp_out tapped at every layer. A sender that no receiver follows scores 0.
        """
        from .analysis.patching.path import path_patch

        return path_patch(self, clean, corrupt, receiver, sender, metric, layers, positions, heads, through_mlps, direction, batch,
                          progress)

    def attribution_patch(self, clean: Any, corrupt: Any, point: str = "resid_post", metric: Any = None, *,
                          layers: int | Iterable[int] | None = None, positions: Any = None, heads: Any = None,
                          direction: str = "denoise", model: Any = None) -> PatchGrid:
        """Estimate what `patch` would give from one gradient, in Hugging Face's float32 model rather than in the engine.

        model: that model where it is loaded already; by default the session's own folder is loaded, which takes 4 bytes a weight of
        the host's memory. The values at the points, and the metric, must be the engine's, else MiaError. `grid.agreement(patched)`
        compares it with the patched grid: it is poor where softmax or norms saturate.
        """
        from .analysis.patching.attribution import attribution_patch

        return attribution_patch(self, clean, corrupt, point, metric, layers, positions, heads, direction, model)

    def trace(self, prompts: Any, max_tokens: int = 0, **sampling: Any) -> Trace:
        """Write a run down as if its values were here: `with s.trace(prompt) as t:`; it runs once, when the block ends.

        `t["resid_post", 3]`, `t.layers[3].output`, `t.blocks[3].hook_resid_post` stand for values `[batch pos d_model]`. `.save()` gives a
        tensor that holds the value, as it is at that line, after the block. `value[:, 5] += vector`, `*= 2`, `= rows` change it, for all
        positions where none is named. Positions are the prompt's. What is no affine change is refused, with the edit that says it.
        """
        from .analysis.tracing.tape import Tape
        from .analysis.tracing.trace import Trace

        return Trace(Tape(self, prompts, max_tokens, sampling))

    def run_with_hooks(self, prompts: Any, fwd_hooks: Iterable[tuple[Any, Any]] = ()) -> LazyTensor:
        """Run prompts once under hooks, and return lazy logits `[batch pos d_vocab]`.

        fwd_hooks: pairs of a point (or a function of TransformerLens names) and a function of `value`, or of `value, hook`, which is
        called once, before the run, and changes the value, or returns what it becomes, as in `trace`.
        """
        from .analysis.tracing.trace import run_with_hooks

        return run_with_hooks(self, prompts, fwd_hooks)

    # -- what edits do ------------------------------------------------------------------------------------------------

    def sweep(self, vectors: Any, coeffs: Iterable[float], prompts: Any = None, metrics: Sequence[Any] = (), *, select: Any = None,
              holdout: Any = None, where: Any = None, placebos: int = 20, placebo_prompts: int = 6, pairs: Any = None, at: int = -1,
              guards: Sequence[Any] | None = None, seeds: Sequence[int] = (0,), temperature: float = 0.0, max_tokens: int = 24,
              seed: int = 0, progress: bool = True) -> Sweep:
        """Try a vector (or several by name) one layer and one coefficient at a time, both signs, beside the unsteered model and placebos.

        prompts: divided by group into those used here and those that `Sweep.best` reports on; or give select= and holdout=. Lines of a
        data set with a "prompt" and a "group" will do. metrics: `mia.token_odds`, `answer_odds`, `sentiment`, `follows`, ...; the
        first is the effect. guards: by default `mia.kl()` and `mia.perplexity()`, on neutral texts. where: a selector, or several
        to compare. placebos: random directions as long as the edit with the covariance of unrelated text, each tried on
        `placebo_prompts` prompts; with pairs= (and at=) that the vector was fitted on, also as many fitted on shuffled labels.
        Generated texts are greedy unless there is a temperature, and then one a seed of `seeds`. seed: of the division and the
        placebos. Everything is one batch for each length of text; an interrupt keeps what is done.
        """
        from .analysis.sweep.run import sweep

        return sweep(self, vectors, coeffs, where, prompts=prompts, metrics=metrics, select=select, holdout=holdout, placebos=placebos,
                     placebo_prompts=placebo_prompts, pairs=pairs, at=at, guards=guards, seeds=seeds, temperature=temperature,
                     max_tokens=max_tokens, seed=seed, progress=progress)

    def compose(self, recipes: Mapping[str, Any], prompts: Any = None, metrics: Sequence[Any] = (), *, select: Any = None,
                holdout: Any = None, placebos: int = 20, placebo_prompts: int = 6, guards: Sequence[Any] | None = None,
                seeds: Sequence[int] = (0,), temperature: float = 0.0, max_tokens: int = 24, seed: int = 0,
                progress: bool = True) -> Sweep:
        """Try recipes by name: a list of edits that act together, a system prompt, or both as (system prompt, edits).

        The rest is as in `sweep`. A system prompt is a message before chat messages, and a paragraph before a plain text. Recipes whose
        edits are all `Add` have placebos, under the same system prompt. `best` takes the smallest KL where there is no coefficient.
        """
        from .analysis.sweep.run import compose

        return compose(self, recipes, prompts=prompts, metrics=metrics, select=select, holdout=holdout, placebos=placebos,
                       placebo_prompts=placebo_prompts, guards=guards, seeds=seeds, temperature=temperature, max_tokens=max_tokens,
                       seed=seed, progress=progress)
