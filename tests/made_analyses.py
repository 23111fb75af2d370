"""Results of analyses, caches and cards from made-up numbers, for views: no engine."""
from __future__ import annotations

import torch

import mia_lab as mia
from mia_lab.bench.card import Card, Line
from mia_lab.bench.cases import Work
from mia_lab.bench.drive import METRICS
from mia_lab.bench.overhead import Facts, Figure, Row
from mia_lab.bench.overhead_card import OverheadCard
from mia_lab.bench.peers import PeerRow
from mia_lab.cache import ActivationCache, Batch
from mia_lab.notebook.point_table import PointTable
from mia_lab.points import Point, every

TEXTS = ("<bos>", "The", " cat", " sat", "\n", " <b>", " Paris", "'\"&", " Rome", " a rather long one")
NAN = float("nan")


def lens(lengths: tuple[int, ...] = (4, 3), layers: tuple = ("embed", 0, 1, 2), k: int = 3) -> mia.LogitLens:
    """A lens whose probabilities grow with the layer; prompts are padded to the longest."""
    n, width = len(lengths), max(lengths)
    shape = (n, len(layers), width)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]  # [prompt pos]
    order = torch.arange(n * len(layers) * width * k).view(*shape, k) % len(TEXTS)
    best = torch.linspace(0.1, 0.9, len(layers))[None, :, None].expand(shape)
    chances = torch.stack([best / 2**i for i in range(k)], -1)
    pad = lambda values: torch.where(real[:, None].view(n, 1, width, *[1] * (values.ndim - 3)), values, NAN)  # noqa: E731
    tokens = tuple(tuple(j % len(TEXTS) for j in range(length)) for length in lengths)
    return mia.LogitLens(layers, tuple(tuple(range(length)) for length in lengths), tokens, torch.where(real[:, None, :, None], order, -1),
                         pad(chances.log()), pad(3 - best), pad(1 - best), torch.zeros(n, width, 1, dtype=torch.long),
                         pad(chances[..., :1].log()), torch.ones(*shape, 1, dtype=torch.long), dict(enumerate(TEXTS)))


def grid(layers: int = 3, heads: tuple[int, ...] | None = None, positions: int | None = 3) -> mia.PatchGrid:
    """A patching grid whose first cell was interrupted."""
    shape = (2, layers, *([len(heads)] if heads else []), *([positions] if positions else []))
    raw = torch.linspace(-1, 4, torch.Size(shape).numel()).double().view(shape)
    raw.view(-1)[0] = NAN
    labels = tuple(f"{i} ' <a>'|' b'" for i in range(positions)) if positions else None
    return mia.PatchGrid("resid_post", tuple(range(layers)), heads, labels, raw, torch.tensor([4.0, 3.0]).double(),
                         torch.tensor([0.0, 1.0]).double(), "logit ' Paris' - logit ' Rome'", ran=17, cached=0.5)


def cosines(layers: int = 3) -> mia.CosineMap:
    """Cosines of two vectors' layers to each other."""
    labels = tuple((name, layer) for name in ("mood", "style") for layer in range(layers))
    n = len(labels)
    values = torch.cos(torch.arange(n)[:, None] - torch.arange(n)[None, :].float())
    return mia.CosineMap(labels, labels, values, 0.75)


def attribution(layers: int = 2, heads: int = 0) -> mia.LogitAttribution:
    """Parts of a logit difference, the last layer without an MLP."""
    attention = [f"L{{0}}H{h}" for h in range(heads)] or ["{0}_attn_out"]
    branches = [part.format(layer) for layer in range(layers) for part in (*attention, "{0}_mlp_out")]
    labels = ["embed", *branches[:-1], "bias"]
    values = torch.tensor([(-1) ** i * 0.5 * i for i in range(len(labels))])
    return mia.LogitAttribution(("<bos>", " The", "\n"), 2, " Paris", " <Rome>", tuple(labels), values, float(values.sum()) + 0.01)


def points() -> PointTable:
    """The points of a model of three layers, one of them without a router."""
    shapes = {p: (2, 2) if p.kind == "z" else (4,) for p in every(3) if p.kind != "router"}
    return PointTable.of(3, shapes, lambda p: 8, [p for p in shapes if p.kind == "resid_post"],
                         {Point("router", layer): "the block routes to <no> experts" for layer in range(3)})


class Rows:
    """Rows that count how often they are asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def rows(self, point: Point, prompts: object, before: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.asked += 1
        return [(torch.arange(n), torch.ones(n, 4)) for n in (5, 3)]


def cache(source: Rows | None = None) -> ActivationCache:
    """Two prompts, of five positions, one of them generated, and of three."""
    held = [Point("resid_post", 0), Point("resid_post", 1), Point("attn_out", 2)]
    batch = Batch(((1, 2, 3, 4, 5), (1, 2, 3)), (4, 3), dict.fromkeys(held, (4,)), dict.fromkeys(held, torch.float32), 3)
    return ActivationCache(source or Rows(), held, batch)


def overhead() -> OverheadCard:
    """Two cases at two batch sizes, one of which was not measured."""
    def row(case: str, batch: int, ratio: float) -> Row:
        figure = Figure(2.0, 2.0 * ratio, ratio, ratio - 0.01, ratio + 0.02, 0.96)
        return Row("a <model>", case, Work(batch, 128, 96), 7, **dict.fromkeys(METRICS, figure), delivered=1 << 20)

    rows = (row("idle", 1, 1.004), row("idle", 32, 0.99), row("steer every layer", 32, 1.2))
    peer = PeerRow("a <model>", "other-tool", "1.0", "idle", Work(1, 128, 96), 7, Figure(1.0, 2.0, 2.0, 1.9, 2.1, 0.96))
    return OverheadCard({"device": "an H200", "vllm": "0.25.1", "bytes": 1.5}, (Facts("a <model>", 3 << 20, 2 << 20, 7, 5),), rows, (peer,))


def card() -> Card:
    """A support card on which a feature failed."""
    return Card("a <model>", (Line("point", "resid_post", "ok", "layers 0 to 3"), Line("point", "router", "absent", "no experts"),
                              Line("feature", "gate", "FAILED", "a & b")))
