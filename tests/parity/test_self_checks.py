"""Identities of edits and readouts in a running engine, on tiny models. Those that need none: ../test_self_checks.py."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.points import Point
from parity import reference, scenario, zoo

pytestmark = pytest.mark.full
POINT = Point("resid_post", 1)


@pytest.fixture
def family() -> str:
    return "llama"


@pytest.fixture
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    return open_tiny(family, **scenario.EVERYTHING | dict(max_biased_tokens=1024, num_gpu_blocks_override=24))


def logits(session: mia.Session, ids: list[list[int]], edits: Any = None) -> list[torch.Tensor]:
    """Each prompt's logits `[pos d_vocab]`, every row of them computed anew."""
    session.reset_prefix_cache()
    found, _ = session.run_with_cache(ids, ["resid_post"], edits=edits)
    return [found[i, : len(row)] for i, row in enumerate(ids)]


def test_e1_edits_without_an_effect_leave_every_bit(session: mia.Session) -> None:
    animals, ids = zoo.Zoo(session), scenario.prompts(1, 40) * 9
    v, u, at = animals.vector(POINT), animals.leaning(POINT), dict(layers=[1])
    probe, readings = animals.probe(Point("resid_post", 0))
    shut = mia.Gate(probe, above=float(readings.max()) + 1e3)
    idle = [mia.Add(v, 0.0, **at), mia.Ablate(u, 0.0, **at), mia.Clamp(u, low=-1e6, high=1e6, **at), mia.Scale(1.0, **at),
            mia.Replace(v, blend=0.0, **at), mia.Affine.loreft(u[None], u[None] * 1.0, **at), mia.Add(v, 1.0, when=shut, **at),
            mia.AttentionBias(mia.window(2, 5), bias=0.0, layers=[1]), mia.Add(v, 1.0, where=mia.generated(), **at)]
    clean = logits(session, ids)
    for edit, ours, base in zip(idle, logits(session, ids, [[edit] for edit in idle]), clean):
        assert torch.equal(ours, base), edit
    for ours, base in zip(logits(session, ids, [[mia.Add(v, 1.0, **at)]] * 9), clean):
        assert not torch.equal(ours, base)
    assert all(torch.equal(ours, base) for ours, base in zip(logits(session, ids), clean))  # what acted before is gone


def test_e2_what_lies_before_an_edit_keeps_every_bit(session: mia.Session) -> None:
    animals, ids, t = zoo.Zoo(session), scenario.prompts(1, 41)[0][:30], 13
    edits = list(animals.edits(POINT, where=mia.positions([t])).values())
    edits.append(mia.AttentionBias(mia.window(2, 5), bias=3.0, layers=[1], where=mia.positions([t])))
    clean = logits(session, [ids] * len(edits))
    for edit, ours, base in zip(edits, logits(session, [ids] * len(edits), [[edit] for edit in edits]), clean):
        assert torch.equal(ours[:t], base[:t]), edit
        assert not torch.equal(ours[t], base[t]), edit
        assert not torch.equal(ours[t + 1], base[t + 1]), edit  # through attention


def test_e3_prefill_and_decode_give_what_one_pass_gives(session: mia.Session) -> None:
    animals, ids, n = zoo.Zoo(session), [[*scenario.prompts(1, 42)[0][:14], i] for i in range(40, 46)], 12
    where = mia.window(5, None)  # through the prompt's end and on
    chosen = ["add", "ablate a subspace", "clamp two", "blend", "loreft", "clamp a feature"]
    edits = [[animals.edits(POINT, where=where)[name]] for name in chosen]
    stepwise, cache = session.run_with_cache(ids, ["resid_post", "mlp_out"], max_tokens=n, edits=edits, ignore_eos=True)
    whole = [list(row) for row in cache.tokens]
    assert {len(row) for row in whole} == {len(ids[0]) + n - 1} and len({tuple(row[-n:]) for row in whole}) == 6
    session.reset_prefix_cache()
    at_once, again = session.run_with_cache(whole, ["resid_post", "mlp_out"], edits=edits)
    scale = at_once.get().std()
    assert (stepwise.get() - at_once.get()).abs().max() < 1e-5 * max(float(scale), 1.0)
    for point in (Point("resid_post", 3), Point("mlp_out", 1)):
        ours, theirs = cache[point].get(), again[point].get()
        assert (ours - theirs).norm(dim=-1).max() < 1e-5 * theirs.norm(dim=-1).mean()


