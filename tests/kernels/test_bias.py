"""The biased attention: the torch reference against a whole softmax, and the Triton body against the reference."""
from __future__ import annotations

import pytest
import torch

from mia_lab.kernels import program as P
from mia_lab.kernels.bias import bias_, bias_reference

HEADS, KV, E, EV, TOKENS, ROWS = 4, 2, 16, 24, 40, 12


def case(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", sinks: bool = False) -> dict:
    """Three requests: history at 0, 20 and none; the first biased by a share, the second by nats on two heads and held by a
    gate, the third not at all."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    rows = torch.full((ROWS, P.ROW_COLUMNS), -1, dtype=torch.int32)
    owner = [0] * 4 + [1] * 5 + [2] * 3
    for i, r in enumerate(owner):
        rows[i, P.PROGRAM], rows[i, P.HISTORY], rows[i, P.SLOT] = (0, 0, 0) if r == 0 else (1, 20, 1) if r == 1 else (2, -1, 0)
        rows[i, P.POSITION] = 9 + i if r == 0 else 4 + i - 4
    words, numbers = torch.zeros(3, P.COLUMNS, dtype=torch.int32), torch.zeros(3, P.COLUMNS)
    words[0] = torch.tensor([P.BIAS, -1, -1, -1, 2, 6, 0, 0])
    numbers[0, P.COEFF], numbers[0, P.SLOPE] = 0.7, 1.0
    words[1] = torch.tensor([P.BIAS, 0b1010, 0, 1, 1, 4, 0, 0])
    numbers[1, P.COEFF] = 1.5
    index = torch.tensor([[0, 1, -1, 0], [1, 1, -1, 0], [2, 0, -1, 0]], dtype=torch.int32)
    opens = torch.tensor([[0, 0], [0, 6]], dtype=torch.int32)
    tensors = dict(q=draw(ROWS, HEADS, E).to(dtype), k=draw(ROWS, KV, E).to(dtype), v=draw(ROWS, KV, EV).to(dtype),
                   rows=rows, index=index, words=words, numbers=numbers, measures=torch.zeros(ROWS, 2), opens=opens,
                   keys=draw(TOKENS, KV, E).to(dtype), values=draw(TOKENS, KV, EV).to(dtype), out=draw(ROWS, HEADS, EV).to(dtype))
    found = {name: tensor.to(device) for name, tensor in tensors.items()}
    return found | dict(scale=0.25, softcap=0.0, window=0, sinks=draw(HEADS).to(device) if sinks else None)


def run(body, c: dict) -> torch.Tensor:
    names = ("out", "q", "k", "v", "rows", "index", "words", "numbers", "measures", "opens", "keys", "values", "scale", "softcap",
             "window", "sinks")
    body(*(c[name] for name in names))
    return c["out"]


def expected(c: dict, row: int, head: int, edited: bool = True) -> tuple[torch.Tensor, float]:
    """One row and head by a plain softmax over its history, with this step's keys already kept; and the span's share."""
    position, base = int(c["rows"][row, P.POSITION]), int(c["rows"][row, P.HISTORY])
    line = int(c["rows"][row, P.PROGRAM])
    k, v = (c[name][base : base + position + 1, head // (HEADS // KV)].double() for name in ("keys", "values"))
    s = k @ c["q"][row, head].double() * c["scale"]
    s = c["softcap"] * torch.tanh(s / c["softcap"]) if c["softcap"] else s
    at = torch.arange(position + 1)
    if c["window"]:
        s[at <= position - c["window"]] = -torch.inf
    inside = (at >= c["words"][line, P.FIRST_COLUMN]) & (at < c["words"][line, P.LAST_COLUMN])
    sink = torch.zeros(0, dtype=s.dtype) if c["sinks"] is None else c["sinks"][head : head + 1].double()
    share = torch.cat([s, sink]).softmax(0)[: len(s)][inside].sum()
    if edited and line == 0 and 0 < share < 0.7:
        s = s + inside * (torch.tensor(0.7).double().logit() - share.logit())
    elif edited and line == 1 and head in (1, 3) and position >= 6:
        s = s + inside * 1.5
    weights = torch.cat([s, sink]).softmax(0)[: len(s)]
    return weights @ v, float(weights[inside].sum())


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 0.8}, {"sinks": True}])
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_is_a_softmax_with_a_bias(seed: int, options: dict) -> None:
    c = case(seed, sinks=options.pop("sinks", False) if "sinks" in options else False) | options
    before = c["out"].clone()
    out = run(bias_reference, c)
    for row in range(ROWS):
        biased = row < 4 or (row < 9 and c["rows"][row, P.POSITION] >= 6)
        for head in range(HEADS):
            if biased:
                value, share = expected(c, row, head)
                torch.testing.assert_close(out[row, head].double(), value, rtol=1e-5, atol=1e-5)
                if row < 4 and expected(c, row, head, edited=False)[1] < 0.7 and expected(c, row, head, edited=False)[1] > 0:
                    assert share == pytest.approx(0.7, abs=1e-6)
            else:
                assert torch.equal(out[row, head], before[row, head])
    for row in range(9):
        at = int(c["rows"][row, P.HISTORY] + c["rows"][row, P.POSITION])
        assert torch.equal(c["keys"][at], c["k"][row]) and torch.equal(c["values"][at], c["v"][row])


def test_nothing_happens_to_rows_without_a_history() -> None:
    c = case(0)
    c["rows"][:, P.HISTORY] = -1
    before = {name: c[name].clone() for name in ("out", "keys", "values")}
    run(bias_reference, c)
    assert all(torch.equal(c[name], tensor) for name, tensor in before.items())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 0.8}, {"sinks": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_does_what_the_reference_does(dtype: torch.dtype, options: dict) -> None:
    sinks = "sinks" in options
    rest = {key: value for key, value in options.items() if key != "sinks"}
    ours, theirs = (case(1, dtype, device, sinks) | rest for device in ("cuda", "cpu"))
    found, wanted = run(bias_, ours).cpu(), run(bias_reference, theirs)
    torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    for name in ("keys", "values"):
        assert torch.equal(ours[name].cpu(), theirs[name])
