"""What a Session, a cache and a lazy tensor say of themselves in a notebook. Nothing is fetched for it."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..counted import counted
from ..lazy import human_bytes
from ..points import KINDS, ranges

if TYPE_CHECKING:
    from ..cache import ActivationCache, Batch
    from ..session import Session
    from ..show.parts import Part, Table


def session_text(session: Session) -> str:
    """Return the three lines of its repr."""
    if session._engine.closed:
        return f"{type(session).__name__}({session.model}): closed"
    facts = session_facts(session)
    return (f"{type(session).__name__}: {facts['model']}\n  {facts['engine']}; taps {facts['taps']}\n"
            f"  tables {facts['tables']}; KV room for {facts['KV room']}")


def session_facts(session: Session) -> dict[str, str]:
    """Return what an open session runs, by name."""
    settings, facts = session._engine.settings, session._engine.facts
    compiled, graphs = settings.compiled.split(", ")
    kinds = {kind: sum(p.kind == kind for p in session.tapped) for kind in KINDS}
    return {
        "model": f"{session.model}, {session.n_layers} layers, d_model {session.d_model}, {str(session.dtype).removeprefix('torch.')}, "
                 f"adds BOS: {session._has_bos_rule()}",
        "engine": f"compile {compiled}, graphs {graphs}, runner {facts['runner']}",
        "taps": ", ".join(f"{kind} x{n}" for kind, n in kinds.items() if n),
        "tables": f"{human_bytes(facts['table_bytes'])}, up to {facts['captured_tokens']} captured tokens a step",
        "KV room": f"{settings.kv_tokens} tokens"}


def session_card(session: Session) -> list[Part]:
    """Return the parts of a session's card: what runs, what acts on it now, and what to type next."""
    from ..show.parts import Prose, Table

    if session._engine.closed:
        return [Prose(session_text(session))]
    acting = len(session._acting)
    facts = session_facts(session) | {
        "edits": f"{', '.join(session.edit_kinds) or 'none'} enabled; {acting or 'none'} acting on all that is run now",
        "proved": f"{len({v.point for v in session.proof})} points and {len({v.edit for v in session.proof})} kinds of edit, each "
                  "against its formula, at prefill and at decode" if session.proof else "by its server, when it started"}
    middle = session.n_layers // 2
    steps = (("see every point and its shape", "s.points()"),
             ("read values", 'logits, cache = s.run_with_cache("The Eiffel Tower is in")'),
             ("see what each layer says next", 's.logit_lens("The Eiffel Tower is in")'),
             ("find a direction", 'v = s.vector([("I love this!", "I hate this!"), ("What a joy.", "What a bore.")])'),
             ("steer with it", f'with s.steer(v[{middle}], 0.2): s.generate("When I opened the letter, I")'))
    return [Table(("Session", facts.pop("model")), tuple(facts.items())),
            Table(("to", "type"), steps, "What to do next, where s is this session")]


def cache_card(cache: ActivationCache) -> list[Part]:
    """Return the parts of a cache's card: a line a kind of point, and what of it is here."""
    from ..show.parts import Prose

    batch, width = cache._batch, max(cache._batch.n_positions)
    table = _points_table(cache, f"{len(cache.n_prompt)} {width}")
    typed = 'cache["resid_post", 3]' if ("resid_post", 3) in cache else f"cache[{cache.keys()[0]!r}]" if len(cache) else ""
    return [Prose(f"ActivationCache: {counted(len(cache.n_prompt), 'prompt')}, up to {width} positions, the shorter ones padded; "
                  f"{human_bytes(cache.nbytes)} held, {human_bytes(cache.nbytes_fetched)} fetched"), table,
            Prose(f"{_reading(batch)} Type {typed} for a tensor, cache[0] for the first prompt without padding.")]


def prompt_card(cache: ActivationCache, index: int) -> list[Part]:
    """Return the parts of the card of one prompt of a cache."""
    from ..show.parts import Prose

    batch = cache._batch
    n, given = batch.n_positions[index], batch.n_prompt[index]
    return [Prose(f"Prompt {index} of {len(batch.n_prompt)}: {n} positions, {given} of them of the prompt and {n - given} generated"),
            _points_table(cache, f"{n}")]


def as_html(parts: Iterable[Part]) -> str:
    """Return parts as HTML."""
    from ..show.html import render

    return render(*parts)


def _points_table(cache: ActivationCache, axes: str) -> Table:
    """A line for each kind of point held: name, layers, shape in front of which `axes` stand, bytes, and how many tensors are here."""
    from ..show.parts import Table

    batch, rows = cache._batch, []
    for kind in dict.fromkeys(p.kind for p in cache._points):
        here = [p for p in cache._points if p.kind == kind]
        layers = ranges([p.layer for p in here])
        fetched = sum(p in cache._held and cache._held[p].fetched for p in here)
        size = sum(map(batch.row_bytes, here)) * len(batch.n_prompt) * max(batch.n_positions)
        rows.append((kind, here[0].name.replace(f"blocks.{here[0].layer}.", "blocks.{layer}."), layers,
                     f"[{axes} {' '.join(map(str, batch.shapes[here[0]]))}]", str(batch.dtypes[here[0]]).removeprefix("torch."),
                     human_bytes(size), f"{fetched} of {len(here)}"))
    return Table(("point", "name", "layers", "shape of each", "type", "bytes of all prompts", "fetched"), tuple(rows))


def _reading(batch: Batch) -> str:
    return "Values are from before the edits at their point." if batch.before else "Values are from after the edits at their point."