def test_e8_ablating_what_is_written_is_orthogonalising_the_weights_that_write_it(session: mia.Session, models: Path) -> None:
    ids, u = scenario.prompts(2, 43), zoo.Zoo(session).leaning(POINT)
    kinds = {"embed": [0], "attn_out": range(session.n_layers), "mlp_out": range(session.n_layers)}
    edits = [mia.Ablate(u, layers=list(layers), point=kind, where=mia.everywhere()) for kind, layers in kinds.items()]
    ours, clean = logits(session, ids, edits), logits(session, ids)
    model, unit = tiny.load(tiny.build("llama", models)).double(), u.double() / u.double().norm()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding -= torch.outer(embedding @ unit, unit)
        for block in model.model.layers:
            for weight in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
                weight -= torch.outer(unit, unit @ weight)
        for i, row in enumerate(ids):
            theirs = model(torch.tensor([row])).logits[0]
            assert (ours[i] - theirs).abs().max() < 1e-5
            assert (clean[i] - theirs).abs().max() > 1e-2


def test_e11_a_mixed_batch_gives_what_each_request_gives_alone(session: mia.Session) -> None:
    animals, ids = zoo.Zoo(session), scenario.prompts(4, 44)
    probe, _ = animals.probe(Point("resid_post", 0))
    readings = session.capture([ids[3]], layers=0, at=None, reduce=mia.Project(probe.direction, torch.tensor([probe.offset]))).get()
    gated = mia.Add(animals.vector(POINT), 1.0, layers=[1], when=mia.Gate(probe, above=float(readings.median())))  # half of its rows
    edits = [[], [animals.edits(POINT)["add"]], [animals.edits(POINT)["clamp"]], [gated]]
    together = logits(session, ids, edits)
    for i, row in enumerate(ids):
        alone = logits(session, [row], edits[i])[0]
        assert (together[i] - alone).abs().max() < 1e-5
        assert i == 0 or (alone - logits(session, [row])[0]).abs().max() > 1e-3


def test_a2_a_biased_head_gives_the_values_with_the_span_s_share_raised(session: mia.Session) -> None:
    """Spotlight's share p' = p e^b / (p e^b + 1 - p), and PASTA's weights outside the span times 0.01, in what heads give."""
    ids, layer, span, b = scenario.prompts(3, 45), 1, mia.window(2, 6), 1.3
    _, cache = session.run_with_cache(ids, ["q", "k", "v", "z"])
    for bias, scale in ((b, None), (float(-torch.tensor(0.01).log()), 0.01)):
        edit = mia.AttentionBias(span, bias=bias, layers=[layer], where=mia.everywhere())
        found = session.capture(ids, "z", layers=layer, at=None, edits=[edit]).get()
        for i, row in enumerate(ids):
            n = len(row)
            weights = cache["pattern", layer][i, :, :n, :n].double()  # [head pos key]
            inside = torch.zeros(n).double()
            inside[2:6] = 1
            p = (weights * inside).sum(-1, keepdim=True)
            if scale is None:
                share = p * torch.tensor(bias).exp() / (p * torch.tensor(bias).exp() + 1 - p)
                moved = weights * (inside * share / p.clamp(min=1e-30) + (1 - inside) * (1 - share) / (1 - p).clamp(min=1e-30))
            else:
                moved = torch.where(inside > 0, weights, scale * weights)
                moved = moved / moved.sum(-1, keepdim=True)
            moved = torch.where(p > 0, moved, weights)
            values = cache["v", layer][i, :n].double().repeat_interleave(2, 1)  # two query heads share one of these
            expected = torch.einsum("hqk,khe->qhe", moved, values)
            assert (found[i, :n].double() - expected).abs().max() < 1e-5 * expected.norm(dim=-1).mean()


def test_a3_a_focus_score_is_the_share_of_its_span_where_attention_is_uniform_and_turns_round_with_the_spans(session: mia.Session) -> None:
    """Attention Tracker's I / (I + D) from masses on the device; a block whose input is zero attends to all keys alike."""
    ids = scenario.prompts(4, 46)
    instruction, data = mia.window(1, 4), mia.window(4, 9)

    def focus(one: mia.selectors.Selector, other: mia.selectors.Selector, edits: Any = None) -> torch.Tensor:
        i, d = (session.capture(ids, "pattern", layers=1, at=-1, edits=edits, reduce=mia.Mass(s)).get() for s in (one, other))
        return i / (i + d)

    blank = mia.Replace(torch.zeros(session.d_model), layers=[1], point="resid_pre", where=mia.everywhere())
    torch.testing.assert_close(focus(instruction, data, [blank]), torch.full((4, 4), 3 / 8), rtol=0, atol=1e-6)
    found = focus(instruction, data)
    assert ((found > 0) & (found < 1)).all() and (found - 3 / 8).abs().max() > 1e-2
    torch.testing.assert_close(focus(data, instruction), 1 - found, rtol=0, atol=1e-6)


