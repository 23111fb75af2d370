"""Traces and hooks: the same Python gives what it gives on Hugging Face's tensors, and what cannot be recorded is refused."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import mia_lab as mia
from mia_lab.errors import EditError, MiaError, PointError

pytestmark = pytest.mark.full
OPTIONS = dict(points=["resid_pre", "resid_post", "attn_out", "mlp_out", "z", "final_norm"], max_model_len=96, max_num_batched_tokens=64,
               max_num_seqs=8, block_size=32, enforce_eager=True)
PROMPT, LONGER = "a prompt", "and a longer prompt"
LAYER, WIDTH, HEADS = 1, 128, 4
V = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **OPTIONS)


@pytest.fixture(scope="module")
def model(session: mia.Session, models: Path) -> Any:
    return tiny.load(tiny.build("llama", models))


def record(session: mia.Session, body: Callable) -> None:
    with session.trace(PROMPT) as t:
        body(t)


def theirs(model: Any, ids: torch.Tensor, body: Callable, heads: bool = False) -> torch.Tensor:
    """Hugging Face's logits `[batch pos d_vocab]` with `body` run on a block's output, or on what its heads give."""
    block = model.model.layers[LAYER]

    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().view(*x.shape[:2], HEADS, -1) if heads else x.clone()
        found = body(x)
        return (x if found is None else found).flatten(2)

    hook = (block.self_attn.o_proj.register_forward_pre_hook(lambda m, args: (changed(args[0]),)) if heads else
            block.register_forward_hook(lambda m, args, out: changed(out)))
    try:
        with torch.no_grad():
            return model(ids).logits
    finally:
        hook.remove()


def narrow(x: Any) -> None:
    x[:, 3] += V


def from_the_end(x: Any) -> None:
    x[:, -2] -= V
    x[:, -1] *= -0.5


def whole(x: Any) -> Any:
    x += V
    x /= 2
    return x


def result(x: Any) -> Any:
    return 2 * x - V


def reversed_(x: Any) -> Any:
    return V - x.clone()


def span(x: Any) -> None:
    x[:, 2:5] = x[:, 2:5] * 0.25 + ROWS


def rows(x: Any) -> None:
    x[:, [6, 1, 4]] = ROWS


def added_rows(x: Any) -> None:
    x[:, 1:4] += ROWS


def zeros(x: Any) -> Any:
    return torch.zeros_like(x) + V


def in_place(x: Any) -> None:
    x[:, 5].zero_()
    x[:, 4].copy_(V)
    x[:, 3].add_(V)
    torch.add(x, V)  # a result that nobody uses


def twice(x: Any) -> None:
    x[:, 2] += V
    x[:, 2] = x[:, 2] + x[:, 2] * 0.5 + 1.0


def one_prompt(x: Any) -> None:
    x[0, 1] = torch.ones(WIDTH)


BODIES = [narrow, from_the_end, whole, result, reversed_, span, rows, added_rows, zeros, in_place, twice, one_prompt]


@pytest.mark.parametrize("body", BODIES)
def test_a_body_does_what_it_does_on_tensors(session: mia.Session, model: Any, body: Callable) -> None:
    ids = session.to_tokens(PROMPT)
    ours = session.run_with_hooks(PROMPT, [(("resid_post", LAYER), body)])
    want = theirs(model, ids, body)
    torch.testing.assert_close(ours.get(), want, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert float((want - model(ids).logits).abs().max()) > 1e-2
    with session.trace(PROMPT) as t:
        found = body(t["resid_post", LAYER])
        if found is not None:
            t.layers[LAYER].output = found
        logits = t.logits[:, -1].save()
    torch.testing.assert_close(logits.get(), want[:, -1], rtol=1e-4, atol=1e-4)


def test_heads_are_an_axis(session: mia.Session, model: Any) -> None:
    piece = V[: WIDTH // HEADS]

    def body(x: Any) -> None:
        x[:, :, 2] = piece
        x[:, -1, 1] *= 0
        x[:, 2, 3] += piece

    ours = session.run_with_hooks(PROMPT, [(f"blocks.{LAYER}.attn.hook_z", body)])
    torch.testing.assert_close(ours.get(), theirs(model, session.to_tokens(PROMPT), body, heads=True), rtol=1e-4, atol=1e-4)


def test_any_integer_drops_its_axis(session: mia.Session) -> None:
    with session.trace(PROMPT) as t:
        found = [t["resid_post", LAYER][:, place].save() for place in (3, np.int64(3), torch.tensor(3))]
    assert all(x.shape == (1, WIDTH) and torch.equal(x.get(), found[0].get()) for x in found)


def test_prompts_of_mixed_lengths_have_their_own_last_position(session: mia.Session, model: Any) -> None:
    with session.trace([PROMPT, LONGER]) as t:
        t.layers[LAYER].output[:, -1] += V
        t.layers[2].output[1, 2] = torch.zeros(WIDTH)
        kept, last, every = t["resid_post", LAYER][:, -1].save(), t.logits[:, -1].save(), t.blocks[2].resid_post.save()
    for i, prompt in enumerate((PROMPT, LONGER)):
        edits = [mia.Add(V, layers=[LAYER], where=mia.last())]
        edits += [mia.Replace(torch.zeros(WIDTH), layers=[2], where=mia.positions([2]))] if i else []
        logits, cache = session.run_with_cache(prompt, edits=edits)
        torch.testing.assert_close(kept[i], cache["resid_post", LAYER][0, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[i], logits[0, -1], rtol=1e-4, atol=1e-4)
        n = cache.n_prompt[0]
        torch.testing.assert_close(every[i, :n], cache["resid_post", 2][0], rtol=1e-4, atol=1e-5)
        assert every[i, n:].isnan().all()
    assert float(every[1, 2].abs().max()) < 1e-6


def test_a_saved_value_is_that_of_its_line(session: mia.Session) -> None:
    with session.trace(PROMPT) as t:
        h = t.blocks[LAYER].hook_resid_post
        before = h.save()
        h[:, 2] += V
        after = t.layers[LAYER].output.save()
        assert h.shape == (1, 9, WIDTH) and before.shape == (1, 9, WIDTH) and h.ndim == 3
    moved = after - before
    torch.testing.assert_close(moved[0, 2], V, rtol=1e-4, atol=1e-4)
    assert not moved[0, [0, 1, *range(3, 9)]].any()

    def between(t: Any) -> None:
        t["resid_post", 1][:, 2] += V
        t["resid_post", 1].save()
        t["resid_post", 1][:, 3] += V

    with pytest.raises(EditError, match="between two changes"):
        record(session, between)


def test_a_saved_value_goes_into_a_second_run(session: mia.Session) -> None:
    with session.trace("b prompt") as t:
        source, wanted = t["resid_post", 2].save(), t.logits.save()
    with session.trace(PROMPT) as t:
        t["resid_post", 2] = source
        logits = t.logits.save()
    torch.testing.assert_close(logits.get(), wanted.get(), rtol=1e-4, atol=1e-4)
    with session.trace(PROMPT) as t:
        t["resid_post", 2][:, 1:] = source[:, 1:]
        other = t.logits[0].save()
    torch.testing.assert_close(other[1:], wanted[0, 1:], rtol=1e-4, atol=1e-4)


def test_text_is_generated_and_its_positions_are_kept(session: mia.Session) -> None:
    big = 40 * V
    with session.trace([PROMPT, LONGER], max_tokens=4, ignore_eos=True) as t:
        t.layers[2].output += big
        kept = t["resid_post", 2].save()
    edit = mia.Add(big, layers=[2], where=mia.everywhere())
    assert t.text == session.generate([PROMPT, LONGER], max_tokens=4, ignore_eos=True, edits=[edit])
    assert t.text != session.generate([PROMPT, LONGER], max_tokens=4, ignore_eos=True)
    _, cache = session.run_with_cache([PROMPT, LONGER], max_tokens=4, ignore_eos=True, edits=[edit])
    torch.testing.assert_close(kept.get(), cache["resid_post", 2].get(), equal_nan=True, rtol=1e-4, atol=1e-4)


def test_a_vector_is_added_by_its_row(session: mia.Session) -> None:
    vector = session.vector([("a good thing", "a bad thing"), ("so glad", "so sad")])
    with session.trace(PROMPT) as t:
        t["resid_post", 2] += 0.5 * vector
        t["resid_post", 1][:, 3] -= vector
        logits = t.logits.save()
    edits = [mia.Add(vector[2], 0.5, where=mia.everywhere()), mia.Add(vector[1], -1.0, where=mia.positions([3]))]
    torch.testing.assert_close(logits.get(), session.run_with_cache(PROMPT, edits=edits)[0].get(), rtol=1e-4, atol=1e-4)
    with pytest.raises(EditError, match="fitted at resid_post"):
        session.run_with_hooks(PROMPT, [(("mlp_out", 2), lambda value: value + vector)])
    with pytest.raises(EditError, match="dict cannot be put into"):
        session.run_with_hooks(PROMPT, [(("mlp_out", 2), lambda value: value + {})])


def test_hooks_by_name_and_by_function_of_names(session: mia.Session) -> None:
    seen = []

    def hook(value: Any, hook: Any) -> Any:
        seen.append((hook.name, hook.layer(), value.shape))
        return value + V

    ours = session.run_with_hooks(PROMPT, [(lambda name: name.endswith("hook_mlp_out"), hook), ("blocks.0.hook_resid_pre", hook)])
    edits = [mia.Add(V, layers=range(4), point="mlp_out", where=mia.everywhere()),
             mia.Add(V, layers=[0], point="resid_pre", where=mia.everywhere())]
    torch.testing.assert_close(ours.get(), session.run_with_cache(PROMPT, edits=edits)[0].get(), rtol=1e-4, atol=1e-4)
    assert seen[1] == ("blocks.1.hook_mlp_out", 1, (1, 9, WIDTH)) and len(seen) == 5


def test_logits_after_a_change_of_the_final_norm(session: mia.Session) -> None:
    with session.trace(PROMPT) as t:
        t["final_norm"] *= 2.0
        doubled = t.logits.save()
    plain = session.run_with_cache(PROMPT)[0]
    torch.testing.assert_close(doubled.get(), 2 * plain, rtol=1e-4, atol=1e-4)


REFUSED = [
    (lambda h: bool(h[0, 1] > 0), "Gate"), (lambda h: h.item(), "Gate"), (lambda h: float(h), "Gate"), (lambda h: list(h), "Gate"),
    (lambda h: h == 1, "Gate"), (lambda h: len(h), "Gate"), (lambda h: torch.relu(h), "Clamp"), (lambda h: h.clamp(min=0), "Clamp"),
    (lambda h: h @ V, "Affine"), (lambda h: h.norm(dim=-1), "keep_norm"), (lambda h: h * V, "Affine"), (lambda h: h * h, "Affine"),
    (lambda h: torch.softmax(h, -1), "Affine"), (lambda h: torch.fft.fft(h), "Replace"), (lambda h: 1 / h, "Affine"),
    (lambda h: h.view(-1), "Replace"), (lambda h: h[:, :, 3], "components"), (lambda h: h[..., 3], "masks"),
    (lambda h: h[:, 99], "does not fit"), (lambda h: h[5], "none of the 1 prompts"), (lambda h: h[0][1], "index a value once"),
    (lambda h: h.assign(torch.ones(3)), r"shape \[3\] does not fit"), (lambda h: h.assign(V * float("nan")), "NaN"),
    (lambda h: h[:, [1, 1]].assign(V), "twice"), (lambda h: (h * 2).save(), "save the value itself"),
    (lambda h: h[None], "None"), (lambda h: h[:, torch.arange(9) > 4], "does not fit"), (lambda h: h[[0, 0], 1].assign(ROWS[:2]), "twice"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_recorded_is_refused(session: mia.Session, body: Callable, says: str) -> None:
    def hook(value: Any) -> None:
        found = body(value)
        _ = getattr(found, "shape", None)

    with pytest.raises(MiaError, match=says):
        session.run_with_hooks(PROMPT, [(("resid_post", LAYER), hook)])


def test_rows_under_way_are_not_mixed_up(session: mia.Session) -> None:
    with pytest.raises(EditError, match="second run"), session.trace(PROMPT) as t:
        t["resid_post", 2] = t["resid_post", 1]
    with pytest.raises(EditError, match="second run"), session.trace(PROMPT) as t:
        t["resid_post", 2][:, 1] = t["resid_post", 2][:, 3]

    def stale(t: Any) -> None:
        old = t["resid_post", 2] * 2
        t["resid_post", 2] += V
        t["resid_post", 2] = old

    with pytest.raises(EditError, match="was changed after"):
        record(session, stale)
    with pytest.raises(MiaError, match="known once the run is over"), session.trace(PROMPT) as t:
        t["resid_post", 2] += t["resid_post", 1].save()
    with pytest.raises(EditError, match="tuple"), session.trace(PROMPT) as t:
        t.layers[2].output[0][:, 1] += V
    with pytest.raises(EditError, match="logits are read"), session.trace(PROMPT) as t:
        t.logits[:, -1] = 0.0
    with pytest.raises(AttributeError, match="spelling knows"), session.trace(PROMPT) as t:
        t.layers[2].outptu.save()
    with pytest.raises(PointError, match="is not tapped"), session.trace(PROMPT) as t:
        t["mlp_act", 2].save()
    with session.trace(PROMPT) as t:
        h = t["resid_post", 2]
    with pytest.raises(MiaError, match="this run is over"):
        h += V


def test_an_error_in_the_block_runs_nothing(session: mia.Session) -> None:
    with pytest.raises(RuntimeError, match="mine"), session.trace(PROMPT) as t:
        raise RuntimeError("mine")
    with pytest.raises(MiaError, match="nothing was generated"):
        _ = t.text
