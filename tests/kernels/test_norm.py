"""Taps within a norm: they are the taps, one after the other, and then the norm."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import DTYPES, ROWS, WIDTHS, Case, chain, crowd, make, on_gpu, one_by_one, same, together, wider

from mia_lab.kernels import program as P
from mia_lab.kernels.norm import TAPS, norm, norm_cuda, norm_reference, tap_norm, tap_norm_cuda, tap_norm_reference
from mia_lab.kernels.tap import tap_cuda, tap_reference

EPS = 1e-5
BODIES = [tap_norm_reference, tap_norm, *on_gpu([tap_norm_cuda])]
CHAINS = [(1, False), (1, True), (2, False), (2, True), (3, True)]  # how many taps, and whether the first is of x alone


def weight(d: int, shifted: bool, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(d, generator=torch.Generator().manual_seed(1)) / 4
    return (drawn if shifted else 1 + drawn).to(dtype)


def applied(body: Callable, case: Case, w: torch.Tensor, shifted: bool, taps: int = 1,
            alone: bool = False) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """The case after one of the bodies, where that one runs, and what it returned."""
    device = "cuda" if body is tap_norm_cuda else "cpu"
    case, index, offsets = chain(case, taps)
    tables = [[t.to(device) for t in some] for some in (index, offsets)]
    found, normed, whole = together(body, case.copy(device), *tables, w.to(device), EPS, shifted, alone)
    return found.copy(), normed.cpu(), whole.cpu()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("taps", "alone"), CHAINS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, *on_gpu(WIDTHS)])
@pytest.mark.parametrize("body", BODIES)
def test_it_is_the_taps_and_then_the_norm(body: Callable, width: int, dtype: torch.dtype, taps: int, alone: bool, shifted: bool,
                                          seed: int) -> None:
    case, w = make(width, dtype, seed=seed), weight(width, shifted, dtype)
    room, index, offsets = chain(case, taps)
    tapped = one_by_one(tap_reference, room, index, offsets, alone)
    stream = tapped.x.double() + tapped.residual.double()
    expected = torch.nn.functional.rms_norm(stream, (width,), w.double() + float(shifted), EPS)
    found, normed, whole = applied(body, case, w, shifted, taps, alone)
    exact = dtype == torch.float32
    # Where a sum falls between two values of 16 bits, the edit's last bit decides which one is taken.
    torch.testing.assert_close(whole.double(), stream, **dict(rtol=2e-5, atol=2e-5) if exact else dict(rtol=2**-6, atol=2e-2))
    torch.testing.assert_close(normed.double(), expected, **dict(rtol=3e-5, atol=3e-5) if exact else dict(rtol=2**-6, atol=3e-2))
    close = dict(rtol=2e-5, atol=2e-5) if exact else dict(rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(found.arena, tapped.arena, **close)
    torch.testing.assert_close(found.measures, tapped.measures, rtol=1e-5, atol=1e-5)
    assert not same(found.arena, room.arena) and not same(found.measures, room.measures)
    assert same(found.x, case.x) and same(found.residual, case.residual)
    assert normed.is_contiguous() and whole.is_contiguous()


@pytest.mark.parametrize(("taps", "alone"), CHAINS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, *on_gpu(WIDTHS)])
@pytest.mark.parametrize("body", BODIES)
def test_what_is_only_captured_has_the_bits_of_taps_by_themselves(body: Callable, width: int, dtype: torch.dtype, taps: int,
                                                                  alone: bool) -> None:
    case, w = make(width, dtype), weight(width, False, dtype)
    case.rows[:, P.PROGRAM] = -1
    tap, device = (tap_cuda, "cuda") if body is tap_norm_cuda else (tap_reference, "cpu")
    room, index, offsets = chain(case, taps)
    tables = [[t.to(device) for t in some] for some in (index, offsets)]
    expected = one_by_one(tap, room.copy(device), *tables, alone).copy()
    found, _, whole = applied(body, case, w, False, taps, alone)
    assert same(found.arena, expected.arena) and not same(found.arena, room.arena)
    assert same(whole, (case.x.float() + case.residual.float()).to(dtype))


@pytest.mark.parametrize(("taps", "alone"), CHAINS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [ROWS, *on_gpu([20 * ROWS])])  # as many as crowd a processor
@pytest.mark.parametrize("device", ["cpu", *on_gpu(["cuda"])])
def test_sites_that_are_noted_as_unedited_only_capture(device: str, rows: int, dtype: torch.dtype, taps: int, alone: bool,
                                                       noting: Callable) -> None:
    case, index, offsets = (part.copy(device) if isinstance(part, Case) else [t.to(device) for t in part]
                            for part in chain(crowd(make(640, dtype), rows // ROWS), taps))
    how = weight(640, False, dtype).to(device), EPS, False, alone
    clean = case.copy(device)
    clean.rows[:, P.PROGRAM] = -1
    expected, *wanted = together(tap_norm, clean, index, offsets, *how)
    edited, *_ = together(tap_norm, case, index, offsets, *how)
    noting(index)
    found, *values = together(tap_norm, case, index, offsets, *how)
    assert same(found.arena.cpu(), expected.arena.cpu()) and not same(edited.arena.cpu(), expected.arena.cpu())
    assert all(same(a.cpu(), b.cpu()) for a, b in zip(values, wanted))
    assert same(found.measures.cpu(), case.measures.cpu())


def test_more_taps_than_a_norm_carries_are_refused() -> None:
    with pytest.raises(ValueError, match="a norm carries 3 taps at most, not 4"):
        together(tap_norm_cuda, *chain(make(), TAPS + 1), weight(8, False, torch.float32), EPS, False, True)


@pytest.mark.parametrize(("taps", "alone"), CHAINS)
def test_the_operator_is_declared_as_what_it_does(taps: int, alone: bool) -> None:
    def checked(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        torch.library.opcheck(tap_norm, args, test_utils=("test_schema", "test_faketensor"))
        return tap_norm(*args)

    case, index, offsets = chain(make(), taps)
    case.bank.nan_to_num_()
    together(checked, case, index, offsets, weight(8, False, torch.float32), EPS, False, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", BODIES)
def test_a_row_with_nothing_to_do_is_only_normed(body: Callable, dtype: torch.dtype) -> None:
    case, w = make(64, dtype), weight(64, False, dtype)
    case.rows.fill_(-1)
    found, _, whole = applied(body, case, w, False)
    assert same(whole, (case.x.float() + case.residual.float()).to(dtype))
    assert same(found.arena, case.arena) and same(found.measures, case.measures)


@pytest.mark.parametrize("body", BODIES)
def test_rows_may_be_part_of_wider_ones(body: Callable) -> None:
    device, w = "cuda" if body is tap_norm_cuda else "cpu", weight(64, False, torch.float32)
    case, index, offsets = chain(make(64), 1)
    case, w, index, offsets = case.copy(device), w.to(device), [index[0].to(device)], [offsets[0].to(device)]
    _, *expected = together(body, case, index, offsets, w, EPS, False, False)
    _, *found = together(lambda x, *args: body(wider(x), *args), case, index, offsets, w, EPS, False, False)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, expected))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, *on_gpu(WIDTHS)])
@pytest.mark.parametrize("body", [norm_reference, norm, *on_gpu([norm_cuda])])
def test_without_a_tap_it_is_the_norm(body: Callable, width: int, dtype: torch.dtype, shifted: bool) -> None:
    device = "cuda" if body is norm_cuda else "cpu"
    case, w = make(width, dtype), weight(width, shifted, dtype)
    case.rows.fill_(-1)
    wide = torch.zeros(ROWS, 2 * width, dtype=dtype)
    wide[:, :width] = case.x
    found = body(wide.to(device)[:, :width], case.residual.to(device), w.to(device), EPS, shifted)
    _, *expected = applied(tap_norm_cuda if body is norm_cuda else tap_norm_reference, case, w, shifted)
    assert all(torch.equal(a.cpu(), b) and a.is_contiguous() for a, b in zip(found, expected))
    assert same(case.x, wide[:, :width])
