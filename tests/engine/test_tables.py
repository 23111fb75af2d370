"""Tables: equal entries share a place, used ones keep it and their contents, idle ones make room, addresses stay."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.engine.config import Sizes
from mia_lab.engine.tables import Line, Plan, Program, Tables
from mia_lab.engine.wire import MAX_GATES, Term
from mia_lab.errors import UnsupportedError
from mia_lab.kernels import program as P

WIDTHS, WIDE = (2, 2, 2, 9), (False, False, False, True)
SITES, ROW = len(WIDTHS), 4 * max(WIDTHS)
VECTORS = {name: torch.tensor([[float(i), -float(i)]]) for i, name in enumerate("abcdefg", 1)}
BLOCK = torch.arange(6.0).view(3, 2)  # three vectors, one a position


def tables(bank_rows: int = 5, dtype: torch.dtype = torch.float32, **sizes: int) -> Tables:
    usual = Sizes(tokens=8, requests=3, programs=4, plans=3, terms=32, bank_bytes=bank_rows * ROW + ROW - 1, captured_tokens=4)
    made = Tables(WIDTHS, WIDE, replace(usual, **sizes), dtype, torch.device("cpu"))
    for name, vector in VECTORS.items():
        made.register(name, vector)
    made.register("block", BLOCK)
    return made


def add(site: int, name: str, coeff: float = 1.0) -> Line:
    return Line(site, Term("add", "any", 0, (), write=name, coeff=coeff))


def adds(*parts: tuple[int, str, float]) -> Program:
    return tuple(add(*part) for part in parts)


def contents(t: Tables, place: int) -> list[list[tuple]]:
    """What a program's place says at each site: its terms with the vectors that they name."""
    t.flush()
    found = []
    for site, width in enumerate(WIDTHS):
        _, index, words, numbers, bank, *_ = t.of_site(site)
        first, count, *_ = index[place].tolist()
        lines = [(words[i].tolist(), numbers[i].tolist()) for i in range(first, first + count)]
        vector = lambda at, width=width, bank=bank: None if at < 0 else bank[at, :width].tolist()  # noqa: E731
        found.append([(P.OPS[w[P.OP]], vector(w[P.READ]), vector(w[P.WRITE]), n[P.COEFF]) for w, n in lines])
    return found


def meant(program: Program) -> list[list[tuple]]:
    vector = lambda name: VECTORS[name][0].tolist() if name else None  # noqa: E731
    return [[(line.term.op, vector(line.term.read), vector(line.term.write), line.term.coeff) for line in program if line.site == site]
            for site in range(SITES)]


