"""Monitors on an engine: the numbers that come back are those that a gate reads, or projections of the rows."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served import draw

import mia_lab as mia
from mia_lab.bundles.model import ModelFacts
from mia_lab.points import Point
from mia_lab.serve.asking import Asked, Captured, resolve, takes
from mia_lab.serve.catalogue import Catalogue
from mia_lab.serve.policy import EVERYONE, Named

OPTIONS = dict(points=["resid_post"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=4, block_size=32, enforce_eager=True)
PROMPT = "one two three four five"


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **OPTIONS)


@pytest.fixture
def catalogue(session: mia.Session, tmp_path: Path) -> Catalogue:
    d = session.d_model
    probe = mia.Probe(draw(d, seed=1), 1, bias=0.5, mean=draw(d))
    edits = {"push": [mia.Add(draw(d), 2.0, [1])], "gated": [mia.Add(draw(d), 1.0, [2], when=mia.Gate(probe, above=-1e6))]}
    for name, mine in edits.items():
        mia.export(mine, tmp_path / "bundles" / f"{name}.steer.zip", session=session, prompts=[PROMPT], max_tokens=2)
    found = Catalogue.read(tmp_path, ModelFacts.of(session))
    assert not found.quarantined and sorted(found.bundles) == ["gated", "push"]
    return found


@pytest.mark.full
def test_readings_are_those_of_the_rows(session: mia.Session, catalogue: Catalogue) -> None:
    asked = Asked((Named("push", 0.5), Named("gated")), monitors=("push", "gated"), captures=(Captured("resid_post", (0,), "all"),))
    resolved, read = resolve(asked, catalogue, EVERYONE), session._read([PROMPT])
    rows, reduce, matrices, labels = takes(resolved, session._context(read, 0))
    outputs, source = session._run(read, [list(resolved.edits)], dict(max_tokens=1, temperature=0.0), [rows], reduce, matrices)
    edits = [mia.Add(draw(session.d_model), 1.0, [1]), *catalogue.bundles["gated"].bundle]
    expected = {before: session.capture([PROMPT], at=None, edits=edits, before=before).get()[0].float() for before in (False, True)}
    assert [(one.name, one.layer, one.before) for one in labels] == [("push", 1, False), ("gated", 1, True)]
    push, probe = torch.nn.functional.normalize(draw(session.d_model), dim=0), catalogue.bundles["gated"].bundle[0].when.probes[0]
    for label, found in zip(labels, (expected[False][1] @ push, torch.tensor([probe.read(row) for row in expected[True][1]]))):
        at, values = source.rows(Point("resid_post", 1), [0], label.before, ((2,), torch.float32))[0]
        assert at.tolist() == list(range(len(read.ids[0])))
        torch.testing.assert_close(values[:, label.column], found, rtol=0, atol=1e-3)
    plain = source.rows(Point("resid_post", 0), [0], False, ((session.d_model,), torch.float32))[0][1]  # captured beside, whole
    torch.testing.assert_close(plain, expected[False][0], rtol=0, atol=1e-5)
    assert outputs[0].outputs[0].token_ids
