"""The fused tap: the torch reference against a loop over rows, and the Triton body against the reference."""
from __future__ import annotations

from collections.abc import Callable

import programs
import pytest
import torch
from programs import ADDITION, ALL, DTYPES, EMPTY, NOTHING, OPS, ORIGIN, READS, ROWS, WIDTHS, Case, captured, make, on_gpu, same, term

from mia_lab.kernels import program as P
from mia_lab.kernels.tap import tap_, tap_cuda, tap_reference

CONSTANT = ("rows", "index", "words", "numbers", "bank", "offsets", "opens")
BODIES = [tap_reference, tap_, *on_gpu([tap_cuda])]


def loop(case: Case) -> None:
    """What the operator does to `x` and `measures`, one row after the other, in float64."""
    d = case.x.shape[-1]
    for row in range(len(case.x)):
        program, _, _, position, slot, _ = case.rows[row].tolist()
        first, count, *_ = case.index[program].tolist() if program >= 0 else (0, 0)
        if count:
            other = torch.zeros(d).double() if case.residual is None else case.residual[row].double()
            now = case.x[row].double() + other
            run(case, range(first, first + count), now, row, position, slot)
            case.x[row] = (now - other).float().to(case.x.dtype)


def run(case: Case, lines: range, now: torch.Tensor, row: int, position: int, slot: int) -> None:
    """Run a program on the value of one row, in place."""
    d, seen = len(now), now.clone()
    for line in lines:
        op, read, write, gate, first, last, origin, flags = case.words[line].tolist()
        coeff, slope, offset, low, high, rate, threshold, level = case.numbers[line].tolist()
        if flags & P.FRESH:
            seen = now.clone()
        coeff *= 2 ** (rate * (position - origin))
        p = float(seen @ case.bank[read, :d].double())
        place = write + (position - origin) * bool(flags & P.ALIGNED)
        vector = case.bank[place, :d].double() if write >= 0 else torch.zeros(d).double()
        if op == P.MEASURE:
            reading = (p + offset) / (float((seen - vector).norm()) if flags & P.COSINE else 1.0)
            taken = float(coeff * reading > threshold) if flags & P.VOTE else coeff * reading
            case.measures[row, gate] = taken + (0.0 if flags & P.BEGINS else float(case.measures[row, gate]))
            continue
        passed = float(case.measures[row, gate]) > level if flags & P.PER_ROW else position >= int(case.opens[slot, gate])
        if gate >= 0 and not passed:
            continue
        columns = slice(first, last)
        if op == P.ADD:
            now[columns] += coeff * vector[columns]
        elif op == P.AFFINE:
            now += coeff * (slope * p + offset) * vector
        elif op == P.CLIP:
            now += coeff * (min(max(p, low), high) - p) * vector
        elif op == P.FEATURE:
            now += coeff * (low - (p + offset if p + offset > threshold else 0.0)) * vector
        elif op == P.SCALE:
            now[columns] += coeff * seen[columns]
        elif op == P.RENORM:
            now *= seen.norm() / now.norm()


def check(found: Case, before: Case, expected: Case) -> None:
    """Values and measures as expected, rows without terms as they were, the arena what the values make, all else untouched."""
    close = dict(rtol=1e-5, atol=1e-5) if found.x.dtype == torch.float32 else dict(rtol=2**-7, atol=1e-5)  # one rounding to bfloat16
    torch.testing.assert_close(found.x, expected.x, **close)
    torch.testing.assert_close(found.measures, expected.measures, rtol=1e-5, atol=1e-5)
    program = before.rows[:ROWS, P.PROGRAM]
    idle = (program < 0) | (before.index[program.clamp(min=0).long(), P.COUNT] == 0)
    assert same(found.x[idle], before.x[idle])
    assert same(found.measures[:ROWS][idle], before.measures[:ROWS][idle])
    assert same(found.measures[ROWS:], before.measures[ROWS:])
    assert same(found.arena, captured(before, found))
    for name in CONSTANT:
        assert same(getattr(found, name), getattr(before, name)), name
    assert found.residual is None or same(found.residual, before.residual)


def applied(body: Callable, case: Case) -> Case:
    """The case after one of the bodies, where that one runs."""
    found = case.copy("cuda" if body is tap_cuda else "cpu")
    body(*found.args)
    return found.copy()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_does_what_a_loop_over_rows_does(dtype: torch.dtype, residual: bool, seed: int) -> None:
    found = make(dtype=dtype, residual=residual, seed=seed)
    before, expected = found.copy(), found.copy()
    loop(expected)
    tap_reference(*found.args)
    check(found, before, expected)
    assert not any(same(getattr(found, name), getattr(before, name)) for name in ("x", "arena", "measures"))


