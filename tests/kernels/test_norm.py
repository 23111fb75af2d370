"""The tap within a norm: it is the tap, followed by the norm."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import DTYPES, ROWS, WIDTHS, Case, make, on_gpu, same

from mia_lab.kernels.norm import norm, norm_cuda, norm_reference, tap_norm, tap_norm_cuda, tap_norm_reference
from mia_lab.kernels.tap import tap_reference

EPS = 1e-5
BODIES = [tap_norm_reference, tap_norm, *on_gpu([tap_norm_cuda])]


def weight(d: int, shifted: bool, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(d, generator=torch.Generator().manual_seed(1)) / 4
    return (drawn if shifted else 1 + drawn).to(dtype)


def applied(body: Callable, case: Case, w: torch.Tensor, shifted: bool) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """The case after one of the bodies, where that one runs, and what it returned."""
    device = "cuda" if body is tap_norm_cuda else "cpu"
    found = case.copy(device)
    normed, whole = body(*found.args, w.to(device), EPS, shifted)
    return found.copy(), normed.cpu(), whole.cpu()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, *on_gpu(WIDTHS)])
@pytest.mark.parametrize("body", BODIES)
def test_it_is_the_tap_and_then_the_norm(body: Callable, width: int, dtype: torch.dtype, shifted: bool, seed: int) -> None:
    case, w = make(width, dtype, seed=seed), weight(width, shifted, dtype)
    tapped = case.copy()
    tap_reference(*tapped.args)
    stream = tapped.x.double() + tapped.residual.double()
    expected = torch.nn.functional.rms_norm(stream, (width,), w.double() + float(shifted), EPS)
    found, normed, whole = applied(body, case, w, shifted)
    exact = dtype == torch.float32
    # Where a sum falls between two values of 16 bits, the edit's last bit decides which one is taken.
    torch.testing.assert_close(whole.double(), stream, **dict(rtol=2e-5, atol=2e-5) if exact else dict(rtol=2**-6, atol=2e-2))
    torch.testing.assert_close(normed.double(), expected, **dict(rtol=3e-5, atol=3e-5) if exact else dict(rtol=2**-6, atol=3e-2))
    close = dict(rtol=2e-5, atol=2e-5) if exact else dict(rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(found.arena, tapped.arena, **close)
    torch.testing.assert_close(found.measures, tapped.measures, rtol=1e-5, atol=1e-5)
    assert same(found.x, case.x) and same(found.residual, case.residual)
    assert normed.is_contiguous() and whole.is_contiguous()


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
    whole_case, w = make(64), weight(64, False, torch.float32)
    _, normed, stream = applied(body, whole_case, w, False)
    case = whole_case.copy()
    wide = torch.zeros(ROWS, 2 * 64)
    wide[:, :64] = case.x
    case.x = wide[:, :64]
    device = "cuda" if body is tap_norm_cuda else "cpu"
    moved = [wide.to(device)[:, :64], *case.copy(device).args[1:]]
    found = body(*moved, w.to(device), EPS, False)
    assert all(torch.equal(a.cpu(), b) and a.is_contiguous() for a, b in zip(found, (normed, stream)))


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
