"""A Session as its users see it, on a tiny model with an ordinary, compiled engine."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import einops
import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.analysis.fitting import METHODS
from mia_lab.errors import ClosedError, EditError, MissingRowsError, PointError, PromptError, UnsupportedError

pytestmark = pytest.mark.full

OPTIONS = dict(points=["resid_pre", "resid_post", "mlp_out"], max_model_len=128, max_num_batched_tokens=64, max_num_seqs=8,
               block_size=32)
PROMPT = "steer me"


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **OPTIONS)


def vector(session: mia.Session, seed: int = 0) -> torch.Tensor:
    """A direction as long as the stream after block 1 varies."""
    draw = torch.randn(session.d_model, generator=torch.Generator().manual_seed(seed))
    return draw / draw.norm() * session.unit()[1]


def test_one_prompt_gives_one_text_and_a_list_gives_a_list(session: mia.Session) -> None:
    one = session.generate(PROMPT, max_tokens=4)
    assert isinstance(one, str)
    assert session.generate([PROMPT, "other"], max_tokens=4)[0] == one
    assert session.generate(session.to_tokens(PROMPT)[0].tolist(), max_tokens=4) == one
    assert session.completions(PROMPT, max_tokens=4).outputs[0].text == one


def test_tokens_go_there_and_back(session: mia.Session) -> None:
    tokens = session.to_tokens(["abc", "a"])
    assert tokens.shape == (2, 4)
    assert tokens[0, 0] == session.tokenizer.bos_token_id
    assert tokens[1, 2:].tolist() == [session.tokenizer.pad_token_id] * 2
    assert session.to_str_tokens("abc") == ["<s>", "a", "b", "c"]
    assert session.to_string(tokens[0]) == "<s>abc"


def test_run_with_cache_keeps_transformer_lens_shapes_and_names(session: mia.Session) -> None:
    logits, cache = session.run_with_cache([PROMPT, "a b"], max_tokens=3, ignore_eos=True)
    assert logits.shape == (2, 11, 320)
    assert not logits.fetched
    tensor = cache["resid_post", 2]
    assert tensor.shape == (2, 11, 128)
    assert cache["blocks.2.hook_resid_post"] is tensor
    assert cache["model.layers.2.output"] is tensor
    assert cache.n_prompt == (9, 4)
    assert cache.mask.sum(-1).tolist() == [11, 6]
    assert cache[1]["resid_post", 2].shape == (6, 128)
    assert tensor[1, 6:].isnan().all()
    greedy = logits.argmax(-1)
    assert greedy[0, 8:10].tolist() == list(cache.tokens[0][9:])
    assert einops.reduce(cache[0]["mlp_out", 0], "pos d -> d", "mean").shape == (128,)


def test_names_filter_picks_points(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPT, names_filter=["mlp_out", ("resid_post", 1)])
    assert {name.split("hook_")[1] for name in cache} == {"mlp_out", "resid_post"}
    assert len(cache) == session.n_layers + 1
    _, cache = session.run_with_cache(PROMPT, names_filter=lambda name: name.endswith("resid_pre"))
    assert len(cache) == session.n_layers


def test_continuations_of_a_prompt_stand_one_after_the_other(session: mia.Session) -> None:
    logits, cache = session.run_with_cache([PROMPT, "a b"], n=2, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)
    assert logits.shape == (4, 12, 320)
    assert cache.n_prompt == (9, 9, 4, 4)
    assert cache.tokens[0][:9] == cache.tokens[1][:9]
    assert cache.tokens[0] != cache.tokens[1]
    assert torch.allclose(cache[0]["resid_post", 2][:9], cache[1]["resid_post", 2][:9], atol=1e-5)
    one, _ = session.run_with_cache(PROMPT, n=2, max_tokens=1)
    assert one.shape[0] == 2


def test_capture_axes_follow_what_was_asked(session: mia.Session) -> None:
    prompts = [PROMPT, "abc"]
    _, cache = session.run_with_cache(prompts)
    last = session.capture(prompts, "resid_post", layers=range(1, 3))
    assert last.shape == (2, 2, 128)
    for i in range(2):
        expected = cache[i]["resid_post", 2][cache.n_prompt[i] - 1]
        assert torch.allclose(last[i, 1], expected, atol=1e-5)
    assert session.capture(PROMPT, "mlp_out", layers=2, at=0).shape == (128,)
    assert session.capture(PROMPT, at=[1, -1]).shape == (session.n_layers, 2, 128)
    ragged = session.capture(prompts, layers=0, at=slice(1, None))
    assert ragged.shape == (2, 8, 128)
    assert ragged[1, 3:].isnan().all()
    assert torch.allclose(ragged[1, :3], cache[1]["resid_post", 0][1:4], atol=1e-5)
    assert session.capture(PROMPT, at=-1, layers=[0]).shape == (1, 128)


def test_a_long_prompt_is_chunked_not_failed(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", **OPTIONS | dict(max_captured_tokens=5), enforce_eager=True)
    _, cache = session.run_with_cache(["x" * 90, "y" * 60])
    assert cache["mlp_out", 3].shape == (2, 91, 128)
    assert session._engine.facts["captured_tokens"] == 5


def test_steer_scopes_add_up_and_end_on_exceptions(session: mia.Session) -> None:
    v, base = vector(session), session.capture(PROMPT, layers=1, at=3)
    with session.steer(v, 0.5, layers=[1]):
        with session.steer(v, 0.25, layers=[1]):
            both = session.capture(PROMPT, layers=1, at=3)
        once = session.capture(PROMPT, layers=1, at=3)
        per_request = session.capture(PROMPT, layers=1, at=3, edits=[mia.Add(v, 0.25, [1])])
    with pytest.raises(ZeroDivisionError), session.steer(v, layers=[1]):
        1 / 0  # noqa: B018
    after = session.capture(PROMPT, layers=1, at=3)
    assert torch.allclose(both - base, 0.75 * v, atol=1e-4)
    assert torch.allclose(once - base, 0.5 * v, atol=1e-4)
    assert torch.allclose(per_request, both.get(), atol=1e-5)
    assert torch.equal(after.get(), base.get())


def test_each_prompt_has_its_own_edits(session: mia.Session) -> None:
    v = vector(session)
    edits = [[mia.Add(v, 1.0, [1])], None, [mia.Add(v, -1.0, [1]), mia.Add(v, 0.5, [1])]]
    rows = session.capture([PROMPT] * 3, layers=1, edits=edits)
    assert torch.allclose(rows[0] - rows[1], v, atol=1e-4)
    assert torch.allclose(rows[2] - rows[1], -0.5 * v, atol=1e-4)


def test_bos_is_not_edited_unless_asked(session: mia.Session) -> None:
    v = vector(session)
    base = session.capture(PROMPT, layers=1, at=None)
    default = session.capture(PROMPT, layers=1, at=None, edits=mia.Add(v, 1.0, [1]))
    everywhere = session.capture(PROMPT, layers=1, at=None, edits=mia.Add(v, 1.0, [1], where=mia.everywhere()))
    assert torch.allclose(default[0], base[0], atol=1e-5)
    assert torch.allclose(everywhere[0] - base[0], v, atol=1e-4)


def test_zero_coefficient_changes_no_bit(session: mia.Session) -> None:
    base = session.completions([PROMPT] * 2, max_tokens=6, logprobs=1)
    zero = session.completions([PROMPT] * 2, max_tokens=6, logprobs=1, edits=mia.Add(vector(session), 0.0, [1]))
    assert [o.outputs[0].cumulative_logprob for o in base] == [o.outputs[0].cumulative_logprob for o in zero]


def test_a_mean_difference_vector_has_its_unit(session: mia.Session) -> None:
    v = session.vector([("aaa", "zzz"), {"positive": "abab", "negative": "zyzy"}])
    assert v.layers == tuple(range(session.n_layers))
    assert torch.allclose(v.rows.norm(dim=-1), v.unit)
    difference = session.capture(["aaa", "abab"]).float().mean(0) - session.capture(["zzz", "zyzy"]).float().mean(0)
    assert torch.allclose(difference.norm(dim=-1), v.raw_norms, rtol=1e-4)
    assert torch.cosine_similarity(difference, v.rows, dim=-1).min() > 0.9999
    moved = session.capture(PROMPT, layers=1, edits=mia.Add(2 * v[1], 0.1)) - session.capture(PROMPT, layers=1)
    assert torch.allclose(moved, 0.2 * v.rows[1], atol=1e-4)


@pytest.mark.parametrize("method", ["pca", "pca_centred", "lat", "logistic", "lda"])
def test_every_method_fits_the_rows_that_capture_gives(session: mia.Session, method: str) -> None:
    pairs = mia.Pairs.of([("aaa", "zzz"), ("abab", "zyzy"), ("baab", "yzzy"), ("bbba", "yyyz"), ("aab", "zzy")])
    v = session.vector(pairs, method=method)
    expected = METHODS[method](session.capture(pairs.positive).float(), session.capture(pairs.negative).float())
    assert torch.allclose(v.rows.norm(dim=-1), v.unit)
    assert torch.cosine_similarity(expected, v.rows, dim=-1).min() > 0.9999
    assert v.method == method and method in repr(v)


def test_repr_and_points_name_what_is_there(session: mia.Session) -> None:
    lines = repr(session).splitlines()
    assert len(lines) == 3
    assert "float32" in lines[0]
    assert "resid_post x4" in lines[1]
    assert "KV room" in lines[2]
    table = repr(session.points())
    assert "blocks.{0..3}.hook_mlp_out" in table
    assert "not tapped" in table
    assert "<table" in session.points()._repr_html_()


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda s: s.generate(""), PromptError, "empty"),
    (lambda s: s.generate([]), PromptError, "no prompt"),
    (lambda s: s.generate(["ok", ""]), PromptError, "prompt 1 is empty"),
    (lambda s: s.generate("x" * 200), PromptError, "max_model_len=202"),
    (lambda s: s.generate([1, 99999]), PromptError, "99999"),
    (lambda s: s.generate(3.5), PromptError, "float"),
    (lambda s: s.generate([{"role": "user", "content": "hi"}]), PromptError, "chat template"),
    (lambda s: s.generate("a", temprature=1), PromptError, "temprature"),
    (lambda s: s.generate("a", max_tokens=0), PromptError, "max_tokens"),
    (lambda s: s.capture("a", "resid_pots"), PointError, "resid_pots"),
    (lambda s: s.capture("a", layers=9), PointError, "0 to 3"),
    (lambda s: s.capture("a", "attn_out"), PointError, "not tapped"),
    (lambda s: s.capture("a", at=7), PromptError, "at=7"),
    (lambda s: s.capture("a", at=slice(5, None)), PromptError, "no position"),
    (lambda s: s.run_with_cache("a", names_filter="blocks.1.hook_attn_out"), PointError, r"points=\[...\]"),
    (lambda s: s.capture("a", "logits"), PointError, "run_with_cache returns"),
    (lambda s: s.capture("a", "pattern"), PointError, "not tapped"),
    (lambda s: s.capture("a", layers=[]), PointError, "no layer"),
    (lambda s: s.generate("a", edits=mia.Add(torch.ones(3), 1.0, [1])), EditError, "width 3; the model's is 128"),
    (lambda s: s.generate("a", edits=mia.Add(torch.ones(128), 1.0, [7])), EditError, "layers 0 to 3"),
    (lambda s: s.generate("a", edits=mia.Add(torch.ones(128), 1.0, [1], "attn_out")), EditError, "not declared"),
    (lambda s: s.generate("a", edits=mia.Scale(0.5, [1], heads=0)), EditError, "has no heads"),
    (lambda s: s.generate("a", edits=mia.Add(torch.ones(128), 1.0, [1], where=mia.span("xyz"))), EditError, "occurs 0 times"),
    (lambda s: s.generate("a", edits=mia.Add(torch.ones(128), 1.0, [1], when=mia.Gate(mia.Probe(torch.ones(128), 2), above=0))), EditError,
     "comes after"),
    (lambda s: s.generate(["ok", "a"], edits=[None, [mia.Add(torch.ones(128), 1.0, [1], where=mia.tokens("ab"))]]), EditError, "2 tokens"),
    (lambda s: s.default([mia.Add(torch.ones(3), 1.0, [1])]), EditError, "width 3; the model's is 128"),
    (lambda s: s.generate("a", edits=mia.Add(torch.full((128,), float("nan")), 1.0, [1])), EditError, "NaN"),
    (lambda s: s.generate(["a", "b"], edits=[[]]), EditError, "2 prompts"),
    (lambda s: s.generate("a", edits=["up"]), EditError, "edits is"),
    (lambda s: s.vector([]), EditError, "there is no pair"),
    (lambda s: s.vector([("a", "a")]), EditError, "are equal"),
    (lambda s: s.vector([("a", "b"), ("b", "a")]), EditError, "no direction"),
    (lambda s: s.vector([("a", "b")], method="magic"), EditError, "mean_diff"),
])
def test_bad_input_says_what_to_type_and_leaves_the_session_working(session: mia.Session, call: Callable[..., Any],
                                                                    error: type[Exception], words: str) -> None:
    before = session.generate(PROMPT, max_tokens=3)
    with pytest.raises(error, match=words):
        call(session)
    assert session.generate(PROMPT, max_tokens=3) == before
    assert not session._engine.llm.llm_engine.has_unfinished_requests()


def held(session: mia.Session, uids: list[str]) -> int:
    """Rows that the worker holds for these requests."""
    return sum(len(positions) for positions, _ in session._engine.rpc("fetch", uids, "resid_post", 1, False, True))


def test_rows_are_let_go_with_their_cache(session: mia.Session) -> None:
    _, cache = session.run_with_cache(PROMPT)
    uids = list(cache._source._uids)
    assert held(session, uids) > 0
    del cache, _
    session.generate("a", max_tokens=1)
    assert held(session, uids) == 0


def interrupted(session: mia.Session, monkeypatch: pytest.MonkeyPatch, prompts: list[str], **params: Any) -> None:
    """Run prompts and break off inside the third forward, when blocks are named and not yet computed."""
    runner = session._engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    forward, calls = runner._model_forward, []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner, "_model_forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.run_with_cache(prompts, max_tokens=20, **params)
    monkeypatch.setattr(runner, "_model_forward", forward)


@pytest.mark.skipif(torch.cuda.is_available(), reason="breaks off inside the V1 runner")
def test_a_broken_off_run_leaves_neither_requests_nor_rows_nor_cached_blocks(session: mia.Session,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "a long prompt that fills three blocks of the cache, each of thirty-two tokens, and more"
    expected = session.completions(prompt, max_tokens=4, logprobs=1).outputs[0].cumulative_logprob
    session.reset_prefix_cache()
    interrupted(session, monkeypatch, ["b" * 60, prompt])
    assert not session._engine.llm.llm_engine.has_unfinished_requests()
    session.generate("a", max_tokens=1)
    again = session.completions(prompt, max_tokens=4, logprobs=1)
    assert again.outputs[0].cumulative_logprob == pytest.approx(expected, abs=1e-5)
    courier = session._engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.mia_fetch.__self__._courier
    assert not courier._kept and not courier._sent


def test_the_unit_is_measured_without_open_scopes(open_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                                  tmp_path: Path) -> None:
    session = open_tiny("llama", **OPTIONS)
    known = session.unit("resid_post")
    monkeypatch.setenv("MIA_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(session, "_units", {})
    with session.steer(vector(session), 3.0, layers=[1]):
        assert torch.allclose(session.unit("resid_post"), known, rtol=1e-4)


def test_edits_that_the_tables_cannot_hold_are_refused_whole(session: mia.Session) -> None:
    v = vector(session)
    many = [mia.Add(v, 0.01 * i, [1], where=mia.positions([i])) for i in range(1, 40)]
    with pytest.raises(EditError, match="fewer selectors"):
        session.generate("x" * 50, max_tokens=1, edits=many)
    assert session.generate(PROMPT, max_tokens=2, edits=many[:8])


def test_vectors_are_let_go_when_there_are_many(session: mia.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from mia_lab.running import launch

    monkeypatch.setattr(launch, "_VECTOR_BYTES", 4 * session.d_model * 3)
    base = session.capture(PROMPT, layers=1)
    for _ in range(2):
        for seed in range(6):
            moved = session.capture(PROMPT, layers=1, edits=mia.Add(vector(session, seed), 1.0, [1]))
            assert torch.allclose(moved - base, vector(session, seed), atol=1e-4)
    assert len(session._engine._known) == 3


def test_a_mean_over_positions_counts_only_real_ones(session: mia.Session) -> None:
    v = session.vector([("aaaa", "z")], at=slice(1, None))
    _, cache = session.run_with_cache(["aaaa", "z"])
    expected = cache[0]["resid_post", 2][1:].mean(0) - cache[1]["resid_post", 2][1:].mean(0)
    assert torch.cosine_similarity(expected, v.rows[2], dim=0) > 0.9999


def test_two_sessions_live_side_by_side(models: Path, open_tiny: Callable[..., Any]) -> None:
    options = dict(points=["resid_post"], max_model_len=64, enforce_eager=True)
    first = open_tiny("llama", **options)
    before = first.capture(PROMPT, layers=1)
    second = mia.Session(str(tiny.build("qwen3", models)), tokenizer=str(tiny.tokenizer(models)), dtype="float32", **options)
    assert not torch.allclose(second.capture(PROMPT, layers=1), before.get(), atol=1e-2)
    second.close()
    assert torch.equal(first.capture(PROMPT, layers=1).get(), before.get())


def test_one_sequence_at_a_time_is_enough(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", max_model_len=64, max_num_seqs=1, enforce_eager=True)
    assert session.capture([PROMPT, "abc"], layers=1).shape == (2, 128)


def test_a_closed_session_says_so_and_keeps_what_was_fetched(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", points=["resid_post"], max_model_len=64, enforce_eager=True)
    logits, cache = session.run_with_cache(PROMPT)
    kept = cache["resid_post", 1].get()
    executor = session._engine.llm.llm_engine.engine_core.engine_core.model_executor
    lab = executor.driver_worker.worker.mia_fetch.__self__
    held = [weakref.ref(part) for part in (executor, lab._tables, lab._courier._ring)]
    del executor, lab
    session.close()
    session.close()
    assert [part() for part in held] == [None] * 3, "the engine, and with it the model's and the taps' memory, is still held"
    assert torch.equal(cache["resid_post", 1].get(), kept)
    assert repr(session).endswith("closed") and repr(session) in session._repr_html_()
    with pytest.raises(MissingRowsError, match="fetch"):
        cache["resid_post", 0].get()
    with pytest.raises(MissingRowsError):
        logits.get()
    with pytest.raises(ClosedError, match="open a new one"):
        session.generate("a")


@pytest.mark.parametrize(("options", "error", "words"), [
    (dict(points=["resid_pots"]), PointError, "resid_pots"),
    (dict(points=[("resid_post", 12)]), PointError, "layers 0 to 3"),
    (dict(edits=["explode"]), EditError, "the kinds are add, ablate"),
    (dict(points=["mlp_out_raw"]), PointError, "no norm of its own"),
    (dict(enable_chunked_prefill=False, max_captured_tokens=8), UnsupportedError, "enable_chunked_prefill=True"),
    (dict(tensor_parallel_size=2), UnsupportedError, "tensor_parallel_size=1"),
    (dict(pipeline_parallel_size=2), UnsupportedError, "pipeline_parallel_size=1"),
])
def test_options_that_cannot_be_right_are_refused(open_tiny: Callable[..., Any], options: dict[str, Any],
                                                  error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_tiny("llama", **dict(max_model_len=64, enforce_eager=True) | options)


def test_a_missing_point_of_the_architecture_is_refused(open_tiny: Callable[..., Any]) -> None:
    with pytest.raises(PointError, match="parallel"):
        open_tiny("cohere", points=["resid_mid"], max_model_len=64, enforce_eager=True)


def test_a_separate_process_gives_the_same_rows(models: Path, open_tiny: Callable[..., Any]) -> None:
    options = dict(points=["resid_post", "mlp_out"], max_model_len=64, enforce_eager=True)
    here = open_tiny("llama", **options)
    v, unit = vector(here), here.unit()
    edits = [mia.Add(v, 1.0, [1])]
    _, cache = here.run_with_cache(PROMPT, max_tokens=4, edits=edits)
    expected = cache.fetch().stack_activation("mlp_out")
    with mia.Session(str(tiny.build("llama", models)), tokenizer=str(tiny.tokenizer(models)), dtype="float32", **options,
                     in_process=False) as there:
        assert there._engine.llm.llm_engine.engine_core.resources is not None  # vLLM's own, of a process beside this one
        logits, cache = there.run_with_cache(PROMPT, max_tokens=4, edits=edits)
        assert torch.allclose(cache.stack_activation("mlp_out"), expected, atol=1e-5)
        assert torch.allclose(there.unit(), unit)
        assert logits.argmax(-1)[0, cache.n_prompt[0] - 1] == cache.tokens[0][cache.n_prompt[0]]
    assert here.generate(PROMPT, max_tokens=2)


def test_a_capture_that_the_host_cannot_hold_is_refused(session: mia.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10_000})())
    with pytest.raises(PromptError, match="fewer points"):
        session.run_with_cache(PROMPT)
    assert session.capture(PROMPT, layers=1).shape == (128,)
