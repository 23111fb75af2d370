"""Taps that ride together in one norm: what is captured and said is, to the bit, what taps of their own give."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.engine.discover import Layout
from mia_lab.engine.taps import Normed

pytestmark = pytest.mark.full
STREAM = ("attn_out", "resid_mid", "mlp_out", "resid_post", "resid_pre")
KINDS = [*STREAM, "q", "k", "v", "z", "embed", "final_norm"]
IDS = [[1, *range(20, 44)], [1, 7, 9], [1, *range(60, 90)]]


def edits(session: mia.Session) -> list[Any]:
    """An addition at each point of the stream around one border, and gated ones: by a branch's reading, and by the stream's."""
    draw = torch.Generator().manual_seed(0)
    size = 0.3 * float(session.unit()[1])
    ways = torch.nn.functional.normalize(torch.randn(len(STREAM) + 2, session.d_model, generator=draw), dim=1)
    added = [mia.Add(size * way, 1.0, [1 + (kind == "resid_pre")], kind) for kind, way in zip(STREAM, ways)]
    probes = [mia.Probe(ways[-1], point="mlp_out", layer=1), mia.Probe(ways[-2], point="resid_post", layer=1)]
    gated = [mia.Add(size * ways[-1], 1.0, [layer], kind, when=mia.Gate(probe, above=0.0))
             for probe, kind, layer in zip(probes, ("resid_post", "resid_pre"), (1, 2))]
    return [*added, *gated]


def run(session: mia.Session) -> tuple[dict[str, torch.Tensor], list[int]]:
    """All that is captured, with the edits and without, and how many taps ride in each norm that carries any."""
    found: dict[str, torch.Tensor] = {}
    for name, some in (("clean", None), ("edited", edits(session))):
        logits, cache = session.run_with_cache(IDS, max_tokens=3, edits=some)
        found |= {f"{name} {point}": cache[point.kind, point.layer].get() for point in session.tapped} | {f"{name} logits": logits.get()}
    model = session._engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    norms = [module for module in model.modules() if hasattr(module, "mia_tables") and "Norm" in type(module).__name__]
    return found, sorted(len(norm.mia_tables) for norm in norms)


def apart(layout: Layout, sites: Sequence[tuple[str, int]]) -> list[Any]:
    """One tap a norm: the others by themselves, in front of it."""
    last = {"resid_mid", "resid_pre"}
    return [layout.carriers.get(site, layout.places[site]) if site[0] in last else layout.places[site] for site in sites]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_they_give_what_taps_by_themselves_give(family: str, open_tiny: Callable[..., mia.Session],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(points=KINDS, edits=("add",), enforce_eager=True, max_num_batched_tokens=32, max_num_seqs=8)
    together, riding = run(open_tiny(family, **options))
    layers = sum(name.startswith("clean resid_mid") for name in together)
    assert riding == [2] * layers + [3] * layers  # behind the last block: its branch, its stream, and final_norm
    monkeypatch.setattr(Layout, "chosen", apart)
    alone, riding = run(open_tiny(family, **options, seed=1))
    assert set(riding) == {1}
    for name, values in together.items():
        assert torch.equal(values.nan_to_num(), alone[name].nan_to_num()), name
    assert not torch.equal(together["edited resid_post.2"].nan_to_num(), together["clean resid_post.2"].nan_to_num())


def test_every_point_of_the_stream_rides(open_tiny: Callable[..., mia.Session]) -> None:
    session = open_tiny("llama", points=KINDS, edits=("add",), enforce_eager=True, max_num_batched_tokens=32, max_num_seqs=8)
    lab = session._engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.mia_fetch.__self__
    riding = {site for site, place in zip(lab._sites, lab._layout.chosen(lab._sites)) if isinstance(place.at, Normed)}
    assert riding == {site for site in lab._sites if site[0] in STREAM} - {("resid_pre", 0)}
    alone = {site for site, place in lab._layout.carriers.items() if place.at.alone}
    assert alone == {site for site in lab._sites if site[0] in ("attn_out", "mlp_out")}