def offsets(plan: Plan) -> list[list[int]]:
    """Where each entry lies in a row of float32 values: entries start on whole 8 values."""
    starts, at = {}, 0
    for entry in plan:
        starts[entry] = at
        at += -(-WIDTHS[entry[0]] // 8) * 8
    return [[starts.get((site, before), -1) for before in (True, False)] for site in range(SITES)]


# -- Tables -----------------------------------------------------------------------------------------------------------


def test_fresh_tables_are_neutral() -> None:
    t = tables()
    assert (t.rows == -1).all()
    assert t.rows.shape == (8, P.ROW_COLUMNS)
    assert not t.index[..., 1].any()
    assert (t.offsets == -1).all()
    assert not t.arena.any()
    assert t.arena.shape == (2 * t.half,)
    assert t.half == 4 * (8 + 8 + 8 + 16)
    assert (t.bank_rows, t.bank.shape) == (5, (5, 9))
    assert (t.measures.shape, t.opens.shape) == ((8, MAX_GATES), (3, MAX_GATES))
    held = (t.rows, t.index, t.words, t.numbers, t.bank, t.offsets, t.arena, t.measures, t.opens)
    assert t.nbytes == sum(x.nbytes for x in held)


def test_a_wide_site_takes_the_room_of_float32_beside_16_bits() -> None:
    t = tables(dtype=torch.bfloat16)
    assert t.room == [2, 2, 2, 18]
    assert t.half == 4 * (8 + 8 + 8 + 24)
    layout = t.plans[t.take_plan(((0, False), (3, False)))]
    assert (layout.stride, layout.cuts) == (32, {(0, False): (0, 2), (3, False): (8, 18)})


def test_an_arena_that_cannot_be_addressed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"more than 2\^31; declare fewer points or a smaller max_captured_tokens"):
        tables(captured_tokens=(1 << 30) // 40 + 1)


def test_a_program_is_written_site_by_site_with_its_vectors() -> None:
    t = tables()
    program = adds((2, "a", 0.5), (0, "a", 2.0), (0, "b", -1.0))
    place = t.take_program(program)
    assert contents(t, place) == meant(program)
    assert contents(t, place)[1] == []


def test_the_terms_of_a_site_keep_their_order() -> None:
    t = tables()
    one, other = (t.take_program(adds(*order)) for order in ([(1, "b", 1.0), (0, "c", 1.0), (1, "a", 2.0)], [(1, "a", 2.0), (1, "b", 1.0)]))
    assert [line[2] for line in contents(t, one)[1]] == [[2.0, -2.0], [1.0, -1.0]]
    assert [line[2] for line in contents(t, other)[1]] == [[1.0, -1.0], [2.0, -2.0]]


def test_every_part_of_a_term_has_its_column() -> None:
    t = tables()
    t.take_program(adds((0, "a", 1.0)))
    term = Term("clip", "any", 0, (), "b", "block", 2.0, 3.0, 4.0, 5.0, 6.0, -7.0, 8.0, 2, (1, 2), 9, 3, fresh=False)
    place = t.take_program((Line(1, term, level=10.0), Line(1, replace(term, op="measure", aligned=0, write="", cosine=True, vote=True,
                                                                        fresh=True), begins=True)))
    t.flush()
    first, count, *_ = t.index[1, place].tolist()
    assert count == 2
    clip, measure = t.words[first].tolist(), t.words[first + 1].tolist()
    assert t.numbers[first].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, -7.0, 8.0, 10.0]
    assert t.numbers[first + 1].tolist()[P.LEVEL] == 0.0
    assert clip[:1] + clip[3:] == [P.CLIP, 2, 1, 2, 9, P.PER_ROW | P.ALIGNED]
    assert measure[:1] + measure[2:] == [P.MEASURE, -1, 2, 1, 2, 9, P.FRESH | P.COSINE | P.VOTE | P.BEGINS]
    assert torch.equal(t.bank[clip[P.WRITE] : clip[P.WRITE] + 3, :2], BLOCK)
    assert torch.equal(t.bank[clip[P.READ], :2], VECTORS["b"][0])
    assert measure[P.READ] == clip[P.READ]


@pytest.mark.parametrize(("site", "terms", "plain"), [
    (0, [dict(coeff=2.5)], True), (1, [dict(columns=(0, 2))], True), (1, [dict(columns=(0, 1))], False), (1, [dict(columns=(1, 2))], False),
    (0, [dict(gate=0)], False), (0, [dict(rate=-1.0)], False), (0, [dict(write="block", aligned=3)], False), (0, [dict(), dict()], False),
    (0, [dict(op="affine", read="b")], False), (0, [dict(op="scale", write="")], False), (0, [], False)])
def test_one_plain_addition_is_written_out_in_the_index(site: int, terms: list[dict[str, Any]], plain: bool) -> None:
    t = tables()
    t.take_program(adds((2, "c", 1.0)))
    place = t.take_program(tuple(Line(site, Term(**dict(op="add", kind="any", layer=0, spans=(), write="a") | term)) for term in terms))
    t.flush()
    assert (t.index[:, place, P.PLAIN] >= 0).tolist() == [plain and at == site for at in range(SITES)]
    if plain:
        vector, coeff = t.index[site, place, P.PLAIN], t.index[site, place, P.PLAIN_COEFF].view(torch.float32)
        assert torch.equal(t.bank[vector, :2], VECTORS["a"][0])
        assert coeff == terms[0].get("coeff", 1.0)


@pytest.mark.parametrize("line", [
    add(3, "a"), Line(0, Term("add", "any", 0, (), write="block")), Line(0, Term("add", "any", 0, (), write="block", aligned=2)),
    Line(0, Term("add", "any", 0, (), write="a", aligned=2))])
def test_a_vector_that_does_not_fit_its_term_is_refused_and_leaves_nothing(line: Line) -> None:
    t = tables(bank_rows=3, terms=2)
    with pytest.raises(ValueError, match="its term needs"):
        t.take_program((add(0, "b"), line))
    program = (Line(0, Term("add", "any", 0, (), write="block", aligned=3)), Line(1, Term("renorm", "any", 0, ())))
    place = t.take_program(program)
    t.flush()
    assert t.index[0, place].tolist()[:2] == [0, 1]


