"""Curves and scatters: numbers and pictures hold the same, gaps stay gaps, and what would be drawn at a wrong place is refused."""
from __future__ import annotations

import sys
from dataclasses import replace
from math import isnan, nan

import pytest
from matplotlib.figure import Figure as Canvas
from show.golden import check
from show.markup import parsed

from mia_lab.show import curve, html, scatter, text
from mia_lab.show.parts import Curve, Scatter, Series

LINE = Series("on <held> out", (0.0, 1.0, 2.0, 3.0, 4.0), (0.5, 0.75, nan, 0.625, nan),
              (0.25, 0.5, nan, 0.5, nan), (0.75, 1.0, nan, 0.75, nan))
OTHER = Series("placebos", (1.0, 4.0), (0.5, 0.25))
TWO = Curve((LINE, OTHER), "layer", "AUROC", "Two of <them>", level=0.5)
NAMED = Curve((Series("idle", (0.0, 1.0), (0.5, -1.0), (0.0, -2.0), (1.0, 0.5)), Series("steering", (1.0,), (2.0,), (1.0,), (4.0,))),
              "batch", "% more", "Costs", ticks=("1", "32"))
POINTS = Scatter((("positive", ((1.0, 2.0, "I love <b>"), (3.0, 1.5, "joy"))), ("negative", ((-1.0, -2.0, "hate"), (nan, 1.0, "lost")))),
                 "component 1", "component 2", "Layer 3", arrows=((2.0, 1.0, "mood"),))
PARTS = {"curve": TWO, "curve_named": NAMED, "scatter": POINTS}


def axes(part: Curve | Scatter):
    found = Canvas().subplots()
    (curve if isinstance(part, Curve) else scatter).draw(part, found)
    return found


@pytest.mark.parametrize("name", PARTS)
def test_it_looks_as_it_did(name: str) -> None:
    check(f"{name}.html", html.render(PARTS[name]))
    check(f"{name}.txt", text.render(PARTS[name]))


@pytest.mark.parametrize("name", PARTS)
def test_text_and_html_hold_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = parsed(html.render(PARTS[name]))
    assert [tag for tag, _ in folded.tags].count("img") == 1 and ("details", {}) in folded.tags
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bare = parsed(html.render(PARTS[name]))
    assert "img" not in [tag for tag, _ in bare.tags]
    cells = [[text for _, _, text in row] for row in folded.rows]
    assert cells == [[text for _, _, text in row] for row in bare.rows]
    lines = text.render(PARTS[name]).splitlines()[-len(cells):]
    assert [line.split() for line in lines] == [" ".join(row).split() for row in cells]


def test_numbers_have_a_row_a_place_and_a_dash_for_none() -> None:
    table = curve.numbers(TWO, 300)
    assert table.rows == (("0", "0.5 [0.25, 0.75]", ""), ("1", "0.75 [0.5, 1]", "0.5"), ("2", "–", ""), ("3", "0.625 [0.5, 0.75]", ""),
                          ("4", "–", "0.25"))
    assert curve.numbers(NAMED, 300).rows == (("1", "0.5 [0, 1]", ""), ("32", "-1 [-2, 0.5]", "2 [1, 4]"))


def test_two_values_at_one_place_have_a_row_each() -> None:
    twice = Curve((Series("a", (1.0, 1.0, 2.0), (5.0, 6.0, 7.0)),), "x", "y")
    assert curve.numbers(twice, 300).rows == (("1", "5"), ("1", "6"), ("2", "7"))


def test_a_long_curve_has_some_of_its_rows_and_says_so() -> None:
    long = Curve((Series("loss", tuple(map(float, range(1000))), tuple(map(float, range(1000)))),), "step", "nats")
    table = curve.numbers(long, 300)
    assert len(table.rows) == 250 and table.rows[-1] == ("999", "999") and "every 4th of 1000 places" in table.caption
    assert len(html.render(long)) < 60_000 and len(text.render(long).splitlines()) < 45


def test_a_picture_is_told_in_a_sentence_a_series() -> None:
    assert curve.described(TWO) == ("Two of <them>: AUROC over layer. on <held> out runs from 0.5 at 0 to 0.75 at 1. "
                                    "placebos runs from 0.25 at 4 to 0.5 at 1.")
    (image,) = (attrs for tag, attrs in parsed(html.render(TWO)).tags if tag == "img")
    assert image["alt"] == curve.described(TWO)
    assert "negative: 1 points around (-1, -2)." in scatter.described(POINTS) and "mood points to (2, 1)" in scatter.described(POINTS)
    assert "empty has no value." in curve.described(Curve((Series("empty", (0.0,), (nan,)),), "x", "y"))


@pytest.mark.parametrize("lower", ["matplotlib", "plotly"])
def test_a_value_that_is_none_leaves_a_gap(lower: str) -> None:
    if lower == "matplotlib":
        drawn = axes(TWO).lines[-2].get_ydata()
        found = [None if isnan(v) else float(v) for v in drawn]
    else:
        (trace,) = (t for t in curve.as_plot(TWO).traces if t["mode"] == "lines+markers" and t["name"].startswith("on"))
        found = trace["y"]
        assert trace["connectgaps"] is False
    assert found == [0.5, 0.75, None, 0.625, None]


def test_intervals_are_bands_and_where_a_band_has_no_width_bars() -> None:
    """Places 0 and 1 are joined; 3 stands between two gaps."""
    found = axes(TWO)
    (band,) = found.collections
    (path,) = band.get_paths()
    corners = {tuple(map(float, corner)) for corner in path.vertices}
    assert {(0.0, 0.25), (0.0, 0.75), (1.0, 0.5), (1.0, 1.0)} == corners
    assert [list(line.get_ydata()) for line in found.lines if list(line.get_xdata()) == [3.0, 3.0]] == [[0.5, 0.75]]
    traces = curve.as_plot(TWO).traces
    (filled,) = (t for t in traces if t.get("fill"))
    assert set(zip(filled["x"], filled["y"])) == corners
    (line,) = (t for t in traces if "error_y" in t)
    assert line["error_y"]["array"] == [None, None, None, 0.125, None] and line["error_y"]["arrayminus"][3] == 0.125


