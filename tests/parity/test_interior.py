"""Points inside blocks, what is rebuilt from them, and reductions on the device, against Hugging Face and arithmetic."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.errors import PromptError, UnsupportedError
from mia_lab.points import Point
from mia_lab.prompts import Prompts
from parity import reference, scenario, zoo

pytestmark = pytest.mark.full
FAMILIES = ["llama", "gemma3", "gpt2", "mixtral", "qwen3"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_point_and_rebuilt_attention(session: mia.Session, model: Any) -> None:
    ids = scenario.prompts(5, 7)
    animals = zoo.Zoo(session)
    edits = [[animals.edits(Point("resid_post", 1))["add"]], None, [animals.edits(Point("z", 2))["scale heads"]], None, None]
    logits, cache = session.run_with_cache(ids, max_tokens=4, edits=edits)
    layers = range(session.n_layers)
    worst = 0.0
    for i, tokens in enumerate(cache.tokens):
        wanted = [*session.tapped, *(Point("pattern", layer) for layer in layers)]
        theirs_logits, theirs = reference.run(model, list(tokens), wanted, edits[i] or [], len(ids[i]), session._submit.model.shapes)
        assert (logits[i, : len(tokens)].log_softmax(-1) - theirs_logits.log_softmax(-1)).abs().max() < 1e-4
        for p in session.tapped:
            ours = cache[p][i, : len(tokens)].float().flatten(1)
            worst = max(worst, float(reference.row_errors(ours, theirs[p]).max()))
        for layer in layers:
            n, pattern = len(tokens), cache["pattern", layer][i]
            ours = pattern[:, :n, :n].transpose(0, 1).flatten(1)
            assert (ours - theirs[Point("pattern", layer)]).abs().max() < 1e-6
            assert pattern[:, n:].isnan().all()
    print(f"{len(session.tapped)} points, worst row {worst:.2e}")
    assert worst <= 1e-5


def test_logits_follow_an_edit_after_the_final_norm(session: mia.Session, model: Any) -> None:
    ids = scenario.prompts(2, 15)
    edit = zoo.Zoo(session).edits(Point("final_norm", session.n_layers - 1))["add"]
    with session.steer(edit):
        logits, _ = session.run_with_cache(ids, ["resid_post"])
    for i, tokens in enumerate(ids):
        theirs, _ = reference.run(model, tokens, (), [edit])
        assert (logits[i, : len(tokens)].log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < 1e-4


def test_attention_of_one_row_and_its_mass_on_a_span(session: mia.Session, model: Any) -> None:
    ids = scenario.prompts(3, 8)
    ours = session.capture(ids, "pattern", at=-1)
    mass = session.capture(ids, "pattern", at=[0, -1], reduce=mia.Mass(mia.window(2, 6)), layers=[1, 3])
    assert ours.shape == (3, session.n_layers, session._submit.model.shapes[Point("q", 0)][0], max(map(len, ids)))
    assert mass.shape == (3, 2, 2, ours.shape[2])
    for i, tokens in enumerate(ids):
        _, theirs = reference.run(model, tokens, [Point("pattern", layer) for layer in range(session.n_layers)])
        for layer in range(session.n_layers):
            row = theirs[Point("pattern", layer)][-1].view(ours.shape[2], -1)
            assert (ours[i, layer, :, : len(tokens)] - row).abs().max() < 1e-6
            if layer in (1, 3):
                assert (mass[i, layer // 2, 1] - row[:, 2:6].sum(-1)).abs().max() < 1e-6
                assert not mass[i, layer // 2, 0].any()


def test_rows_before_the_edits_at_their_point(session: mia.Session, model: Any) -> None:
    ids = scenario.prompts(2, 9)
    animals = zoo.Zoo(session)
    edit = animals.edits(Point("resid_post", 1))["replace"]
    for before in (True, False):
        _, cache = session.run_with_cache(ids, ["resid_post", "attn_out"], edits=[edit], before=before)
        for i, tokens in enumerate(ids):
            _, theirs = reference.run(model, tokens, list(map(cache._batch.point, cache.keys())), [edit], before=before)
            floor = float(reference.centred(animals.rows[Point("resid_post", 1)].double()).mean())
            for p, values in theirs.items():
                assert reference.row_errors(cache[p][i, : len(tokens)], values, floor).max() <= 1e-5
    both = session.capture(ids, "resid_post", layers=1, at=None, edits=[edit], before=True)
    assert torch.equal(both.get()[0, : len(ids[0])], session.capture(ids, layers=1, at=None)[0, : len(ids[0])])


def test_reductions_are_what_the_rows_give(session: mia.Session) -> None:
    ids = scenario.prompts(3, 10)
    at = [1, 4, -1]
    rows = session.capture(ids, "resid_mid", at=at).double()  # [prompt layer pos d]
    d = rows.shape[-1]
    draw = torch.Generator().manual_seed(0)
    w, b = torch.randn(3, d, generator=draw), torch.randn(3, generator=draw)
    take = lambda how: session.capture(ids, "resid_mid", at=at, reduce=how)  # noqa: E731
    close = lambda a, b: torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)  # noqa: E731
    close(take(mia.Project(w, b)).get(), rows @ w.double().T + b)
    close(take(mia.Norm()).get(), rows.norm(dim=-1))
    close(take(mia.Mean()).get(), rows.mean(2))
    close(take(mia.Mean(mia.Project(w))).get(), (rows @ w.double().T).mean(2))
    close(take(mia.Mean(mia.Norm())).get(), rows.norm(dim=-1).mean(2))
    values, places = take(mia.TopK(4))
    close(values.get(), rows.topk(4).values)
    assert torch.equal(places.get(), rows.topk(4).indices)
    encoder, bias = torch.randn(d, 4 * d, generator=draw), torch.randn(4 * d, generator=draw)
    values, places = take(mia.SAE(encoder, bias, k=5, threshold=0.5))
    units = rows @ encoder.double() + bias
    units = torch.where(units > 0.5, units, 0.0)
    close(values.get(), units.topk(5).values)
    assert torch.equal(places.get(), units.topk(5).indices)


def test_a_selector_says_which_rows_to_capture(session: mia.Session) -> None:
    ids = scenario.prompts(3, 14)
    every = session.capture(ids, layers=1, at=None)
    for where in (mia.last(), mia.window(2, 5) | mia.last(), ~mia.tokens(*range(3, 200)) & mia.prompt()):
        rows = session.capture(ids, layers=1, at=where)
        for i, prompt in enumerate(ids):
            spans = where.spans(session._context(Prompts.of(ids), i))
            wanted = [q for a, b in spans for q in range(a, len(prompt) if b is None else min(b, len(prompt)))]
            torch.testing.assert_close(rows[i, : len(wanted)], every[i, wanted], rtol=1e-5, atol=1e-6)  # others are in the batch
    with pytest.raises(PromptError, match="selects no position of prompt 0"):
        session.capture(ids, at=mia.generated())


def test_a_vector_projects_on_its_own_layer(session: mia.Session) -> None:
    ids = scenario.prompts(2, 11)
    rows = session.capture(ids, at=-1)
    unit = torch.ones(session.n_layers)
    vector = mia.Vector("resid_post", tuple(range(session.n_layers)), torch.randn(session.n_layers, session.d_model), unit, unit)
    ours = session.capture(ids, at=-1, reduce=mia.Project(vector))
    torch.testing.assert_close(ours[..., 0], torch.einsum("pld,ld->pl", rows.get(), vector.rows), rtol=1e-4, atol=1e-4)


def test_several_continuations_of_a_prompt(session: mia.Session) -> None:
    ids = [p[:7] for p in scenario.prompts(2, 12)]  # vLLM's CPU build cannot seed a prompt that it computes in pieces
    _, cache = session.run_with_cache(ids, ["resid_post"], n=3, max_tokens=6, temperature=1.5, seed=5)
    again = [session.completions(p, max_tokens=6, temperature=1.5, seed=5 + k).outputs[0].token_ids for p in ids for k in range(3)]
    assert [list(tokens[n:]) for tokens, n in zip(cache.tokens, cache.n_prompt)] == [list(found)[:-1] for found in again]
    assert len({tuple(t) for t in again[:3]}) == 3
    assert cache["resid_post", 0].shape[0] == 6


def test_router_and_chosen_experts(open_tiny: Callable[..., Any], models: Path) -> None:
    session = open_tiny("mixtral", **scenario.EVERYTHING)
    model = tiny.load(tiny.build("mixtral", models)).double()
    ids = scenario.prompts(3, 13)
    _, cache = session.run_with_cache(ids, ["router"])
    for layer in range(session.n_layers):
        try:
            weights, experts = cache.experts(layer)
        except UnsupportedError as error:
            pytest.skip(str(error))
        for i, tokens in enumerate(ids):
            _, theirs = reference.run(model, tokens, [Point("router", layer)])
            logits = theirs[Point("router", layer)]
            assert (cache["router", layer][i, : len(tokens)] - logits).abs().max() < 1e-5
            top = logits.softmax(-1).topk(2)
            assert torch.equal(experts[i, : len(tokens)].sort(-1).values, top.indices.sort(-1).values)
            expected = (top.values / top.values.sum(-1, keepdim=True)).sort(-1).values
            assert (weights[i, : len(tokens)].sort(-1).values - expected).abs().max() < 1e-5
