"""Readings of a generation: what is read where, and a cell that is updated in place."""
from __future__ import annotations

import made_up
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from show.golden import check
from show.markup import parsed

from mia_lab.analysis import live
from mia_lab.analysis.live import BROKEN, Readings
from mia_lab.errors import EditError

READ = made_up.readings()


def test_readings_look_as_they_did() -> None:
    check("readings.html", READ._repr_html_())
    check("readings.txt", repr(READ))


def test_what_is_above_the_threshold_is_named() -> None:
    assert READ.above == (2,) and "2 tokens generated, 2 read: reading at resid_post.9; 1 above 0.25: 2 ·<b>cat</b>" in repr(READ)
    assert "<b>cat</b>" in parsed(READ._repr_html_()).text
    with pytest.raises(EditError, match=r"threshold=0\.5"):
        _ = Readings(READ.ids, READ.tokens, READ.values, 3, "reading").above


def test_data_has_no_number_where_nothing_was_read() -> None:
    assert READ.data[1] == dict(position=1, token="The", reading=None, generated=False)
    assert [row["reading"] for row in READ.data] == [None, None, 0.5, -1.25, None]
    assert [row["generated"] for row in READ.data] == [False] * 3 + [True] * 2


def test_a_figure_leaves_a_gap_where_nothing_was_read() -> None:
    figure = READ.figure
    drawn = [(x, y) for trace in figure.data for x, y in zip(trace.x, trace.y) if y is not None and y == y]
    assert (2.0, 0.5) in drawn and (3.0, -1.25) in drawn and not [x for x, _ in drawn if x in (1.0, 4.0)]


def test_one_that_was_broken_off_says_so() -> None:
    broken = Readings(READ.ids, READ.tokens, READ.values, 3, "reading", None, BROKEN)
    assert not broken.complete and "2 tokens generated, broken off, 2 read" in repr(broken)


def test_a_cell_is_one_output_updated_ten_times_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = InteractiveShell.instance()
    published = CapturingDisplayPublisher()
    monkeypatch.setattr(shell, "display_pub", published)
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    cell = live._Cell()
    for _ in range(30):
        cell.show(READ)
        now[0] += 0.04
    cell.show(READ, last=True)
    assert len({output["transient"]["display_id"] for output in published.outputs}) == 1
    assert [bool(output["update"]) for output in published.outputs] == [False] + [True] * 10
    assert all("text/html" in output["data"] for output in published.outputs)
    InteractiveShell.clear_instance()


def test_outside_a_notebook_the_text_runs_on(capsys: pytest.CaptureFixture) -> None:
    stream = live._screen()
    for n in (3, 4):
        stream.show(Readings(READ.ids[: n + 1], READ.tokens[: n + 1], READ.values[: n + 1], 3, "reading"))
    stream.show(READ, last=True)
    assert capsys.readouterr().out == " sat\n\n"
