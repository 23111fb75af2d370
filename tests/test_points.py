"""Points: one parser for every spelling, errors that say what to type, filters over what a session taps."""
from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mia_lab.errors import MiaError, PointError
from mia_lab.points import DERIVED, KINDS, Point, every, kind_of, parse, ranges, select, undeclared

N_LAYERS = 8
POST = [Point("resid_post", layer) for layer in range(N_LAYERS)]
TAPPED = [*reversed(POST), Point("attn_out", 2), Point("resid_pre", 2)]

SPELLINGS = {
    "resid_pre": ["blocks.3.hook_in", "model.layers.3.input", "transformer.h.3.input", "model.decoder.layers.3.input",
                  "language_model.model.layers.3.input", "model.language_model.layers.3.input"],
    "q": ["blocks.3.attn.hook_rot_q", "blocks.3.attn.hook_q"],
    "k": ["blocks.3.attn.hook_rot_k", "blocks.3.attn.hook_k"],
    "v": ["blocks.3.attn.hook_v"],
    "z": ["blocks.3.attn.hook_z", "model.layers.3.self_attn.o_proj.input", "transformer.h.3.attn.c_proj.input"],
    "resid_mid": ["blocks.3.ln2.hook_in", "blocks.3.hook_resid_mid"],
    "mlp_act": ["blocks.3.mlp.hook_post", "model.layers.3.mlp.down_proj.input", "transformer.h.3.mlp.c_proj.input"],
    "router": ["blocks.3.mlp.hook_router", "model.layers.3.mlp.gate.output", "model.layers.3.block_sparse_moe.gate.output"],
    "resid_post": ["blocks.3.hook_out", "model.layers.3.output", "transformer.h.3.output",
                   "model.decoder.layers.3.output", "language_model.model.layers.3.output",
                   "model.language_model.layers.3.output", "language_model.layers.3.output",
                   "transformer.blocks.3.output"],
    "attention": ["blocks.3.hook_attention"],
    "attn_out": ["blocks.3.hook_attn_out"],
    "mlp_out": ["blocks.3.hook_mlp_out"],
    "attn_out_raw": ["blocks.3.hook_attn_out_raw"],
    "mlp_out_raw": ["blocks.3.hook_mlp_out_raw"],
    "pattern": ["blocks.3.attn.hook_pattern"],
    "attn_scores": ["blocks.3.attn.hook_attn_scores"],
}
ONCE = {"embed": (0, ["hook_embed", "embed.hook_out", "model.embed_tokens.output", "transformer.wte.output"]),
        "final_norm": (7, ["ln_final.hook_normalized", "ln_final.hook_out", "model.norm.output", "transformer.ln_f.output"]),
        "logits": (7, ["unembed.hook_out", "lm_head.output"])}
RAW = {"attn": ["blocks.3.attn.hook_out", "blocks.3.attn.hook_hidden_states", "model.layers.3.self_attn.output",
                "transformer.h.3.attn.output", "model.decoder.layers.3.self_attn.output"],
       "mlp": ["blocks.3.mlp.hook_out", "model.layers.3.mlp.output", "transformer.h.3.mlp.output",
               "model.layers.3.block_sparse_moe.output", "language_model.model.layers.3.mlp.output"]}