def test_beside_names_every_interval_is_a_bar_and_series_stand_side_by_side() -> None:
    idle, steering = curve.as_plot(NAMED).traces[1:]
    assert idle["mode"] == "markers" and idle["error_y"]["array"] == [0.5, 1.5] and idle["error_y"]["arrayminus"] == [0.5, 1.0]
    assert steering["x"][0] - idle["x"][1] == pytest.approx(0.12) and round(steering["x"][0]) == 1
    bars = [line for line in axes(NAMED).lines if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2 and
            line.get_linestyle() == "-"]
    assert [tuple(line.get_ydata()) for line in bars if line.get_marker() == "None"] == [(0.0, 1.0), (-2.0, 0.5), (1.0, 4.0)]


def test_the_line_of_no_effect_is_where_it_was_asked_for() -> None:
    assert [line.get_ydata()[0] for line in axes(TWO).lines if line.get_zorder() == 1] == [0.5]
    assert curve.as_plot(TWO).traces[0]["y"] == [0.5, 0.5]
    without = replace(TWO, zero=False)
    assert not [line for line in axes(without).lines if line.get_zorder() == 1] and curve.as_plot(without).traces[0]["name"] != "no effect"


def test_the_axis_holds_every_interval() -> None:
    low, high = curve.reach(NAMED)
    assert low < -2.0 and high > 4.0 and axes(NAMED).get_ylim() == (low, high) == tuple(curve.as_plot(NAMED).y["range"])


@pytest.mark.parametrize(("change", "says"), [
    ({"y": (0.5, 0.75)}, "5 places, 2 values"), ({"low": None}, "intervals of other lengths"),
    ({"high": (1.0,)}, "intervals of other lengths"), ({"x": (nan, 1.0, 2.0, 3.0, 4.0)}, "at no place")])
def test_what_would_be_drawn_at_a_wrong_place_is_refused(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(LINE, **change)


@pytest.mark.parametrize("x", [2.0, -1.0, 0.5])
def test_a_place_without_a_name_is_refused(x: float) -> None:
    with pytest.raises(ValueError, match="none of the 2 names"):
        replace(NAMED, series=(Series("idle", (x,), (1.0,)),))


def test_points_that_are_not_finite_are_not_drawn_and_stand_in_the_table() -> None:
    positive, negative, arrow = scatter.as_plot(POINTS).traces
    assert (positive["x"], negative["x"], arrow["x"], arrow["y"]) == ([1.0, 3.0], [-1.0], [0.0, 2.0], [0.0, 1.0])
    assert positive["customdata"] == ["I love &lt;b&gt;", "joy"]
    assert [list(line.get_xdata()) for line in axes(POINTS).lines] == [[1.0, 3.0], [-1.0]]
    assert ("negative", "–", "1", "lost") in scatter.numbers(POINTS, 300).rows


def test_a_direction_is_drawn_to_one_scale() -> None:
    assert scatter.as_plot(POINTS).y["scaleanchor"] == "x" and axes(POINTS).get_aspect() == 1.0
    without = replace(POINTS, arrows=())
    assert "scaleanchor" not in scatter.as_plot(without).y and axes(without).get_aspect() == "auto"


def test_of_many_points_some_are_listed() -> None:
    many = Scatter((("a", ((1.0, 2.0, "x" * 80),) * 900), ("b", ((2.0, 1.0, "y"),) * 900)), "x", "y")
    table = scatter.numbers(many, 300)
    assert len(table.rows) == 300 and "1500 more points" in table.caption and len(html.render(many)) < 100_000


def test_lines_run_in_the_order_of_the_axis() -> None:
    part = Curve((Series("a", (9.0, 2.0, 5.0), (3.0, 1.0, 2.0), (2.5, 0.5, 1.5), (3.5, 1.5, 2.5)),), "layer", "effect")
    (line,) = [found for found in axes(part).lines if len(found.get_xdata()) == 3]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([2.0, 5.0, 9.0], [1.0, 2.0, 3.0])
    *_, band, trace = curve.as_plot(part).traces
    assert (trace["x"], trace["y"]) == ([2.0, 5.0, 9.0], [1.0, 2.0, 3.0]) and trace["customdata"][0] == "1 [0.5, 1.5]"
    assert band["x"] == [2.0, 5.0, 9.0, 9.0, 5.0, 2.0]


def test_names_stand_apart_and_are_told_beside_every_value() -> None:
    named = Curve((Series("a", (0.0, 1.0), (1.0, 2.0)), Series("b", (1.0,), (3.0,))), "", "y", ticks=("one <b>", "two"))
    assert [list(trace["customdata"]) for trace in curve.as_plot(named).traces[1:]] == [["one &lt;b&gt;: 1", "two: 2"], ["two: 3"]]
    assert "%{x}" not in curve.as_plot(named).traces[1]["hovertemplate"] and "%{x}" in curve.as_plot(TWO).traces[-1]["hovertemplate"]
    line = Series("a", tuple(map(float, range(9))), (1.0,) * 9)
    many = Curve((line,), "", "y", ticks=tuple(f"a long name of recipe {i}" for i in range(9)))
    labels = [axes(part).get_xticklabels() for part in (named, many)]
    assert [found[0].get_rotation() for found in labels] == [0.0, 45.0] and max(len(tick.get_text()) for tick in labels[1]) == 20
