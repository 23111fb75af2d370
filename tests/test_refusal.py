"""The choice of a refusal direction: its scores are Hugging Face's under the same edits, and the rules of the choice hold."""
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from parity import reference

import mia_lab as mia
from mia_lab.analysis.pairs import Pairs
from mia_lab.analysis.refusal import RefusalSearch, log_odds, passing
from mia_lab.errors import EditError
from mia_lab.points import Point

PLACES, LAYERS = (-2, -1), (0, 1, 2, 3, 4)


def found(bypass: torch.Tensor, induce: torch.Tensor, kl: torch.Tensor) -> RefusalSearch:
    passes = passing(LAYERS, 5, induce, kl, 0.1, 0.2)
    directions = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    return RefusalSearch(LAYERS, PLACES, directions, torch.arange(1.0, 6.0), bypass, induce, kl, passes, 1.0, -4.0,
                         (Point("resid_post", 0), Point("resid_post", 1), Point("attn_out", 1)), None)


def test_the_lowest_bypass_wins_among_those_that_pass_every_rule() -> None:
    bypass, induce, kl = torch.zeros(5, 2), torch.ones(5, 2), torch.full((5, 2), 0.05)
    bypass[4, 0] = -9.0  # in the last fifth
    bypass[2, 0], kl[2, 0] = -8.0, 0.11
    bypass[1, 1], induce[1, 1] = -7.0, 0.0
    bypass[3, 1] = -6.0
    search = found(bypass, induce, kl)
    assert search.best == (3, -1) and int(search.passes.sum()) == 6
    torch.testing.assert_close(search.vector.natural.rows[0], search.directions[3, 1])
    assert search.vector.layers == (3,) and float(search.vector.rows.norm()) == pytest.approx(4.0)
    assert [(e.point, list(e.layers)) for e in search.edits] == [("resid_post", [0, 1]), ("attn_out", [1])]
    assert sum(r["passes"] for r in search.data) == 6 and "6 of 10 directions pass" in repr(search) and "<table" in search._repr_html_()


def test_where_none_passes_it_says_why() -> None:
    search = found(torch.zeros(5, 2), torch.full((5, 2), -3.0), torch.full((5, 2), 0.05))
    with pytest.raises(EditError, match=r"at -3\.00 at most .* 0\.05 nats at least. Unsteered they are \+1\.00 for harmful"):
        _ = search.best
    assert "0 of 10" in repr(search)


def test_log_odds_are_of_the_probability_of_any_of_the_tokens() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    p = logits.softmax(-1)[:, [3, 7]].sum(-1)
    torch.testing.assert_close(log_odds(logits, [3, 7]).float(), (p / (1 - p)).log(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_scores_are_those_of_hugging_face_under_the_same_edits(open_tiny: Callable[..., Any], models: Path) -> None:
    s = open_tiny("llama", points=["resid_pre", "resid_mid", "resid_post"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8,
                  block_size=32, enforce_eager=True)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 320, (10, 2, 9), generator=draw).tolist()
    pairs = Pairs.of([{"positive": [1, *a, 70], "negative": [1, *b, 70], "group": f"g{i}"} for i, (a, b) in enumerate(rows)])
    says, layers = [50, 51, 52], [0, 2]
    search = s.refusal_direction(pairs, at=PLACES, says=says, layers=layers, max_kl=math.inf)
    fit, select = pairs.split(seed=0).fit, pairs.split(seed=0).select
    model = tiny.load(tiny.build("llama", models)).double()
    run = lambda ids, edits=(): reference.run(model, list(ids), [Point("resid_post", layer) for layer in layers], edits)  # noqa: E731
    sides = [[run(ids)[1] for ids in side] for side in (fit.positive, fit.negative)]
    for i, layer in enumerate(layers):
        for j, place in enumerate(PLACES):
            means = [torch.stack([values[Point("resid_post", layer)][place] for values in side]).mean(0) for side in sides]
            direction = means[0] - means[1]
            torch.testing.assert_close(search.directions[i, j], direction, rtol=0, atol=1e-5 * float(direction.norm()))
            out = [mia.Ablate(direction, layers=range(4), point=kind) for kind in ("resid_pre", "resid_mid", "resid_post")]
            score = lambda prompts, edits: float(log_odds(  # noqa: E731
                torch.stack([run(ids, edits)[0][-1] for ids in prompts]), says).mean())
            assert float(search.bypass[i, j]) == pytest.approx(score(select.positive, out), abs=1e-4)
            assert float(search.induce[i, j]) == pytest.approx(score(select.negative, [mia.Add(direction, 1.0, [layer])]), abs=1e-4)
            p, q = (torch.stack([run(ids, edits)[0][-1] for ids in select.negative]).log_softmax(-1) for edits in ((), out))
            assert float(search.kl[i, j]) == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=1e-4)
    assert search.harmful == pytest.approx(score(select.positive, []), abs=1e-4)
    assert search.harmless == pytest.approx(score(select.negative, []), abs=1e-4)
    for arguments, says_what in ((dict(at=(0,)), "from the prompt's end"), (dict(says=("two tokens",)), "10 tokens of this model"),
                                 (dict(says=()), "names no token")):
        with pytest.raises(EditError, match=says_what):
            s.refusal_direction(pairs, **arguments)
