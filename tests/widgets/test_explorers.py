"""The other panels: each leads to what the session's own verb gives, and leaves it in the twin."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mia_lab as mia
from mia_lab.errors import EditError, PointError
from mia_lab.widgets.pair_editor import read_pasted

pytestmark = pytest.mark.full
PROMPT = "The capital of France is"


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def shown(outputs: list[dict[str, Any]]) -> Callable[[Any], str]:
    """Show a panel, wait for it, and return the HTML of its twin as last published."""
    def show(panel: Any) -> str:
        if not any(o["transient"]["display_id"] == f"mia-twin-{panel.twin.id}" for o in outputs):
            panel._ipython_display_()
        assert panel.wait()
        pages = [o["data"]["text/html"] for o in outputs if o["transient"]["display_id"] == f"mia-twin-{panel.twin.id}"]
        assert len(pages[-1]) < 300_000
        return pages[-1]

    return show


def test_layers_come_from_one_run_and_are_the_sessions(session: mia.Session, shown: Callable[[Any], str]) -> None:
    panel = session.layer_explorer(PROMPT)
    shown(panel)
    rows = session.capture(PROMPT, at=None).get().float()
    assert torch.allclose(panel.reading.norms, rows.norm(dim=-1), rtol=1e-2)
    asked = panel._asked
    panel.layer.value = 17
    page = shown(panel)
    assert panel._asked == asked and "layer 17" in page  # moving the layer asks nothing of the engine
    last = session.logit_lens(PROMPT, layers=17)
    top = session.to_string(last.top[0, 0, -1, :1]).strip()
    assert f"·{top} {float(last.top_probabilities[0, 0, -1, 0]):.2f}" in page
    assert "s.logit_lens" in panel.code and "BOS, which is longer, is cut off" in page
    with pytest.raises(PointError, match="there are resid_post"):
        session.layer_explorer(point="mlp_out")


def test_attention_needs_queries_and_keys(session: mia.Session) -> None:
    with pytest.raises(PointError, match="load with points"):
        session.attention_explorer(PROMPT)


def test_attention_of_a_layer_and_head(open_tiny: Callable[..., Any], shown: Callable[[Any], str]) -> None:
    small = open_tiny("llama", points=["resid_post", "q", "k"], max_model_len=96, max_num_batched_tokens=64, max_num_seqs=8,
                      block_size=32, enforce_eager=True)
    panel = small.attention_explorer("one two three")
    assert "layer 0 head 0" in shown(panel)
    panel.head.value = 1
    page = shown(panel)
    assert "layer 0 head 1" in page and "layer 0 head 0" not in page
    assert eval(panel.code, {"s": small}).names == small.attention("one two three", layers=0, heads=1).names


def test_a_sweep_runs_beside_and_stop_keeps_what_is_done(session: mia.Session, vector: mia.Vector, shown: Callable[[Any], str]) -> None:
    panel = session.sweep_launcher(vector, metrics=[mia.token_odds([" good"], [" bad"])], guards=())
    with panel.quietly():
        panel.layers.value, panel.largest.value, panel.steps.value, panel.placebos.value = (9,), 0.2, 1, 0
        panel.prompts.value = "\n".join(panel.prompts.value.splitlines()[::2])
    panel.run_button.click()
    page = shown(panel)
    assert panel.sweep is not None, panel.twin.text
    assert panel.sweep.complete and len(panel.sweep.table) == 2 and panel.bar.value == 1.0
    assert "Sweep of 2 settings" in page
    told = dict(prompts=panel._lines(), metrics=[mia.token_odds([" good"], [" bad"])], placebos=0, guards=(), progress=False)
    again = session.sweep(vector[9], (-0.2, 0.2), **told)
    assert [r.effect.mean for r in again.table] == pytest.approx([r.effect.mean for r in panel.sweep.table], abs=1e-3)
    panel.layers.value, panel.steps.value = vector.layers, 8
    panel.run_button.click()
    until(lambda: 0.1 < panel.bar.value < 1.0 and "requests" in panel.status.value)
    panel.stop_button.click()
    assert panel.wait(20)
    assert not panel.sweep.complete and 0 < len(panel.sweep.table) < 288 and "broken off" in shown(panel)
    assert session.generate(PROMPT, max_tokens=2)


def test_pairs_are_edited_pasted_and_fitted(session: mia.Session, shown: Callable[[Any], str]) -> None:
    panel = session.pair_editor([("A good day", "A bad day")])
    panel.pasted.value = 'A glad man\tA sad man\n{"chosen": "She smiled", "rejected": "She wept"}\n'
    panel.paste_button.click()
    panel.add("half a row", "")
    with pytest.raises(EditError, match="row 4 has only one side"):
        panel.pairs  # noqa: B018
    panel.rows.children[-1].children[2].click()
    expected = mia.Pairs.of([("A good day", "A bad day"), ("A glad man", "A sad man"), ("She smiled", "She wept")])
    assert list(panel.pairs) == list(expected)
    panel.rows.children[0].children[0].value = "A very good day"
    panel.fit_button.click()
    page = shown(panel)
    assert "A very good day" in page and "s.vector(pairs" in page
    assert panel.vector.rows.equal(session.vector(panel.pairs).rows)


def test_what_is_pasted_is_told_apart() -> None:
    assert read_pasted('a\tb\n\n["c", "d"]') == [("a", "b"), ("c", "d")]
    for text, words in (("", "nothing was pasted"), ("one side", "line 1 is no pair"), ("a\tb\n{]", "line 2 is no pair in JSON"),
                        ("a\tb\tc", "line 1"), ("a\t ", "line 1")):
        with pytest.raises(EditError, match=words):
            read_pasted(text)


def test_a_vector_is_kept_found_again_and_deleted(session: mia.Session, vector: mia.Vector, shown: Callable[[Any], str]) -> None:
    with pytest.raises(EditError, match="holds no vector for this model"):
        session.panel()
    steering = session.panel(vector, layers=(8, 9), coeff=0.3, where="prompt")
    steering.keep_name.value = "cheer"
    steering.keep_button.click()
    assert mia.library()["cheer"].rows.equal(vector.rows)
    found = session.panel()
    assert found.presets["cheer: kept"] == {"vector": "cheer", "layers": [8, 9], "coeff": 0.3, "where": "prompt"}
    found.preset.value = "cheer: kept"
    assert found.wait() and found.edit == steering.edit and "mia.library()['cheer'][[8, 9]]" in found.code
    browser = session.vector_library(vector)
    browser.new_name.value = "cheer"
    browser.save_button.click()
    assert "has a vector &#x27;cheer&#x27; already" in shown(browser)
    browser.load_button.click()
    assert browser.vector.layers == vector.layers and "cheer is loaded" in shown(browser)
    browser.delete_button.click()
    assert "press Delete again" in browser.status.value and "cheer" in mia.library()
    browser.delete_button.click()
    assert "cheer" not in mia.library() and "holds no vectors" in shown(browser)


def test_panels_take_what_they_have_controls_for(session: mia.Session, vector: mia.Vector) -> None:
    panel = session.panel(mia.Add(vector, 0.1, layers=[3, 4], where=mia.generated()))
    assert panel.edit == mia.Add(vector, 0.1, layers=[3, 4], where=mia.generated())
    for wrong in (mia.Add(vector, 0.1, where=mia.window(1)), mia.Ablate(vector), 3, {}):
        with pytest.raises(EditError, match=r"a panel"):
            session.panel(wrong)
    with pytest.raises(EditError, match="beyond the slider"):
        session.panel(vector, coeff=3.0)
    with pytest.raises(EditError, match="no layer 99"):
        session.panel(vector, layers=99)
    with pytest.raises(EditError, match="none of text, everywhere"):
        session.panel(vector, where="here")
