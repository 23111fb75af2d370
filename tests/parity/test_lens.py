"""Lenses, heads and attributions against Hugging Face in float64, and against the model's own logits, to the last bit."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch
from torch import nn

import mia_lab as mia
from mia_lab.engine.lens import log_softmax
from mia_lab.errors import EditError, MiaError, PointError, PromptError
from mia_lab.points import Point
from parity import interior, reference

pytestmark = pytest.mark.full
POINTS = [("resid_pre", 0), "z", "attn_out", "mlp_out", "resid_post", "final_norm"]
OPTIONS = dict(max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32, enforce_eager=True)
EXPERTS = ("qwen3moe",)  # whose neurons no one linear map reads
PROMPTS = ["one prompt", "and another, which is longer"]
RIGHT, WRONG, K = 7, 12, 5
Tensor = torch.Tensor


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma2", "gpt2", "qwen3moe", "olmo2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    return open_tiny(family, points=points_of(family), **OPTIONS)


def points_of(family: str) -> list[Any]:
    """What to tap on a family."""
    return POINTS if family in EXPERTS else [*POINTS, "mlp_act"]


class End:
    """Hugging Face's final norm and unembedding, in float64, on its own streams."""

    def __init__(self, path: Path) -> None:
        self.model = tiny.load(path).double()
        self.cap = getattr(self.model.config, "final_logit_softcapping", None)
        self.norm = interior.module_of(self.model, None, "final_norm")[0]

    @torch.no_grad()
    def says(self, stream: Tensor) -> Tensor:
        """Log-probabilities `[pos d_vocab]` of a stream."""
        logits = self.model.get_output_embeddings()(self.norm(stream))
        return (self.cap * torch.tanh(logits / self.cap) if self.cap else logits).log_softmax(-1)

    @torch.no_grad()
    def run(self, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits before a soft cap, and the stream that enters each block and leaves the last."""
        streams: dict[int, Tensor] = {}
        blocks = reference.blocks(self.model)
        note = lambda i, out: streams.update({i: out[0] if isinstance(out, tuple) else out})  # noqa: E731
        hooks = [block.register_forward_hook(lambda m, a, out, i=i: note(i, out)) for i, block in enumerate(blocks)]
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        found = [streams[i].reshape(len(ids), -1) for i in range(len(blocks))]
        logits = out.logits[0]
        return self.cap * torch.atanh(logits / self.cap) if self.cap else logits, [out.hidden_states[0][0], *found]


@pytest.fixture(scope="module")
def end(session: mia.Session, models: Path, family: str) -> End:
    return End(tiny.build(family, models))


def agrees(lens: mia.LogitLens, i: int, row: int, expected: Tensor, said: Tensor) -> None:
    """Assert what a lens holds for one prompt and layer, given the log-probabilities there and the model's own."""
    n = len(expected)
    torch.testing.assert_close(lens.top_log_probabilities[i, row, :n].double(), expected.topk(K).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(expected.gather(1, lens.top[i, row, :n]), expected.topk(K).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(lens.entropy[i, row, :n].double(), -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lens.kl[i, row, :n].double(), (said.exp() * (said - expected)).sum(-1), rtol=1e-4, atol=1e-4)
    asked = expected.gather(1, lens.followed[i, :n])
    torch.testing.assert_close(lens.log_probabilities[i, row, :n].double(), asked, rtol=0, atol=1e-4)
    least, most = (((expected[:, None] > asked[..., None] + shift).sum(-1) + 1) for shift in (1e-4, -1e-4))
    assert ((lens.ranks[i, row, :n] >= least) & (lens.ranks[i, row, :n] <= most)).all()


def test_each_layer_says_what_hugging_face_makes_of_it(session: mia.Session, end: End) -> None:
    lens = session.logit_lens(PROMPTS, tokens=[RIGHT, WRONG])
    assert lens.layers == ("embed", *range(session.n_layers))
    for i, prompt in enumerate(PROMPTS):
        _, streams = end.run(session.to_tokens(prompt)[0].tolist())
        assert lens.followed[i, 0].tolist() == [RIGHT, WRONG]
        for row, stream in enumerate(streams):
            agrees(lens, i, row, end.says(stream), end.says(streams[-1]))
    n = len(lens.tokens[0])
    assert lens.kl[0, :, n:].isnan().all() and (lens.top[0, :, n:] == -1).all() and not lens.kl[:, :, :n].isnan().any()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit; where a GPU took one softmax and this host the other, to the last bits of a float32 logarithm."""
    return torch.allclose(a, b, rtol=0, atol=2e-6) if torch.cuda.is_available() else torch.equal(a, b)


def test_the_last_layer_is_the_model_s_own_logits_to_the_last_bit(session: mia.Session) -> None:
    lens = session.logit_lens(PROMPTS[1])
    logits, cache = session.run_with_cache(PROMPTS[1])
    own = log_softmax(logits.get()[0])
    assert same(lens.top_log_probabilities[0, -1], own.topk(K).values)
    assert torch.equal(lens.followed[0, :, 0], own.argmax(-1))
    assert (lens.ranks[0, -1] == 1).all() and not lens.kl[0, -1].any()
    for layer in range(session.n_layers - 1):
        there = log_softmax(session.unembed(cache["resid_post", layer].get()[0]))
        assert same(lens.top_log_probabilities[0, layer + 1], there.topk(K).values)
    held = cache.logit_lens()
    assert torch.equal(held.kl, lens.kl) and torch.equal(held.top, lens.top) and held.layers == lens.layers


def test_a_tuned_lens_moves_each_layer_by_its_own_map(session: mia.Session, end: End, tmp_path: Path) -> None:
    draw, d = torch.Generator().manual_seed(0), session.d_model
    for name, size in (("zero", 0.0), ("random", 0.3)):
        params = {}
        for i in range(session.n_layers):
            params[f"{i}.weight"] = size * torch.randn(d, d, generator=draw) / d**0.5
            params[f"{i}.bias"] = size * torch.randn(d, generator=draw)
        (tmp_path / name).mkdir()
        torch.save(params, tmp_path / name / "params.pt")
        (tmp_path / name / "config.json").write_text(json.dumps(dict(d_model=d, num_hidden_layers=session.n_layers)))
    plain = session.logit_lens(PROMPTS)
    zero = session.logit_lens(PROMPTS, tuned=mia.TunedLens.load(tmp_path / "zero"))
    assert torch.equal(zero.top_log_probabilities.nan_to_num(), plain.top_log_probabilities.nan_to_num())
    lens = session.logit_lens(PROMPTS, tuned=mia.TunedLens.load(tmp_path / "random"))
    for i, prompt in enumerate(PROMPTS):
        _, streams = end.run(session.to_tokens(prompt)[0].tolist())
        for row, stream in enumerate(streams):  # row i: what enters block i
            if row < session.n_layers:
                stream = stream + stream @ params[f"{row}.weight"].double().T + params[f"{row}.bias"].double()
            agrees(lens, i, row, end.says(stream), end.says(streams[-1]))


def test_heads_are_hugging_face_s_and_sum_to_attention(session: mia.Session, end: End) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    stack, labels = cache.stack_head_results(return_labels=True)
    heads = len(labels) // session.n_layers
    assert labels[:2] == ["L0H0", "L0H1"] and labels[-1] == f"L{session.n_layers - 1}H{heads - 1}"
    for layer in range(session.n_layers):
        mine, out = stack[layer * heads : (layer + 1) * heads], cache["attn_out", layer].get()
        error = (mine.sum(0) + cache.head_bias(layer) - out)[cache.mask].norm() / out[cache.mask].norm()
        assert float(error) < 1e-6
        ids = session.to_tokens(PROMPTS[1])[0].tolist()
        points = [Point("z", layer), Point("attn_out", layer)]
        _, values = reference.run(end.model, ids, points)
        for head, theirs in enumerate(shares(end.model, layer, values[points[0]].double(), values[points[1]].double(), heads)):
            assert float((mine[head, 1].double() - theirs).norm() / theirs.norm()) < 2e-5
    some, named = cache.stack_head_results(2, True, True, pos_slice=-1)
    assert named == [*labels[: 2 * heads], "remainder"]
    torch.testing.assert_close(some[:-1, 1], stack[: 2 * heads, 1, -1])
    torch.testing.assert_close(some.sum(0)[1], cache["resid_post", 1].get()[1, -1], rtol=1e-5, atol=1e-5)
    assert some[:, 0].isnan().all()


@torch.no_grad()
def shares(model: Any, layer: int, z: Tensor, out: Tensor, heads: int) -> Iterator[Tensor]:
    """What each head adds: the projection of its part of z, scaled as the norm behind it, if any, scales the whole."""
    block = reference.blocks(model)[layer]
    attention = getattr(block, "self_attn", None) or block.attn
    linear: nn.Module = getattr(attention, "o_proj", None) or attention.c_proj
    nothing = linear(torch.zeros_like(z))
    gain = out / linear(z)
    size = z.shape[1] // heads
    for head in range(heads):
        alone = torch.zeros_like(z)
        alone[:, head * size : (head + 1) * size] = z[:, head * size : (head + 1) * size]
        yield (linear(alone) - nothing) * gain


def test_the_full_decomposition_sums_to_the_stream(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    for layer in (1, None):
        stack, labels = cache.get_full_resid_decomposition(layer, expand_neurons=False, return_labels=True)
        stream = cache["resid_post", (layer or session.n_layers) - 1].get()
        assert labels[0] == "L0H0" and labels[-3:] == [f"{(layer or session.n_layers) - 1}_mlp_out", "embed", "bias"]
        assert float((stack.sum(0) - stream)[cache.mask].norm() / stream[cache.mask].norm()) < 1e-6


def test_neurons_sum_to_what_the_mlp_adds(session: mia.Session, family: str) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    if family in EXPERTS:
        with pytest.raises(PointError, match=r"mlp_act\.0 is not tapped"):
            cache.get_full_resid_decomposition()
        return
    stack, labels = cache.get_full_resid_decomposition(2, mlp_input=True, pos_slice=2, return_labels=True)
    neurons = sum(label.startswith("L1N") for label in labels)
    assert neurons == cache["mlp_act", 1].shape[-1] and len(labels) == len(stack) == len(set(labels))
    stream = cache["resid_post", 1].get()[:, 2] + cache["attn_out", 2].get()[:, 2]
    torch.testing.assert_close(stack.sum(0), stream, rtol=1e-5, atol=1e-5)
    some, named = cache.stack_neuron_results(2, [1, 2], slice(3, 5), True, incl_remainder=True)
    assert named == ["L0N3", "L0N4", "L1N3", "L1N4", "remainder"]
    torch.testing.assert_close(some[:-1, :, 1], stack[[labels.index(label) for label in named[:-1]]])
    torch.testing.assert_close(some.sum(0), cache["resid_post", 1].get()[:, [1, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama"], indirect=True, scope="module")
def test_more_parts_than_memory_holds_are_refused(session: mia.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Free", (), {"available": 1 << 20})())
    with pytest.raises(PointError, match="of memory that are free; choose some"):
        cache.stack_neuron_results()
    assert len(cache.stack_neuron_results(1, -1, [0])) == 1


@pytest.mark.parametrize("family", ["llama"], indirect=True, scope="module")
def test_activations_are_stacked_up_to_a_layer(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    assert torch.equal(cache.stack_activation("hook_mlp_out", 2).nan_to_num(),
                       torch.stack([cache["mlp_out", layer].get() for layer in range(2)]).nan_to_num())
    with pytest.raises(PointError, match="q is not tapped"):
        cache.stack_activation("q")


@pytest.mark.parametrize("heads", [False, True])
def test_an_attribution_sums_to_hugging_face_s_difference(session: mia.Session, end: End, heads: bool) -> None:
    logits, _ = end.run(session.to_tokens(PROMPTS[1])[0].tolist())
    for at in (-1, 4):
        for wrong in (WRONG, None):
            found = session.direct_logit_attribution(PROMPTS[1], RIGHT, wrong, heads=heads, at=at)
            expected = float(logits[at, RIGHT] - (0.0 if wrong is None else logits[at, wrong]))
            assert abs(found.net - expected) < 1e-4 * found.total
            assert abs(found.rest) < 1e-5 * found.total
            assert found.total >= abs(found.net)
    _, cache = session.run_with_cache(PROMPTS[1])
    stack, labels = cache.stack_head_results(return_labels=True) if heads else cache.decompose_resid(return_labels=True)
    along = dict(zip(labels, cache.logit_attrs(stack, RIGHT)[:, 0, 4].tolist()))
    mine = {row["component"]: row["contribution"] for row in found.data}
    assert set(along) <= set(mine)
    assert all(abs(mine[label] - value) < 1e-5 * found.total for label, value in along.items())


@pytest.mark.parametrize("family", ["llama"], indirect=True, scope="module")
def test_edits_are_seen_where_they_act(session: mia.Session) -> None:
    draw = torch.randn(session.d_model, generator=torch.Generator().manual_seed(0))
    plain, moved = session.logit_lens(PROMPTS[0]), session.logit_lens(PROMPTS[0], edits=[mia.Add(draw, layers=[1])])
    assert torch.equal(moved.entropy[0, :2], plain.entropy[0, :2]) and not torch.equal(moved.entropy[0, 2], plain.entropy[0, 2])
    assert not moved.kl[0, -1].any()
    logits, cache = session.run_with_cache(PROMPTS[0], edits=[mia.Add(draw, layers=[3], point="final_norm")])
    with session.steer(mia.Add(draw, layers=[3], point="final_norm")):
        after = session.logit_lens(PROMPTS[0])
        with pytest.raises(EditError, match="final norm's output"):
            session.direct_logit_attribution(PROMPTS[0], RIGHT)
    assert torch.equal(after.followed[0, :, 0], logits[0].argmax(-1)) and (after.kl[0, -1, 1:] > 0).all()
    assert torch.equal(cache.logit_lens().kl, after.kl)
    with pytest.raises(EditError, match="final norm's output"):
        cache.logit_attrs(cache.decompose_resid(), RIGHT)
    found = session.direct_logit_attribution(PROMPTS[0], RIGHT, WRONG, edits=[mia.Add(draw, layers=[1])])
    logits, _ = session.run_with_cache(PROMPTS[0], edits=[mia.Add(draw, layers=[1])])
    assert found.labels[-1] == "edits" and abs(found.values[-1]) > 0.01
    assert abs(found.net - float(logits[0, -1, RIGHT] - logits[0, -1, WRONG])) < 1e-4 * found.total


@pytest.mark.parametrize("family", ["llama"], indirect=True, scope="module")
def test_positions_and_layers_are_chosen_at_the_source(session: mia.Session) -> None:
    whole = session.logit_lens(PROMPTS)
    some = session.logit_lens(PROMPTS, layers=[2, "embed", -1], top_k=2, at=[-1, 1])
    assert some.layers == ("embed", 2, 3) and some.positions == tuple((len(ids) - 1, 1) for ids in whole.tokens)
    for i in range(2):
        torch.testing.assert_close(some.entropy[i], whole.entropy[i][[0, 3, 4]][:, list(some.positions[i])])
    assert some.top.shape == (2, 3, 2, 2)
    assert session.logit_lens(PROMPTS[0], layers=1, at=-1).top.shape == (1, 1, 1, 5)
    assert len(some.data) == 2 * 2 * 3 and some.data[0]["token"] == "t"
    assert len(some.figure.data[0].z) == 3
    assert "prompt 1" in some._repr_html_() and "KL at the last" in repr(some)


@pytest.mark.parametrize("family", ["llama"], indirect=True, scope="module")
def test_what_cannot_be_is_said(session: mia.Session, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="the 999 likeliest tokens were asked for; the model knows 320"):
        session.logit_lens("a", top_k=999)
    with pytest.raises(PromptError, match="320 is no token id"):
        session.logit_lens("a", tokens=320)
    with pytest.raises(PromptError, match="names no token"):
        session.logit_lens("a", tokens=[])
    with pytest.raises(PointError, match="no layer was asked for"):
        session.logit_lens("a", layers=[])
    torch.save({"0.weight": torch.zeros(2, 2)}, tmp_path / "params.pt")
    with pytest.raises(MiaError, match="of 1 layers and width 2"):
        session.logit_lens("a", tuned=mia.TunedLens.load(tmp_path))
    with pytest.raises(PromptError, match="of one prompt, not of 2"):
        session.direct_logit_attribution(["a", "b"], RIGHT)
    with pytest.raises(PromptError, match="no int"):
        session.direct_logit_attribution("a", RIGHT, at=[0])
    _, cache = session.run_with_cache("a", ["resid_post"])
    with pytest.raises(PointError, match=r"z\.0 is not tapped"):
        cache.stack_head_results()


@pytest.mark.parametrize("family", ["llama"], indirect=True, scope="module")
def test_an_engine_in_its_own_process_gives_the_same(session: mia.Session, open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    d, draw = session.d_model, torch.Generator().manual_seed(0)
    torch.save({f"{i}.weight": torch.randn(d, d, generator=draw) / d for i in range(session.n_layers)}, tmp_path / "params.pt")
    tuned = mia.TunedLens.load(tmp_path)

    def results(session: mia.Session) -> list[Tensor]:
        lens = session.logit_lens(PROMPTS, tuned=tuned)
        _, cache = session.run_with_cache(PROMPTS)
        return [lens.kl, lens.top_log_probabilities, cache.stack_head_results(), cache.head_bias(0),
                session.direct_logit_attribution(PROMPTS[0], RIGHT, heads=True).values]

    here = results(session)
    for ours, theirs in zip(here, results(open_tiny("llama", in_process=False, points=POINTS, **OPTIONS))):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5, equal_nan=True)
