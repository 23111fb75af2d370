"""Lens, heads and attribution on the embedded model: against Hugging Face in float64, and in the bfloat16 that it is used in."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mia_lab as mia
from mia_lab.models import resolve
from parity.test_lens import End

pytestmark = pytest.mark.full
POINTS = [("resid_pre", 0), "z", "attn_out", "mlp_out", "resid_post"]
PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def session(request: pytest.FixtureRequest) -> Iterator[mia.Session]:
    with mia.Session("demo", dtype=request.param, points=POINTS, max_model_len=128, max_num_seqs=4, enforce_eager=True) as session:
        yield session


def test_each_layer_is_hugging_face_s(session: mia.Session) -> None:
    lens = session.logit_lens(PROMPT, tokens=" Paris")
    assert lens.texts[int(lens.top[0, -1, -1, 0])] == " Paris" and lens.ranks[0, -1, -1].tolist() == [1]
    assert not lens.kl[0, -1].any() and lens.kl[0, 1, -1] > 50  # the first block writes in another basis
    if session.dtype != torch.float32:
        return
    end = End(resolve("demo"))
    _, streams = end.run(session.to_tokens(PROMPT)[0].tolist())
    said, worst = end.says(streams[-1]), 0.0
    for row, stream in enumerate(streams):
        expected = end.says(stream)
        values = expected.gather(1, lens.top[0, row])
        worst = max(worst, float((lens.top_log_probabilities[0, row] - values).abs().max()) if row > 1 else 0.0)
        near = dict(rtol=0, atol=max(1e-4, 1e-6 * float(expected.amax() - expected.amin())))  # early logits span thousands
        torch.testing.assert_close(lens.top_log_probabilities[0, row].double(), values, **near)
        torch.testing.assert_close(expected.topk(5).values, values, **near)
        torch.testing.assert_close(lens.kl[0, row].double(), (said.exp() * (said - expected)).sum(-1), **near)
        torch.testing.assert_close(lens.entropy[0, row].double(), -(expected.exp() * expected).sum(-1), **near)
    print(f"lens: worst log-probability difference after block 1 or later {worst:.1e}")


@pytest.mark.parametrize("heads", [False, True])
def test_an_attribution_sums_to_the_model_s_own_difference(session: mia.Session, heads: bool) -> None:
    found = session.direct_logit_attribution(PROMPT, " Paris", " Rome", heads=heads)
    logits, _ = session.run_with_cache(PROMPT, ["resid_post"])
    right, wrong = (session.tokenizer.encode(text, add_special_tokens=False)[0] for text in (" Paris", " Rome"))
    own = float(logits[0, -1, right] - logits[0, -1, wrong])
    print(f"{session.dtype}: net {found.net:.5f}, the model's {own:.5f}, sum of sizes {found.total:.3f}, rest {found.rest:.1e}")
    rounded = session.dtype != torch.float32  # logits near 20 are then multiples of 1/8
    assert abs(found.net - own) < (0.25 if rounded else 1e-4 * found.total)
    assert abs(found.rest) < (1e-3 if rounded else 1e-6) * found.total
    assert found.total > 3 * abs(found.net)  # much of it cancels


def test_heads_sum_to_what_attention_adds(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPT)
    stack = cache.stack_head_results()
    for layer, mine in enumerate(stack.chunk(session.n_layers)):
        out = cache["attn_out", layer].get().float()[0]
        error = float(((mine.sum(0)[0] - out).norm(dim=-1) / out.norm(dim=-1)).max())
        rounded = 3 * torch.finfo(session.dtype).eps / 2  # the projection, the norm's weight and its result, half a unit each
        assert error < (1e-6 if session.dtype == torch.float32 else rounded)
