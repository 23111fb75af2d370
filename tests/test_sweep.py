"""Sweeps on a tiny model in float32: nothing changes nothing, edits act on given texts as on generated ones, what breaks off is kept."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.analysis import units
from mia_lab.analysis.controls import label_shuffled, matched_randoms
from mia_lab.analysis.sweep import choice as choosing
from mia_lab.analysis.sweep.effects import results
from mia_lab.analysis.sweep.items import Item, Lab
from mia_lab.analysis.sweep.measuring import Measured, measure
from mia_lab.analysis.sweep.result import Bench, Sweep
from mia_lab.analysis.sweep.settings import BASE, STEERED, Placebos, Setting, of_vectors
from mia_lab.analysis.sweep.trials import Ask, Job, fixed, run
from mia_lab.errors import EditError, MiaError, PromptError

PROMPTS = [{"prompt": text, "group": text[0], "yes": text[1], "no": text[0]} for text in
           ("abcd", "aefgh", "bcde", "bfghi", "cdef", "cghij", "defg", "dhijk", "efgh", "eijkl", "fghi", "fjklm")]
GUARDS = [mia.kl(2, given=6, scored=10), mia.perplexity(2, given=6, scored=10)]
ODDS = mia.token_odds(["a", "b", "c"], ["x", "y", "z"])
QUIET = dict(progress=False, guards=GUARDS, placebos=0)


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", points=["resid_post"], max_model_len=256, max_num_seqs=16, block_size=32, enforce_eager=True)


@pytest.fixture
def vector(session: mia.Session) -> mia.Vector:
    return session.vector([(f"{a}{b} abc", f"{a}{b} xyz") for a in "abcd" for b in "klm"])[[1, 2]]


# -- edits on given texts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "expected"), [
    (mia.generated(), [(5, None)]), (mia.generated(2), [(5, 7)]), (mia.prompt(), [(1, 5)]), (mia.last(), [(4, 5)]),
    (mia.window(-2), [(3, None)]), (mia.positions([0, -1]), [(0, 1), (4, 5)]), (~mia.last(), [(0, 4), (5, None)]),
    (mia.everywhere(), [(0, None)])])
def test_selectors_see_the_prompt_and_not_what_is_given_after_it(where: Any, expected: list) -> None:
    class Words:
        bos_token_id = 1

    add = mia.Add(torch.ones(4), 0.5, [3], where=where)
    prompt = Ask((1, 5, 6, 7, 8), 5)
    longer = replace(prompt, ids=(*prompt.ids, 9, 9, 9))
    assert fixed(add, prompt, Words()) is add
    from mia_lab.selectors import Context

    assert fixed(add, longer, Words()).where.spans(Context(longer.ids, True)) == expected


def test_a_gate_that_opens_after_the_prompt_is_refused_on_given_texts() -> None:
    gate = mia.Gate(mia.Probe(torch.ones(4), 1), above=0.0, over="prompt_last")
    with pytest.raises(EditError, match="use metrics of generated texts"):
        fixed(mia.Add(torch.ones(4), 0.5, [3], when=gate), Ask((1, 2, 3), 2), None)


@pytest.mark.full
@pytest.mark.parametrize("where", [mia.generated(), mia.prompt(), mia.last(), mia.everywhere()])
def test_a_given_text_has_the_probabilities_that_it_was_generated_with(session: mia.Session, vector: mia.Vector, where: Any) -> None:
    edit = mia.Add(vector[1], 2.0, where=where)
    logits, cache = session.run_with_cache("abcd", max_tokens=7, edits=edit, ignore_eos=True)
    ids, n = cache.tokens[0], cache.n_prompt[0]
    ask = Ask(tuple(ids), n, tuple(range(n - 1, len(ids) - 1)))
    (given,), (plain,) = (run(session, [Job(ask, edits)]) for edits in ((edit,), ()))
    torch.testing.assert_close(session.unembed(given.stream), logits[0, n - 1: len(ids) - 1], rtol=0, atol=1e-4)
    assert not torch.allclose(given.stream, plain.stream, atol=1e-2)


# -- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_nothing_changes_nothing(session: mia.Session, vector: mia.Vector) -> None:
    metrics = [ODDS, mia.answer_odds("yes", "no", columns=True), mia.capability(3)]
    zero = mia.Add(0 * vector[1])
    swept = session.compose({"c = 0": [mia.Add(vector[1], 0.0)], "zero": [zero]}, PROMPTS, metrics, **QUIET)
    for r in swept.table:
        assert abs(r.effect.mean) < 1e-5 and abs(r.kl) < 1e-6 and r.perplexity_ratio == pytest.approx(1.0, abs=1e-5)
        assert r.effects["capability"].mean == 0.0
    assert swept.values["kl"][0].tolist() == [0.0, 0.0]
    assert all(row["effect"] == row["score"] for row in swept.regression_only(["capability"]))
    choice = swept.best(max_perplexity_ratio=None)
    assert not choice and choice.setting is None and "nothing passes" in repr(choice) and swept.looks == []
    with pytest.raises(MiaError, match="no setting passed: 2 settings"):
        _ = choice.edit


@pytest.mark.full
def test_a_small_edit_and_its_opposite_do_the_opposite_and_cost_alike(session: mia.Session, vector: mia.Vector) -> None:
    swept = session.sweep(vector, [0.05, 0.0], PROMPTS, [ODDS], **QUIET)
    assert [(r.setting.layer, r.setting.coeff, r.setting.asked) for r in swept.table] == [
        (1, -0.05, False), (1, 0.05, True), (2, -0.05, False), (2, 0.05, True)]
    for down, up in zip(swept.table[::2], swept.table[1::2]):
        change = swept.values[ODDS.name]
        odd, even = ((change[i] + sign * change[j] - (1 + sign) * change[0]).abs().mean() for (i, j), sign in
                     (((swept.settings.index(up.setting), swept.settings.index(down.setting)), s) for s in (-1, 1)))
        assert odd > 10 * even
        assert up.kl == pytest.approx(down.kl, rel=0.3) and up.kl > 1e-7


@pytest.mark.full
def test_numbers_are_those_of_a_run_of_one_s_own(session: mia.Session, vector: mia.Vector) -> None:
    metrics = [ODDS, mia.answer_odds("ab", "z"), mia.probe_reading(mia.Probe(vector[2].rows[0], 2))]
    swept = session.sweep(vector[1], [0.5], PROMPTS, metrics, where=mia.prompt(), **QUIET)
    i, edit = next((i, s.edits[0]) for i, s in enumerate(swept.settings) if s.coeff == 0.5)
    item = swept.bench.lab.items[3]
    token = lambda text: session.tokenizer.encode(text, add_special_tokens=False)[0]  # noqa: E731
    logits, cache = session.run_with_cache(item.prompt, edits=edit)
    p = logits[0, -1].double().log_softmax(-1)
    odds = p[[token(t) for t in "abc"]].logsumexp(0) - p[[token(t) for t in "xyz"]].logsumexp(0)
    assert float(swept.values["token_odds"][i, 3]) == pytest.approx(float(odds), abs=1e-4)
    ids = [*session.to_tokens(item.prompt)[0].tolist(), token("a")]
    longer, _ = session.run_with_cache(ids, edits=mia.Add(vector[1], 0.5, where=mia.window(1, len(ids) - 1)))
    answer = p[token("a")] + longer[0, -1].double().log_softmax(-1)[token("b")] - p[token("z")]
    assert float(swept.values["answer_odds"][i, 3]) == pytest.approx(float(answer), abs=1e-4)
    reading = float(cache["resid_post", 2][0, -1].double() @ vector[2].rows[0].double())
    assert float(swept.values["probe_reading"][i, 3]) == pytest.approx(reading, rel=1e-4)


@pytest.mark.full
def test_prompt_edits_and_edits_of_generated_tokens_both_cost_on_neutral_texts(session: mia.Session, vector: mia.Vector) -> None:
    swept = session.sweep(vector[1], [1.0], PROMPTS, [ODDS], where=[mia.prompt(), mia.generated(), mia.last()], **QUIET)
    costs = {(r.setting.where, r.setting.coeff): r.kl for r in swept.table}
    assert len(costs) == 6 and min(costs.values()) > 1e-6
    after = next(r for r in swept.table if "generated" in r.setting.where)
    assert after.effect.mean == pytest.approx(0.0, abs=1e-5)  # the next token of a prompt comes before it acts


@pytest.mark.full
def test_placebos_have_the_length_of_the_edit_and_shuffled_labels_their_own(session: mia.Session, vector: mia.Vector) -> None:
    pairs = [(f"{a}{b} abc", f"{a}{b} xyz") for a in "abcd" for b in "klm"]
    swept = session.sweep(3 * vector[1], [0.5], PROMPTS, [ODDS], progress=False, guards=(), placebos=5, placebo_prompts=2, pairs=pairs)
    real = next(s for s in swept.settings if s.role == STEERED)
    length = lambda s: float(next(iter(s.edits[0].rows.values())).norm() * abs(s.edits[0].coeff))  # noqa: E731
    random, shuffled = ([s for s in swept.settings if s.role == role] for role in ("random", "shuffled"))
    assert len(random) == len(shuffled) == 5  # both signs share them
    assert all(length(s) == pytest.approx(length(real), rel=1e-5) for s in random)
    assert all(0 < length(s) < length(real) for s in shuffled)
    tried = [~swept.values["token_odds"][i].isnan() for i, s in enumerate(swept.settings) if s.role == "random"]
    assert {int(t.sum()) for t in tried} == {2} and torch.stack(tried).any(0).all()
    assert all(len(r.random.effects) == len(r.shuffled.effects) == 5 for r in swept.table)
    with pytest.raises(EditError, match="do not give back the vector"):
        label_shuffled(session, vector, [(f"{i}{i}", f"q{i}") for i in range(8)], range(2))
    one, other = matched_randoms(session, "resid_post", [0, 1])
    assert torch.equal(mia.analysis.controls.matched_random(session, seed=1).rows, other.rows) and not torch.equal(one.rows, other.rows)


@pytest.mark.full
def test_an_interrupt_keeps_what_is_done_and_the_session_goes_on(session: mia.Session, vector: mia.Vector) -> None:
    def stop(done: int, tokens: int) -> None:
        assert tokens >= done
        raise KeyboardInterrupt

    before = session.generate("abcd", max_tokens=5)
    jobs = [Job(Ask((1, 40 + i % 50, 50 + i // 50), 3, (2,)), (mia.Add(vector[1], 0.1),)) for i in range(400)]
    found = run(session, jobs, tick=stop)
    kept = [outcome is not None for outcome in found]
    assert 128 <= sum(kept) < 400
    whole = run(session, jobs)
    for one, other in zip(found, whole):
        assert one is None or torch.allclose(one.stream, other.stream, atol=1e-4)
    assert session.generate("abcd", max_tokens=5) == before

    lab = session.sweep(vector[1], [0.1], PROMPTS, [ODDS], **QUIET).bench.lab
    calls = []

    def judge(text: str) -> float:
        calls.append(text)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return float(len(text))

    settings = [Setting("base", BASE), Setting("v", STEERED, (mia.Add(vector[1], 0.1),))]
    measured = measure(lab, settings, [mia.scored(judge)], 0.0, False)
    assert not measured.done and int((~measured.values["judge"].isnan()).sum()) == 4


@pytest.mark.full
def test_texts_are_generated_once_a_seed(session: mia.Session, vector: mia.Vector) -> None:
    options = dict(progress=False, guards=(), placebos=0, max_tokens=6)
    swept = session.sweep(vector[1], [0.5], PROMPTS, [mia.length("characters")], temperature=1.0, seeds=[1, 2, 3], **options)
    texts = swept.texts[0][0]
    assert len(texts) == 3 and len(set(texts)) > 1
    prompt = swept.bench.lab.items[0].prompt
    assert texts[1] == session.generate(prompt, max_tokens=6, temperature=1.0, seed=2)
    assert float(swept.values["length"][0, 0]) == pytest.approx(sum(map(len, texts)) / 3)
    with pytest.raises(EditError, match="give a temperature"):
        session.sweep(vector[1], [0.5], PROMPTS, [mia.length()], seeds=[1, 2], **options)


@pytest.mark.full
def test_recipes_act_together_and_under_a_system_prompt(session: mia.Session, vector: mia.Vector) -> None:
    both = [mia.Add(vector[1], 0.5), mia.Add(vector[2], -0.3)]
    recipes = {"both": both, "words": "xyz", "words and both": ("xyz", both)}
    swept = session.compose(recipes, PROMPTS, [ODDS, mia.capability(2)], progress=False, guards=GUARDS, placebos=4, placebo_prompts=3)
    item = swept.bench.lab.items[1]
    plain, added = ({i: swept.values["token_odds"][i, 1] for i, s in enumerate(swept.settings) if s.role == STEERED}[k] for k in (2, 3))
    for prompt, edits, found in ((f"xyz\n\n{item.prompt}", None, plain), (f"xyz\n\n{item.prompt}", both, added)):
        logits = session.run_with_cache(prompt, edits=edits)[0][0, -1]
        ids = [[session.tokenizer.encode(t, add_special_tokens=False)[0] for t in side] for side in ("abc", "xyz")]
        assert float(found) == pytest.approx(float(logits[ids[0]].logsumexp(0) - logits[ids[1]].logsumexp(0)), abs=1e-4)
    results = {r.setting.name: r for r in swept.table}
    assert results["both"].random is not None and results["words"].random is None
    assert [row["setting"] for row in swept.regression_only()] and len(swept.pareto()) >= 1
    assert results["words"].kl > 1e-6 and math.isfinite(results["words and both"].perplexity_ratio)


@pytest.mark.full
def test_a_choice_reports_on_prompts_that_it_was_not_made_on(session: mia.Session, vector: mia.Vector) -> None:
    prompts = [f"{a}{b}{c}" for a in "abcdef" for b in "ghi" for c in "jk"]
    ids = [session.tokenizer.encode(t, add_special_tokens=False)[0] for t in "abcxyz"]
    read = session.run_with_cache("a")[1]._source.readout(ids).vectors
    row = read[:3].mean(0) - read[3:].mean(0)  # what the last block's stream needs for these tokens
    rows = torch.stack([row / row.norm() * unit for unit in vector.unit])
    swept = session.sweep(replace(vector, rows=rows, layers=(2, 3)), mia.grid(-0.4, 0.4, 5), prompts, [ODDS], progress=False,
                          guards=GUARDS, placebos=6, placebo_prompts=3)
    choice = swept.best(max_perplexity_ratio=3.0, questions=2)
    assert choice.setting is not None and choice.edit == choice.setting.edits[0]
    select, holdout = ({item.prompt for item in items} for items in (swept.bench.lab.items, swept.bench.holdout))
    assert not select & holdout and choice.effect.n == len(holdout)
    values = []
    for item in swept.bench.holdout:
        p = [session.run_with_cache(item.prompt, edits=edits)[0][0, -1] for edits in (choice.edit, None)]
        values.append([float(x[ids[:3]].logsumexp(0) - x[ids[3:]].logsumexp(0)) for x in p])
    assert choice.effect.mean == pytest.approx(sum(a - b for a, b in values) / len(values), abs=1e-4)
    assert choice.data["effect"][0] == choice.effect.mean and choice.flipped.mean * choice.effect.mean < 0
    assert swept.looks == [choice.setting.label]
    turned = swept.best(max_perplexity_ratio=3.0, questions=0, towards="lower")
    assert turned.looks == 2 and turned.setting.coeff < 0 and turned.effect.high < 0 and turned.capability is None
    assert swept.best(max_kl=0.0).setting is None
    for shown in (swept, choice):
        assert "<table" in shown._repr_html_() and len(shown.figure.data) >= 1 and repr(shown)
    rows = swept.at_kl(swept.table[0].kl)
    assert rows[0]["effect"] is not None and len(rows) == 4


@pytest.mark.full
@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda s, v: s.sweep(v, [0.0], PROMPTS, [ODDS]), EditError, "coefficients other than 0"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, []), EditError, "needs a metric"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [len]), EditError, "is no metric"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [mia.length(), mia.length("characters")]), EditError, "two metrics have the name 'length'"),
    (lambda s, v: s.sweep(v, [0.1], None, [ODDS]), EditError, "give prompts"),
    (lambda s, v: s.sweep(v, [0.1], None, [ODDS], select=PROMPTS[:4], holdout=PROMPTS[3:]), EditError, "in select and in holdout"),
    (lambda s, v: s.sweep(v, [0.1], [{"prompt": "ab", "group": i} for i in range(6)], [ODDS]), EditError, "in select and in holdout"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [mia.token_odds(["ab"], ["c"])]), PromptError, "'ab' is 2 tokens"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [mia.token_odds(["a"], ["a"])]), EditError, "on both sides"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [mia.answer_odds("maybe", columns=True)]), EditError, "no column 'maybe'"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [ODDS], guards=[mia.kl(2, given=9, scored=300)]), EditError, "fewer than the 9 given"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [ODDS], where=mia.span("bc")), EditError, "use metrics of generated texts"),
    (lambda s, v: s.sweep(torch.ones(128), [0.1], PROMPTS, [ODDS]), EditError, "takes a Vector"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [mia.token_odds([-1], [3])]), PromptError, "-1 is no token id"),
    (lambda s, v: s.sweep(v, [0.1], [{**row, "no": None} for row in PROMPTS], [mia.answer_odds("yes", "no", columns=True)]), EditError,
     "the column 'no' is empty"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [mia.length()], max_tokens=0), EditError, "max_tokens of at least 1"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [ODDS], placebo_prompts=0), EditError, "each on a prompt or more"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [ODDS], where=[mia.tokens(1), mia.tokens("1")]), EditError, "are shown alike"),
    (lambda s, v: s.compose({"none": []}, PROMPTS, [ODDS]), EditError, "the recipe 'none' is a list"),
    (lambda s, v: s.sweep(v, [0.1], PROMPTS, [ODDS], **QUIET).best(min_capability=0.9), EditError, "needs mia.capability"),
])
def test_what_cannot_be_measured_is_refused_with_what_to_do(session: mia.Session, vector: mia.Vector, call: Callable, error: type,
                                                            says: str) -> None:
    with pytest.raises(error) as caught:
        call(session, vector)
    assert says in str(caught.value)


@pytest.mark.full
def test_edits_in_force_are_refused_for_they_would_be_in_the_base(session: mia.Session, vector: mia.Vector) -> None:
    with session.steer(vector[2], 0.1), pytest.raises(EditError, match="end the steer scope"):
        session.sweep(vector[1], [0.1], PROMPTS, [ODDS], **QUIET)
    with session.steer(vector[2], 0.1), session.unsteered():
        assert session.sweep(vector[1], [0.1], PROMPTS, [ODDS], **QUIET).complete


def test_settings_stand_for_each_vector_layer_selector_and_sign() -> None:
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    v = mia.Vector("resid_post", (3, 5), rows, rows.norm(dim=-1), torch.ones(2))
    found = of_vectors({"a": v, "b": 2 * v}, [0.1, 0.2, -0.2], [mia.prompt(), mia.last()])
    assert len(found) == 1 + 2 * 2 * 2 * 4 and found[0].role == BASE
    assert len({s.label for s in found}) == len(found)
    assert {s.coeff for s in found if s.asked and s.coeff} == {0.1, 0.2, -0.2}


# -- choices, from numbers that are given -----------------------------------------------------------------------------


def chosen(monkeypatch: pytest.MonkeyPatch, effects: list[float], accuracy: tuple[float, float] = (0.8, 0.75)) -> mia.Choice:
    """The choice of the one setting of a sweep that was good on the select prompts, and does this on the holdout."""
    settings = [Setting("unsteered", BASE), Setting("v", STEERED, (mia.Add(torch.ones(4), 0.1, [1]),), 1, 0.1, of=((0,), (0,)))]
    metrics = [mia.scored(len, name="effect"), mia.capability(2)]

    def measured(effects: list[float], accuracy: tuple[float, float]) -> Measured:
        values = {"effect": torch.tensor([[0.0] * len(effects), effects]).double(),
                  "capability": torch.tensor(accuracy)[:, None].expand(2, 2)}
        return Measured(values, {"effect": tuple(map(str, range(len(effects)))), "capability": ("p", "q")}, {}, True)

    def report(lab: Lab, settings: list, *rest: Any) -> Measured:
        found = measured(effects, accuracy)
        again = {name: torch.cat([values, -values[1:]]) for name, values in found.values.items()}  # the opposite comes after
        return replace(found, values=again)

    monkeypatch.setattr(choosing, "measure", report)
    bench = Bench(Lab(None, (), "select", 1, (None,)), (Item("a", "a"),), 0.0, Placebos((), {}, 1), False)
    swept = Sweep.of(settings, metrics, measured([1.0 + i / 10 for i in range(12)], (0.8, 0.75)), bench)
    return swept.best(max_perplexity_ratio=None, min_capability=0.9)


def test_two_groups_of_the_holdout_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no effect, the bootstrap's interval of two groups is above zero one time in four."""
    few = chosen(monkeypatch, [1.0, 1.2])
    assert few.setting is not None and few.effect.low > 0 and not few and "not significant" in few.fault
    assert chosen(monkeypatch, [1.0 + i / 10 for i in range(8)])


