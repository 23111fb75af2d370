"""The overhead card: its arithmetic, its proofs, and what taps cost on the embedded model."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mia_lab import cli
from mia_lab.bench import peers, report
from mia_lab.bench.cases import Steering, Work, cases
from mia_lab.bench.drive import METRICS, drive
from mia_lab.bench.overhead import Facts, Figure, Pair, Row
from mia_lab.bench.sharing import share
from mia_lab.errors import MiaError, ProofError

WORK = Work(batch=4, tokens_in=24, tokens_out=12)
TINY = dict(enforce_eager=True, max_num_batched_tokens=64, block_size=32)


def row(case: str = "idle", batch: int = 1, ratio: float = 1.0) -> Row:
    figure = Figure(2.0, 2.0 * ratio, ratio, ratio - 0.01, ratio + 0.02, 0.95)
    return Row("a model", case, replace(WORK, batch=batch), 3, **dict.fromkeys(METRICS, figure), delivered=1 << 20)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_figure_is_the_median_of_paired_ratios() -> None:
    drifting = [(1.0, 1.1), (2.0, 2.2), (4.0, 4.4), (3.0, 3.3)]  # the machine slows down, the ratio stays
    figure = Figure.of(drifting)
    assert (figure.native, figure.case) == (2.5, 2.75)
    assert [figure.ratio, figure.low, figure.high] == pytest.approx([1.1, 1.1, 1.1])


@pytest.mark.parametrize("n", [2, 5, 6, 7, 12, 25])
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    draw = torch.Generator().manual_seed(n)
    held, stated = [], set()
    for _ in range(2000):
        figure = Figure.of([(1.0, float(x)) for x in torch.randn(n, generator=draw).exp()])  # skewed; its median is 1
        held.append(figure.low <= 1.0 <= figure.high)
        stated.add(figure.coverage)
    assert len(stated) == 1
    coverage = stated.pop()
    assert (coverage >= 0.95) == (n >= 6)
    assert sum(held) / len(held) == pytest.approx(coverage, abs=0.02)


def test_the_card_says_what_was_measured(tmp_path: Path) -> None:
    rows = [row(), row("steer every layer", 8, 1.25)]
    lines = report.text(rows).splitlines()
    assert len(lines) == 4 and all(line.count("|") == lines[0].count("|") for line in lines)
    assert "+25.00 [+24.00, +27.00]" in lines[3] and "| 8 | 24+12 | steer every layer | 2.000 |" in lines[3]
    facts = Facts("a model", 3 << 20, 2 << 20, 7, 5)
    assert "3 MiB" in report.describe(facts) and "7 tokens" in report.describe(facts)
    report.save(tmp_path / "all.json", {"device": "x"}, [facts], rows)
    saved = json.loads((tmp_path / "all.json").read_text())
    assert saved["rows"][1]["step_ms"]["ratio"] == 1.25 and saved["facts"][0]["kv_tokens_lost"] == 7
    report.plot(tmp_path / "all.png", rows)
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair.load("tiny", TINY, [WORK])
    yield found
    found.close()


@pytest.mark.full
def test_every_case_runs_and_proves_itself(pair: Pair) -> None:
    rows = list(pair.measure(WORK, 2))
    names = [case.name for case in cases(pair.session, WORK)]
    assert [row.case for row in rows] == names and len(names) == 8
    every = next(row for row in rows if row.case == "capture every token, all layers")
    assert every.delivered == 4 * (24 + 11) * 4 * 256 * 2  # requests, positions, layers, width, bytes
    assert all(row.step_ms.native > 0 and row.seconds.native > 0 and row.ttft_ms.case > 0 for row in rows)


@pytest.mark.full
def test_a_run_s_times_add_up(pair: Pair) -> None:
    from vllm import SamplingParams

    run = drive(pair.native, WORK.prompts(pair.vocab, 0), [SamplingParams(**WORK.sampling)] * WORK.batch)
    assert [len(output.outputs[0].token_ids) for output in run.outputs] == [12] * 4
    assert run.ttft_ms + 11 * run.tpot_ms == pytest.approx(1e3 * run.seconds, rel=0.2)
    assert run.step_ms == pytest.approx(run.tpot_ms, rel=0.5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["steer one layer", "steer every layer", "another edit in each request"])
def test_a_run_without_its_steering_proves_nothing(pair: Pair, name: str) -> None:
    chosen = {case.name: case for case in cases(pair.session, WORK)}
    idle = chosen["idle"].run(WORK.prompts(pair.vocab, 0))
    with pytest.raises(ProofError, match="was steered towards token"):
        chosen[name].prove(*idle)


@pytest.mark.full
@pytest.mark.parametrize("spoil", ["missing", "other"])
def test_rows_that_are_missing_or_another_s_prove_nothing(pair: Pair, spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases(pair.session, WORK) if case.name == "capture every token, all layers")
    run, source = case.run(WORK.prompts(pair.vocab, 0))
    assert case.prove(run, source)
    rows = source.rows

    def spoiled(point: Any, prompts: list[int], *rest: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = rows(point, prompts, *rest)
        return [(positions[:-1], values[:-1]) if spoil == "missing" else (positions, values.flip(0)) for positions, values in found]

    monkeypatch.setattr(source, "rows", spoiled)
    with pytest.raises(ProofError):
        case.prove(run, source)


@pytest.mark.full
def test_a_peer_runs_in_a_process_of_its_own_in_turn_with_native(pair: Pair) -> None:
    (row,) = peers.measure(pair, WORK, 2, ["vllm"])
    assert (row.peer, row.case, row.model) == ("vllm", "idle", "tiny") and row.version == peers.installed()["vllm"]
    assert 0.2 < row.seconds.ratio < 5  # it is the same engine on the same work
    assert f"vllm {row.version}, batch 4, 24+12 tokens, idle" in report.describe_peer(row)


@pytest.mark.full
def test_each_direction_that_steers_makes_a_token_of_its_own(pair: Pair) -> None:
    steering = Steering(pair.session, 40)
    assert len(set(steering.tokens)) == 40 and steering.turns(20) == [*range(16), *range(4)]
    last = torch.cat([steering.rows(i)[-1:] for i in range(40)])
    assert pair.session.unembed(last).argmax(-1).tolist() == steering.tokens
    assert not torch.equal(steering.rows(0), steering.rows(1)) and torch.equal(steering.rows(0)[:-1], steering.rows(1)[:-1])


@pytest.mark.full
def test_a_peer_that_did_not_do_what_is_timed_is_found_out(pair: Pair) -> None:
    steering = Steering(pair.session, 1)
    with pytest.raises(ProofError, match="was to say token"):
        peers._prove("x", "steer one layer", WORK, [[3] * 12], None, steering, pair)
    said = steering.tokens * 12
    peers._prove("x", "steer one layer", WORK, [said], None, steering, pair)
    with pytest.raises(ProofError, match="no rows"):
        peers._prove("x", "capture every token, one layer", WORK, [said], torch.zeros(3, 256), steering, pair)
    random = torch.randn(35, 256)
    with pytest.raises(ProofError, match="do not lead"):
        peers._prove("x", "capture every token, one layer", WORK, [said], random, steering, pair)


@pytest.mark.full
def test_the_command_prints_the_card_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "found.json"
    options = ["--batch", "2", "--tokens", "8", "4", "--rounds", "1", "--layers", "2", "--case", "idle", "--peers",
               "--engine", json.dumps(TINY)]
    assert cli.main(["bench", "tiny", "--out", str(out), *options]) == 0
    assert "tiny, 2 layers: taps hold" in capsys.readouterr().out
    saved = json.loads(out.read_text())
    assert saved["rows"][0]["case"] == "idle" and saved["machine"]["vllm"]
    assert {row["peer"] for row in saved["peers"]} == set(peers.installed())
    assert out.with_suffix(".png").exists()


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="bounds for the CPU build")
def test_what_taps_cost_on_the_embedded_model() -> None:
    """Loose enough for a busy machine: what fails is certain to be slower, by its whole interval."""
    bounds = {"idle": 1.08, "steer every layer": 1.25, "another edit in each request": 1.12, "capture last token, all layers": 1.10,
              "capture every token, all layers": 1.25}
    found = Pair.load("demo", dict(enforce_eager=True), [WORK])
    rows = {row.case: row for row in found.measure(WORK, 5, list(bounds))}
    found.close()
    for name, bound in bounds.items():
        print(f"{name}: step {report.percent(rows[name].step_ms)} %")
        assert rows[name].step_ms.low < bound, (name, report.percent(rows[name].step_ms))


@pytest.mark.full
def test_a_model_that_fits_once_is_measured_beside_itself() -> None:
    pair = Pair.load("tiny", TINY, [WORK], alone=True)
    try:
        rows = list(pair.measure(WORK, 2, ["idle", "steer every layer"]))
        assert pair.native is None and [(row.model, row.case) for row in rows] == [("tiny, beside itself", "idle"),
                                                                                   ("tiny, beside itself", "steer every layer")]
        assert all(row.tpot_ms.native > 0 for row in rows) and pair.facts().device_bytes > 0
    finally:
        pair.close()


def test_two_models_share_one_set_of_weights() -> None:
    model, source, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
    share(model, source)
    assert [p.data_ptr() for p in model.parameters()] == [p.data_ptr() for p in source.parameters()]
    with pytest.raises(MiaError, match="the two engines differ in weight"):
        share(model, other)