def test_a3_a_query_that_is_the_null_query_ranks_nothing(session: mia.Session) -> None:
    """In-context re-ranking scores a document by its attention under the query less that under "N/A": zero for "N/A" itself."""
    documents, null, other = scenario.prompts(1, 47)[0][:25], [45, 15, 36], [60, 61, 62]
    rows = list(range(25, 28))  # the query's

    def scores(query: list[int]) -> torch.Tensor:
        session.reset_prefix_cache()
        found = [session.capture(documents + query, "pattern", at=rows, reduce=mia.Mass(mia.window(a, a + 8))).get() for a in (1, 9, 17)]
        return torch.stack([f.mean(1) for f in found])  # [document layer head]

    delta, real = scores(null) - scores(null), scores(other) - scores(null)
    assert delta.abs().max() < 1e-6 < 1e-4 < real.abs().max()
    assert real.sum(0).abs().max() <= 1.0  # a head shares out one, so documents together have at most as many as heads


def test_r3_the_gradient_at_a_token_s_embedding_is_what_moving_it_does(session: mia.Session, models: Path) -> None:
    """Token Highlighter's gradient of an answer's loss, against the engine with the embedding moved either way; the gradient is
    nearly orthogonal to the embedding, since a norm reads it."""
    ids, answer, eps = scenario.prompts(1, 48)[0][:16], [50, 60, 70], 0.02
    model = tiny.load(tiny.build("llama", models)).double()
    embedded = model.get_input_embeddings()(torch.tensor([ids + answer])).detach().requires_grad_()

    def loss(found: torch.Tensor) -> torch.Tensor:
        return -found[len(ids) - 1 : -1].log_softmax(-1)[torch.arange(3), torch.tensor(answer)].sum()

    gradient = torch.autograd.grad(loss(model(inputs_embeds=embedded).logits[0]), embedded)[0][0]
    places = [2, 7, 12, 15]
    draw = torch.nn.functional.normalize(torch.randn(len(places), session.d_model, generator=torch.Generator().manual_seed(0)), dim=-1)
    move = lambda t, u, by: [mia.Add(u, by, layers=[0], point="embed", where=mia.positions([t]))]  # noqa: E731
    batch = [move(t, u, by) for t, u in zip(places, draw) for by in (eps, -eps)]
    found = [float(loss(x)) for x in logits(session, [ids + answer] * len(batch), batch)]
    slopes = [(up - down) / (2 * eps) for up, down in zip(found[::2], found[1::2])]
    for t, u, slope in zip(places, draw, slopes):
        typical = float(gradient[t].norm()) / session.d_model**0.5
        assert slope == pytest.approx(float(gradient[t] @ u.double()), rel=0.03, abs=0.03 * typical)
    cosines = torch.cosine_similarity(gradient[1 : len(ids)], embedded[0, 1 : len(ids)], dim=-1)
    print(f"mean |cos(gradient, embedding)| {float(cosines.abs().mean().detach()):.3f}")
    assert cosines.abs().mean() < 0.1


def test_r4_a_monitor_of_steered_traffic_sees_its_own_steering(session: mia.Session) -> None:
    animals, ids, c = zoo.Zoo(session), scenario.prompts(3, 49), 1.7
    v, w = animals.vector(POINT), animals.leaning(POINT)
    read = lambda edits: session.capture(ids, layers=1, at=-1, edits=edits, reduce=mia.Project(w)).get()[:, 0]  # noqa: E731
    shift = read([mia.Add(v, c, layers=[1])]) - read(None)
    torch.testing.assert_close(shift, torch.full_like(shift, c * float(w @ v)), rtol=1e-5, atol=1e-5 * float(v.norm()))


def test_g5_gates_of_one_batch_decide_as_they_do_alone(session: mia.Session) -> None:
    """Each request's gate reads its own prompt: the same gate, closed for some of a batch and open for others."""
    animals, ids = zoo.Zoo(session), scenario.prompts(6, 50)
    probe, _ = animals.probe(Point("resid_post", 0))
    readings = session.capture(ids, layers=0, at=-1, reduce=mia.Project(probe.direction, torch.tensor([probe.offset]))).get()[:, 0]
    level = float(readings.sort().values[2:4].mean())
    edit = mia.Add(animals.vector(POINT), 1.0, layers=[1], when=mia.Gate(probe, above=level, over="prompt_last"))
    run = lambda prompts, edits: session.run_with_cache(prompts, ["resid_post"], max_tokens=4, edits=edits, ignore_eos=True)[1]  # noqa: E731
    steered, clean = run(ids, [edit]), run(ids, None)
    for i, reading in enumerate(readings.tolist()):
        alone = run([ids[i]], [edit])
        at = len(ids[i])  # the first generated position, computed from the same token in all three
        assert (alone[POINT][0, at] - steered[POINT][i, at]).norm() < 1e-4 * alone[POINT][0, at].norm()
        moved = (steered[POINT][i, at] - clean[POINT][i, at]).norm() / clean[POINT][i, at].norm()
        assert (moved > 1e-2) == (reading > level)
        assert reference.row_errors(steered[POINT][i, :at], clean[POINT][i, :at]).max() < 1e-5  # the prompt is not edited
