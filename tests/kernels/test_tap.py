"""The fused tap: the torch reference against a loop over rows, and the Triton body against the reference."""
from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from mia_lab.kernels.tap import tap_, tap_cuda, tap_reference

ROWS, PROGRAMS, K, PLANS, VECTORS = 14, 5, 4, 3, 6
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [64, 640, 1536, 4096]


@dataclass
class Case:
    """The operator's arguments, in its order."""

    x: torch.Tensor
    residual: torch.Tensor | None
    rows: torch.Tensor
    vec: torch.Tensor
    coef: torch.Tensor
    bank: torch.Tensor
    offsets: torch.Tensor
    arena: torch.Tensor

    @property
    def args(self) -> list[torch.Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def copy(self, device: str = "cpu") -> Case:
        return Case(*(None if a is None else a.clone().to(device) for a in self.args))


def make(d: int = 8, dtype: torch.dtype = torch.float32, residual: bool = True, seed: int = 0) -> Case:
    """Rows edited or not, captured or not, some by programs and plans that say nothing here; the last ones neutral."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    vec = torch.tensor([[0, -1, -1, -1], [3, 1, -1, -1], [-1] * 4, [5, 2, 0, 4], [2, 2, -1, -1]], dtype=torch.int32)
    rows = torch.full((ROWS + 4, 4), -1, dtype=torch.int32)  # the table is longer than a batch
    kinds = [(p, q) for p in range(-1, PROGRAMS) for q in range(-1, PLANS)]
    for row, pick in enumerate(torch.randperm(len(kinds), generator=g)[: ROWS - 3].tolist()):
        rows[row, 0], rows[row, 1] = kinds[pick]
    rows[:ROWS, 2] = torch.randperm(ROWS, generator=g) * 2 * d
    rows[ROWS - 3: ROWS, :3] = -1
    rows[ROWS:, :3] = torch.tensor([3, 0, 0])
    offsets = torch.tensor([0, d, -1], dtype=torch.int32)
    return Case(draw(ROWS, d).to(dtype), draw(ROWS, d).to(dtype) if residual else None, rows, vec, draw(PROGRAMS, K),
                draw(VECTORS, d), offsets, torch.full((ROWS * 2 * d,), 7.0, dtype=dtype))


def loop(case: Case) -> None:
    """What the operator means, one row after the other."""
    d = case.x.shape[-1]
    for row in range(len(case.x)):
        program, plan, base, _ = case.rows[row].tolist()
        if program >= 0 and case.vec[program, 0] >= 0:
            delta = torch.zeros(d)
            for k in range(K):
                if case.vec[program, k] >= 0:
                    delta = delta + case.coef[program, k] * case.bank[case.vec[program, k]]
            case.x[row] = (case.x[row].float() + delta).to(case.x.dtype)
        if plan >= 0 and case.offsets[plan] >= 0:
            value = case.x[row].float()
            if case.residual is not None:
                value = value + case.residual[row].float()
            start = base + int(case.offsets[plan])
            case.arena[start: start + d] = value.to(case.arena.dtype)


def bits(tensor: torch.Tensor) -> list:
    """The stored bits, for which NaN equals itself and 0.0 differs from -0.0."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_does_what_a_loop_over_rows_does(dtype: torch.dtype, residual: bool, seed: int) -> None:
    ours = make(dtype=dtype, residual=residual, seed=seed)
    theirs, before = ours.copy(), ours.copy()
    tap_reference(*ours.args)
    loop(theirs)
    for field in fields(Case):
        found, expected = getattr(ours, field.name), getattr(theirs, field.name)
        assert found is expected or bits_or_values(found) == bits_or_values(expected), field.name
    assert not torch.equal(ours.x, before.x)
    assert not torch.equal(ours.arena, before.arena)


def bits_or_values(tensor: torch.Tensor) -> list:
    return bits(tensor) if tensor.is_floating_point() else tensor.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", [tap_reference, tap_])
def test_neutral_rows_are_untouched_to_the_bit(body, dtype: torch.dtype) -> None:
    case = make(dtype=dtype)
    case.rows[:, :2] = -1
    case.rows[0, 0], case.rows[1, 0], case.rows[2, 1], case.rows[3, 1] = 0, 2, 0, 2  # edit, empty, capture, not here
    case.x[1:] = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40] * 2).to(dtype)
    before = case.copy()
    body(*case.args)
    assert bits(case.x[0]) != bits(before.x[0])
    assert bits(case.x[1:]) == bits(before.x[1:])
    assert bits(case.residual) == bits(before.residual)
    at = int(case.rows[2, 2])
    changed = (case.arena != 7.0).nonzero().flatten().tolist()
    assert changed == list(range(at, at + 8))


@pytest.mark.parametrize("body", [tap_reference, tap_])
def test_a_batch_with_nothing_to_do_changes_nothing(body) -> None:
    case = make()
    case.rows.fill_(-1)
    before = case.copy()
    body(*case.args)
    assert torch.equal(case.x, before.x)
    assert torch.equal(case.arena, before.arena)


