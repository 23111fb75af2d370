"""In an engine: a request that it cannot run ends alone, captures are held by name until they are let go, and decisions are counted."""
from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parity import scenario

import mia_lab as mia
from mia_lab.engine import turned_away
from mia_lab.engine.reservation import ROOM, Reservation
from mia_lab.engine.reservation import encode as reserve
from mia_lab.engine.wire import KEY, Gate, Spec, Take, Term, address, encode
from mia_lab.errors import EditError, MissingRowsError, RoomError

pytestmark = pytest.mark.full

CUDA = torch.cuda.is_available()
PLAIN = dict(max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4, block_size=32, enforce_eager=True, disable_log_stats=False)
IDS = [1, *range(40, 75)]
EVERY = ((0, None),)
EVERYTHING = Spec(takes=(Take("resid_post", 0, EVERY), Take("resid_post", 2, EVERY)))
WRONG = {
    "point": encode("u", Spec((Term("scale", "resid_pre", 0, EVERY),))), "layer": encode("u", Spec(takes=(Take("resid_post", 99, EVERY),))),
    "vector": encode("u", Spec((Term("add", "resid_post", 0, EVERY, write="f" * 32),))), "text": "u {}", "type": 7,
}


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", **PLAIN)


def call(session: mia.Session, name: str, *args: Any) -> Any:
    return session._engine.llm.collective_rpc(f"mia_{name}", args=args)[0]


def sampling(text: Any = None, max_tokens: int = 8, room: str | None = None, **other: Any) -> Any:
    from vllm import SamplingParams

    extra = None if text is None else {KEY: text} | ({} if room is None else {ROOM: room})
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra, **other)


def taken(found: dict[str, Any]) -> dict[tuple, tuple[list[int], torch.Tensor]]:
    """What `collect` gave, by point: positions, and rows."""
    return {(kind, layer): (np.frombuffer(positions, np.int64).tolist(),
                            torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(-1, *shape))
            for kind, layer, _, positions, shape, dtype, data in found["rows"]}


def begun(session: mia.Session, ids: list[int], text: str, **other: Any) -> str:
    """Add a request to a session's engine and return the name that it goes by there."""
    engine = session._engine.llm.llm_engine
    engine.add_request(uuid.uuid4().hex, {"prompt_token_ids": ids}, sampling(text, **other))
    return list(engine.output_processor.request_states)[-1]


def to_the_end(session: mia.Session) -> None:
    engine = session._engine.llm.llm_engine
    while engine.has_unfinished_requests():
        engine.step()


def kept(size: int = 996, seconds: float = 60.0, share: int = 1 << 20) -> str:
    return reserve(Reservation("note", size, seconds, 1 << 20, share))


# -- turned away ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_request_that_cannot_be_run_raises_and_the_engine_goes_on(session: mia.Session, wrong: Any) -> None:
    llm, before = session._engine.llm, session.generate(IDS, max_tokens=6)
    for _ in range(2):
        with pytest.raises(EditError):
            llm.generate([{"prompt_token_ids": IDS}] * 2, [sampling(), sampling(wrong)], use_tqdm=False)
    assert llm.generate([{"prompt_token_ids": IDS}], sampling(max_tokens=6), use_tqdm=False)[0].outputs[0].text == before
    assert session.generate(IDS, max_tokens=6) == before


def test_a_vector_that_was_let_go_of_stays_for_the_requests_that_name_it(session: mia.Session) -> None:
    vector = torch.full((1, session.d_model), 3.0)
    sha = address(1, vector.numpy().tobytes())
    edited = session.generate(IDS, max_tokens=8, edits=[mia.Add(vector[0], 1.0, layers=[1], where=mia.everywhere())])
    assert edited != session.generate(IDS, max_tokens=8)
    text = encode("u", Spec((Term("add", "resid_post", 1, EVERY, write=sha),)))
    call(session, "forget", [sha])
    with pytest.raises(EditError, match="not registered"):
        session._engine.llm.generate([{"prompt_token_ids": IDS}], sampling(text), use_tqdm=False)
    call(session, "register", {sha: (1, vector.numpy().tobytes())}, "someone")
    engine = session._engine.llm.llm_engine
    waits = [begun(session, IDS[: 10 + i], None) for i in range(4)]  # the seats are taken, so that it is forgotten before it runs
    name = begun(session, IDS, text)
    call(session, "forget", [sha], "someone")
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert list(outputs.values())[-1].outputs[0].text == edited and len(outputs) == len([*waits, name])
    with pytest.raises(EditError, match="not registered"):
        session._engine.llm.generate([{"prompt_token_ids": IDS}], sampling(text), use_tqdm=False)


