"""From edits to the wire: what the terms and gates of one request are, and what does not fit a model or a prompt."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.edits import digest
from mia_lab.engine.wire import MAX_GATES, MAX_TERMS, Gate, Spec, Term, decode, encode
from mia_lab.errors import EditError
from mia_lab.points import Point
from mia_lab.running.compile import Compiled, Model, check, compile_edits
from mia_lab.selectors import Context

D, LAYERS = 6, 4
SHAPES = {Point("resid_post", layer): (D,) for layer in range(LAYERS)} | {Point("z", layer): (2, 3) for layer in range(LAYERS)}
READ_ONLY = {Point("q", layer): (2, 3) for layer in range(LAYERS)}
MODEL = Model(LAYERS, SHAPES | READ_ONLY, frozenset(SHAPES), frozenset({"q"}),
              ("add", "ablate", "clamp", "scale", "replace", "affine", "clampfeature"))
ONES = torch.ones(D)
U = torch.tensor([0.0, 3.0, 0, 0, 4.0, 0])


def compiled(*edits: Any, n: int = 5, has_bos: bool = True, model: Model = MODEL, **context: Any) -> Compiled:
    return compile_edits(edits, Context(range(n), has_bos, **context), model)


def refused(*edits: Any, **options: Any) -> str:
    with pytest.raises(EditError) as caught:
        compiled(*edits, **options)
    return str(caught.value)


# -- terms ------------------------------------------------------------------------------------------------------------


def test_a_term_names_point_address_coefficient_and_spans() -> None:
    found = compiled(mia.Add(U, 0.5, [2, 1]), mia.Add(ONES, 3, [0], where=mia.positions([0, 1, 4])))
    assert found.terms == [
        *[Term("add", "resid_post", layer, ((1, None),), write=digest(U), coeff=0.5, columns=(0, D)) for layer in (1, 2)],
        Term("add", "resid_post", 0, ((0, 2), (4, 5)), write=digest(ONES), coeff=3.0, columns=(0, D))]
    assert {sha: digest(rows) for sha, rows in found.vectors.items()} == {sha: sha for sha in (digest(U), digest(ONES))}
    assert found.gates == []


def test_the_parts_of_a_step_reach_its_term() -> None:
    (clip,) = compiled(mia.Clamp(U, low=-1.0, high=2.0, layers=[1])).terms
    assert (clip.op, clip.low, clip.high, clip.read, clip.write) == ("clip", -1.0, 2.0, digest(U / 5), digest(U / 5))
    (feature,) = compiled(mia.ClampFeature(U, ONES, 3.0, bias=0.5, threshold=0.25, layers=[1])).terms
    assert (feature.op, feature.low, feature.offset, feature.threshold) == ("feature", 3.0, 0.5, 0.25)
    affine = compiled(mia.Affine(torch.eye(D)[:2], torch.eye(D)[2:4], torch.tensor([0.5, 0.25]), [1], coeff=2.0)).terms
    assert {(t.op, t.coeff, t.slope) for t in affine} == {("affine", 2.0, 1.0)}
    assert [(t.offset, t.fresh) for t in affine] == [(0.5, True), (0.25, False)]
    scale, add = compiled(mia.Replace(ONES, [1], blend=0.25)).terms
    assert [(t.op, t.coeff, t.fresh) for t in (scale, add)] == [("scale", -0.25, True), ("add", 0.25, False)]


def test_a_head_is_its_columns_and_a_vector_as_wide_is_put_there() -> None:
    found = compiled(mia.Add(torch.tensor([1.0, 2, 3]), 2.0, [1], "z", head=1))
    (term,) = found.terms
    assert term.columns == (3, 6)
    assert found.vectors[term.write].tolist() == [[0, 0, 0, 1, 2, 3]]
    assert [t.columns for t in compiled(mia.Scale(0.0, [1], "z", heads=[1, 0])).terms] == [(3, 6), (0, 3)]


def test_a_schedule_counts_from_the_first_row_that_the_edit_touches() -> None:
    edits = [mia.Add(U, layers=[layer], schedule=mia.Decay(4), where=where) for layer, where in ((1, mia.window(1)), (2, mia.generated()))]
    terms = compiled(*edits).terms
    assert [(t.rate, t.origin) for t in terms] == [(-0.25, 1), (-0.25, 5)]


def test_rows_by_position_are_a_block_of_vectors_on_the_rows_that_they_cover() -> None:
    rows = torch.randn(4, D, generator=torch.Generator().manual_seed(0))
    found = compiled(mia.Replace(rows, [1], start=3, where=mia.everywhere() & ~mia.positions([5])))
    assert [(t.spans, t.origin, t.aligned) for t in found.terms] == [(((3, 5), (6, 7)), 3, 0), (((3, 5), (6, 7)), 3, 4)]
    assert torch.equal(found.vectors[found.terms[1].write], rows)
    assert refused(mia.Replace(rows, [1], start=5, where=mia.prompt())) == (
        "none of the 4 rows from position 5 on is selected by where=prompt()")


@pytest.mark.parametrize("edit", [
    mia.Add(ONES, 0.0, [0]), mia.Add(ONES, 0.0, [0], keep_norm=True), mia.Ablate(ONES, 0.0, layers=[0]), mia.Scale(1.0, [0]),
    mia.Replace(ONES, [0], blend=0.0), mia.Affine(ONES[None], ONES[None], layers=[0], coeff=0.0)])
def test_an_edit_without_an_effect_leaves_nothing(edit: mia.Edit) -> None:
    assert compiled(edit) == Compiled()


def test_a_selector_that_takes_no_row_of_this_prompt_leaves_no_term() -> None:
    edit = mia.Add(ONES, layers=[0], where=mia.prompt())
    assert compiled(edit, n=1) == Compiled()
    assert len(compiled(edit, n=1, has_bos=False).terms) == len(compiled(edit, n=2).terms) == 1


def test_edits_at_one_point_keep_their_order_and_equal_vectors_are_one() -> None:
    found = compiled(mia.Add(ONES, 1, [1]), mia.Scale(2.0, [0, 1]), mia.Add(ONES.clone(), 2, [1, 0]))
    assert [(t.op, t.coeff) for t in found.terms if t.layer == 1] == [("add", 1.0), ("scale", 1.0), ("add", 2.0)]
    assert list(found.vectors) == [digest(ONES)]


def test_compiled_terms_survive_the_wire() -> None:
    gate = mia.Gate([mia.Probe(U, 0, cosine=True, mean=ONES), mia.Probe(U, 0, "z")], below=1 / 3, rule="all", over="since")
    found = compiled(mia.Add(U, 1 / 3, [1], when=gate), mia.Add(U, 1e-30, [1], where=mia.positions([1, 3])),
                     mia.Ablate([U, ONES], layers=[2], when=mia.After([7, 9])), mia.Scale(0.5, [3], schedule=mia.Decay(3)))
    spec = Spec(tuple(found.terms), (), tuple(found.gates))
    assert decode(encode("r", spec))[1] == spec


def test_up_to_the_limit_terms_may_meet_at_one_point() -> None:
    edits = [mia.Add(ONES, 1 + i, [layer]) for layer in (0, 1) for i in range(MAX_TERMS)]
    assert len(compiled(*edits).terms) == 2 * MAX_TERMS
    assert refused(*edits, mia.Add(ONES, 1, [1], where=mia.last())) == (
        f"{MAX_TERMS + 1} edit terms meet at resid_post.1 from position 4 on; at most {MAX_TERMS} can")
    apart = [mia.Add(ONES, 1, [0], where=mia.positions([p])) for p in range(3 * MAX_TERMS)]
    assert len(compiled(*apart).terms) == 3 * MAX_TERMS


@pytest.mark.parametrize(("edit", "says"), [
    (mia.Add(torch.ones(5), layers=[0]), "the vector for resid_post.0 has width 5; the model's is 6"),
    (mia.Add(torch.ones(0), layers=[0]), "the vector for resid_post.0 has width 0; the model's is 6"),
    (mia.Add(torch.ones(3), layers=[0], point="z"), "the vector for z.0 has width 3; the model's is 6"),
    (mia.Add(torch.ones(2), layers=[0], point="z", head=0), "the vector for z.0 has width 2; the model's is 6"),
    (mia.Add(ONES, layers=[4]), "the edit names layer 4; the model has layers 0 to 3"),
    (mia.Add(ONES, layers=[-1]), "the edit names layer -1; the model has layers 0 to 3"),
    (mia.Add(ONES, 0.0, [2], "mlp_out"), "edits at mlp_out.2 were not declared; declared: resid_post, z. Load with "
                                         "Session(..., points=['mlp_out', ...]"),
    (mia.Scale(0.5, [1], "q"), "q can be captured but not edited"),
    (mia.Scale(0.5, [1], "z", heads=2), "head 2 was named at z.1, which has 2 heads"),
    (mia.Scale(0.5, [1], "z", heads=-1), "head -1 was named at z.1, which has 2 heads"),
    (mia.Scale(0.5, [1], heads=0), "head 0 was named at resid_post.1, which has no heads"),
    ("cheerful", "str is not an edit; type for example mia.Add(vector, 0.2)"),
    (ONES, "Tensor is not an edit"),
    (mia.Add(ONES, layers=[0], where=mia.window(3, 3)), "selects nothing in a prompt of 5 tokens"),
    (mia.Replace(torch.ones(2, D), [1], start=3, schedule=mia.Decay(2)), "rows by position take no schedule"),
    (mia.Add(ONES, layers=[1], when=mia.After([3]), schedule=mia.Decay(2)), "a gate that opens later would not wait for"),
])
def test_an_edit_that_does_not_fit_the_model_is_an_error(edit: Any, says: str) -> None:
    assert says in refused(mia.Add(ONES, layers=[0]), edit)


def test_what_was_not_declared_is_an_error_whatever_the_prompt() -> None:
    none = Model(LAYERS, SHAPES, frozenset(), edit_kinds=("add",))
    assert "were not declared; declared: none" in refused(mia.Add(ONES, layers=[0]), model=none)
    few = Model(LAYERS, SHAPES, frozenset(SHAPES), edit_kinds=("add", "scale"))
    for edit in (mia.Ablate(ONES, layers=[0]), mia.ClampFeature(ONES, ONES, 1.0, layers=[0])):
        with pytest.raises(EditError, match=f"{type(edit).__name__} edits were not declared; declared: add, scale"):
            check(edit, few)
    check(mia.Scale(0.5, [0]), few)


# -- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("over", "gate", "read", "edited"), [
    ("row", Gate("row", 0.5), ((1, None),), ((1, None),)),
    ("prompt_mean", Gate("mean", 0.5, 1, 5), ((1, 5),), ((5, None),)),
    ("prompt_max", Gate("max", 0.5, 1, 5), ((1, 5),), ((5, None),)),
    ("prompt_last", Gate("last", 0.5, 4, 5), ((4, 5),), ((5, None),)),
    ("since", Gate("since", 0.5, 4), ((4, None),), ((5, None),)),
])
def test_a_gate_is_read_before_the_rows_it_governs(over: str, gate: Gate, read: tuple, edited: tuple) -> None:
    found = compiled(mia.Add(ONES, layers=[1], when=mia.Gate(mia.Probe(U, 0, bias=0.25), above=0.5, over=over)))
    measure, add = found.terms
    assert found.gates == [gate]
    assert (measure.op, measure.site, measure.spans, measure.read, measure.coeff, measure.offset, measure.gate) == (
        "measure", ("resid_post", 0), read, digest(U), 1.0, 0.25, 0)
    assert (add.spans, add.gate) == (edited, 0)
    encode("r", Spec(tuple(found.terms), (), tuple(found.gates)))


def test_the_side_rule_and_cosine_of_a_gate_reach_its_readings() -> None:
    probes = [mia.Probe(U, 0, cosine=True, mean=ONES), mia.Probe(U, 0, "z")]
    found = compiled(mia.Add(ONES, layers=[2], when=mia.Gate(probes, below=0.5, rule="all")))
    one, other, _ = found.terms
    assert found.gates == [Gate("row", 1.5)]
    assert (one.coeff, one.threshold, one.vote, one.cosine, one.read, one.write) == (-1.0, -0.5, True, True, digest(U / 5), digest(ONES))
    assert one.offset == pytest.approx(-7 / 5)
    assert (other.coeff, other.threshold, other.vote, other.cosine, other.write, other.site) == (-1.0, -0.5, True, False, "", ("z", 0))


def test_edits_of_one_gate_share_it_and_it_reads_all_their_rows() -> None:
    gate = mia.Gate(mia.Probe(U, 0), above=0.5)
    found = compiled(mia.Add(ONES, layers=[1], when=gate, where=mia.window(1, 3)), mia.Scale(0.5, [2], when=gate, where=mia.window(2, 9)),
                     mia.Scale(0.5, [3]))
    assert len(found.gates) == 1
    assert [t.spans for t in found.terms if t.op == "measure"] == [((1, 9),)]
    assert [t.gate for t in found.terms] == [0, 0, 0, -1]


def test_a_prompt_of_bos_alone_is_read_whole() -> None:
    gate = mia.Gate(mia.Probe(U, 0), above=0.5, over="prompt_mean")
    assert compiled(mia.Add(ONES, layers=[1], when=gate), n=1).gates == [Gate("mean", 0.5, 0, 1)]


class Letters:
    """A tokenizer of single letters."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def test_after_takes_ids_and_texts_of_one_token() -> None:
    found = compiled(mia.Add(ONES, layers=[1], when=mia.After([7, "x"])), tokenizer=Letters())
    assert found.gates == [Gate("token", 0.0, 5, 0, (7, ord("x")))]
    assert [(t.op, t.spans, t.gate) for t in found.terms] == [("add", ((5, None),), 0)]
    assert "'xy' is not one token of this model" in refused(mia.Add(ONES, layers=[1], when=mia.After("xy")), tokenizer=Letters())


