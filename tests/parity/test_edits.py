"""Every edit at every kind of point, every gate and schedule, against Hugging Face, in one mixed batch each."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.points import Point
from parity import scenario, zoo

pytestmark = pytest.mark.full


@pytest.fixture(params=["llama", "gemma3", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_edit_at_every_point(session: mia.Session, model: Any) -> None:
    animals = zoo.Zoo(session)
    editable = sorted(session._submit.model.editable)
    kinds = {p.kind: p for p in editable if p.layer in (1, 0)} | {p.kind: p for p in editable if p.kind == "final_norm"}
    every = [edit for point in kinds.values() for edit in animals.edits(point).values()]
    assert len(kinds) >= 9
    scenario.check(session, model, [scenario.Request(ids, [edit]) for ids, edit in zip(scenario.prompts(len(every)), every)])


def test_gates_and_schedules(session: mia.Session, model: Any) -> None:
    animals = zoo.Zoo(session)
    place = Point("resid_post", 2)
    edits = []
    for over in ("row", "prompt_mean", "prompt_max", "prompt_last", "since"):
        for rule in ("sum", "any", "all"):
            for side in ("above", "below"):
                for cosine in (False, True):
                    if over == "prompt_mean" and rule != "sum":
                        continue
                    (one, a), (two, b) = animals.probe(Point("resid_post", 0), cosine), animals.probe(Point("resid_mid", 1), cosine)
                    level = float((a + b).median()) if rule == "sum" else float(torch.cat([a, b]).median())
                    gate = mia.Gate([one, two], rule=rule, over=over, **{side: level})
                    edits.append([mia.Add(animals.vector(place), 1.0, layers=[place.layer], when=gate)])
    edits.append([animals.edits(place, when=mia.After([7, 9, *range(100, 160)]))["clamp"]])
    edits.append([animals.edits(place, schedule=mia.Decay(5.0))["add"],
                  animals.edits(place, schedule=mia.Decay(3), where=mia.generated())["blend"]])
    edits.append([animals.edits(Point("resid_post", 0), where=mia.generated(3))["replace"]])
    outcomes = scenario.check(session, model, [scenario.Request(ids, mine) for ids, mine in zip(scenario.prompts(len(edits), 1), edits)])
    assert len({tuple(o.ids[-12:]) for o in outcomes}) > 10


def test_edits_compose_in_the_stated_order(session: mia.Session, model: Any) -> None:
    animals = zoo.Zoo(session)
    found = list(animals.edits(Point("resid_post", 1)).values())
    ids = scenario.prompts(1)[0]
    batch = [scenario.Request(ids, found[i : i + 4]) for i in range(len(found) - 4)]
    batch += [scenario.Request(ids, found[i : i + 4][::-1]) for i in range(len(found) - 4)]
    outcomes = scenario.check(session, model, batch)
    assert not torch.allclose(outcomes[0].rows[Point("resid_post", 1)], outcomes[len(found) - 4].rows[Point("resid_post", 1)])


def test_rows_of_another_request_by_position(session: mia.Session, model: Any) -> None:
    animals = zoo.Zoo(session)
    ids = scenario.prompts(4, 3)
    batch = [scenario.Request(ids[0], [animals.aligned(Point("resid_post", 1), 3, 5)]),
             scenario.Request(ids[1], [animals.aligned(Point("z", 2), 0, 40, blend=0.5)]),
             scenario.Request(ids[2], [animals.aligned(Point("resid_mid", 0), len(ids[2]) - 2, 6, where=mia.everywhere())]),
             scenario.Request(ids[3], [animals.aligned(Point("mlp_out", 3), 2, 60, where=mia.prompt() & ~mia.positions([4, 5]))])]
    scenario.check(session, model, batch)
