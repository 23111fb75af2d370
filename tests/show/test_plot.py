"""Figures: blank nowhere, small, readable on dark and light pages, and their numbers are the result's own."""
from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from math import nan
from typing import Any

import made_analyses
import made_curves as made
import made_up
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure as Canvas
from PIL import Image
from show.golden import check
from show.markup import parsed

from mia_lab.errors import EditError, MiaError
from mia_lab.show import colours, heatmap, html, plot, png, text
from mia_lab.show.parts import Bars, Curve, Heat, Part, Prose, Scatter, Series

LINE = Curve((Series("a", (0.0, 1.0, 2.0), (1.0, nan, 3.0), (0.5, nan, 2.5), (1.5, nan, 3.5)),), "layer", "effect", "A curve")
GRID = Heat(("0", "1"), (" the", " the"), ((0.5, -1.0), (nan, 0.0)), "A grid", notes=(("a <b>", "b"), ("not run", "d")))
PARTS: dict[str, Part] = {"curve": LINE, "heat": GRID, "bars": Bars(("up", "down", "none"), (2.0, -1.0, nan), "Bars"),
                          "scatter": Scatter((("a", ((1.0, 2.0, "x"),)),), "x", "y", "A scatter")}
PLOTLY = "application/vnd.plotly.v1+json"


def traces(figure: plot.Figure) -> list[Any]:
    """Those that show values: no bands, no line of no effect, no crosses."""
    return [t for t in figure.data if t.name not in ("no effect", "no value") and not getattr(t, "fill", None)]


def values(column: Any) -> list[Any]:
    return [None if v is None or v != v else float(v) for v in column]


def records(result: Any, *names: str) -> list[list[float]]:
    return [[record[name] for record in result.data] for name in names]


# -- a figure's numbers are the result's ------------------------------------------------------------------------------


def of_sweep(result: Any, name: str = "sentiment") -> list[list[float]]:
    """Those of each layer, and the unsteered model's between both signs."""
    layers = dict.fromkeys(row["layer"] for row in result.data)
    return [[value for rows in ([r for r in result.data if r["layer"] == layer],) for sign, middle in ((-1, [level]), (1, []))
             for value in (*(r[key] for r in rows if sign * r["coeff"] > 0), *middle)]
            for key, level in ((name, 0.0), ("perplexity_ratio", 1.0)) for layer in layers]


def of_refusal(result: Any) -> list[list[float]]:
    return [[row[name] for row in result.data if row["position"] == at] for name in ("bypass", "induce", "kl") for at in result.positions]


def of_choice(result: Any) -> list[list[float]]:
    return [[result.data[name][0] for name in ("selected", "effect", "flipped", "placebo")]]


def of_projection(result: Any) -> list[list[float]]:
    sides = [[[row[axis] for row in result.data if (row["layer"], row["side"]) == (layer, side)] for axis in "xy"]
             for layer in result.layers for side in ("positive", "negative")]
    return [y for _, y in sides]


