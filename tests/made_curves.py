"""Results that are drawn as curves and scatters, from made-up numbers: no engine."""
from __future__ import annotations

from dataclasses import replace

import made_up
import torch

import mia_lab as mia
from mia_lab.analysis.judging import Separability, separability
from mia_lab.analysis.projection import Projection, project
from mia_lab.analysis.reft import ReftFit
from mia_lab.analysis.refusal import RefusalSearch
from mia_lab.analysis.sweep.choice import Choice
from mia_lab.analysis.sweep.effects import Null
from mia_lab.analysis.sweep.statistics import Estimate
from mia_lab.analysis.vectors import Vector

LAYERS = (2, 5, 9)


def sides(n: int = 12, layers: int = 3, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of both sides, apart along a direction of their own at each layer."""
    draw = torch.Generator().manual_seed(3)
    apart = torch.randn(layers, d, generator=draw)
    rows = torch.randn(2, n, layers, d, generator=draw) * torch.linspace(0.3, 2.0, d)
    return rows[0] + apart, rows[1] - apart


def vector(layers: tuple[int, ...] = LAYERS) -> Vector:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(len(layers), 6, generator=draw)
    return Vector("resid_post", layers, rows, rows.norm(dim=-1) / 3, rows.norm(dim=-1), "mean_diff")


def judged(groups: int = 6) -> Separability:
    positive, negative = sides()
    return separability(positive, negative, vector().rows, LAYERS, [f"g{i % groups}" for i in range(12)], draws=50)


def projection(layers: tuple[int, ...] = LAYERS, n: int = 12) -> Projection:
    positive, negative = sides(n, len(layers))
    texts = [(f"I love <b>{i}</b>.", f"I hate {i}.") for i in range(n)]
    return project(positive, negative, positive.mean(0) - negative.mean(0), "resid_post", layers, "mean difference", texts)


def reft() -> ReftFit:
    return ReftFit(mia.Affine(torch.ones(1, 4), torch.ones(1, 4), torch.zeros(1), layers=[3]), 3, 1, 5, (2.5, 1.5, 0.75), 2.25, 0.5, 0.5)


def refusal() -> RefusalSearch:
    bypass = torch.tensor([[1.0, -0.5], [-2.0, 0.25], [0.5, 3.0]])
    return RefusalSearch(LAYERS, (-1, -2), torch.ones(3, 2, 4), torch.ones(3), bypass, -bypass, bypass.abs() / 10, bypass < 0, 2.5, -3.0,
                         (), None)


def choice() -> Choice:
    sweep = made_up.sweep()
    chosen, effect = sweep.table[2], Estimate(0.5, 0.25, 0.875, 0.01, 8, 4, 0.0)
    return Choice(chosen.setting, "sentiment", {"has a KL above 0.1": 1}, chosen, effect, Null((0.1, -0.1), 0.0, -0.1, 0.1, 0.3), None,
                  replace(effect, mean=-0.5, low=-0.75, high=-0.125), holds=True, looks=1)