def asked(call, *args, **kwargs) -> str:
    """The text of the PointError that a call raises."""
    with pytest.raises(PointError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("kind", SPELLINGS)
def test_every_kind_parses_in_each_form_that_names_it(kind: str) -> None:
    forms = [Point(kind, 3), (kind, 3), [kind, 3], f"{kind}.3", f"{kind}_3", f"{kind}3", ("blocks." + SPELLINGS[kind][0]).split(".", 1)[1],
             *SPELLINGS[kind]]
    assert {repr(form): parse(form, N_LAYERS) for form in forms} == {repr(form): Point(kind, 3) for form in forms}


def test_every_kind_is_tested() -> None:
    assert {*SPELLINGS, *ONCE} == {*KINDS, *DERIVED}


@pytest.mark.parametrize("kind", ONCE)
def test_what_a_model_has_once_needs_no_layer_and_has_no_other(kind: str) -> None:
    layer, spellings = ONCE[kind]
    for form in [kind, (kind, layer), (kind, layer - N_LAYERS), (kind, None), Point(kind, layer), f"{kind}.{layer}", *spellings]:
        assert parse(form, N_LAYERS) == Point(kind, layer), form
    for form in [(kind, 3), f"{kind}.3", Point(kind, 3)]:
        assert asked(parse, form, N_LAYERS) == f"{kind} is not in every layer; the model has it once: type {kind!r}"
    assert "is not an integer" in asked(parse, ("resid_post", None), N_LAYERS)


@pytest.mark.parametrize("point", every(N_LAYERS), ids=str)
def test_its_own_texts_parse_back_to_a_point(point: Point) -> None:
    assert parse(point.name, N_LAYERS) == parse(str(point), N_LAYERS) == point
    assert parse(point.name, N_LAYERS, sandwich=True, rotary=True) == point


def test_its_texts_are_those_of_transformer_lens() -> None:
    assert (Point("mlp_out", 5).name, str(Point("mlp_out", 5))) == ("blocks.5.hook_mlp_out", "mlp_out.5")
    assert [Point(kind, 0).name for kind in ("q", "z", "mlp_act", "embed")] == [
        "blocks.0.attn.hook_rot_q", "blocks.0.attn.hook_z", "blocks.0.mlp.hook_post", "hook_embed"]


def test_a_model_could_have_every_kind_in_every_layer_but_for_its_ends() -> None:
    found = every(2)
    assert found[0] == Point("embed", 0)
    assert found[-1] == Point("final_norm", 1)
    assert len(found) == len(set(found)) == 2 * len(KINDS) - 2
    assert [p.layer for p in found] == sorted(p.layer for p in found)


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
    (("resid_pots", 3), "there is no point 'resid_pots'; the points are embed, resid_pre, q, k, v, z, "),
    ("", "there is no point ''; type for example"),
    ("blocks.3", "there is no point 'blocks.3'; type for example"),
    ("blocks.-1.hook_resid_post", "there is no point 'blocks.-1.hook_resid_post'"),
    ("resid_post..3", "there is no point 'resid_post..3'"),
    ("resid_post.3.5", "there is no point 'resid_post.3.5'"),
    (" resid_post.3", "there is no point ' resid_post.3'"),
    ("blocks.3.hook_z", "there is no point 'blocks.3.hook_z'; after the block this spelling knows hook_embed, hook_resid_pre, "),
    ("blocks.3.mlp.output", "after the block this spelling knows hook_embed"),
    ("model.layers.3.attn.hook_q", "after the block this spelling knows input, output"),
    ("attn.hook_z", "'attn.hook_z' needs a layer here: type ('z', 0) or 'blocks.0.attn.hook_z'"),
    ("pattern", "'pattern' needs a layer here: type ('pattern', 0) or 'blocks.0.attn.hook_pattern'"),
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


# -- blocks that norm what their branches return, and heads that are rotated ------------------------------------------


@pytest.mark.parametrize(("branch", "spec"), [(branch, spec) for branch, specs in RAW.items() for spec in specs])
def test_a_module_s_own_output_is_what_it_adds_unless_a_norm_follows_it(branch: str, spec: str) -> None:
    assert parse(spec, N_LAYERS) == Point(f"{branch}_out", 3)
    assert parse(spec, N_LAYERS, sandwich=True) == Point(f"{branch}_out_raw", 3)


@pytest.mark.parametrize("spec", ["blocks.3.hook_mlp_out", ("mlp_out", 3), "mlp_out.3", "mlp_out_raw.3", "blocks.3.hook_out",
                                  "blocks.3.hook_attn_out_raw", "model.layers.3.output", "model.layers.3.input", "blocks.3.ln2.hook_in"])
def test_every_other_spelling_means_the_same_with_and_without_such_norms(spec: object) -> None:
    assert parse(spec, N_LAYERS, sandwich=True) == parse(spec, N_LAYERS)


@pytest.mark.parametrize("kind", ["q", "k"])
def test_heads_before_they_are_rotated_are_refused_with_the_name_of_what_there_is(kind: str) -> None:
    says = asked(parse, f"blocks.3.attn.hook_{kind}", N_LAYERS, rotary=True)
    assert says == (f"'blocks.3.attn.hook_{kind}' names {kind} before it is rotated, which is not tapped; "
                    f"as the kernel sees it, it is 'blocks.3.attn.hook_rot_{kind}'")
    advice = re.search(r"blocks\.3\.attn\.hook_rot_\w", says)[0]
    assert parse(advice, N_LAYERS, rotary=True) == parse((kind, 3), N_LAYERS, rotary=True) == Point(kind, 3)
    assert "before it is rotated" in asked(select, f"blocks.3.attn.hook_{kind}", every(N_LAYERS), N_LAYERS, rotary=True)


def test_a_filter_takes_a_module_s_own_output_too() -> None:
    chosen = ["resid_post.3", "model.layers.3.mlp.output"]
    for sandwich, kind in ((False, "mlp_out"), (True, "mlp_out_raw")):
        assert select(chosen, every(N_LAYERS), N_LAYERS, sandwich=sandwich) == [Point(kind, 3), POST[3]]


# -- filters ----------------------------------------------------------------------------------------------------------


def test_without_a_filter_everything_is_chosen_in_order_of_layer_then_kind() -> None:
    layers_2 = [Point("resid_pre", 2), Point("attn_out", 2), Point("resid_post", 2)]
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


TAPPED_HERE = "Tapped: resid_pre at layers 2; attn_out at layers 2; resid_post at layers 0 to 7. "


@pytest.mark.parametrize(("chosen", "says"), [
    ("mlp_out", f"mlp_out is not tapped in this session. {TAPPED_HERE}Load with Session(..., points=[...]) that"),
    (("attn_out", 3), "attn_out.3 is not tapped in this session. " + TAPPED_HERE),
    (["resid_post", "model.layers.3.mlp.output"], "mlp_out.3 is not tapped in this session. " + TAPPED_HERE),
    ([], "no point was asked for"),
    (lambda name: False, "names_filter picked none of the 10 declared points, blocks.0.hook_resid_post to blocks.7."),
    (("resid_post", 8), "layer 8 was asked for; the model has layers 0 to 7"),
    ("resid_pots", "there is no point 'resid_pots'"),
    ("logits", "logits.7 is not tapped in this session. " + TAPPED_HERE),
    (("pattern", 3), "pattern.3 is not tapped in this session. " + TAPPED_HERE),
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


def test_a_filter_takes_what_a_model_has_once_by_its_name_alone() -> None:
    assert select(["final_norm", "hook_embed"], every(N_LAYERS), N_LAYERS) == [Point("embed", 0), Point("final_norm", 7)]
    assert select("z", every(2), 2) == select("attn.hook_z", every(2), 2) == [Point("z", 0), Point("z", 1)]


@pytest.mark.parametrize(("layers", "text"), [([3], "3"), ([1, 0], "0 to 1"), ([2, 3, 4], "2 to 4"), ([0, 2, 3], "0, 2, 3")])
def test_layers_are_written_as_runs(layers: list[int], text: str) -> None:
    assert ranges(layers) == text
