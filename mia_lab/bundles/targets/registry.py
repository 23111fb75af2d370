"""The table of formats: what each is, which files it takes, whether it is read or written, and what it has no word for."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...edits import Edit
from ...errors import BundleError, MiaError


@dataclass(frozen=True, slots=True)
class Target:
    """One format. suffixes: of its files, "" for a folder; lacks: what it cannot say; sure: whether the suffix alone says the format."""

    name: str
    module: str
    what: str
    suffixes: tuple[str, ...]
    says: str
    lacks: str
    reads: bool = True
    writes: bool = True
    sure: bool = False

    def call(self, function: str) -> Callable[..., Any]:
        """`export_to` or `import_from` of its module; BundleError with the reason where it has none."""
        if not (self.writes if function == "export_to" else self.reads):
            raise BundleError(f"{self.name} is not {'written' if function == 'export_to' else 'read'}: {self.lacks}")
        return getattr(import_module(f".{self.module}", __package__), function)


_ONE = "factor (folded in), positions, gates, other edits than Add"
TARGETS = {target.name: target for target in (
    Target("gguf", "gguf", "control vector of repeng and llama.cpp", (".gguf",), "Add at resid_post, every position",
           f"block 0, {_ONE}", sure=True),
    Target("svec", "svec", "vector of AISteer360", (".svec",), "Add at resid_post, every position", _ONE, sure=True),
    Target("steering-vectors", "steering_vectors", "fields of a SteeringVector, by torch.save", (".pt",),
           "Add at resid_post or a module's own output", _ONE),
    Target("spipe", "spipe", "pipeline of the steerability toolkit", (".spipe",),
           "Add, Ablate; all, generated, from a position, the last k and on", "keep_norm, gates, schedules, other edits, code", sure=True),
    Target("intervention", "intervention", "spec and tensors of vLLM-Hook's unified worker", ("",),
           "Add, Ablate; all, generated, from a position, the last k and on", "keep_norm, gates, schedules, partial Ablate, other edits"),
    Target("vllm-hook", "vllm_hook", "steering config of vLLM-Hook and MIA, with its .pt", (".json",),
           "one Add of one vector; all, prompt, generated, last", "several edits, another vector at each layer, gates, other edits"),
    Target("hotwire", "hotwire", "request of hotwire-vllm, with its .pt", (".json", ".pt"), "Add at resid_post; all or generated",
           "two vectors at one layer, other positions, gates, other edits"),
    Target("vllm-lens", "vllm_lens", "request of vllm-lens", (".json",), "Add at resid_post; all or listed positions",
           "keep_norm, norm_match, prompt or generated, gates, other edits, hooks (pickled code)"),
    Target("easysteer", "easysteer", "request and payloads of EasySteer", (".json",),
           "Add, Ablate, Replace, Affine at resid_post; phases, windows; keep_norm", "gates, schedules, partial Ablate or Replace"),
    Target("rhizonymph", "rhizonymph", "named steering module of RhizoNymph's vLLM", (".json",),
           "Add, Ablate, Clamp at resid_pre, mid, post; all, prompt, generated", "Add after Clamp at a point, other positions, gates"),
    Target("saelens", "saelens", "one feature of a SAELens folder (feature=, value=)", ("",), "Add of its direction, or ClampFeature",
           "an edit knows one feature, and an autoencoder is all of them", writes=False),
    Target("vllm", "engine_config", "vllm serve --config, or --additional-config", (".yaml", ".json"), "the points of any edits",
           "it declares points, and holds no edit", reads=False),
    Target("kubernetes", "kubernetes", "ConfigMap with a bundle and its config", (".yaml",), "everything: it carries the bundle",
           "more than 1 MiB"),
    Target("compose", "compose", "compose file for vllm serve with a bundle", (".yaml",), "everything: it mounts the bundle",
           "it names a bundle, and holds no edit", reads=False),
)}


def of(name: str) -> Target:
    """The format of a name."""
    if name not in TARGETS:
        raise BundleError(f"there is no format {name!r}; the formats are {', '.join(TARGETS)}")
    return TARGETS[name]


def guess(path: Path) -> Target | None:
    """The format that a file's name is sure to mean, if any."""
    return next((target for target in TARGETS.values() if target.sure and path.suffix in target.suffixes), None)


def export_to(name: str, edits: Sequence[Edit], path: str | Path, **options: Any) -> Path:
    """Write edits in a format; return the path of the file, or of the first. options: bos=, model=, as the format takes them."""
    return _run(of(name).call("export_to"), name, edits, Path(path), **options)


def import_from(name: str, path: str | Path, **options: Any) -> list[Edit]:
    """Read edits from a file in a format. options: as the format takes them."""
    return _run(of(name).call("import_from"), name, Path(path), **options)


def _run(function: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    strange = sorted(set(options) - set(inspect.signature(function).parameters))
    if strange:
        raise BundleError(f"the format {name} takes no {strange[0]}=")
    try:
        return function(*args, **options)
    except (MiaError, OSError) as error:
        raise error if isinstance(error, BundleError) else BundleError(f"{name}: {error}") from None
