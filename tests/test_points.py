"""Points: one parser for every spelling, errors that say what to type, filters over what a session taps."""
from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mia_lab.errors import MiaError, PointError
from mia_lab.points import KINDS, Point, kind_of, parse, select, undeclared

N_LAYERS = 8
POST = [Point("resid_post", layer) for layer in range(N_LAYERS)]
TAPPED = [*reversed(POST), Point("attn_out", 2), Point("resid_pre", 2)]

SPELLINGS = {
    "resid_pre": ["blocks.3.hook_in", "model.layers.3.input", "transformer.h.3.input", "model.decoder.layers.3.input",
                  "language_model.model.layers.3.input", "model.language_model.layers.3.input"],
    "resid_mid": ["blocks.3.ln2.hook_in"],
    "resid_post": ["blocks.3.hook_out", "model.layers.3.output", "transformer.h.3.output",
                   "model.decoder.layers.3.output", "language_model.model.layers.3.output",
                   "model.language_model.layers.3.output", "language_model.layers.3.output",
                   "transformer.blocks.3.output"],
    "attn_out": ["blocks.3.attn.hook_out", "model.layers.3.self_attn.output", "transformer.h.3.attn.output",
                 "model.decoder.layers.3.self_attn.output", "language_model.model.layers.3.self_attn.output"],
    "mlp_out": ["blocks.3.mlp.hook_out", "model.layers.3.mlp.output", "transformer.h.3.mlp.output",
                "model.layers.3.block_sparse_moe.output", "model.language_model.layers.3.mlp.output"],
}
RAW = ["blocks.3.attn.hook_out", "blocks.3.mlp.hook_out", "model.layers.3.self_attn.output",
       "transformer.h.3.attn.output", "model.layers.3.mlp.output", "language_model.model.layers.3.mlp.output"]