def test_equal_programs_share_a_place_and_equal_vectors_a_bank_row() -> None:
    t = tables(bank_rows=1, programs=3)
    one, again = t.take_program(adds((0, "a", 1.0))), t.take_program(adds((0, "a", 1.0)))
    other = t.take_program(adds((0, "a", 2.0), (1, "a", 1.0)))
    assert one == again != other
    with pytest.raises(RuntimeError, match="all 1 vector places are in use"):
        t.take_program(adds((0, "b", 1.0)))


def test_a_program_that_nobody_uses_is_found_again_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    t, program = tables(), adds((0, "a", 1.0), (1, "b", 2.0), (2, "a", 3.0))
    place = t.take_program(program)
    t.give_program(program)
    t.forget("a")
    monkeypatch.setattr(t, "_try_to_write", None)
    assert t.take_program(program) == place and contents(t, place) == meant(program)


def test_programs_that_nobody_uses_make_room_for_vectors_and_terms() -> None:
    t = tables(bank_rows=3, terms=4)
    first, second, kept = adds((0, "a", 1.0), (1, "b", 1.0)), adds((0, "c", 1.0)), adds((2, "c", 2.0))
    places = {program: t.take_program(program) for program in (first, second, kept)}
    t.give_program(first), t.give_program(second)
    coming = adds((0, "d", 1.0), (1, "e", 1.0), (2, "c", 1.0))  # neither vectors nor terms have room beside the first
    place = t.take_program(coming)
    assert contents(t, place) == meant(coming) and contents(t, places[kept]) == meant(kept)
    assert set(t._used) == {"c", "d", "e"} and first not in t._programs.places


def test_programs_that_differ_in_a_level_do_not_share() -> None:
    t = tables()
    gated = Term("scale", "any", 0, (), gate=0)
    assert len({t.take_program((Line(0, gated, level),)) for level in (None, 0.0, 1.0)}) == 3


def test_a_place_is_used_again_by_another_program_without_remains() -> None:
    t = tables(programs=1, bank_rows=3, terms=3)
    for program in [adds((0, "a", 2.0), (0, "b", 3.0), (2, "c", 1.0)), adds((1, "c", 1.0)), adds((0, "d", 1.0), (1, "a", 1.0))]:
        place = t.take_program(program)
        assert contents(t, place) == meant(program)
        t.give_program(program)


def test_terms_in_use_are_not_dropped_for_others() -> None:
    t = tables(terms=3)
    t.take_program(adds((0, "a", 1.0), (1, "a", 1.0)))
    with pytest.raises(RuntimeError, match="all 3 edit terms are in use"):
        t.take_program(adds((0, "b", 1.0), (1, "b", 1.0)))
    t.give_program(adds((0, "a", 1.0), (1, "a", 1.0)))
    program = adds((0, "b", 1.0), (1, "b", 1.0), (2, "b", 1.0))
    assert contents(t, t.take_program(program)) == meant(program)