def test_the_capability_to_keep_is_a_share_of_the_same_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = chosen(monkeypatch, [1.0 + i / 10 for i in range(8)], (0.3, 0.25))
    assert not lost and lost.fault == "loses too much capability" and lost.capability.mean == pytest.approx(-0.05)


def test_the_kl_of_a_choice_is_of_the_metric_that_guards_it() -> None:
    settings = [Setting("unsteered", BASE), Setting("v", STEERED, of=((0,), (0,)))]
    metrics = [mia.scored(len, name="effect"), mia.kl(2), mia.kl(2, name="other")]
    values = {m.name: torch.tensor([[0.0, 0.0], [size, size]]).double() for m, size in zip(metrics, (1.0, 0.1, 0.7))}
    measured = Measured(values, {m.name: ("p", "q") for m in metrics}, {}, True)
    mine = results(settings, metrics, measured)[0]
    costs = choosing._costs(settings, metrics, measured, mine)
    assert costs["kl"].mean == mine.kl == pytest.approx(0.1) and costs["side"]["other"].mean == pytest.approx(0.7)


@pytest.mark.full
def test_a_unit_is_of_the_model_as_it_was_configured(open_tiny: Callable[..., Any]) -> None:
    """Equal weights under another configuration have other activations, and must not be given the kept unit."""
    options = dict(points=["resid_post"], max_model_len=256, max_num_seqs=16, block_size=32, enforce_eager=True)
    plain = open_tiny("llama", **options).unit("resid_post")
    other = open_tiny("llama", **options, hf_overrides={"rms_norm_eps": 5.0})
    torch.testing.assert_close(other.unit("resid_post"), units._measure(other, "resid_post"))
    assert not torch.allclose(other.unit("resid_post"), plain, rtol=0.1)
