"""Sweeps of the embedded model, for real: vectors of mood and of formality hold on prompts that nobody chose on, placebos do not.

Figures are printed with `pytest -s`.
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import mia_lab as mia
from mia_lab.analysis.sweep.items import Lab
from mia_lab.analysis.sweep.measuring import measure
from mia_lab.analysis.sweep.metrics import Metric
from mia_lab.analysis.sweep.settings import BASE, STEERED, Setting
from mia_lab.analysis.sweep.trials import Job, run

pytestmark = pytest.mark.full

GLAD = [" happy", " wonderful", " beautiful", " great", " lovely", " delighted"]
GLOOMY = [" sad", " terrible", " horrible", " awful", " miserable", " angry"]
FORMAL = [" therefore", " regarding", " however", " shall", " require", " request", " regret", " assist", " respectfully", " additionally"]
INFORMAL = [" gonna", " kinda", " stuff", " cool", " okay", " yeah", " guys", " awesome", " wanna", " pretty"]
GUARDS = [mia.kl(3), mia.perplexity(3)]


@pytest.fixture(scope="module")
def session() -> Iterator[mia.Session]:
    with mia.Session("demo", max_model_len=256, max_num_seqs=64, enforce_eager=True) as session:
        yield session


def check_that_it_holds(session: mia.Session, name: str, layers: list[int], metric: Metric) -> mia.Choice:
    """Fit on the fit split, choose on the select prompts, and look at the report on the holdout."""
    fit = mia.Pairs.of(mia.dataset(f"{name}_pairs")).split().fit
    swept = session.sweep(session.vector(fit)[layers], [0.1, 0.2], mia.dataset(f"{name}_prompts"), [metric], guards=GUARDS,
                          placebos=10, placebo_prompts=4, pairs=fit, progress=False)
    choice = swept.best(questions=6)
    print(f"\n{name}\n{swept}\n{choice}\n")
    assert swept.complete and len(swept.table) == 4 * len(layers)
    for r in swept.table:
        turned = next(o for o in swept.table if (o.setting.layer, o.setting.coeff) == (r.setting.layer, -r.setting.coeff))
        assert r.effect.mean * turned.effect.mean < 0  # a sign flip turns the effect round
    assert choice and choice.looks == 1 and choice.setting.coeff > 0
    assert choice.effect.low > 0.5 and choice.flipped.high < -0.5
    assert choice.perplexity_ratio.mean <= 1.1
    assert choice.random.low < 0 < choice.random.high or abs(choice.random.mean) < 0.1
    assert choice.effect.low > 2 * max(choice.random.limit, abs(choice.shuffled.mean))
    return choice


def test_a_mood_vector_holds_and_its_placebos_do_not(session: mia.Session) -> None:
    choice = check_that_it_holds(session, "sentiment", [9], mia.token_odds(GLAD, GLOOMY))
    prompts = [row["prompt"] for row in mia.dataset("sentiment_prompts")][:4]
    assert session.generate(prompts, edits=choice.edit, max_tokens=8) != session.generate(prompts, max_tokens=8)


def test_a_formality_vector_holds_and_its_placebos_do_not(session: mia.Session) -> None:
    check_that_it_holds(session, "formality", [10], mia.token_odds(FORMAL, INFORMAL))


def test_the_sentiment_reference_row(session: mia.Session) -> None:
    """Block 9, mean difference of all pairs: more than 3 nats at a KL under 0.15, both signs alike, the null within 1 nat."""
    v = session.vector(mia.dataset("sentiment_pairs"))
    swept = session.sweep(v[9], [0.2, 0.25], mia.dataset("sentiment_prompts"), [mia.token_odds(GLAD, GLOOMY)], guards=[mia.kl(4)],
                          placebos=12, placebo_prompts=4, progress=False)
    at = {row["sign"]: row["effect"] for row in swept.at_kl(0.12)}
    print(f"\n{swept}\nat a KL of 0.12: {at}\n")
    assert at[1] > 3 and at[-1] < -3 and abs(at[1] + at[-1]) < 0.2 * (at[1] - at[-1])
    assert all(r.random.limit < 1 and abs(r.random.mean) < 0.5 for r in swept.table)


def test_samples_of_the_base_give_the_kl(session: mia.Session) -> None:
    """On tokens drawn from the base, the mean of log p_base / p_steered is KL(base || steered), within two standard errors."""
    v, metric = session.vector(mia.dataset("sentiment_pairs")), mia.kl(3)
    lab = Lab(session, (), "select", 1, (None,))
    edits = (mia.Add(v[9], 0.2),)
    settings = [Setting("base", BASE), Setting("steered", STEERED, edits)]
    exact = float(measure(lab, settings, [metric], 0.0, False).values["kl"][1].mean())
    asks = [ask for item in metric.items(lab) for ask in metric.asks(lab, item, None)]
    streams = [torch.cat([o.stream for o in run(session, [Job(ask, mine) for ask in asks])]) for mine in ((), edits)]
    base, steered = (session.unembed(rows).log_softmax(-1) for rows in streams)
    drawn = torch.multinomial(base.exp(), 40, replacement=True, generator=torch.Generator().manual_seed(0))
    ratios = (base.gather(1, drawn) - steered.gather(1, drawn)).double()  # [row draw]
    spread = float(ratios.std(1).square().sum().sqrt()) / 40**0.5 / len(ratios)  # rows are fixed, so only draws vary
    print(f"\nKL {exact:.4f}, sampled {float(ratios.mean()):.4f} +- {spread:.4f}\n")
    assert abs(float(ratios.mean()) - exact) < 2 * spread and exact > 10 * spread / 2


def test_generated_moods_change_as_the_probabilities_do(session: mia.Session) -> None:
    """VADER on generated texts, in one sweep with repetition and a Python function of the texts."""
    fit = mia.Pairs.of(mia.dataset("sentiment_pairs")).split().fit
    prompts = mia.dataset("sentiment_prompts")
    swept = session.sweep(session.vector(fit)[9], [0.2], prompts, [mia.sentiment(), mia.repeats(), mia.scored(len)], guards=(),
                          placebos=0, max_tokens=16, progress=False)
    print(f"\n{swept}\n")
    down, up = swept.table
    assert up.effect.low > 0 > down.effect.mean
    assert up.setting.coeff > 0 and len(swept.texts[0]) == len(swept.groups["sentiment"])
    assert np.isfinite([row["repeats"] for row in swept.data]).all()
