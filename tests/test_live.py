"""A generation shown live: each reading is that of its own token's row, before the edits there, and an interrupt keeps them."""
from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.analysis import live
from mia_lab.errors import EditError, PointError, PromptError

pytestmark = pytest.mark.full
PROMPT = "a short prompt"


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", points=["resid_post", "mlp_out"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8, block_size=32,
                     enforce_eager=True)


def probe_of(session: mia.Session, layer: int = 1, **options: Any) -> mia.Probe:
    return mia.Probe(torch.randn(session.d_model, generator=torch.Generator().manual_seed(1)), layer, **options)


@pytest.mark.parametrize("cosine", [False, True])
def test_readings_are_those_of_a_capture_of_the_same_tokens(session: mia.Session, cosine: bool) -> None:
    probe = probe_of(session, cosine=cosine, bias=0.25, mean=torch.full((session.d_model,), 0.1))
    found = session.live(PROMPT, probe, max_tokens=9, ignore_eos=True)
    n = len(session.to_tokens(PROMPT)[0])
    output = session.completions(PROMPT, max_tokens=9, ignore_eos=True)
    assert list(found.ids) == [*session.to_tokens(PROMPT)[0].tolist(), *output.outputs[0].token_ids] and found.n_prompt == n
    assert found.complete and all(map(isnan, [*found.values[: n - 1], found.values[-1]]))
    rows = session.capture(list(found.ids), layers=1, at=None).get()
    wanted = [probe.read(row) for row in rows]
    assert found.values[n - 1 : -1] == pytest.approx(wanted[n - 1 : -1], rel=1e-4, abs=1e-5)
    assert found.values[n - 1 : -1] != pytest.approx(wanted[n:], rel=1e-2)  # no other token's


def test_what_is_read_is_before_the_edits_at_the_probe_s_point_and_after_those_before_it(session: mia.Session) -> None:
    probe, push = probe_of(session), torch.full((session.d_model,), 0.5)
    at_it = mia.Add(push, 1.0, [1], where=mia.generated())
    before = mia.Add(push, 1.0, [0], where=mia.everywhere())
    options = dict(max_tokens=3, ignore_eos=True)
    edited = session.live(PROMPT, probe, edits=[before, at_it], **options)
    rows = session.capture(list(edited.ids), layers=1, at=None, edits=before).get()
    p = edited.n_prompt - 1
    assert edited.values[p] == pytest.approx(probe.read(rows[p]), rel=1e-4)
    assert edited.values[p] != pytest.approx(session.live(PROMPT, probe, **options).values[p], rel=1e-3)
    plain = session.live(PROMPT, probe, edits=mia.Add(push, 1.0, [1], where=mia.prompt()), max_tokens=1)
    assert plain.values[p] == pytest.approx(session.live(PROMPT, probe, max_tokens=1).values[p], rel=1e-4)


def test_an_interrupt_keeps_what_is_there_and_the_session_goes_on(session: mia.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = session.live(PROMPT, probe_of(session), max_tokens=8, ignore_eos=True)

    def stop(self: Any, readings: live.Readings, last: bool = False) -> None:
        if len(readings.ids) == whole.n_prompt + 3 and not last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(live._Stream, "show", stop)
        found = session.live(PROMPT, probe_of(session), max_tokens=8, ignore_eos=True)
    assert not found.complete and found.ids == whole.ids[: whole.n_prompt + 3]
    assert found.values[whole.n_prompt : -1] == pytest.approx(whole.values[whole.n_prompt :][:2], rel=1e-4)
    assert session.live(PROMPT, probe_of(session), max_tokens=8, ignore_eos=True).ids == whole.ids


def test_words_are_written_as_they_come(session: mia.Session, capsys: pytest.CaptureFixture) -> None:
    found = session.live(PROMPT, probe_of(session), threshold=-1e9, max_tokens=5, ignore_eos=True)
    assert capsys.readouterr().out == "".join(found.tokens[found.n_prompt :]) + "\n"
    assert found.above == tuple(range(found.n_prompt - 1, found.n_prompt + 4))


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda s: s.live(["a", "b"], probe_of(s)), PromptError, "one generation is shown live, not 2"),
    (lambda s: s.live("a", torch.ones(3)), EditError, "live reads a mia.Probe, for example"),
    (lambda s: s.live("a", mia.Probe(torch.ones(3), 1)), EditError, "the probe has width 3, resid_post.1 has"),
    (lambda s: s.live("a", probe_of(s, 99)), PointError, "layer 99"),
    (lambda s: s.live("a", probe_of(s, point="resid_pre")), PointError, "resid_pre.1 is not tapped in this session"),
    (lambda s: s.live("a", probe_of(s), threshold="high"), EditError, "the threshold is 'high'"),
])
def test_what_cannot_be_read_is_refused_before_the_first_step(session: mia.Session, call: Callable, error: type, says: str) -> None:
    with pytest.raises(error) as caught:
        call(session)
    assert says in str(caught.value)
    assert session.generate("x", max_tokens=1)
