"""ActivationCache over rows held in memory: padding, spellings, missing and surplus rows, what it says of itself."""
from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mia_lab.cache import ActivationCache, Batch, PromptView
from mia_lab.errors import MissingRowsError, PointError
from mia_lab.lazy import LazyTensor
from mia_lab.points import Point, every

POINTS = [Point("resid_post", 0), Point("attn_out", 2), Point("resid_post", 2)]
LENGTHS, N_PROMPT, WIDTH = (5, 3), (4, 3), 4
LAYERS = 3
TOKENS = ((1, 10, 11, 12, 13), (1, 20, 21))
NAMES = ["blocks.0.hook_resid_post", "blocks.2.hook_attn_out", "blocks.2.hook_resid_post"]


class Held:
    """Rows in memory, and how often each point was asked for."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        self.values = {p: [torch.randn(n, WIDTH, generator=draw).to(dtype) for n in LENGTHS] for p in POINTS}
        self.places = {p: [torch.arange(n) for n in LENGTHS] for p in POINTS}
        self.asked: list[Point] = []
        self.sides: set[bool] = set()

    def rows(self, point: Point, prompts: Sequence[int], before: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.asked.append(point)
        self.sides.add(before)
        return [(self.places[point][i], self.values[point][i]) for i in prompts]

    def keep(self, point: Point, prompt: int, places: list[int]) -> None:
        """Hold only these rows of a prompt."""
        self.places[point][prompt] = torch.tensor(places, dtype=torch.int64)
        self.values[point][prompt] = self.values[point][prompt][places]


def cache_of(held: Held, dtype: torch.dtype = torch.float32, points: Sequence[Point] = POINTS, **dialect: bool) -> ActivationCache:
    shapes = {p: (2, WIDTH // 2) if p.kind == "z" else (WIDTH,) for p in every(LAYERS)}
    dtypes = {p: torch.float32 if p.kind == "router" else dtype for p in shapes}
    return ActivationCache(held, points, Batch(TOKENS, N_PROMPT, shapes, dtypes, LAYERS, **dialect))


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def cache(held: Held) -> ActivationCache:
    return cache_of(held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_padded_on_the_right_with_nan(dtype: torch.dtype) -> None:
    held = Held(dtype)
    cache = cache_of(held, dtype)
    for point in POINTS:
        tensor = cache[point]
        assert (tensor.shape, tensor.dtype) == ((2, 5, WIDTH), dtype)
        assert torch.equal(tensor[0], held.values[point][0])
        assert torch.equal(tensor[1, :3], held.values[point][1])
        assert tensor[1, 3:].isnan().all()


def test_the_mask_is_true_on_real_rows(cache: ActivationCache) -> None:
    assert cache.mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    for tensor in cache.values():
        assert torch.equal(~tensor.isnan().any(-1), cache.mask)


def test_it_knows_tokens_borders_and_last_prompt_positions(cache: ActivationCache) -> None:
    assert cache.n_prompt == N_PROMPT
    assert cache.tokens == TOKENS
    assert cache.last.tolist() == [3, 2]


@pytest.mark.parametrize("key", [("resid_post", 2), ("resid_post", -1), "resid_post.2", "blocks.2.hook_resid_post",
                                 "blocks.2.hook_out", "model.layers.2.output", "transformer.h.2.output",
                                 Point("resid_post", 2)])
def test_every_spelling_is_the_same_tensor(cache: ActivationCache, held: Held, key: object) -> None:
    assert key in cache
    assert cache[key] is cache["resid_post", 2]
    assert isinstance(cache[key], LazyTensor)
    assert held.asked == []
    assert torch.equal(cache[key][0], held.values[Point("resid_post", 2)][0])


def test_on_a_sandwich_norm_model_a_module_s_own_output_is_a_point_of_its_own(held: Held) -> None:
    assert cache_of(held)["model.layers.2.self_attn.output"].shape == (2, 5, WIDTH)
    sandwich = cache_of(held, sandwich=True)
    assert "model.layers.2.self_attn.output" not in sandwich
    with pytest.raises(PointError, match=r"attn_out_raw\.2 is not tapped"):
        sandwich["model.layers.2.self_attn.output"]


def test_on_a_model_with_rotary_embeddings_unrotated_heads_are_refused(held: Held) -> None:
    assert "blocks.2.attn.hook_q" not in cache_of(held, rotary=True)
    with pytest.raises(PointError, match="names q before it is rotated"):
        cache_of(held, rotary=True)["blocks.2.attn.hook_q"]


def hold(held: Held, point: Point, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    draw = torch.Generator().manual_seed(1)
    held.values[point] = [torch.randn(n, *shape, generator=draw).to(dtype) for n in LENGTHS]
    held.places[point] = [torch.arange(n) for n in LENGTHS]


def test_points_per_head_keep_their_axes_and_points_kept_as_float32_their_type() -> None:
    held = Held(torch.bfloat16)
    z, router = Point("z", 1), Point("router", 1)
    hold(held, z, 2, WIDTH // 2, dtype=torch.bfloat16)
    hold(held, router, WIDTH)
    cache = cache_of(held, torch.bfloat16, [z, router])
    assert cache.keys() == ["blocks.1.attn.hook_z", "blocks.1.mlp.hook_router"]
    assert (cache["z", 1].shape, cache["z", 1].dtype) == ((2, 5, 2, WIDTH // 2), torch.bfloat16)
    assert (cache["router", 1].shape, cache["router", 1].dtype) == ((2, 5, WIDTH), torch.float32)
    assert torch.equal(cache[1]["z", 1], held.values[z][1])
    assert cache["z", 1][1, 3:].isnan().all()
    assert cache.nbytes == 2 * 5 * (2 * WIDTH + 4 * WIDTH) == cache.fetch().nbytes_fetched
    assert "bfloat16, float32" in repr(cache)


@pytest.mark.parametrize("before", [False, True])
def test_rows_are_asked_for_on_the_side_of_the_edits_where_they_were_taken(held: Held, before: bool) -> None:
    cache_of(held, before=before).fetch()
    assert held.sides == {before}


@pytest.mark.parametrize("key", [("resid_post", 1), "mlp_out.0"])
def test_a_point_that_was_not_captured_is_an_error_that_lists_what_was(cache: ActivationCache, key: object) -> None:
    assert key not in cache
    with pytest.raises(PointError, match=r"is not tapped in this session\. Tapped: attn_out at layers 2; resid_post at"):
        cache[key]


@pytest.mark.parametrize("key", ["resid_pots.1", ("resid_post", 3), "resid_post", None, 2.5, True, ("attn_out", 0, 1)])
def test_what_is_no_point_is_not_in_it(cache: ActivationCache, key: object) -> None:
    assert key not in cache
    with pytest.raises(PointError):
        cache[key]


def test_it_iterates_as_a_mapping_in_the_order_of_its_points(cache: ActivationCache, held: Held) -> None:
    assert list(cache) == cache.keys() == NAMES
    assert len(cache) == 3
    assert all(cache[name] is tensor for name, tensor in cache.items())
    assert all(a is b for a, b in zip(cache.values(), [cache[p] for p in POINTS], strict=True))
    assert held.asked == []


def test_each_point_is_asked_for_once_and_only_when_it_is_used(cache: ActivationCache, held: Held) -> None:
    cache["attn_out", 2].sum()
    cache["blocks.2.hook_attn_out"].mean()
    assert held.asked == [Point("attn_out", 2)]
    assert cache.fetch() is cache
    assert sorted(held.asked) == sorted(POINTS)
    assert all(tensor.fetched for tensor in cache.values())


# -- one prompt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "prompt"), [(0, 0), (1, 1), (-1, 1), (-2, 0)])
def test_an_index_is_one_prompt_unpadded(cache: ActivationCache, held: Held, index: int, prompt: int) -> None:
    view = cache[index]
    assert isinstance(view, PromptView)
    assert view.keys() == NAMES
    for name, point in zip(NAMES, POINTS, strict=True):
        assert torch.equal(view[name], held.values[point][prompt])
    assert torch.equal(view["resid_post", -1], view["model.layers.2.output"])
    assert repr(view) == ["prompt 0 of 2: 5 positions (4 of the prompt), 3 tensors",
                          "prompt 1 of 2: 3 positions (3 of the prompt), 3 tensors"][prompt]


@pytest.mark.parametrize("index", [2, -3])
def test_a_prompt_that_is_not_there_is_an_index_error(cache: ActivationCache, index: int) -> None:
    with pytest.raises(IndexError):
        cache[index]


# -- missing and surplus rows -----------------------------------------------------------------------------------------

LACKS = "resid_post.0 of prompt {} lacks positions {} of {}: they were never computed"


@pytest.mark.parametrize(("prompt", "kept", "absent"), [
    (0, [0, 1, 3, 4], [2]), (0, [0, 1, 2, 3], [4]), (1, [1, 2], [0]), (1, [], [0, 1, 2]), (0, [], [0, 1, 2, 3, 4])])
def test_a_row_that_was_never_computed_raises_when_it_is_used(cache: ActivationCache, held: Held, prompt: int,
                                                              kept: list[int], absent: list[int]) -> None:
    held.keep(POINTS[0], prompt, kept)
    tensor = cache[POINTS[0]]
    assert tensor.shape == (2, 5, WIDTH)
    with pytest.raises(MissingRowsError) as caught:
        tensor.sum()
    assert str(caught.value) == LACKS.format(prompt, absent, LENGTHS[prompt])
    with pytest.raises(MissingRowsError):
        cache[1 - prompt][POINTS[0]]
    assert torch.equal(cache[0][POINTS[1]], held.values[POINTS[1]][0])


def test_rows_past_the_end_are_left_out(cache: ActivationCache, held: Held) -> None:
    point, surplus = POINTS[0], torch.full((2, WIDTH), 9.0)
    kept = held.values[point][1]
    held.places[point][1] = torch.arange(5)
    held.values[point][1] = torch.cat([kept, surplus])
    assert torch.equal(cache[1][point], kept)
    assert cache[point][1, 3:].isnan().all()


def test_a_row_past_the_end_does_not_stand_in_for_a_missing_one(cache: ActivationCache, held: Held) -> None:
    held.places[POINTS[0]][1] = torch.tensor([0, 1, 3])
    with pytest.raises(MissingRowsError, match=r"lacks positions \[2\] of 3"):
        cache[POINTS[0]].sum()


# -- whole ------------------------------------------------------------------------------------------------------------


def test_the_layers_of_a_kind_stack(cache: ActivationCache, held: Held) -> None:
    stacked = cache.stack_activation("resid_post")
    assert stacked.shape == (2, 2, 5, WIDTH)
    assert torch.equal(stacked[1, 0], held.values[Point("resid_post", 2)][0])
    assert torch.equal(stacked.isnan().any(-1), ~cache.mask.expand(2, 2, 5))
    with pytest.raises(PointError, match="mlp_out is not tapped"):
        cache.stack_activation("mlp_out")


def test_its_text_counts_prompts_points_and_bytes(cache: ActivationCache) -> None:
    text = ("ActivationCache: 2 prompts, up to 5 positions, float32\n"
            "  resid_post, attn_out at 2 layers (0 to 2): 3 tensors\n"
            "  480 B held, {} B fetched")
    assert repr(cache) == text.format(0)
    cache["resid_post", 0].sum()
    assert repr(cache) == text.format(160)
    cache.fetch()
    assert repr(cache) == text.format(480)
    assert cache.nbytes == cache.nbytes_fetched == sum(tensor.nbytes for tensor in cache.values())


def test_bytes_follow_the_dtype() -> None:
    cache = cache_of(Held(torch.bfloat16), torch.bfloat16)
    assert cache.nbytes == 240
    assert repr(cache).endswith("240 B held, 0 B fetched")


def test_its_tensors_outlive_it(held: Held) -> None:
    tensor = cache_of(held)["resid_post", 0]
    assert torch.equal(tensor[0], held.values[POINTS[0]][0])
