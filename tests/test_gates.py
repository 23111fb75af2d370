"""The words for gates and schedules: what they accept, what they say is wrong, and the numbers that they stand for."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.errors import EditError, PointError
from mia_lab.gates import OVER, RULES
from mia_lab.points import Point

U = torch.tensor([3.0, 0.0, 4.0])
PROBE = mia.Probe(U, 1)


# -- Probe ------------------------------------------------------------------------------------------------------------


def test_a_probe_reads_at_a_point_of_any_spelling_of_its_kind() -> None:
    assert PROBE.at == Point("resid_post", 1)
    assert mia.Probe(U, 2, "hook_mlp_out").at == Point("mlp_out", 2)
    assert mia.Probe(U, torch.tensor(2)).layer == 2
    with pytest.raises(PointError, match="resid_pots"):
        _ = mia.Probe(U, 1, "resid_pots").at


def test_its_direction_is_a_float32_copy_which_only_a_cosine_makes_unit() -> None:
    given = U.double().clone()
    plain, cosine = mia.Probe(given, 1), mia.Probe(given, 1, cosine=True)
    given.zero_()
    assert plain.direction.dtype == torch.float32
    assert plain.direction.tolist() == [3.0, 0.0, 4.0]
    torch.testing.assert_close(cosine.direction, U / 5)


@pytest.mark.parametrize("cosine", [False, True])
def test_its_offset_makes_the_product_with_the_direction_the_reading(cosine: bool) -> None:
    mean, h = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 2.0])
    probe = mia.Probe(U, 1, bias=0.25, mean=mean, cosine=cosine)
    wanted = (h - mean) @ (U / 5 if cosine else U) + 0.25
    assert float(h @ probe.direction) + probe.offset == pytest.approx(float(wanted))
    assert mia.Probe(U, 1, bias=0.25).offset == 0.25


@pytest.mark.parametrize(("args", "says"), [
    (dict(direction=torch.ones(2, 3)), "the direction of a probe is a finite vector, not [2, 3]"),
    (dict(direction=torch.tensor(1.0)), "the direction of a probe is a finite vector, not []"),
    (dict(direction=torch.tensor([1.0, float("nan")])), "the direction of a probe is a finite vector"),
    (dict(mean=torch.tensor([float("inf"), 0.0, 0.0])), "the mean of a probe is a finite vector"),
    (dict(mean=torch.ones(4)), "the mean has width 4, the direction 3"),
    (dict(direction=torch.zeros(3), cosine=True), "the direction of a cosine probe is zero"),
])
def test_a_probe_that_cannot_read_is_an_error(args: dict[str, Any], says: str) -> None:
    with pytest.raises(EditError) as caught:
        mia.Probe(**dict(direction=U, layer=1) | args)
    assert says in str(caught.value)


# -- Gate -------------------------------------------------------------------------------------------------------------


def test_one_probe_or_several_make_a_gate() -> None:
    assert mia.Gate(PROBE, above=1).probes == mia.Gate([PROBE], above=1).probes == (PROBE,)
    assert mia.Gate(iter([PROBE, PROBE]), above=1).probes == (PROBE, PROBE)


def is_open(gate: mia.Gate, readings: list[float]) -> bool:
    """Decide as the engine does: from signed readings, or from votes, and one threshold."""
    signed = [gate.sign * r for r in readings]
    return (sum(s > gate.level for s in signed) if gate.votes else sum(signed)) > gate.threshold


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("readings", [[1.0], [3.0], [1.0, 1.5], [3.0, -2.5], [-2.5, 3.0], [2.5, 3.0], [2.0, 2.0, 9.0], [2.0]])
@pytest.mark.parametrize("side", ["above", "below"])
def test_its_numbers_decide_as_its_words_say(side: str, readings: list[float], rule: str) -> None:
    gate = mia.Gate([PROBE] * len(readings), rule=rule, **{side: 2.0})
    passes = (lambda r: r > 2.0) if side == "above" else (lambda r: r < 2.0)
    expected = {"sum": passes(sum(readings)), "any": any(map(passes, readings)), "all": all(map(passes, readings))}[rule]
    assert is_open(gate, readings) == expected


@pytest.mark.parametrize(("args", "says"), [
    (dict(), "a gate needs a threshold on one side: above=... or below=..."),
    (dict(above=1.0, below=2.0), "a gate needs a threshold on one side"),
    (dict(probes=[], above=1.0), "a gate reads one or more mia.Probe"),
    (dict(probes=[PROBE, U], above=1.0), "a gate reads one or more mia.Probe"),
    (dict(above=1.0, rule="most"), "rule is one of sum, any, all and over one of row, prompt_mean"),
    (dict(above=1.0, over="prompt"), "got 'sum' and 'prompt'"),
    *[(dict(probes=[PROBE, PROBE], above=1.0, rule=rule, over="prompt_mean"), "use rule='sum', or over='prompt_max'")
      for rule in ("any", "all")],
])
def test_a_gate_that_decides_nothing_is_an_error(args: dict[str, Any], says: str) -> None:
    with pytest.raises(EditError) as caught:
        mia.Gate(**dict(probes=PROBE) | args)
    assert says in str(caught.value)


@pytest.mark.parametrize("over", OVER)
def test_zero_is_a_threshold_and_one_probe_may_have_any_rule(over: str) -> None:
    for rule in RULES:
        gate = mia.Gate(PROBE, above=0.0, rule=rule, over=over)
        assert (gate.votes, gate.threshold, gate.sign) == (False, 0.0, 1.0)


# -- After, Decay -----------------------------------------------------------------------------------------------------


def test_tokens_are_ids_or_texts() -> None:
    assert mia.After(7) == mia.After([7]) == mia.After((7,))
    assert mia.After("x").tokens == ("x",)
    assert mia.After([7, "x"]).tokens == (7, "x")
    assert hash(mia.After(7)) == hash(mia.After([7])) and mia.After(7) != mia.After(8)
    assert len(mia.After(range(64)).tokens) == 64


@pytest.mark.parametrize(("tokens", "n"), [([], 0), (range(65), 65)])
def test_a_watch_for_no_token_or_too_many_is_an_error(tokens: Any, n: int) -> None:
    with pytest.raises(EditError, match=f"After takes 1 to 64 tokens, not {n}"):
        mia.After(tokens)


@pytest.mark.parametrize("half_life", [1e-3, 0.5, 1, 20.0])
def test_after_a_half_life_half_is_left(half_life: float) -> None:
    assert 2 ** (mia.Decay(half_life).rate * half_life) == pytest.approx(0.5)
    assert mia.Decay(half_life).rate < 0


@pytest.mark.parametrize("half_life", [0, -1, 1e-4, float("nan"), float("inf"), 1e9])
def test_a_half_life_is_a_positive_number_of_positions(half_life: float) -> None:
    with pytest.raises(EditError, match="must be a positive number of positions"):
        mia.Decay(half_life)


# -- on an edit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "says"), [
    (dict(when=PROBE), "is no gate; type for example when=mia.Gate(probe, above=0.5)"),
    (dict(when=0.5), "when=0.5 is no gate"),
    (dict(schedule=20), "schedule=20 is no schedule; type for example schedule=mia.Decay(20)"),
    (dict(where="prompt"), "where='prompt' is no selector; type for example where=mia.prompt()"),
])
def test_an_edit_takes_only_these_words(options: dict[str, Any], says: str) -> None:
    with pytest.raises(EditError) as caught:
        mia.Add(U, layers=[1], **options)
    assert says in str(caught.value)


def test_equal_gates_and_schedules_make_equal_edits() -> None:
    make = lambda direction=U, above=0.5, over="row", half_life=20: mia.Add(  # noqa: E731
        U, layers=[1], when=mia.Gate(mia.Probe(direction, 0), above=above, over=over), schedule=mia.Decay(half_life))
    others = [make(-U), make(above=0.6), make(over="since"), make(half_life=21), mia.Add(U, layers=[1], when=mia.After(7)),
              mia.Add(U, layers=[1], when=mia.After(8)), mia.Add(U, layers=[1])]
    assert make() == make(U.clone())
    assert len({make(), make(U.clone()), *others}) == 1 + len(others)


@pytest.mark.parametrize(("value", "name"), [(PROBE, "layer"), (mia.Gate(PROBE, above=1), "above"), (mia.After(7), "tokens"),
                                             (mia.Decay(3), "half_life")])
def test_none_of_them_can_be_changed(value: Any, name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, 2)