DRAWN: dict[str, tuple[Callable[[], Any], Callable[[Any], list[list[float]]]]] = {
    "vector": (made.vector, lambda r: records(r, "unit", "raw_norm")),
    "vector_doubled": (lambda: made.vector() * 2.0, lambda r: records(r, "unit", "raw_norm", "norm")),
    "separability": (made.judged, lambda r: records(r, "auroc", "accuracy")),
    "reft": (made.reft, lambda r: records(r, "loss")),
    "refusal": (made.refusal, of_refusal),
    "choice": (made.choice, of_choice),
    "sweep_curves": (lambda: made_up.sweep((3, 9)), of_sweep),
    "by_layer": (lambda: made_up.sweep((3, 9)).by_layer(0.2), lambda r: records(r, "effect", "placebo", "perplexity_ratio")),
    "patched_layers": (lambda: made_analyses.grid(3, None, None),
                       lambda r: [[float("nan") if s != s else s for s in r.scores.tolist()]]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_every_number_of_the_figure_is_that_of_data(name: str) -> None:
    make, expected = DRAWN[name]
    result = make()
    found = [values(t.y) for t in traces(result.figure)]
    wanted = [values(column) for column in expected(result)]
    assert found == [[v if v is None else pytest.approx(v, rel=1e-9) for v in column] for column in wanted]


def test_every_point_of_a_projection_is_that_of_data() -> None:
    result = made.projection()
    groups = [t for t in result.figure.data if t.mode == "markers"]
    assert [values(t.y) for t in groups] == of_projection(result)
    arrows = [t for t in result.figure.data if t.mode != "markers"]
    for layer, arrow in enumerate(arrows):
        x, y = arrow.x[1], arrow.y[1]
        assert y / x == pytest.approx(float(result.direction[layer, 1] / result.direction[layer, 0]))


@pytest.mark.parametrize(("result", "key"), [(made_analyses.cosines(), "cosine"), (made_analyses.attribution(), "contribution")])
def test_grids_and_bars_hold_every_record(result: Any, key: str) -> None:
    first = result.figure.data[0]
    cells = [v for row in first.z for v in row] if first.type == "heatmap" else first.y
    assert list(cells) == pytest.approx([row[key] for row in result.data], rel=1e-6)


def test_a_lens_is_drawn_with_its_first_prompt() -> None:
    result = made_analyses.lens()
    chances = {(row["layer"], row["position"]): row["top_probabilities"][0] for row in result.data if row["prompt"] == 0}
    (shown,) = result.figure.data
    expected = [[chances[layer, at] for at in range(len(result.tokens[0]))] for layer in result.layers[::-1]]
    assert [v for row in shown.z for v in row] == pytest.approx([v for row in expected for v in row], rel=1e-6)


def test_overhead_is_drawn_in_per_cent_more() -> None:
    result = made_analyses.overhead()
    rows = {(row["case"], row["batch"]): row for row in result.data}
    idle, steering = traces(result.figure)
    assert values(idle.y) == pytest.approx([100 * (rows["idle", batch]["tpot_ms_ratio"] - 1) for batch in (1, 32)])
    assert steering.y[0] + steering.error_y.array[0] == pytest.approx(100 * (rows["steer every layer", 32]["tpot_ms_high"] - 1))


def test_intervals_are_those_of_data() -> None:
    result = made.judged()
    (auroc,) = (t for t in result.figure.data if t.name == "AUROC, interval")
    low, high = records(result, "low", "high")
    assert values(auroc.y) == [*high, *low[::-1]]


def test_without_groups_there_is_no_interval_to_draw() -> None:
    one = made.judged(groups=1)
    assert not [t for t in one.figure.data if t.fill] and "nan" in repr(one) and "–" in one._repr_html_()


# -- results as they are shown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vector", "separability", "reft", "refusal", "choice", "by_layer"])
def test_a_result_looks_as_it_did(name: str) -> None:
    result = DRAWN[name][0]()
    assert "<img " in result._repr_html_()
    parsed(result._repr_html_())
    check(f"{name}.html", result._repr_html_())
    check(f"{name}.txt", repr(result))


def test_a_projection_looks_as_it_did() -> None:
    result = made.projection((2, 5), 3)
    parsed(result._repr_html_())
    check("projection.html", result._repr_html_())
    check("projection.txt", repr(result))


def test_a_large_projection_is_a_small_view() -> None:
    result = made.projection(tuple(range(18)), 200)
    assert "Drawn are layers 0, 9, 17" in parsed(result._repr_html_()).text
    assert result[[3, 4]].layers == (3, 4) and len(result[3].figure.data) == 3
    with pytest.raises(EditError, match="no layer 40"):
        result[40]


def test_one_layer_of_a_vector_is_a_table() -> None:
    one = made.vector()[5]
    assert "<img" not in one._repr_html_() and f"{one.data[0]['raw_norm']:.4g}" in parsed(one._repr_html_()).text
    assert repr(one).startswith("Vector: mean_diff at resid_post, layer 5")


def test_of_many_curves_those_with_the_largest_effects_are_drawn_and_it_is_said() -> None:
    effect, cost = made_up.sweep(tuple(range(9)))._plots()
    assert [s.name for s in effect.series] == [s.name for s in cost.series] == [f"mood layer {i}" for i in range(3, 9)]
    assert "the 6 of 9 curves with the largest effects" in effect.caption
    assert "curves" not in made_up.sweep((3, 9))._plots()[0].caption


def test_of_many_vectors_by_layer_those_with_the_largest_effects_are_drawn() -> None:
    found = made_up.sweep((3, 9)).by_layer(0.2)
    vectors = [[replace(r, setting=replace(r.setting, name=f"v{i}")) for r in found.results] for i in range(8)]
    effects, cost = replace(found, results=tuple(r for results in vectors for r in results))._plots()
    assert (len(effects.series), len(cost.series)) == (12, 6) and "the 6 of 8 curves with the largest effects" in effects.caption


def test_a_coefficient_that_was_not_measured_is_not_drawn() -> None:
    with pytest.raises(EditError, match=r"no coefficient 0.3; it has -0.4, -0.2, 0.2, 0.4"):
        made_up.sweep().by_layer(0.3)


# -- output -----------------------------------------------------------------------------------------------------------


def bundle(*parts: Part) -> dict[str, Any]:
    return plot.figure(*parts)._repr_mimebundle_()


@pytest.mark.parametrize("name", PARTS)
def test_the_output_holds_plotly_and_html(name: str) -> None:
    """And no PNG of its own: see show/plot.py."""
    found = bundle(PARTS[name])
    assert set(found) == {PLOTLY, "text/html", "text/plain"}
    assert Image.open(BytesIO(plot.figure(PARTS[name]).png())).width == 2 * png.WIDTH
    assert PARTS[name].caption in parsed(found["text/html"]).text and PARTS[name].caption in found["text/plain"]
    drawn = json.loads(json.dumps(found[PLOTLY]))
    assert drawn["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)" and "NaN" not in json.dumps(drawn)
    assert sum(len(v if isinstance(v, str) else json.dumps(v)) for v in found.values()) < 100_000


def test_ipython_takes_the_bundle_and_shows_nothing_itself(capsys: pytest.CaptureFixture) -> None:
    """plotly's own display function would send its form alone, and take no display_id."""
    formatter = DisplayFormatter()
    formatter.ipython_display_formatter.enabled = True
    formatter.active_types = formatter.format_types
    found, _ = formatter.format(plot.figure(LINE))
    assert set(found) == {PLOTLY, "text/html", "text/plain"} and capsys.readouterr().out == ""


def test_show_sends_the_same_bundle() -> None:
    code = ("from IPython.core.interactiveshell import InteractiveShell\nfrom IPython.utils.capture import capture_output\n"
            "from mia_lab.show.parts import Bars\nfrom mia_lab.show.plot import figure\n"
            "InteractiveShell.instance()\n"
            "with capture_output() as seen:\n    figure(Bars(('a',), (1.0,), 'Bars')).show()\n"
            "print(sorted(seen.outputs[0].data))\n")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip().endswith(str(sorted([PLOTLY, "text/html", "text/plain"])))


def test_panels_stand_under_each_other_each_with_axes_of_its_own() -> None:
    figure = plot.figure(LINE, Prose("told, not drawn"), GRID, PARTS["bars"])
    assert [t.yaxis for t in figure.data] == ["y", "y", "y2", "y2", "y3"]
    spans = [figure.layout[name].domain for name in ("yaxis", "yaxis2", "yaxis3")]
    assert 1 >= spans[0][1] > spans[0][0] > spans[1][1] > spans[1][0] > spans[2][1] > spans[2][0] > 0
    assert [a.text for a in figure.layout.annotations] == ["A curve", "A grid", "Bars"]


def test_a_figure_that_was_changed_has_no_html_that_pretends_otherwise() -> None:
    figure = plot.figure(LINE)
    figure.update_layout(title="mine")
    assert "was changed" not in figure._repr_mimebundle_()["text/html"]
    figure.add_scatter(x=[0, 1], y=[9, 9])
    found = figure._repr_mimebundle_()
    assert "was changed" in found["text/html"] and "was changed" in found["text/plain"] and found[PLOTLY]["data"][-1]["y"] == [9, 9]


def test_a_figure_is_copied_and_pickled_with_its_html() -> None:
    figure = plot.figure(LINE, GRID)
    again = pickle.loads(pickle.dumps(figure))
    assert type(again) is plot.Figure and again._repr_mimebundle_() == figure._repr_mimebundle_()


def test_what_cannot_be_drawn_says_where_its_numbers_are() -> None:
    with pytest.raises(MiaError, match=r"numbers are in \.data"):
        plot.figure(Prose("words"))
    with pytest.raises(MiaError, match=r"numbers are in \.data"):
        _ = made_analyses.card().figure


def test_without_plotly_a_figure_says_what_to_install_and_without_matplotlib_it_has_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    code = ("import sys; sys.modules['plotly'] = None\n"
            "import mia_lab.show.html, mia_lab.show.text\n"
            "from mia_lab.analysis.reft import ReftFit\n"
            "fit = ReftFit(None, 3, 1, 5, (2.5, 1.5), 2.25, 0.5, 0.5)\n"
            "fit._repr_html_()\n"
            "try:\n    fit.figure\nexcept Exception as error:\n    print(type(error).__name__, error)\n")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("MiaError") and 'pip install "mia_lab[lab]"' in said
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = bundle(LINE)
    assert "<img" not in found["text/html"] and "A curve" in found["text/html"] and PLOTLY in found


# -- pictures ---------------------------------------------------------------------------------------------------------


def ratio(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Contrast as WCAG 2 defines it."""
    def light(rgb: tuple[float, ...]) -> float:
        shares = [v / 255 for v in rgb]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((light(one), light(other)))
    return (lighter + 0.05) / (darker + 0.05)


def contrast(colour: tuple[int, ...], page: int) -> float:
    return ratio(colour, (page,) * 3)


@pytest.mark.parametrize("page", [0xFF, 0x11])
def test_ink_and_lines_stand_out_from_white_and_from_near_black(page: int) -> None:
    assert contrast(colours.INK, page) > 4.3 and all(contrast(colour, page) >= 3 for colour in colours.LINES)


@pytest.mark.parametrize("page", [0xFF, 0x11])
@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_texts_are_read_on_the_fullest_cell(low: float, page: int) -> None:
    grid = Heat(("0",), ("a",), ((1.0,),), texts=(("·Paris",),), low=low)
    for _, hue, alpha in heatmap.scale(grid):
        cell = tuple(alpha * c + (1 - alpha) * page for c in hue)
        assert ratio(colours.INK, cell) >= 2.7
    assert max(alpha for _, _, alpha in heatmap.scale(GRID)) == 1.0


@pytest.mark.parametrize("page", [0xFF, 0x11])
def test_what_a_picture_is_painted_with_stands_out(page: int) -> None:
    two = Curve((LINE.series[0], Series("b", (0.0, 1.0), (2.0, 1.0))), "layer", "effect", "A curve")
    pixels = np.asarray(Image.open(BytesIO(png.png(two))).convert("RGBA")).reshape(-1, 4)
    solid, counts = np.unique(pixels[pixels[:, 3] > 250], axis=0, return_counts=True)
    assert len(pixels[pixels[:, 3] == 0]) > len(pixels) / 2
    assert all(contrast(tuple(map(int, colour[:3])), page) >= 2.9 for colour, n in zip(solid, counts) if n > 100)


SIGHT = {"protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
         "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
         "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
         "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))}


@pytest.mark.parametrize("sight", SIGHT)
def test_lines_are_told_apart_by_colour_alone(sight: str) -> None:
    """Machado's simulation (2009), and the distance in CIE L*a*b*, of which 2 can just be seen."""
    shares = np.array(colours.LINES) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(SIGHT[sight]).T, 0, 1)
    xyz = seen @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1) + 1e9 * np.eye(len(lab))
    assert apart.min() > 20


def test_pictures_of_curves_are_small() -> None:
    series = tuple(Series(f"series {k}", tuple(map(float, range(32))), tuple(np.sin(np.arange(32) / 5 + k).tolist()),
                          tuple((np.sin(np.arange(32) / 5 + k) - 0.2).tolist()), tuple((np.sin(np.arange(32) / 5 + k) + 0.3).tolist()))
                   for k in range(6))
    assert len(png.png(Curve(series[:3], "layer", "effect", "Three with bands"))) < 40_000
    assert len(png.png(Curve(series, "layer", "effect", "Six with bands"))) < 55_000
    assert len(png.png(*made.projection(n=100)._plots()[:1])) < 40_000


def test_text_of_tokens_is_drawn_as_it_is(recwarn: pytest.WarningsRecorder) -> None:
    """Two dollars would make a formula, and a character that the font lacks a warning."""
    odd = Heat(("$a", "b$"), ("$x_1$", "中"), ((0.1, 0.2), (0.3, 0.4)), "$odd$ 文", (("$\\frac$", "<b>"), ("", "中")), unit="$u$")
    assert png.png(odd).startswith(b"\x89PNG") and not [w for w in recwarn if "Glyph" in str(w.message)]
    assert png.png(Curve((Series("$a$ 中", (0.0,), (1.0,)), Series("b$", (0.0,), (2.0,))), "$x$", "$y$ 文", "$c$")).startswith(b"\x89PNG")


def test_no_figure_is_left_open_with_pyplot() -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    png.png(LINE)
    assert plt.get_fignums() == before


# -- grids ------------------------------------------------------------------------------------------------------------


def test_columns_of_one_name_stay_apart_and_a_cell_without_a_value_is_crossed_out() -> None:
    shown, crosses = plot.figure(GRID).data
    assert [name.rstrip("\u200b") for name in shown.x] == ["·the", "·the"] and len(set(shown.x)) == 2
    assert [values(row) for row in shown.z] == [[0.5, -1.0], [None, 0.0]] and (list(crosses.x), list(crosses.y)) == (["·the"], ["1"])
    assert [list(row) for row in shown.customdata] == [["a &lt;b&gt;", "b"], ["not run", "d"]]
    axes = Canvas().subplots()
    heatmap.draw(GRID, axes)
    assert [(t.get_position(), t.get_text()) for t in axes.texts] == [((0, 1), "×")]
    assert axes.images[0].get_array().mask.tolist() == [[False, False], [True, False]]


def test_colours_are_centred_on_nothing() -> None:
    shown = plot.figure(GRID).data[0]
    assert (shown.zmin, shown.zmax) == (-1.0, 1.0) and shown.colorscale[0][1] == "rgba(41,128,185,1)"
    chances = plot.figure(Heat(("0",), ("a",), ((0.5,),), low=0.0, high=1.0)).data[0]
    assert (chances.zmin, chances.zmax) == (0.0, 1.0) and chances.colorscale[0][1] == "rgba(230,126,34,0)"


def test_bars_without_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match="2 bars have 1 labels"):
        Bars(("a",), (1.0, 2.0))


def test_a_bar_without_a_value_is_not_drawn_and_moves_no_other() -> None:
    part = Bars(("lost", "up", "down"), (nan, 2.0, -1.0))
    found = html.render(part)
    assert re.findall(r"width:([\w.]+)%", found) == ["50.0", "25.0"] and ">–</td>" in found and "nan" not in found + text.render(part)


def test_the_largest_grid_stays_within_the_size_of_a_view() -> None:
    figure = made_analyses.lens((128,), ("embed", *range(31)), 5).figure
    kept = json.dumps(figure._repr_mimebundle_(), indent=1)  # as a notebook is written
    assert len(kept) < 300_000 and figure.data[0].z.shape == (32, 128)