def test_the_cases_make_use_of_everything() -> None:
    seen = torch.cat([make(seed=seed).words for seed in range(12)])
    for op, name in enumerate(OPS):
        mine = seen[seen[:, P.OP] == op]
        assert {True, False} == set((mine[:, P.FLAGS] & P.FRESH > 0).tolist()), name
        if op != P.MEASURE:
            gated = mine[mine[:, P.GATE] >= 0]
            assert {True, False} == set((gated[:, P.FLAGS] & P.PER_ROW > 0).tolist()), name
        assert op > P.FEATURE or {True, False} == set((mine[:, P.FLAGS] & P.ALIGNED > 0).tolist()), name
        assert op not in (P.ADD, P.SCALE) or {True, False} == set((mine[:, P.LAST_COLUMN] == ALL[1]).tolist()), name
    ways = seen[seen[:, P.OP] == P.MEASURE, P.FLAGS] & (P.COSINE | P.VOTE | P.BEGINS)
    assert len(set(ways.tolist())) == 8


@pytest.mark.parametrize("width", [8, *on_gpu(WIDTHS)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", BODIES)
def test_neutral_rows_are_untouched_to_the_bit(body: Callable, dtype: torch.dtype, width: int) -> None:
    before = make(width, dtype)
    before.rows[:, : P.PLAN + 1] = -1  # but: an addition, a program that is empty here, a capture, a plan that takes nothing here
    before.rows[0, P.PROGRAM], before.rows[1, P.PROGRAM], before.rows[2, P.PLAN], before.rows[3, P.PLAN] = ADDITION, EMPTY, 0, 3
    before.x[1:] = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40]).repeat(width // 4).to(dtype)
    found = applied(body, before)
    assert not same(found.x[0], before.x[0])
    assert same(found.x[1:], before.x[1:]) and same(found.residual, before.residual) and same(found.measures, before.measures)
    at = int(before.rows[2, P.BASE])
    assert (found.arena != NOTHING).nonzero().flatten().tolist() == list(range(at, at + width))


@pytest.mark.parametrize("body", BODIES)
def test_a_batch_with_nothing_to_do_changes_nothing(body: Callable) -> None:
    before = make(64)
    before.rows.fill_(-1)
    found = applied(body, before)
    assert all(same(getattr(found, name), getattr(before, name)) for name in ("x", "arena", "measures"))


@pytest.mark.parametrize("body", BODIES)
def test_one_plain_addition_does_what_its_term_says(body: Callable) -> None:
    before = make(64)
    before.rows[:ROWS, P.PROGRAM] = torch.tensor([ADDITION, -1]).repeat(ROWS // 2)
    found, general = applied(body, before), before.copy()
    general.index[ADDITION, P.PLAIN] = -1
    expected = applied(tap_reference, general)
    torch.testing.assert_close(found.x, expected.x, rtol=1e-6, atol=1e-6)
    assert before.index[ADDITION, P.PLAIN] >= 0 and not same(found.x, before.x)


def test_a_capture_reads_before_and_after_the_edit_and_includes_the_pending_half() -> None:
    case = make()
    case.rows.fill_(-1)
    case.rows[4] = torch.tensor([ADDITION, 2, 32, ORIGIN, 0, -1])
    before = case.copy()
    tap_reference(*case.args)
    edited = before.x[4] + 0.75 * case.bank[READS, :8]
    assert torch.equal(case.x[4], edited)
    assert torch.equal(case.arena[32 : 32 + 8], edited + before.residual[4])
    assert torch.equal(case.arena[32 + 16 : 32 + 24], before.x[4] + before.residual[4])


def test_the_sum_is_made_in_float32_and_rounded_once() -> None:
    case = make(4, torch.bfloat16, residual=False)
    case.program(0, term("add", write=READS), term("add", write=READS))
    case.x[0], case.bank[READS] = 256.0, 0.75  # 256 + 0.75 rounds to 256, 256 + 1.5 to 258
    tap_reference(*case.args)
    assert case.x[0].tolist() == [258.0] * 4


def stepwise(*lines: tuple[list[int], list[float]], measure: float = 0.0, opens: int = 0) -> list[float]:
    """What a program makes of the row 1, 2; its vectors are the two axes and, to write, 3 and 5 on both."""
    case = make(2, residual=False)
    case.bank[:2, :2], case.bank[READS, :2], case.bank[READS + 1, :2] = torch.eye(2), 3.0, 5.0
    case.program(0, *lines)
    case.x[0], case.measures[0], case.opens[0] = torch.tensor([1.0, 2.0]), measure, opens
    tap_reference(*case.args)
    return case.x[0].tolist()


HELD, ROW = P.FRESH, P.FRESH | P.PER_ROW


@pytest.mark.parametrize(("lines", "expected"), [
    ([term("affine", 0, READS, slope=1.0, offset=1.0)], [7.0, 8.0]),
    ([term("affine", 0, READS, slope=1.0), term("affine", 0, READS, slope=1.0)], [16.0, 17.0]),  # the second reads 4
    ([term("affine", 0, READS, slope=1.0), term("affine", 0, READS, slope=1.0, flags=0)], [7.0, 8.0]),  # both read 1
    ([term("scale", coeff=1.0), term("scale", coeff=1.0, flags=0)], [3.0, 6.0]),
    ([term("scale", coeff=-1.0, columns=(1, 2)), term("add", write=READS, columns=(0, 1))], [4.0, 0.0]),
    ([term("clip", 1, READS, low=0.0, high=1.5)], [-0.5, 0.5]),
    ([term("feature", 1, READS, low=4.0, offset=1.0, threshold=2.5)], [4.0, 5.0]),
    ([term("feature", 1, READS, low=4.0, offset=1.0, threshold=3.0)], [13.0, 14.0]),  # at its threshold it does not fire
    ([term("scale", coeff=2.0), term("renorm", flags=0)], [1.0, 2.0]),
    ([term("add", write=READS, flags=P.FRESH | P.ALIGNED)], [4.0, 5.0]),
])
def test_terms_compose(lines: list, expected: list[float]) -> None:
    assert stepwise(*lines) == pytest.approx(expected)


@pytest.mark.parametrize(("flags", "measure", "opens", "acts"), [
    (HELD, 0.0, ORIGIN, True), (HELD, 0.0, ORIGIN + 1, False), (ROW, 0.6, ORIGIN + 1, True), (ROW, 0.5, 0, False)])
def test_a_gate_is_a_position_or_a_measure(flags: int, measure: float, opens: int, acts: bool) -> None:
    found = stepwise(term("add", write=READS, gate=1, flags=flags, level=0.5), measure=measure, opens=opens)
    assert found == ([4.0, 5.0] if acts else [1.0, 2.0])


def test_a_row_s_gate_sees_what_an_earlier_term_measured() -> None:
    edit = term("add", write=READS, gate=2, flags=ROW, level=1.5)
    first, second = term("measure", 0, gate=2, flags=P.FRESH | P.BEGINS), term("measure", 0, gate=2)
    assert stepwise(first, edit, measure=9.0) == [1.0, 2.0]  # 1, and what was there before does not count
    assert stepwise(first, second, edit, measure=9.0) == [4.0, 5.0]  # 1 + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", *on_gpu(["cuda"])])
def test_a_site_that_is_noted_as_unedited_only_captures(device: str, dtype: torch.dtype, noting: Callable) -> None:
    before = make(640, dtype)
    found = before.copy(device)
    noting([found.index])
    tap_(*found.args)
    found = found.copy()
    assert same(found.x, before.x) and same(found.measures, before.measures)
    assert same(found.arena, captured(before, before)) and not same(found.arena, before.arena)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_that_crowd_are_done_as_few_are(width: int, dtype: torch.dtype) -> None:
    few = make(width, dtype)
    many = programs.crowd(few, 20).copy("cuda")
    few = few.copy("cuda")
    tap_cuda(*few.args)
    tap_cuda(*many.args)
    few, many = few.copy(), many.copy()
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(many.x, few.x.repeat(20, 1), **close)
    torch.testing.assert_close(many.arena, few.arena.repeat(20), **close)


@pytest.mark.parametrize("body", BODIES)
def test_leading_axes_are_rows(body: Callable) -> None:
    flat, deep = make(64), make(64)
    deep.x, deep.residual = deep.x.view(2, ROWS // 2, 64), deep.residual.view(2, ROWS // 2, 64)
    flat, deep = applied(body, flat), applied(body, deep)
    assert torch.equal(deep.x.view(ROWS, 64), flat.x) and torch.equal(deep.arena, flat.arena)


def test_a_residual_may_be_a_slice_of_wider_rows() -> None:
    dense, strided = make(), make()
    strided.residual = programs.wider(dense.residual)
    assert not strided.residual.is_contiguous()
    tap_reference(*dense.args)
    tap_reference(*strided.args)
    assert torch.equal(strided.arena, dense.arena) and torch.equal(strided.x, dense.x)


def test_the_operator_is_declared_as_what_it_does() -> None:
    for residual in (True, False):
        case = make(residual=residual)
        case.bank.nan_to_num_()
        torch.library.opcheck(tap_, case.args, test_utils=("test_schema", "test_faketensor"))


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
            found.residual = programs.wider(found.residual)
        tap_reference(*expected.args)
        tap_cuda(*found.args)
        check(found.copy(), before, expected)


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
    assert all(same(getattr(found, name).cpu(), getattr(before, name)) for name in ("x", "arena", "measures"))
    found.rows.copy_(rows)
    before, expected = found.copy(), found.copy()
    graph.replay()
    tap_reference(*expected.args)
    check(found.copy(), before, expected)
