"""The stream taken apart: the parts sum to it, and what they add to a logit sums to the model's own logit."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.errors import EditError, MissingRowsError, PointError, PromptError

pytestmark = pytest.mark.full
OPTIONS = dict(points=["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"], max_model_len=96, max_num_batched_tokens=64,
               max_num_seqs=8, block_size=32, enforce_eager=True)
PROMPTS = ["one prompt", "and another, which is longer"]
FAMILIES = ["llama", "gemma3", "gemma2", "gpt2", "qwen3moe", "olmo2"]  # plain, normed branches, a soft cap, LayerNorm, experts, post-norm


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def session(open_tiny: Callable[..., Any], family: str) -> mia.Session:
    return open_tiny(family, **OPTIONS)


def real(cache: mia.ActivationCache, values: torch.Tensor) -> torch.Tensor:
    """Rows at positions that exist."""
    return values[:, cache.mask] if values.dim() == 4 else values[cache.mask]


def reference(family: str, models: Path, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hugging Face's logits, with any soft cap undone, and its stream before each block, in float64."""
    model = tiny.load(tiny.build(family, models)).double()
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = out.logits[0]
    return cap * torch.atanh(logits / cap) if cap else logits, [h[0] for h in out.hidden_states[:-1]]


def test_the_parts_sum_to_the_stream(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    for layer in (None, 1, session.n_layers):
        stack, labels = cache.decompose_resid(layer, return_labels=True)
        last = session.n_layers if layer is None else layer
        assert len(labels) == 1 + 2 * last and labels[:3] == ["embed", "0_attn_out", "0_mlp_out"]
        stream = cache["resid_post", last - 1].get().float()
        torch.testing.assert_close(real(cache, stack.sum(0)), real(cache, stream), rtol=1e-5, atol=1e-5 * float(real(cache, stream).std()))
    mid, labels = cache.decompose_resid(1, mlp_input=True, return_labels=True)
    assert labels[-1] == "1_attn_out"
    if ("resid_mid", 1) in cache:
        torch.testing.assert_close(real(cache, mid.sum(0)), real(cache, cache["resid_mid", 1].get().float()), rtol=1e-4, atol=1e-4)
    branches = [cache.decompose_resid(mode=mode, incl_embeds=False) for mode in ("attn", "mlp")]
    assert [len(b) for b in branches] == [session.n_layers] * 2
    torch.testing.assert_close(real(cache, sum(b.sum(0) for b in branches)), real(cache, cache.decompose_resid(incl_embeds=False).sum(0)))


def test_the_accumulated_stream_is_hugging_face_s(session: mia.Session, family: str, models: Path) -> None:
    _, cache = session.run_with_cache(PROMPTS[0])
    stack, labels = cache.accumulated_resid(return_labels=True)
    assert labels == [f"{i}_pre" for i in range(session.n_layers)] + ["final_post"]
    _, hidden = reference(family, models, session.to_tokens(PROMPTS[0])[0].tolist())
    for ours, theirs in zip(stack, hidden):
        assert float((ours[0] - theirs).norm() / theirs.norm()) < 1e-5
    _, with_mid = cache.accumulated_resid(2, incl_mid=True, mlp_input=True, return_labels=True) if ("resid_mid", 2) in cache else (0, None)
    assert with_mid in (None, ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid"])


def test_what_the_parts_add_sums_to_the_logit_and_to_the_difference(session: mia.Session, family: str, models: Path) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    stack = cache.decompose_resid()
    right, wrong = [7, 30], 12
    for tokens, other in ((right, None), (right, wrong)):
        total = cache.logit_attrs(stack, tokens, other).sum(0) + cache.logit_bias(tokens, other)[:, None]
        for i, prompt in enumerate(PROMPTS):
            logits, _ = reference(family, models, session.to_tokens(prompt)[0].tolist())
            expected = logits[:, right[i]] - (0.0 if other is None else logits[:, wrong])
            torch.testing.assert_close(total[i, : len(expected)].double(), expected, rtol=1e-4, atol=1e-4 * float(logits.std()))
    last = cache.logit_attrs(cache.decompose_resid(pos_slice=2), right, pos_slice=2)
    torch.testing.assert_close(last, cache.logit_attrs(stack, right)[..., 2], rtol=1e-5, atol=1e-5)


def test_the_scale_is_that_of_the_whole_stream(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    stack = cache.decompose_resid()
    scaled = cache.apply_ln_to_stack(stack)
    torch.testing.assert_close(real(cache, scaled), real(cache, cache.decompose_resid(apply_ln=True)))
    whole = real(cache, scaled.sum(0))
    torch.testing.assert_close(whole.square().mean(-1), torch.ones(len(whole)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_stack_of_other_positions_is_refused(session: mia.Session) -> None:
    """Of one prompt, each of these would broadcast to numbers of the wrong scale."""
    _, cache = session.run_with_cache(PROMPTS[0])
    last, whole = cache.decompose_resid(pos_slice=-1), cache.decompose_resid()
    for stack, place in ((last, None), (whole, -1), (whole[0], None), (whole[:, :, :1], None)):
        with pytest.raises(PointError, match="pos_slice= that it was made with"):
            cache.logit_attrs(stack, 7, pos_slice=place)
        with pytest.raises(PointError, match="pos_slice= that it was made with"):
            cache.apply_ln_to_stack(stack, pos_slice=place)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_what_was_read_before_edits_is_not_added_up(session: mia.Session) -> None:
    push = mia.Add(torch.ones(session.d_model), 1.0, layers=[1])
    _, clean = session.run_with_cache(PROMPTS, before=True)
    clean.decompose_resid()  # without edits there is no before and after
    _, mixed = session.run_with_cache(PROMPTS, before=True, edits=[push])
    for add_up in (mixed.decompose_resid, lambda: mixed.logit_attrs(clean.decompose_resid(), 5)):
        with pytest.raises(EditError, match="before the edits"):
            add_up()
    _, after = session.run_with_cache(PROMPTS, edits=[push])
    after.decompose_resid()


def test_what_cannot_be_is_said(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPTS)
    stack = cache.decompose_resid()
    with pytest.raises(PointError, match='"all", "attn" or "mlp"'):
        cache.decompose_resid(mode="heads")
    with pytest.raises(PointError, match="one for each of the 2 prompts; these are 3"):
        cache.logit_attrs(stack, [1, 2, 3])
    with pytest.raises(PromptError, match="give one token, or its id"):
        cache.logit_attrs(stack, "several words of text")
    for token in (-1, 99_999):
        with pytest.raises(PromptError, match="is no token id of this model"):
            cache.logit_attrs(stack, token)
        with pytest.raises(PromptError, match="is no token id of this model"):
            session.direct_logit_attribution(PROMPTS[0], token)
    for take in (cache.decompose_resid, cache.accumulated_resid):
        with pytest.raises(PointError, match="layer=-2 is no block to stop before"):
            take(-2)
    one = session.to_str_tokens("b")[-1]
    by_text, by_id = (cache.logit_attrs(stack, token).nan_to_num() for token in (one, int(session.to_tokens("b")[0, -1])))
    assert torch.equal(by_text, by_id)
    _, part = session.run_with_cache(PROMPTS, ["resid_post"])
    with pytest.raises(PointError, match=r"resid_pre\.0"):
        part.decompose_resid()
    cache.fetch()
    assert torch.equal(cache.decompose_resid().nan_to_num(), stack.nan_to_num())
    with pytest.raises(MissingRowsError, match="no longer holds"):
        cache.logit_attrs(stack, 1)
