"""The embedded model, for real: text, steering of mood, a control that does nothing, and clean requests untouched."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

import mia_lab as mia
from mia_lab import demo
from mia_lab.analysis.controls import matched_random

pytestmark = pytest.mark.full

LAYER, COEFF, DRAWS = 9, 0.2, 3


@pytest.fixture(scope="module")
def session() -> Iterator[mia.Session]:
    with mia.Session("demo", max_model_len=512, max_num_seqs=64) as session:
        yield session


@pytest.fixture(scope="module")
def vector(session: mia.Session) -> mia.Vector:
    return session.vector(demo.sentiment_pairs())


def sentiment(session: mia.Session, edit: mia.Add) -> np.ndarray:
    """VADER compound of the continuation of each held-out prompt."""
    judge = SentimentIntensityAnalyzer()
    texts = session.generate(demo.sentiment_prompts(), max_tokens=32, edits=edit)
    return np.array([judge.polarity_scores(text)["compound"] for text in texts])


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of a paired mean."""
    draws = np.random.default_rng(0).choice(differences, (10_000, len(differences)))
    low, high = np.percentile(draws.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def test_bos_is_added_and_the_text_makes_sense(session: mia.Session) -> None:
    assert session.to_tokens("The")[0, 0] == session.tokenizer.bos_token_id
    assert session.generate("The capital of France is", max_tokens=8) == " the capital of the country of France."


def test_mood_moves_both_ways(session: mia.Session, vector: mia.Vector) -> None:
    base = sentiment(session, mia.Add(vector[LAYER], 0.0))
    up, down = (sentiment(session, mia.Add(vector[LAYER], sign * COEFF)) for sign in (1, -1))
    low, high = interval(up - down)
    print(f"sentiment: base {base.mean():+.2f}, +c {up.mean():+.2f}, -c {down.mean():+.2f}, "
          f"paired difference {np.mean(up - down):.2f} [{low:.2f}, {high:.2f}] on {len(up)} prompts")
    assert len(up) >= 30
    assert low > 0
    assert down.mean() < base.mean() < up.mean()


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_covariance_matched_random_vector_does_not_move_it(session: mia.Session, seed: int) -> None:
    control = matched_random(session, seed=seed)[LAYER]
    up, down = (sentiment(session, mia.Add(control, sign * COEFF)) for sign in (1, -1))
    low, high = interval(up - down)
    print(f"control {seed}: paired difference {np.mean(up - down):.2f} [{low:.2f}, {high:.2f}]")
    assert low < 0 < high


def test_clean_requests_beside_steered_ones_keep_every_bit(session: mia.Session, vector: mia.Vector) -> None:
    prompts = demo.sentiment_prompts()[:12]
    options = dict(max_tokens=16, ignore_eos=True, logprobs=1)

    def run(edits: list | None) -> list[tuple]:
        session.reset_prefix_cache()
        outputs = session.completions(prompts, edits=edits, **options)
        return [(tuple(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]

    half = [[mia.Add(vector[4:12], 0.1)] if i % 2 else None for i in range(len(prompts))]
    plain, mixed = run(None), run(half)
    assert mixed[::2] == plain[::2]
    assert all(a != b for a, b in zip(mixed[1::2], plain[1::2]))


def test_the_stream_is_hugging_faces(session: mia.Session) -> None:
    """Section 5's gate for bfloat16 on the real model, against float32."""
    from transformers import AutoModelForCausalLM

    from mia_lab.models import demo_model

    text = demo.sentiment_pairs()[0]["positive"]
    _, cache = session.run_with_cache(text)
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    with torch.no_grad():
        states = model(session.to_tokens(text), output_hidden_states=True).hidden_states
    for layer in (0, 5, 9, 16):
        ours, theirs = cache["resid_post", layer][0, 1:].float(), states[layer + 1][0, 1:]
        spread = (theirs - theirs.mean(0)).norm()
        assert (ours - theirs).norm() / spread < 6.6e-2


def test_the_report_is_self_contained(tmp_path: Path, session: mia.Session) -> None:
    from mia_lab.show.html import page

    html = page("report", *demo._report(session, lambda line: None))
    assert html.count("<tr") >= 40
    assert "http" not in html
    assert len(html) < 300_000
