"""One bar a job: what is said while it goes on, and the one line that is left."""
from __future__ import annotations

import re
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mia_lab.show import progress


class Screen:
    """A clock that goes as it is told, and what was painted."""

    def __init__(self) -> None:
        self.now, self.said = 10.0, []

    def paint(self, text: str, part: float | None, over: bool) -> None:
        self.said.append((text, part, over))

    def bar(self) -> progress.Bar:
        return progress.Bar(self.paint, lambda: self.now)


def test_a_job_ends_with_one_line() -> None:
    screen = Screen()
    bar = screen.bar()
    bar.stage(640, "runs")
    for _ in range(64):
        screen.now += 0.05
        bar.add(10, 2050)
    bar.end()
    bar.end()
    assert screen.said[-1] == ("640 runs, 3.2 s, 41k tok/s", 1.0, True)
    assert [over for *_, over in screen.said].count(True) == 1
    assert len(screen.said) <= 1 + 3.2 / 0.2
    assert screen.said[0][0].startswith("40 of 640 runs, 0.2 s, ") and screen.said[0][1] == 40 / 640


def test_a_short_job_says_its_line_only_and_one_without_stages_nothing() -> None:
    screen = Screen()
    bar = screen.bar()
    bar.end()
    assert not screen.said
    bar.stage(1234, "requests")
    bar.add(1234)
    bar.end()
    assert screen.said == [("1,234 requests, 0.0 s", 1.0, True)]


def test_stages_share_a_bar_and_of_an_unknown_number_no_part_is_said() -> None:
    screen = Screen()
    bar = screen.bar()
    for noun in ("requests", "scores"):
        bar.stage(2, noun)
        screen.now += 1
        bar.add(2)
    assert [text for text, *_ in screen.said] == ["2 requests, 1.0 s", "2 scores, 2.0 s"]
    bar.end()
    assert screen.said[-1][0] == "2 requests, 2.0 s"
    endless = Screen()
    bar = endless.bar()
    bar.stage(None, "prompts")
    endless.now += 1
    bar.add(8)
    assert endless.said == [("8 prompts, 1.0 s", None, False)]


def test_stages_of_one_noun_are_one() -> None:
    screen = Screen()
    bar = screen.bar()
    for _ in range(2):
        bar.stage(3, "runs")
        bar.add(3)
    bar.end()
    assert screen.said == [("6 runs, 0.0 s", 1.0, True)]


def test_what_breaks_a_job_off_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    screen = Screen()
    monkeypatch.setattr(progress, "_painter", lambda: screen.paint)


    def failing() -> None:
        with progress.bar() as bar:
            bar.stage(5, "runs")
            bar.add(2)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing()
    assert re.fullmatch(r"2 of 5 runs, 0\.0 s; broken off by ValueError", screen.said[-1][0])
    with progress.bar(shown=False) as bar:
        bar.stage(5, "runs")
        bar.add(2)
        bar.broken_off("those are kept")
    assert capsys.readouterr().err == "mia_lab: 2 of 5 runs, 0.0 s; interrupted; those are kept\n"


@pytest.mark.parametrize(("number", "text"), [(412, "412"), (4120, "4.1k"), (41_200, "41k"), (1_250_000, "1.2M"), (3e9, "3.0G")])
def test_numbers_are_short(number: float, text: str) -> None:
    assert progress.short(number) == text


def test_outside_a_notebook_it_is_a_line_of_a_terminal_or_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def job() -> None:
        with progress.bar() as bar:
            bar.stage(2, "runs")
            bar.add(2)

    job()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    job()
    assert capsys.readouterr().err == "\r\x1b[Kmia_lab: 2 runs, 0.0 s\n"


def test_a_notebook_keeps_one_output_without_a_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, kept = InteractiveShell.instance(), {}

    def publish(data: dict, metadata: object = None, *, transient: dict, update: bool = False, **rest: object) -> None:
        assert update == (transient["display_id"] in kept)
        kept.setdefault(transient["display_id"], []).append(data)

    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr(shell.display_pub, "publish", publish)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    try:
        with progress.bar() as bar:
            bar.stage(3, "<runs>")
            for _ in range(3):
                bar.add(1, 5)
    finally:
        InteractiveShell.clear_instance()
    (outputs,) = kept.values()
    assert [set(each) for each in outputs] == [{"text/plain", "text/html"}] * 4
    assert "<progress value='0.333' max='1'" in outputs[0]["text/html"] and "&lt;runs&gt;" in outputs[0]["text/html"]
    assert "<progress" not in outputs[-1]["text/html"] and outputs[-1]["text/plain"].startswith("3 <runs>, ")