def test_where_the_tables_are_full_a_request_is_turned_away_and_the_others_run(session: mia.Session) -> None:
    programs = session._engine.facts["programs"]
    many = [Spec(tuple(Term("scale", "resid_post", 0, ((i, None),), coeff=0.01 * (i + j)) for i in range(programs // 2)))
            for j in range(0, 300, 100)]
    names = [begun(session, IDS, encode("u", spec)) for spec in many[:2]]
    with pytest.raises(RoomError, match=f"different programs of edits; the engine holds {programs} at once"):
        begun(session, IDS, encode("u", many[2]))
    assert len(names) == 2
    to_the_end(session)
    begun(session, IDS, encode("u", many[2]))
    to_the_end(session)


# -- captures ---------------------------------------------------------------------------------------------------------


def test_a_capture_that_is_kept_is_what_a_session_captures(session: mia.Session) -> None:
    uid = "t.whole"
    begun(session, IDS, encode(uid, EVERYTHING), room=kept())
    assert call(session, "collect", uid) == {"note": "note", "running": True, "rows": []}
    to_the_end(session)
    found = call(session, "collect", uid)
    assert (found["note"], found["running"]) == ("note", False)
    _, cache = session.run_with_cache(IDS, max_tokens=8, ignore_eos=True)
    for (kind, layer), (positions, rows) in taken(found).items():
        assert positions == list(range(len(IDS) + 7))
        assert torch.equal(rows, cache[kind, layer][0])
    late = taken(call(session, "collect", uid, 40))
    assert [positions for positions, _ in late.values()] == [[40, 41, 42]] * 2
    call(session, "drop", [uid])
    assert call(session, "collect", uid) is None
    assert session._engine.rpc("fetch", [uid], "resid_post", 0, False, True)[0][0].numel() == 0


def test_rows_of_a_request_that_was_aborted_are_there_until_they_are_let_go(session: mia.Session) -> None:
    uid, engine = "t.aborted", session._engine.llm.llm_engine
    name = begun(session, IDS, encode(uid, EVERYTHING), max_tokens=100, room=kept())
    for _ in range(4):
        engine.step()
    assert call(session, "collect", uid)["running"]
    engine.abort_request([name], internal=True)
    found = call(session, "collect", uid)
    assert not found["running"]
    assert [positions for positions, _ in taken(found).values()] == [list(range(len(IDS) + 3))] * 2
    assert session.generate(IDS, max_tokens=2)
    assert call(session, "collect", uid)["rows"] == found["rows"]
    call(session, "drop", [uid])


def test_a_request_aborted_before_it_ran_has_ended(session: mia.Session) -> None:
    uid = "t.never"
    name = begun(session, IDS, encode(uid, EVERYTHING), room=kept())
    assert call(session, "collect", uid)["running"]
    session._engine.llm.llm_engine.abort_request([name], internal=True)
    assert call(session, "collect", uid) == {"note": "note", "running": False, "rows": []}
    call(session, "drop", [uid])


def test_rows_of_a_capture_that_was_let_go_while_it_ran_are_not_kept(session: mia.Session) -> None:
    uid = "t.left"
    begun(session, IDS, encode(uid, EVERYTHING), room=kept())
    session._engine.llm.llm_engine.step()
    call(session, "drop", [uid])
    to_the_end(session)
    session.generate(IDS, max_tokens=1)
    assert call(session, "collect", uid) is None
    assert session._engine.rpc("fetch", [uid], "resid_post", 0, False, True)[0][0].numel() == 0


def test_a_capture_whose_time_is_over_is_gone(session: mia.Session) -> None:
    begun(session, IDS, encode("t.short", EVERYTHING), room=kept(seconds=1e-3))
    time.sleep(2e-3)
    assert call(session, "collect", "t.short") is None
    to_the_end(session)
    session.generate(IDS, max_tokens=1)
    assert call(session, "beat", "test", "")["held"][1] == 0
    assert session._engine.rpc("fetch", ["t.short"], "resid_post", 0, False, True)[0][0].numel() == 0


def test_without_room_a_request_is_turned_away_and_takes_none(session: mia.Session) -> None:
    held = lambda: call(session, "beat", "test", "")["held"]  # noqa: E731
    call(session, "drop", ["t.gone"])
    for uid, room, error, says in (("t.much", kept(share=999), RoomError, "your captures may take 999 bytes"),
                                   ("t.wrong", "{}", EditError, "cannot be read"),
                                   ("t.gone", kept(), MissingRowsError, "let go of before its request came")):
        with pytest.raises(error, match=says):
            begun(session, IDS, encode(uid, EVERYTHING), room=room)
        assert held() == [0, 0]
    assert not session._engine.llm.llm_engine.has_unfinished_requests()
    session.capture(IDS, "resid_post", layers=1).get()


def test_a_request_that_vllm_does_not_take_keeps_no_room(session: mia.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.request import Request

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("another fault of this request")

    with monkeypatch.context() as patch:
        patch.setattr(Request, "from_engine_core_request", fail)
        with pytest.raises(ValueError, match="another fault"):
            begun(session, IDS, encode("t.fault", EVERYTHING), room=kept())
    engine = session._engine.llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    assert call(session, "beat", "test", "")["held"] == [0, 0]


def test_rows_of_preempted_requests_are_whole(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", **PLAIN)
    alone, prompts = [], [[1, *range(40 + i, 75 + i)] for i in range(4)]
    for i, ids in enumerate(prompts):
        begun(session, ids, encode(f"a.{i}", EVERYTHING), max_tokens=40, room=kept())
        to_the_end(session)
        alone.append(taken(call(session, "collect", f"a.{i}")))
    session = open_tiny("llama", **PLAIN | dict(num_gpu_blocks_override=10))
    before = scenario.preemptions(session)
    for i, ids in enumerate(prompts):
        begun(session, ids, encode(f"t.{i}", EVERYTHING), max_tokens=40, room=kept())
    to_the_end(session)
    assert scenario.preemptions(session) > before
    for i, theirs in enumerate(alone):
        found = call(session, "collect", f"t.{i}")
        assert not found["running"]
        for point, (positions, rows) in taken(found).items():
            assert positions == list(range(len(prompts[i]) + 39))
            assert (rows - theirs[point][1]).abs().max() < 1e-4


def test_a_gate_that_pools_generated_rows_is_decided_by_all_of_them_after_a_preemption(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", **PLAIN | dict(max_model_len=192, num_gpu_blocks_override=7))
    vector = torch.ones(1, session.d_model).numpy().tobytes()
    call(session, "register", {address(1, vector): (1, vector)}, "test")
    n, stop = len(IDS), len(IDS) + 40
    spec = Spec((Term("measure", "resid_post", 0, ((n, stop),), read=address(1, vector), gate=0),
                 Term("scale", "resid_post", 1, ((stop, None),), coeff=0.1, gate=0)), gates=(Gate("mean", -1e6, n, stop),))
    before, (opened, closed) = scenario.preemptions(session), call(session, "beat", "test", "")["gates"]
    begun(session, [1, *reversed(range(40, 101))], None, max_tokens=60)
    begun(session, IDS, encode("u", spec), max_tokens=60)  # gives way in the midst of a block, and finds two of its own again
    to_the_end(session)
    session.generate(IDS, max_tokens=1)
    assert scenario.preemptions(session) > before
    assert call(session, "beat", "test", "")["gates"] == [opened + 1, closed]


def test_a_batch_of_one_priority_waits_for_its_places(open_tiny: Callable[..., Any]) -> None:
    session = open_tiny("llama", **PLAIN | dict(scheduling_policy="priority"))
    n = session._engine.facts["programs"] + 4
    edits = [[mia.Scale(1 + i / n, layers=[1])] for i in range(n)]
    assert len(session.generate([IDS] * n, max_tokens=2, edits=edits)) == n


# -- counts -----------------------------------------------------------------------------------------------------------


def test_rows_and_decisions_are_counted(session: mia.Session) -> None:
    counts = lambda: call(session, "beat", "test", "")  # noqa: E731
    session.generate(IDS, max_tokens=1)
    before = counts()
    session.capture([IDS, IDS[:20]], "resid_post", layers=1, at=None).get()
    session.generate(IDS, max_tokens=1)
    after = counts()
    assert after["rows"] - before["rows"] == len(IDS) + 20
    probe, edit = torch.randn(session.d_model, generator=torch.manual_seed(0)), torch.ones(session.d_model)
    gated = lambda above, over: [mia.Add(edit, 1.0, layers=[2], when=mia.Gate(mia.Probe(probe, 1), above=above, over=over))]  # noqa: E731
    for over in ("prompt_mean", "since"):
        session.generate([IDS] * 3, max_tokens=4, ignore_eos=True, edits=[gated(-1e6, over), gated(1e6, over), gated(1e6, over)])
    session.generate(IDS, max_tokens=1)  # of requests that ended the engine hears with the next step
    opened, closed = (a - b for a, b in zip(counts()["gates"], after["gates"]))
    assert (opened, closed) == (2, 4)


# -- in its own process -----------------------------------------------------------------------------------------------


@pytest.fixture
def apart(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", in_process=False, **PLAIN)


def test_in_its_own_process_the_others_of_a_batch_go_on(apart: mia.Session) -> None:
    assert not hasattr(apart._engine.llm.llm_engine.engine_core, "engine_core")
    ids = [IDS[: 20 + i] for i in range(len(WRONG) + 2)]
    asked = [sampling(), *map(sampling, WRONG.values()), sampling()]
    outputs = apart._engine.llm.generate([{"prompt_token_ids": one} for one in ids], asked, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", *["error"] * len(WRONG), "length"]
    reasons = [turned_away.reason(output) for output in outputs]
    assert reasons[0] is reasons[-1] is None
    assert all(isinstance(error, EditError) for error in reasons[1:-1])
    expected = ("resid_pre.0 is not tapped", "resid_post.99 is not", "is not registered", "needs v=2", "a string")
    assert all(words in str(error) for words, error in zip(expected, reasons[1:-1], strict=True))
    assert [outputs[i].outputs[0].text for i in (0, -1)] == [apart.generate(ids[i], max_tokens=8, ignore_eos=True) for i in (0, -1)]


def test_in_its_own_process_captures_are_held_by_name(apart: mia.Session) -> None:
    uid = "t.apart"
    apart._engine.llm.generate([{"prompt_token_ids": IDS}], sampling(encode(uid, EVERYTHING), room=kept()), use_tqdm=False)
    found = call(apart, "collect", uid)
    _, cache = apart.run_with_cache(IDS, max_tokens=8, ignore_eos=True)
    assert not found["running"] and len(found["rows"]) == 2
    for (kind, layer), (positions, rows) in taken(found).items():
        assert positions == list(range(len(IDS) + 7))
        assert torch.equal(rows, cache[kind, layer][0])
    assert call(apart, "beat", "test", "d")["held"] == [1, 1000]
    full = sampling(encode("t.more", EVERYTHING), room=kept(share=1999))
    outputs = apart._engine.llm.generate([{"prompt_token_ids": IDS}] * 2, [sampling(), full], use_tqdm=False)
    error = turned_away.reason(outputs[1])
    assert isinstance(error, RoomError) and "1000 are taken, and this one could come to 1000" in str(error)
    assert turned_away.reason(outputs[0]) is None and call(apart, "beat", "test", "d")["held"] == [1, 1000]
    with pytest.raises(RoomError, match="your captures may take 1999 bytes"):
        apart._engine.run([IDS], [full])
    assert apart.generate(IDS, max_tokens=2)
    call(apart, "drop", [uid])
    assert call(apart, "collect", uid) is None
