"""The prefix cache stays on and stays right: edited KV is never read by requests with other edits."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import mia_lab as mia
from parity import reference, scenario

pytestmark = pytest.mark.full

BLOCK = 32


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    options = scenario.TIGHT | {"num_gpu_blocks_override": 200}
    return open_tiny("llama", points=["resid_post", "attn_out"], **options)


@pytest.fixture
def model(models: Path) -> Any:
    return tiny.load(tiny.build("llama", models)).double()


def fresh_prompt(seed: int, n: int = 5 * BLOCK + 7) -> list[int]:
    """A prompt that no other test has put into the cache."""
    draw = torch.Generator().manual_seed(seed)
    return [1, *torch.randint(3, 320, (n - 1,), generator=draw).tolist()]


def edit(session: mia.Session, seed: int, where: Any = None) -> mia.Add:
    """An addition at block 1 that moves the stream by about its own size."""
    vector = torch.randn(session.d_model, generator=torch.Generator().manual_seed(seed))
    return mia.Add(vector / vector.norm() * session.unit()[1], 1.0, [1], "resid_post", where or mia.window(1))


def cached_and_checked(session: mia.Session, model: Any, ids: list[int], edits: list[mia.Add]) -> int:
    """Run one request, check its last prompt row and its generated rows against Hugging Face; return the tokens it read
    from the cache."""
    params = dict(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
    outputs, source = scenario.submit(session, [scenario.Request(ids, edits)], params, ((len(ids) - 1, None),))
    tokens = ids + list(outputs[0].outputs[0].token_ids)
    _, values = reference.run(model, tokens[:-1], session.tapped, edits, len(ids))
    for point in session.tapped:
        positions, rows = source.rows(point, [0])[0]
        assert positions.tolist() == list(range(len(ids) - 1, len(tokens) - 1))
        theirs = values[point]
        scale = (theirs - theirs[1:].mean(0)).norm(dim=-1)[positions]
        assert ((rows - theirs[positions]).norm(dim=-1) / scale).max() <= 1e-5, f"{point} differs from Hugging Face"
    return outputs[0].num_cached_tokens


def test_steered_then_clean(session: mia.Session, model: Any) -> None:
    ids = fresh_prompt(1)
    assert cached_and_checked(session, model, ids, [edit(session, 1)]) == 0
    assert cached_and_checked(session, model, ids, []) == 0
    assert cached_and_checked(session, model, ids, []) == 5 * BLOCK


def test_clean_then_steered(session: mia.Session, model: Any) -> None:
    ids = fresh_prompt(2)
    assert cached_and_checked(session, model, ids, []) == 0
    assert cached_and_checked(session, model, ids, [edit(session, 2)]) == 0
    assert cached_and_checked(session, model, ids, []) == 5 * BLOCK


def test_equal_edits_share_and_others_do_not(session: mia.Session, model: Any) -> None:
    ids = fresh_prompt(3)
    assert cached_and_checked(session, model, ids, [edit(session, 3)]) == 0
    assert cached_and_checked(session, model, ids, [edit(session, 3)]) == 5 * BLOCK
    assert cached_and_checked(session, model, ids, [edit(session, 3).scaled(0.5)]) == 0
    assert cached_and_checked(session, model, ids, [edit(session, 4)]) == 0


def test_sharing_ends_at_the_first_edited_token(session: mia.Session, model: Any) -> None:
    ids = fresh_prompt(5)
    assert cached_and_checked(session, model, ids, []) == 0
    assert cached_and_checked(session, model, ids, [edit(session, 5, mia.window(2 * BLOCK + 5))]) == 2 * BLOCK
    assert cached_and_checked(session, model, ids, [edit(session, 6, mia.window(3 * BLOCK))]) == 3 * BLOCK
    assert cached_and_checked(session, model, ids, [edit(session, 6, mia.generated())]) == 5 * BLOCK


def test_generated_kv_is_keyed_too(session: mia.Session, model: Any) -> None:
    """A follow-up that repeats a steered generation as its prompt must not read the steered blocks."""
    ids = fresh_prompt(7, 3 * BLOCK + 2)
    params = dict(max_tokens=BLOCK + 8, temperature=0.0, ignore_eos=True)
    with session.steer(edit(session, 7, mia.generated())):
        out = session.completions(ids, **params)
    longer = ids + list(out.outputs[0].token_ids)
    assert cached_and_checked(session, model, longer, []) == 3 * BLOCK


def test_a_capture_of_all_positions_does_not_read_but_writes(session: mia.Session) -> None:
    ids = fresh_prompt(8)
    session.generate(ids, max_tokens=1)
    _, cache = session.run_with_cache(ids)
    assert not cache["resid_post", 1].get().isnan().any()
    out = session.completions(ids, max_tokens=1)
    assert out.num_cached_tokens == 5 * BLOCK
