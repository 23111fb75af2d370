"""Results from made-up numbers, for views: no engine."""
from __future__ import annotations

from collections.abc import Sequence
from math import nan
from random import Random

import torch

import mia_lab as mia
from mia_lab.analysis.attention_view import AttentionView
from mia_lab.analysis.live import DONE, Readings
from mia_lab.analysis.sweep.effects import Null, Result
from mia_lab.analysis.sweep.items import Item, Lab
from mia_lab.analysis.sweep.result import Bench, Sweep
from mia_lab.analysis.sweep.settings import BASE, STEERED, Setting
from mia_lab.analysis.sweep.statistics import Estimate

_WORDS = ("a", "the", "of", "very", "good", "bad", "<b>fine</b>", "day", "food", "we", "it", "was\n", "not", "so", "great")
_TOKENS = ("<bos>", "The", " cat", " sat", " <b>", "\n", " on", " the", " mat")


def sweep(layers: Sequence[int] = (9,), coeffs: Sequence[float] = (-0.4, -0.2, 0.2, 0.4), prompts: int = 2, words: int = 12,
          texts: bool = True, seeds: int = 1) -> Sweep:
    """A sweep of one vector, whose effect is three times the coefficient, largest in the last layer."""
    rng = Random(0)
    settings = [Setting("unsteered", BASE), *(Setting("mood", STEERED, (), layer, coeff) for layer in layers for coeff in coeffs)]
    base = [" " + " ".join(rng.choices(_WORDS, k=words)) for _ in range(prompts)]
    said = {i: {at: [_changed(text, abs(setting.coeff or 0.0), rng)] * seeds for at, text in enumerate(base)}
            for i, setting in enumerate(settings)}
    table = tuple(_result(s) for s in settings[1:])
    lab = Lab(None, tuple(Item(f"Prompt <{i}>", str(i)) for i in range(prompts)), "select", 24, (None,))
    groups = {"sentiment": tuple(map(str, range(prompts)))}
    return Sweep(tuple(settings), (mia.sentiment(),), {"sentiment": torch.zeros(len(settings), prompts)}, groups, said if texts else {},
                 True, table, Bench(lab, (), 0.0, None, False))


def _changed(text: str, share: float, rng: Random) -> str:
    return " ".join(rng.choice(_WORDS) if rng.random() < share else word for word in text.split(" "))


def _result(setting: Setting) -> Result:
    effect = setting.coeff * (3 + setting.layer / 100)
    return Result(setting, {"sentiment": Estimate(effect, effect - 0.2, effect + 0.2, 0.001, 8, 8, 0.0)}, 0.002,
                  Null((0.1, -0.1), 0.0, -0.1, 0.1, 0.3), None, setting.coeff**2, 1 + setting.coeff**2)


def attention(layers: Sequence[int] = (4, 5), heads: int = 2, n: int = 9, at: Sequence[int] | None = None) -> AttentionView:
    """Causal attention of two heads to a key/value head; layers see 4 tokens, but for every sixth one."""
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(len(layers), heads, n, n, generator=generator) + 2 * (torch.arange(n) == 0)
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    windows = tuple(None if layer % 6 == 5 else 4 for layer in layers)
    seen = torch.stack([(distance >= 0) & (distance < (window or n)) for window in windows])[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    places = tuple(range(n)) if at is None else tuple(at)
    tokens = tuple(_TOKENS[i % len(_TOKENS)] for i in range(n))
    return AttentionView(tuple(layers), tuple(range(heads)), places, tokens, weights[:, :, list(places)], 2, windows, True)


def readings() -> Readings:
    """Three tokens of a prompt and two that followed, of which the last was not read."""
    return Readings((1, 5, 6, 7, 8), ("<s>", "The", " <b>cat</b>", " sat", "\n"), (nan, nan, 0.5, -1.25, nan), 3, "reading at resid_post.9",
                    0.25, DONE)
