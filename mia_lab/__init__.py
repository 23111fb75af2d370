"""mia_lab: look into and steer language models while vLLM serves them at full speed."""
from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {"Session": "session", "Client": "serve.client.client",
         "Point": "points", "ActivationCache": "cache", "LazyTensor": "lazy", "Vector": "analysis.vectors",
         "MiaError": "errors", "library": "analysis.library", "Library": "analysis.library",
         "Recording": "recording", "Pairs": "analysis.pairs", "dataset": "analysis.data",
         **dict.fromkeys(("combine", "orthogonalise"), "analysis.algebra"), "CosineMap": "analysis.cosines",
         "Projection": "analysis.projection",
         **dict.fromkeys(("import_vector", "export_vector"), "analysis.importing"), "SparseAutoencoder": "analysis.autoencoder",
         **dict.fromkeys(("Edit", "Add", "Ablate", "Clamp", "Scale", "Replace", "Affine", "ClampFeature", "AttentionBias"), "edits"),
         **dict.fromkeys(("logit_diff", "log_prob"), "analysis.patching.metrics"), "PatchGrid": "analysis.patching.grids",
         "LogitLens": "analysis.lens.result", "TunedLens": "analysis.lens.tuned", "LogitAttribution": "analysis.lens.attribution",
         "AttentionView": "analysis.attention_view", "Readings": "analysis.live",
         **dict.fromkeys(("Probe", "Gate", "After", "Decay"), "gates"), "OverheadCard": "bench.overhead_card",
         **dict.fromkeys(("export", "load", "verify", "Bundle"), "bundles.bundle"), "sign": "bundles.signing",
         "grid": "analysis.sweep.settings", "Sweep": "analysis.sweep.result", "Choice": "analysis.sweep.choice",
         **dict.fromkeys(("token_odds", "answer_odds", "probe_reading"), "analysis.sweep.metrics"),
         **dict.fromkeys(("kl", "perplexity", "capability"), "analysis.sweep.side_metrics"),
         **dict.fromkeys(("sentiment", "matches", "length", "language", "follows", "distinct", "repeats", "scored"),
                         "analysis.sweep.text_metrics"),
         **dict.fromkeys(("Project", "Norm", "TopK", "SAE", "Mean", "Mass"), "reductions"),
         **dict.fromkeys(("everywhere", "prompt", "generated", "last", "window", "positions", "tokens", "special", "span", "role"),
                         "selectors")}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext mia_lab` gives a notebook the cell magic `%%steer`."""
    from .notebook.magic import Steering

    shell.register_magics(Steering)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
