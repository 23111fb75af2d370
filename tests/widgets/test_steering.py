"""The steering panel on the demo model: what it shows is what the session generates, however it is moved, stopped and closed."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

import mia_lab as mia
from mia_lab.errors import ClosedError, EditError
from mia_lab.widgets.steering import SteeringPanel

pytestmark = pytest.mark.full
PROMPT = "I went to the market this morning and"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def panel(session: mia.Session, vector: mia.Vector, outputs: list) -> SteeringPanel:
    made = session.panel(vector, layers=9, prompt=PROMPT)
    made._ipython_display_()
    yield made
    made.stop()
    assert made.wait()


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def texts(panel: SteeringPanel) -> tuple[str, str]:
    return panel.last.default.text, panel.last.steered.text


def test_it_is_two_outputs_and_only_the_first_is_a_widget(panel: SteeringPanel, outputs: list[dict[str, Any]]) -> None:
    controls, twin = outputs
    assert WIDGET in controls["data"] and "text/html" not in controls["data"]
    assert set(twin["data"]) == {"text/html", "text/plain"} and not twin["update"]
    assert controls["transient"]["display_id"] != twin["transient"]["display_id"]


def test_both_texts_stream_and_end_as_the_session_generates(panel: SteeringPanel, outputs: list[dict[str, Any]],
                                                            session: mia.Session) -> None:
    seen: list[tuple[int, int]] = []
    update = panel.twin.update

    def watched(*args: Any, **more: Any) -> None:
        seen.append((len(panel.last.default.tokens), len(panel.last.steered.tokens)))
        update(*args, **more)

    panel.twin.update = watched
    panel.coefficient.value = 0.25
    assert panel.wait()
    assert seen[:3] == [(1, 1), (2, 2), (3, 3)] and seen[-1] == (24, 24)
    expected = session.generate([PROMPT, PROMPT], max_tokens=24, seed=16, edits=[None, [panel.edit]])
    assert list(texts(panel)) == expected
    page = outputs[-1]["data"]["text/html"]
    assert outputs[-1]["update"] and "<ins" in page and "change of the stream" in page.lower()
    exec_names = {"s": session, "v": panel.vectors["v"], "mia": mia}
    assert eval(panel.code, exec_names) == expected[1]


def test_the_effect_is_that_of_captured_streams(panel: SteeringPanel, session: mia.Session) -> None:
    panel.set(coeff=0.3, layers=(8, 9))
    assert panel.wait()
    plain, steered = (session.capture(PROMPT, edits=edits).get().float() for edits in (None, [panel.edit]))
    assert (panel.last.change - (steered - plain)).abs().max() <= 1e-2 * (steered - plain).abs().max()
    panel.set(where="generated", layers=(9,))
    assert panel.wait()
    assert panel.last.generated and panel.last.default.tokens[0] == panel.last.steered.tokens[0]
    assert panel.last.change[:9].abs().max() == 0
    assert float(panel.last.change[9].norm()) == pytest.approx(0.3 * float(panel.vectors["v"].unit[9]), rel=0.02)


def test_thirty_moves_run_a_few_generations_and_end_at_the_last(panel: SteeringPanel, session: mia.Session) -> None:
    started: list[float] = []
    generate = panel._generate

    def counted(setting: Any, *rest: Any) -> None:
        started.append(setting.coeff)
        generate(setting, *rest)

    panel._generate = counted
    for i in range(30):
        panel.coefficient.value = round(-0.3 + 0.02 * i, 2)
    assert panel.wait()
    assert len(started) <= 4 and started[-1] == 0.28
    assert texts(panel)[1] == session.generate(PROMPT, max_tokens=24, edits=[mia.Add(panel.vectors["v"][9], 0.28)])


def test_stop_keeps_what_is_there_and_the_next_run_is_a_fresh_one(panel: SteeringPanel, session: mia.Session,
                                                                  outputs: list[dict[str, Any]]) -> None:
    long = " ".join([PROMPT] * 40)  # several blocks of KV, which the next run reads from the cache

    def generation(tokens: int) -> list[Any]:
        session.reset_prefix_cache()
        panel.set(prompt=long, max_tokens=tokens, coeff=0.15)
        if tokens == 60:
            until(lambda: panel.last is not None and len(panel.last.steered.tokens) >= 3)
            panel.stop_button.click()
        assert panel.wait()
        rows = session.capture([long, long], edits=[None, [panel.edit]]).get()
        outputs = session.completions([long, long], max_tokens=12, edits=[None, [panel.edit]], logprobs=3)
        assert all(o.num_cached_tokens >= 256 for o in outputs)
        return [rows, [o.outputs[0].token_ids for o in outputs],
                [sorted((t, p.logprob) for t, p in step.items()) for o in outputs for step in o.outputs[0].logprobs]]

    stopped = generation(60)
    assert panel.last.stopped and 3 <= len(panel.last.steered.tokens) < 40
    assert "Stopped after" in outputs[-1]["data"]["text/plain"] and "stopped" in panel.status.value
    assert not session._engine.llm.llm_engine.has_unfinished_requests()
    panel._default = None
    fresh = generation(4)
    assert panel.last.steered.done
    assert stopped[0].equal(fresh[0]) and stopped[1:] == fresh[1:]


def test_a_cell_waits_for_the_panel_and_is_told_so(panel: SteeringPanel, session: mia.Session, capsys: pytest.CaptureFixture[str]) -> None:
    expected = session.generate("One two three", max_tokens=8)
    panel.set(max_tokens=70, coeff=0.1)
    until(lambda: panel.last is not None and panel.last.steered.tokens)
    assert session.generate("One two three", max_tokens=8) == expected
    assert panel.last.steered.done and not panel.last.stopped
    assert "waiting for another thread" in capsys.readouterr().err


def test_the_panel_waits_for_a_cell(panel: SteeringPanel, session: mia.Session) -> None:
    watched = session.watch(PROMPT, layers=0, max_tokens=6)
    first = next(watched)
    panel.coefficient.value = 0.22
    assert not panel.wait(0.3) and (panel.last is None or panel.last.steered.tokens == ())
    assert [first.position, *(moment.position for moment in watched)] == [first.position + i for i in range(6)]
    assert panel.wait() and panel.last.steered.done


def test_open_scopes_of_a_cell_do_not_reach_the_panel_and_defaults_do(panel: SteeringPanel, session: mia.Session) -> None:
    plain = session.generate(PROMPT, max_tokens=24)
    with session.steer(panel.vectors["v"][9], 0.4):
        panel.coefficient.value = 0.0
        panel.run()
        assert panel.wait()
        assert session.generate(PROMPT, max_tokens=24) != plain
    assert texts(panel) == (plain, plain)
    session.default([mia.Add(panel.vectors["v"][9], 0.3)])
    try:
        panel.coefficient.value = 0.1
        assert panel.wait()
        assert texts(panel)[0] == session.generate(PROMPT, max_tokens=24) != plain
        assert "1 default edits act on both" in panel.twin.text
    finally:
        session.default([])


def test_errors_stand_in_the_twin_with_what_to_type(panel: SteeringPanel, outputs: list[dict[str, Any]]) -> None:
    panel.layers.value = ()
    assert panel.wait()
    assert "no layer is chosen; v has layers" in outputs[-1]["data"]["text/html"]
    panel.set(layers=(9,), prompt="")
    assert panel.wait()
    assert "⚠" in outputs[-1]["data"]["text/plain"] and "prompt" in outputs[-1]["data"]["text/plain"]
    panel.set(prompt=PROMPT)
    assert panel.wait() and panel.last.steered.done
    with pytest.raises(EditError, match="there are coeff, layers"):
        panel.set(strength=2)


def test_presets_move_controls_and_run_once(panel: SteeringPanel) -> None:
    panel.preset.value = "opposite"
    assert panel.wait()
    assert panel.setting.coeff == -0.2 and panel.edit == mia.Add(panel.vectors["v"][9], -0.2)


def test_freeze_leaves_html_alone(panel: SteeringPanel, outputs: list[dict[str, Any]]) -> None:
    panel.coefficient.value = 0.21
    assert panel.wait()
    shown = panel.freeze()
    controls = [o for o in outputs if o["transient"]["display_id"].startswith("mia-controls")][-1]
    assert controls["update"] and controls["data"]["text/html"] == ""
    assert outputs[-1]["data"]["text/html"] == shown and len(shown) < 300_000
    assert WIDGET not in panel._repr_mimebundle_() and "<script" not in shown and "controls live" not in shown
    assert panel.last.steered.text.split()[-1] in shown
    before = len(outputs)
    panel._ipython_display_()
    assert [list(o["data"]) for o in outputs[before:]] == [["text/html", "text/plain"]]


def test_first_steered_token_comes_within_150_ms(panel: SteeringPanel, capsys: pytest.CaptureFixture[str]) -> None:
    def first_after(coeff: float) -> float:
        before = panel.last.first_ms
        panel.coefficient.value = coeff
        until(lambda: panel.last.first_ms not in (None, before))
        return panel.last.first_ms

    found = {}
    for name, tokens in (("at rest", 2), ("while the last text is still growing", 48)):
        panel.set(max_tokens=tokens)
        assert panel.wait()
        times = []
        for i in range(20):
            assert tokens != 2 or panel.wait()
            times.append(first_after(round(-0.5 + 0.03 * i, 2)))
        found[name] = statistics.median(times)
        assert panel.wait()
    with capsys.disabled():
        print("\nfrom the slider's release to the first steered token, median of 20:", {k: f"{v:.0f} ms" for k, v in found.items()})
    assert max(found.values()) < 150


def test_a_closed_session_is_said_and_the_result_stays(models: Path, outputs: list[dict[str, Any]]) -> None:
    own = mia.Session(str(tiny.build("llama", models)), tokenizer=str(tiny.tokenizer(models)), dtype="float32", enforce_eager=True,
                      max_model_len=512, max_num_seqs=8)
    panel = own.panel(own.vector([("good day", "bad day"), ("a glad man", "a sad man")]), layers=1, max_tokens=480)
    panel.run()
    until(lambda: panel.last is not None and panel.last.steered.tokens)
    began = time.monotonic()
    own.close()
    assert time.monotonic() - began < 10
    assert panel.wait(10) and "session is closed" in panel.status.value
    assert panel.coefficient.disabled and panel.run_button.disabled
    assert not panel.last.steered.done and "Stopped after" in panel.twin.html
    panel.coefficient.value = 0.5  # as a front end that has not heard of it yet might
    assert "session is closed" in panel.status.value and "Stopped after" in panel.twin.html
    with pytest.raises(ClosedError):
        own.panel(panel.vectors["v"])
