"""A bundle in words: what it holds, and what another holds that it does not."""
from __future__ import annotations

from pathlib import Path

from ..lazy import human_bytes
from ..show.parts import Part, Prose, Table
from .bundle import Bundle, opened
from .folder import SIGNATURE


def inspect(path: str | Path) -> list[Part]:
    """What a bundle holds, without running it."""
    bundle, files = opened(path)
    about, golden = bundle.about, bundle.about["golden"]
    edits = tuple((str(i), repr(edit), human_bytes(_bytes(bundle, i))) for i, edit in enumerate(bundle))
    facts = {"model": f"{about['model'].get('name')}: {about['model'].get('n_layers')} layers, d_model {about['model'].get('d_model')}",
             "weights": about["model"].get("weights"), "tokenizer": about["tokenizer"],
             "golden": f"{len(bundle.goldens)} outputs; " + ", ".join(f"{k} {v}" for k, v in sorted(golden["environment"].items())),
             "signature": "none" if SIGNATURE not in files else
                          f"there is one, as {about.get('name', 'no name')}; mia-lab verify --signer KEY holds it against a key",
             **{f"{name}: {key}": value for name in ("provenance", "evaluation") for key, value in sorted(about.get(name, {}).items())}}
    return [Prose(str(path), 2), Table(("", "edit", "vectors"), edits), Table(("", ""), tuple((k, str(v)) for k, v in facts.items()))]


def differences(one: str | Path, other: str | Path) -> list[str]:
    """How the second bundle differs from the first, a line each; none where they do the same."""
    a, b = opened(one)[0], opened(other)[0]
    lines = []
    for name in ("model", "tokenizer", "provenance", "evaluation"):
        if a.about.get(name) != b.about.get(name):
            lines.append(f"{name}: {a.about.get(name)} | {b.about.get(name)}")
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            lines.append(f"edit {i}: {x!r} | {y!r}" + (" (other vectors)" if repr(x) == repr(y) else ""))
    if len(a) != len(b):
        lines.append(f"edits: {len(a)} | {len(b)}")
    lines += [f"golden output {i} is another" for i, (x, y) in enumerate(zip(a.goldens, b.goldens)) if x != y]
    if len(a.goldens) != len(b.goldens):
        lines.append(f"golden outputs: {len(a.goldens)} | {len(b.goldens)}")
    return lines


def _bytes(bundle: Bundle, i: int) -> int:
    return sum(4 * tensor.numel() for steps in bundle[i].steps.values() for step in steps for tensor in (step.read, step.write)
               if tensor is not None)