def asked(call, *args, **kwargs) -> str:
    """The text of the PointError that a call raises."""
    with pytest.raises(PointError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_parses_in_each_form_that_names_it(kind: str) -> None:
    forms = [Point(kind, 3), (kind, 3), (f"hook_{kind}", 3), [kind, 3], f"{kind}.3", f"{kind}_3", f"{kind}3",
             f"blocks.3.hook_{kind}", *SPELLINGS[kind]]
    assert {repr(form): parse(form, N_LAYERS) for form in forms} == {repr(form): Point(kind, 3) for form in forms}


def test_its_own_texts_parse_back_to_a_point() -> None:
    point = Point("mlp_out", 5)
    assert (point.name, str(point)) == ("blocks.5.hook_mlp_out", "mlp_out.5")
    assert parse(point.name, N_LAYERS) == parse(str(point), N_LAYERS) == point


@pytest.mark.parametrize("layer", [3, -5, np.int64(3), np.int32(-5), torch.tensor(3)])
def test_a_layer_is_any_integer_and_negative_ones_count_from_the_end(layer: object) -> None:
    point = parse(("resid_post", layer), N_LAYERS)
    assert point == Point("resid_post", 3)
    assert type(point.layer) is int


@pytest.mark.parametrize(("spec", "layer"), [("resid_post.-1", 7), ("resid_post-8", 0), (Point("resid_post", -1), 7)])
def test_short_names_and_points_may_count_from_the_end(spec: object, layer: int) -> None:
    assert parse(spec, N_LAYERS) == Point("resid_post", layer)


@pytest.mark.parametrize("layer", [8, -9, 10**9])
@pytest.mark.parametrize("form", [tuple, "{0[0]}.{0[1]}".format, lambda pair: Point(*pair)])
def test_a_layer_outside_the_model_is_an_error_with_the_layers_there_are(form, layer: int) -> None:
    says = f"layer {layer} was asked for; the model has layers 0 to 7"
    assert asked(parse, form(("resid_post", layer)), N_LAYERS) == says


@pytest.mark.parametrize(("spec", "says"), [
    ("resid_pots.3", "there is no point 'resid_pots.3'; type for example ('resid_post', 3); the points are"),
    (("resid_pots", 3), "there is no point 'resid_pots'; the points are resid_pre, resid_mid, resid_post, attn_"),
    ("", "there is no point ''; type for example"),
    ("blocks.3", "there is no point 'blocks.3'; type for example"),
    ("blocks.-1.hook_resid_post", "there is no point 'blocks.-1.hook_resid_post'"),
    ("resid_post..3", "there is no point 'resid_post..3'"),
    ("resid_post.3.5", "there is no point 'resid_post.3.5'"),
    (" resid_post.3", "there is no point ' resid_post.3'"),
    ("blocks.3.hook_z", "there is no point 'blocks.3.hook_z'; after the block this spelling knows hook_resid_pre, "),
    ("blocks.3.mlp.output", "after the block this spelling knows hook_resid_pre"),
    ("model.layers.3.hook_resid_post", "after the block this spelling knows input, output, self_attn.output"),
    ("model.layers.3.norm.output", "there is no point 'model.layers.3.norm.output'"),
    ("resid_post", "'resid_post' needs a layer here: type ('resid_post', 0) or 'blocks.0.hook_resid_post'"),
    ("hook_mlp_out", "'hook_mlp_out' needs a layer here: type ('mlp_out', 0) or 'blocks.0.hook_mlp_out'"),
    (3, "a point is a name or a (kind, layer) pair, not 3"),
    (None, "a point is a name or a (kind, layer) pair, not None"),
    (("resid_post", 1, 2), "a point is a name or a (kind, layer) pair, not ('resid_post', 1, 2)"),
    (("resid_post", 1.0), "the layer of ('resid_post', 1.0) is not an integer"),
    (("resid_post", "1"), "the layer of ('resid_post', '1') is not an integer"),
    (("resid_post", True), "the layer of ('resid_post', True) is not an integer"),
])
def test_what_is_no_point_is_an_error_that_says_what_to_type(spec: object, says: str) -> None:
    assert says in asked(parse, spec, N_LAYERS)


@pytest.mark.parametrize("spec", [([], 1), ("resid_post", torch.tensor(1.5))])
def test_a_pair_of_the_wrong_types_is_a_point_error(spec: object) -> None:
    asked(parse, spec, N_LAYERS)


def test_a_point_of_an_unknown_kind_is_an_error() -> None:
    assert "there is no point 'resid_pots'" in asked(parse, Point("resid_pots", 3), N_LAYERS)


def test_the_error_is_of_the_family_and_a_key_error_that_prints_as_text() -> None:
    with pytest.raises(KeyError) as caught:
        kind_of("nope")
    assert isinstance(caught.value, MiaError)
    assert str(caught.value).startswith("there is no point 'nope'")


# -- blocks that norm what their branches return ----------------------------------------------------------------------


@pytest.mark.parametrize("spec", RAW)
def test_a_module_s_own_output_is_refused_where_a_norm_follows_it(spec: str) -> None:
    branch = "mlp" if "mlp" in spec else "attn"
    says = asked(parse, spec, N_LAYERS, sandwich=True)
    assert says.startswith(f"{spec!r} names the module's own output, before its post-norm, which is not tapped")
    assert says.endswith(f"the residual contribution is blocks.3.hook_{branch}_out")
    advice = re.search(r"blocks\.3\.hook_\w+", says)[0]
    assert parse(advice, N_LAYERS, sandwich=True) == parse(spec, N_LAYERS) == Point(f"{branch}_out", 3)


@pytest.mark.parametrize("spec", ["blocks.3.hook_mlp_out", ("mlp_out", 3), "mlp_out.3", "blocks.3.hook_out",
                                  "model.layers.3.output", "model.layers.3.input", "blocks.3.ln2.hook_in"])
def test_every_other_spelling_means_the_same_with_and_without_such_norms(spec: object) -> None:
    assert parse(spec, N_LAYERS, sandwich=True) == parse(spec, N_LAYERS)


def test_a_filter_refuses_a_module_s_own_output_too() -> None:
    every = [Point(kind, layer) for kind in KINDS for layer in range(N_LAYERS)]
    chosen = ["resid_post", "model.layers.3.mlp.output"]
    assert "before its post-norm" in asked(select, chosen, every, N_LAYERS, sandwich=True)


# -- filters ----------------------------------------------------------------------------------------------------------


def test_without_a_filter_everything_is_chosen_in_order_of_layer_then_kind() -> None:
    layers_2 = [Point("resid_pre", 2), Point("resid_post", 2), Point("attn_out", 2)]
    assert select(None, TAPPED, N_LAYERS) == [*POST[:2], *layers_2, *POST[3:]]
    assert select(None, [], N_LAYERS) == []


@pytest.mark.parametrize(("chosen", "expected"), [
    ("resid_post", POST), ("hook_resid_post", POST), (["resid_post"], POST), ({"resid_post"}, POST),
    ("resid_post.3", [POST[3]]), (("resid_post", 3), [POST[3]]), (("resid_post", -1), [POST[7]]), (POST[3], [POST[3]]),
    ("model.layers.3.output", [POST[3]]), ([("resid_post", 5), "blocks.1.hook_out", POST[5]], [POST[1], POST[5]]),
    (("resid_pre", "attn_out"), [Point("resid_pre", 2), Point("attn_out", 2)]),
    (["attn_out", "resid_post.0"], [POST[0], Point("attn_out", 2)]), (iter(["resid_post.0"]), [POST[0]]),
    ([("resid_post", layer) for layer in range(2)], POST[:2]),
    (lambda name: name.endswith("2.hook_attn_out"), [Point("attn_out", 2)]),
    (lambda name: "blocks.7" in name, [POST[7]]),
])
def test_a_filter_picks_from_what_is_tapped(chosen: object, expected: list[Point]) -> None:
    assert select(chosen, TAPPED, N_LAYERS) == expected


TAPPED_HERE = "Tapped: resid_pre at layers 2; resid_post at layers 0 to 7; attn_out at layers 2. "


@pytest.mark.parametrize(("chosen", "says"), [
    ("mlp_out", f"mlp_out is not tapped in this session. {TAPPED_HERE}Load with Session(..., points=[...]) that"),
    (("attn_out", 3), "attn_out.3 is not tapped in this session. " + TAPPED_HERE),
    (["resid_post", "model.layers.3.mlp.output"], "mlp_out.3 is not tapped in this session. " + TAPPED_HERE),
    ([], "no point was asked for"),
    (lambda name: False, "names_filter picked none of the 10 declared points, blocks.0.hook_resid_post to blocks.7."),
    (("resid_post", 8), "layer 8 was asked for; the model has layers 0 to 7"),
    ("resid_pots", "there is no point 'resid_pots'"),
])
def test_a_filter_that_picks_nothing_is_an_error_that_says_what_is_tapped(chosen: object, says: str) -> None:
    assert says in asked(select, chosen, TAPPED, N_LAYERS)


def test_gaps_between_tapped_layers_are_listed() -> None:
    held = [Point("mlp_out", layer) for layer in (5, 1, 2)]
    assert "Tapped: mlp_out at layers 1, 2, 5. " in str(undeclared("resid_pre", held))
    assert "Tapped: none. " in str(undeclared("resid_pre", []))


@pytest.mark.parametrize(("chosen", "tapped"), [(5, TAPPED), (lambda name: True, [])])
def test_an_unusable_filter_is_a_point_error(chosen: object, tapped: list[Point]) -> None:
    asked(select, chosen, tapped, N_LAYERS)