def test_a_capture_reads_after_the_edit_and_includes_the_pending_half() -> None:
    case = make()
    case.rows.fill_(-1)
    case.rows[4] = torch.tensor([0, 1, 32, -1])
    before = case.copy()
    tap_reference(*case.args)
    edited = before.x[4] + case.coef[0, 0] * case.bank[0]
    assert torch.equal(case.x[4], edited)
    assert torch.equal(case.arena[32 + 8: 32 + 16], edited + before.residual[4])


def test_the_sum_is_made_in_float32_and_rounded_once() -> None:
    case = make(4, torch.bfloat16, residual=False)
    case.rows.fill_(-1)
    case.rows[0, 0] = 4  # vector 2 twice
    case.x[0], case.bank[2], case.coef[4] = 256.0, 0.75, 1.0  # 256 + 0.75 rounds to 256, 256 + 1.5 to 258
    tap_reference(*case.args)
    assert case.x[0].tolist() == [258.0] * 4


@pytest.mark.parametrize("body", [tap_reference, tap_])
def test_leading_axes_are_rows(body) -> None:
    flat = make()
    deep = flat.copy()
    body(*flat.args)
    args = deep.args
    args[0], args[1] = deep.x.view(2, 7, 8), deep.residual.view(2, 7, 8)
    body(*args)
    assert torch.equal(deep.x, flat.x)
    assert torch.equal(deep.arena, flat.arena)


def test_a_residual_may_be_a_slice_of_wider_rows() -> None:
    dense = make()
    strided = dense.copy()
    strided.residual = torch.cat([dense.residual, torch.full((ROWS, 3), 1e9)], 1)[:, :8]
    assert not strided.residual.is_contiguous()
    tap_reference(*dense.args)
    tap_reference(*strided.args)
    assert torch.equal(strided.arena, dense.arena)


def test_the_operator_is_declared_as_what_it_does() -> None:
    torch.library.opcheck(tap_, make().args, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(tap_, make(residual=False).args, test_utils=("test_schema", "test_faketensor"))


# -- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("residual", ["none", "dense", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_triton_body_does_what_the_reference_does(width: int, dtype: torch.dtype, residual: str) -> None:
    for seed in range(3):
        expected = make(width, dtype, residual != "none", seed)
        found, before = expected.copy("cuda"), expected.copy()
        if residual == "strided":
            found.residual = torch.cat([found.residual, torch.full_like(found.residual[:, :16], 1e9)], 1)[:, :width]
        tap_reference(*expected.args)
        tap_cuda(*found.args)
        # A product and sum in one rounding may tip a bfloat16 to its neighbour, which a residual may then cancel to.
        rtol, atol = (1e-6, 1e-5) if dtype == torch.float32 else (2**-7, 2**-4)
        torch.testing.assert_close(found.x.cpu(), expected.x, rtol=rtol, atol=1e-5)
        torch.testing.assert_close(found.arena.cpu(), expected.arena, rtol=rtol, atol=atol)
        for name in ("rows", "vec", "coef", "bank", "offsets"):
            assert torch.equal(getattr(found, name).cpu(), getattr(before, name))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_on_cuda_neutral_rows_are_untouched_to_the_bit(width: int, dtype: torch.dtype) -> None:
    case = make(width, dtype)
    case.rows[:, :2] = -1
    case.rows[0, 0], case.rows[1, 0], case.rows[2, 1], case.rows[3, 1] = 0, 2, 0, 2
    case.x[1:] = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40]).repeat(width // 4).to(dtype)
    found = case.copy("cuda")
    tap_cuda(*found.args)
    assert bits(found.x[0].cpu()) != bits(case.x[0])
    assert bits(found.x[1:].cpu()) == bits(case.x[1:])
    at = int(case.rows[2, 2])
    assert (found.arena != 7.0).nonzero().flatten().tolist() == list(range(at, at + width))


@pytest.mark.gpu
def test_on_cuda_leading_axes_are_rows() -> None:
    flat = make(64).copy("cuda")
    deep = flat.copy("cuda")
    tap_cuda(*flat.args)
    args = deep.args
    args[0], args[1] = deep.x.view(2, 7, 64), deep.residual.view(2, 7, 64)
    tap_cuda(*args)
    assert torch.equal(deep.x, flat.x)
    assert torch.equal(deep.arena, flat.arena)


@pytest.mark.gpu
def test_a_captured_graph_replays_with_what_the_tables_hold_by_then() -> None:
    found = make(640).copy("cuda")
    tap_cuda(*found.copy("cuda").args)  # compiled before the capture
    rows = found.rows.clone()
    found.rows.fill_(-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tap_cuda(*found.args)
    before = found.copy()
    graph.replay()
    assert torch.equal(found.x.cpu(), before.x)
    found.rows.copy_(rows)
    expected = found.copy()
    graph.replay()
    tap_reference(*expected.args)
    torch.testing.assert_close(found.x.cpu(), expected.x, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.arena.cpu(), expected.arena, rtol=1e-6, atol=1e-5)