def gated(layer: int = 1, point: str | None = None, where: Any = None, over: str = "row", probe: mia.Probe | None = None) -> mia.Edit:
    gate = mia.Gate(probe or mia.Probe(U, 1), above=0.5, over=over)
    return mia.Scale(0.5, [layer], point, where or mia.generated(), when=gate)


@pytest.mark.parametrize(("edit", "says"), [
    (gated(), "reads at resid_post.1, which comes after it or beside it; read at an earlier layer, or over='prompt_last' or 'since'"),
    (gated(0), "comes after it or beside it"),
    (gated(point="z", probe=mia.Probe(U, 1, "z")), "comes after it or beside it"),
    (gated(over="since", where=mia.window(0)), "this gate is decided after the prompt, so its edit cannot act on prompt positions"),
    (gated(over="prompt_mean", where=mia.prompt()), "this gate is decided after the prompt"),
    (mia.Scale(0.5, [1], where=mia.last(), when=mia.After(7)), "this gate is decided after the prompt"),
    (gated(2, probe=mia.Probe(ONES[:5], 1)), "the probe at resid_post.1 has width 5; the model's is 6"),
    (gated(2, probe=mia.Probe(U, 7)), "the edit names layer 7; the model has layers 0 to 3"),
])
def test_a_gate_that_cannot_be_decided_in_time_is_an_error(edit: mia.Edit, says: str) -> None:
    assert says in refused(edit)


@pytest.mark.parametrize("edit", [
    gated(2), gated(2, "z"), gated(1, probe=mia.Probe(U, 1, "z")), gated(0, over="since"),
    gated(0, over="prompt_last", where=mia.everywhere()), gated(0, over="prompt_max", where=mia.window(5, 8))])
def test_a_gate_that_is_decided_in_time_passes(edit: mia.Edit) -> None:
    found = compiled(edit)
    encode("r", Spec(tuple(found.terms), (), tuple(found.gates)))


def test_a_request_has_so_many_gates_at_most() -> None:
    edits = [mia.Scale(0.5, [1], when=mia.After(token)) for token in range(MAX_GATES)]
    assert len(compiled(*edits, *edits).gates) == MAX_GATES
    assert refused(*edits, mia.Scale(0.5, [1], when=mia.After(99))) == (
        f"these edits have {MAX_GATES + 1} different gates; one request has {MAX_GATES} at most")
