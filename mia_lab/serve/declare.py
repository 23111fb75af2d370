"""The opt-in of a server, `additional_config["mia_lab"]`, made explicit: which points are tapped and which edits enabled."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundles.bundle import of_files
from ..bundles.folder import Contents
from ..bundles.model import bounded
from ..edits import Edit
from ..engine.config import EngineOptions, width_of
from ..engine.wire import ATTENTION
from ..errors import BundleError, MiaError, PointError
from ..points import KINDS, every
from ..running.declare import BIAS, EDIT_KINDS, declare, needed
from .catalogue import bundles_in
from .disk import Disk
from .refusing import shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN = ("serve", "points", "edits", "max_captured_tokens", "max_biased_tokens", "delivery", "prove")
EXPANDED = ("sites", "exact", "kinds", "complete", "fingerprint")
BIASED_TOKENS = 4096  # of requests under an AttentionBias, where a bundle has one and nobody says how many


class OptInError(MiaError, ValueError):
    """An opt-in that says what there is not."""


def expand(options: Any, config: VllmConfig) -> dict[str, Any]:
    """Return the opt-in with its points and edits spelled out, as `EngineOptions.as_json`, beside "serve" and "prove".

    "points" and "edits" are as Session takes them, JSON lists in place of tuples. Without "points": resid_post at every layer, and
    what the bundles in "serve" need; without "edits": all kinds, attention's bias where a bundle has one. What has "sites" stays as it is.
    Raises OptInError or PointError for anything else, DiskError where there is no such folder.
    """
    said = _checked(options)
    if "sites" in said:
        return said
    n_layers, folder = config.model_config.hf_text_config.num_hidden_layers, said.get("serve")
    edits = served_edits(folder, config) if folder is not None else []
    biased = _count(said, "max_biased_tokens")
    if not biased and BIAS in said.get("edits", [BIAS] if any(p.kind == ATTENTION for edit in edits for p in edit.steps) else ()):
        biased = BIASED_TOKENS
    kinds = tuple(kind for kind in said.get("edits", EDIT_KINDS) if kind != BIAS or biased)
    asked, served = said.get("points"), {point for edit in edits for point in needed(edit) if point.kind != ATTENTION}
    sites, exact, named = declare(_points(asked) if asked is not None else ("resid_post",), n_layers, BIAS in kinds)
    if asked is None:
        sites = tuple((p.kind, p.layer) for p in every(n_layers) if p in served or (p.kind, p.layer) in sites)
    complete = said.get("delivery", "complete") == "complete"
    spelled = EngineOptions(sites, exact, named, kinds, _count(said, "max_captured_tokens"), biased, complete)
    return {name: said[name] for name in ("serve", "prove") if name in said} | spelled.as_json()


def served_edits(folder: str | Path, config: VllmConfig) -> list[Edit]:
    """The edits of the bundles in a folder that are for a model of this size; whether they are for this one, the catalogue finds out."""
    model = config.model_config
    n_layers, d_model = model.hf_text_config.num_hidden_layers, model.get_hidden_size()
    widest = max(n_layers, *(width_of(kind, config) for kind in KINDS))

    def check(found: Contents, path: object) -> None:
        there = found.about["model"]
        if (there.get("n_layers"), there.get("d_model")) != (n_layers, d_model):
            raise BundleError(f"{path} is for a model of another size")
        bounded(found, n_layers, widest, path)

    edits: list[Edit] = []
    for name, files in bundles_in(Disk(folder))[0].items():
        try:
            edits += of_files(files, name, check=check)
        except Exception:  # whatever a file makes its reader do; the catalogue says why it is set aside
            continue
    return edits


def _checked(options: Any) -> dict[str, Any]:
    where = "--additional-config's mia_lab"
    if not isinstance(options, Mapping):
        raise OptInError(f'{where} is {shown(options)}; it is an object, such as {{"serve": "/etc/mia_lab"}}')
    strange = next((name for name in options if name not in (*KNOWN, *EXPANDED)), None)
    if strange is not None:
        raise OptInError(f"{where} has {shown(strange)}; it may have {', '.join(KNOWN)}")
    clash = next((name for name in EXPANDED[1:] if name in options and "sites" not in options), "points" if
                 "points" in options and "sites" in options else None)
    if clash is not None:
        raise OptInError(f'{where} has {clash!r}, which goes {"without" if clash == "points" else "with"} "sites"; name "points" alone')
    folder, edits, delivery = options.get("serve"), options.get("edits", []), options.get("delivery", "complete")
    if folder is not None and (not isinstance(folder, str) or not folder):
        raise OptInError(f'{where}: "serve" is {shown(folder)}; it is a folder, such as "/etc/mia_lab"')
    wrong = [kind for kind in edits if kind not in EDIT_KINDS] if isinstance(edits, (list, tuple)) else [edits]
    if wrong:
        raise OptInError(f'{where}: "edits" has {shown(wrong[0])}; it is a list of {", ".join(EDIT_KINDS)}')
    if delivery not in ("complete", "best_effort"):
        raise OptInError(f'{where}: "delivery" is "complete" or "best_effort", not {shown(delivery)}')
    if not isinstance(options.get("prove", True), bool):
        raise OptInError(f'{where}: "prove" is true or false')
    return dict(options)


def _points(asked: Any) -> Any:
    """Points as Session takes them: JSON has no pairs, so a list of a name and a number is one."""
    if isinstance(asked, str) or _is_pair(asked):
        return tuple(asked) if _is_pair(asked) else asked
    if not isinstance(asked, (list, tuple)) or not asked:
        raise PointError(f'"points" is {shown(asked)}; it is a list of kinds of point, or of points such as ["attn_out", 3]')
    return [tuple(item) if _is_pair(item) else item for item in asked]


def _is_pair(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], int)


def _count(said: Mapping[str, Any], name: str) -> int:
    found = said.get(name, 0)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 31:
        raise OptInError(f"{name} is {shown(found)}; it is a number of tokens")
    return found