@pytest.mark.parametrize("plan", [((0, False),), ((3, True),), ((0, False), (2, True)), ((0, False), (0, True), (1, True), (3, False))])
def test_a_plan_gives_each_of_its_entries_the_next_place(plan: Plan) -> None:
    t = tables()
    place = t.take_plan(plan)
    t.flush()
    assert t.offsets[:, place].tolist() == offsets(plan)
    layout = t.plans[place]
    assert list(layout.cuts) == list(plan)
    assert all(start == offsets(plan)[site][1 - before] and width == WIDTHS[site] for (site, before), (start, width) in layout.cuts.items())
    assert layout.stride == sum(-(-WIDTHS[site] // 8) * 8 for site, _ in plan)
    assert t.take_plan(plan) == place


def test_plans_in_use_are_not_dropped_for_another() -> None:
    t = tables(plans=1)
    one, other = ((0, False), (1, False)), ((0, True),)
    t.take_plan(one)
    with pytest.raises(RuntimeError, match="all 1 capture plans are in use"):
        t.take_plan(other)
    t.give_plan(one)
    place = t.take_plan(other)
    t.flush()
    assert t.offsets[:, place].tolist() == offsets(other)


PROGRAMS: list[Program] = [
    adds((0, "a", 1.0)), adds((0, "a", 2.0)), adds((0, "b", 1.0), (1, "c", 1.0)), adds((1, "c", -1.0), (2, "c", 1.0)),
    adds((2, "d", 1.0)), adds((0, "e", 1.0), (0, "f", 1.0), (0, "g", 1.0)), (Line(3, Term("renorm", "any", 0, ())),),
    (Line(0, Term("clip", "any", 0, (), "a", "b")), *adds((1, "b", 1.0), (2, "c", 1.0))), adds((2, "g", 1.0))]
PLANS: list[Plan] = [((0, False),), ((1, False),), ((0, False), (1, False)), ((0, True),), ((0, False), (0, True), (3, False))]


def fits(t: Tables, used: Counter[Any], item: Any) -> bool:
    """Whether one more entry has room beside those in use, by plain counting."""
    programs = {p for p in {*(+used), item} if p in PROGRAMS}
    vectors = {name for program in programs for line in program for name in (line.term.read, line.term.write) if name}
    plans = {*(+used), item} - programs
    return len(programs) <= t.sizes.programs and len(vectors) <= t.bank_rows and len(plans) <= t.sizes.plans


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(PROGRAMS + PLANS)), max_size=50))
@settings(max_examples=60, deadline=None)
def test_what_is_in_use_is_never_overwritten_and_what_fits_is_never_refused(steps: list[tuple[bool, Any]]) -> None:
    t = tables()
    addresses = [x.data_ptr() for site in range(SITES) for x in t.of_site(site)]
    used: Counter[Any] = Counter()
    places: dict[Any, int] = {}
    for take, item in steps:
        kind = "program" if item in PROGRAMS else "plan"
        if take and fits(t, used, item):
            place = getattr(t, f"take_{kind}")(item)
            assert not used[item] or places[item] == place
            places[item] = place
            used[item] += 1
        elif not take and used[item]:
            getattr(t, f"give_{kind}")(item)
            used[item] -= 1
        for held in +used:
            if held in PROGRAMS:
                assert contents(t, places[held]) == meant(held)
            else:
                t.flush()
                assert t.offsets[:, places[held]].tolist() == offsets(held)
                assert tuple(t.plans[places[held]].cuts) == held
    assert [x.data_ptr() for site in range(SITES) for x in t.of_site(site)] == addresses


def test_a_program_that_did_not_fit_is_written_when_it_does() -> None:
    t = tables(bank_rows=3)
    first, large = adds((0, "a", 1.0)), adds((0, "b", 1.0), (1, "c", 1.0), (2, "d", 1.0))
    t.take_program(first)
    with pytest.raises(RuntimeError, match="all 3 vector places are in use"):
        t.take_program(large)
    t.give_program(first)
    assert contents(t, t.take_program(large)) == meant(large)
    t.give_program(large)
    last = adds((0, "e", 1.0), (1, "f", 1.0), (2, "g", 1.0))
    assert contents(t, t.take_program(last)) == meant(last)


def test_a_program_whose_vector_was_unknown_is_written_once_it_is_registered() -> None:
    t = tables()
    program = adds((0, "a", 1.0), (1, "late", 1.0))
    with pytest.raises(KeyError):
        t.take_program(program)
    t.register("late", torch.tensor([[8.0, 9.0]]))
    assert contents(t, t.take_program(program))[1] == [("add", None, [8.0, 9.0], 1.0)]


def test_a_forgotten_vector_stays_in_the_bank_while_a_program_uses_it() -> None:
    t = tables()
    program = adds((0, "a", 1.0))
    place = t.take_program(program)
    t.forget("a")
    t.forget("never known")
    assert t.take_program(program) == place
    assert contents(t, place) == meant(program)


def test_a_forgotten_vector_moves_with_the_program_that_uses_it() -> None:
    t = tables(terms=4, bank_rows=8)
    gone, kept, after = adds((0, "b", 1.0)), adds((0, "a", 1.0)), adds((0, "c", 1.0), (1, "d", 1.0), (2, "e", 1.0))
    t.take_program(gone)
    place = t.take_program(kept)
    t.give_program(gone)
    t.forget("a")
    assert contents(t, t.take_program(after)) == meant(after)  # no three terms in a row were free
    assert contents(t, place) == meant(kept)
