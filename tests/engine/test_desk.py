"""The desk: what the engine cannot run is turned away and leaves nothing behind; what clients hold and requests name stays."""
from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from desks import EVERY, MATRIX, NARROW, ONE, SETTINGS, THREE, VECTORS, Worker, add, at, facts, is_empty, request, room

from mia_lab.engine.core import hook
from mia_lab.engine.desk import Desk
from mia_lab.engine.wire import Gate, Reduce, Spec, Take, Term
from mia_lab.errors import EditError, MiaError, RoomError


def reduced(*matrices: tuple[str, int, str], **how: Any) -> Spec:
    return Spec(takes=(at(),), reduce=Reduce(matrices, **how))


BIAS = Term("bias", "attention", 0, EVERY, columns=(0, 2))
RIGHT = {
    "one of everything": Spec((add(), add(THREE[0], 1, ((2, 5),), origin=2, aligned=3), BIAS), (at(), at("q")),
                              reduce=Reduce((("resid_post", 0, MATRIX[0]),), k=2)),
    "both sides": Spec(takes=(at(before=True), at())),
    "gated": Spec((Term("measure", "resid_post", 0, EVERY, read=ONE[0], gate=0), add(layer=1, gate=0)), gates=(Gate("row"),)),
    "nothing": Spec(),
}
WRONG = {
    "an undeclared point": (Spec((Term("scale", "embed", 0, EVERY),)), "embed.0 is not tapped by this engine; it taps layers of atten"),
    "a layer that is not there": (Spec((add(layer=7),)), "resid_post.7 is not tapped"),
    "a capture of an undeclared point": (Spec(takes=(at("embed"),)), "embed.0 is not tapped"),
    "a capture of attention": (Spec(takes=(at("attention"),)), "attention cannot be captured; capture q and k"),
    "an edit where only reading is possible": (Spec((Term("scale", "q", 0, EVERY),)), "q can be captured but not edited"),
    "an unregistered vector": (Spec((add("f" * 32),)), "vector f{32} is not registered"),
    "an unregistered matrix": (reduced(("resid_post", 0, "f" * 32)), "vector f{32} is not registered"),
    "a narrow vector": (Spec((add(NARROW[0]),)), r"is \[1, 3\]; an edit at resid_post.0 needs \[1, 4\]"),
    "too many rows": (Spec((add(THREE[0]),)), r"is \[3, 4\]; an edit at resid_post.0 needs \[1, 4\]"),
    "too few rows": (Spec((add(spans=((0, 3),), aligned=3),)), r"is \[1, 4\]; an edit at resid_post.0 needs \[3, 4\]"),
    "a head that is not there": (Spec((Term("bias", "attention", 0, EVERY, columns=(0, 2), heads=(2,)),)), "head 2 .* heads 0 to 1"),
    "a narrow matrix": (reduced(("resid_post", 0, ONE[0])), r"is \[1, 4\]; a reduction at resid_post.0 needs \[m, 5\]"),
    "a matrix at no point": (reduced(("embed", 0, MATRIX[0])), "a reduction at embed.0 needs a tapped point"),
    "two matrices at a point": (reduced(*[("resid_post", 0, MATRIX[0])] * 2), "two matrices at one point"),
    "the largest of fewer": (reduced(k=5), "the 5 largest of 4 values were asked for at resid_post.0"),
    "the largest of fewer rows of a matrix": (reduced(("resid_post", 0, MATRIX[0]), k=3), "the 3 largest of 2 values"),
    "more programs than there are": (Spec(tuple(add(spans=((i, None),)) for i in range(5))), "5 different programs of edits; .* holds 4"),
    "more terms than there are": (Spec((add(),) * 9), "9 terms of edits; the engine holds 8"),
    "a text that is no spec": ("t.uid {", "what this request asks of mia_lab cannot be read"),
    "a name alone": ("t.uid", "cannot be read"),
    "no text": (7, "cannot be read: a spec is a string"),
}


@pytest.mark.parametrize("spec", RIGHT.values(), ids=RIGHT)
def test_what_fits_is_let_in_and_holds_its_vectors_until_it_leaves(desk: Desk, worker: Worker, spec: Spec) -> None:
    desk.enter(request(spec))
    used = {sha for term in spec.terms for sha in (term.read, term.write) if sha}
    used |= {sha for *_, sha in spec.reduce.matrices} if spec.reduce else set()
    desk.forget(list(VECTORS), "client")
    assert {sha for sha in VECTORS if sha in desk.vectors} == used
    worker.heard()
    desk.leave("r")
    assert is_empty(desk)
    desk.answer("mia_beat", ("p", ""))
    assert {sha for name, *args in worker.heard() if name == "forget" for sha in args[0]} == used


@pytest.mark.parametrize(("spec", "says"), WRONG.values(), ids=WRONG)
def test_what_the_engine_cannot_run_is_turned_away_and_leaves_nothing(desk: Desk, spec: Any, says: str) -> None:
    with pytest.raises(EditError, match=says):
        desk.enter(request(spec, room=room()))
    assert is_empty(desk)
    assert desk.collect("t.uid") is None and desk.held.bytes == 0


@pytest.mark.parametrize(("other", "spec", "says"), [
    (dict(settings=SETTINGS | {"edits": ("add",)}), Spec((Term("scale", "resid_post", 0, EVERY),)), "scale or replace edits are not"),
    (dict(settings=SETTINGS | {"edits": ()}), RIGHT["gated"], "any edits are not enabled in this engine; enabled: none"),
    (dict(settings=SETTINGS | {"chunked": False}), RIGHT["both sides"], "enable_chunked_prefill=True"),
    (dict(captured_tokens=1), RIGHT["both sides"], "max_captured_tokens=2"),
    (dict(biased_tokens=7), Spec((BIAS,)), "8 tokens together; the engine keeps 7"),
])
def test_what_this_engine_was_not_loaded_for_is_turned_away(worker: Worker, other: dict, spec: Spec, says: str) -> None:
    desk = Desk(facts(**other), worker)
    desk.register(VECTORS, "client")
    with pytest.raises(EditError, match=says):
        desk.enter(request(spec))
    assert is_empty(desk)


def test_prompts_without_tokens_or_streamed_in(desk: Desk) -> None:
    desk.enter(request(Spec((add(),)), "embeds", prompt=None))
    with pytest.raises(EditError, match="embeddings cannot be run under an attention bias"):
        desk.enter(request(Spec((BIAS,)), prompt=None))
    streamed = request(Spec((add(),)))
    streamed.resumable = True
    with pytest.raises(EditError, match="streamed in"):
        desk.enter(streamed)


def test_requests_that_ask_for_nothing_pass(desk: Desk) -> None:
    for extra in (None, {}, {"other": 1}):
        desk.enter(SimpleNamespace(request_id="r", sampling_params=SimpleNamespace(extra_args=extra)))
    desk.enter(SimpleNamespace(request_id="r", sampling_params=None))
    desk.leave("r")
    assert is_empty(desk)


def test_where_the_tables_are_full_a_request_is_turned_away_until_another_left(desk: Desk) -> None:
    specs = [Spec(tuple(add(coeff=float(i), layer=n % 2) for n in range(4))) for i in range(3)]
    for i in range(2):
        desk.enter(request(specs[i], f"r{i}"))
    desk.enter(request(specs[2], "r2"))  # only two run at once
    for name in ("r3", "r3"):
        with pytest.raises(RoomError, match="terms of edits; the engine holds 8 at once"):
            desk.enter(request(Spec((*specs[2].terms, add(coeff=9.0))), name))
    desk.leave("r0")
    desk.leave("r1")
    desk.leave("r2")
    desk.enter(request(Spec((*specs[2].terms, add(coeff=9.0))), "r3"))


@pytest.mark.parametrize("ranked", [False, True])
def test_priorities_count_where_requests_run_by_them(worker: Worker, ranked: bool) -> None:
    desk, asked = Desk(facts(), worker, ranked), [request(Spec((add(coeff=float(i)),)), f"r{i}") for i in range(5)]
    desk.register(VECTORS, "client")
    for i, one in enumerate(asked):
        one.priority = int(i == 4)
        if ranked and i == 4:
            with pytest.raises(RoomError, match="5 different programs of edits; the engine holds 4"):
                desk.enter(one)
            desk.leave("r0")
        desk.enter(one)
    for one in asked:
        desk.leave(one.request_id)
    assert is_empty(desk)


def test_a_spec_that_is_in_flight_is_let_in_again_without_more_room(desk: Desk) -> None:
    spec = Spec(tuple(add(coeff=float(i), layer=i % 2) for i in range(8)), tuple(at("resid_post", layer) for layer in (0, 1)))
    for i in range(20):
        desk.enter(request(spec, f"r{i}", uid=f"u{i}"))
    desk.forget(list(VECTORS), "client")
    for i in range(20):
        assert ONE[0] in desk.vectors
        desk.leave(f"r{i}")
    assert is_empty(desk)


def test_keys_and_values_count_up_to_the_longest_that_a_request_can_be(desk: Desk) -> None:
    desk.enter(request(Spec((BIAS,)), "r0", max_tokens=1 << 30))  # 16 tokens
    with pytest.raises(RoomError, match="an attention bias over 8 more tokens; the engine keeps 20"):
        desk.enter(request(Spec((BIAS,)), "r1"))
    desk.enter(request(Spec((BIAS,)), "r2", prompt=1, max_tokens=3))


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_vector_is_sent_once_and_stays_while_any_owner_holds_it(worker: Worker) -> None:
    desk, (sha, sent) = Desk(facts(), worker), ONE
    for owner in ("a", "b"):
        assert desk.answer("mia_register", ({sha: list(sent)}, owner)) == [None]
    assert worker.heard() == [("register", {sha: sent})]
    desk.answer("mia_forget", ([sha, "unknown"], "a"))
    assert worker.heard() == []
    desk.answer("mia_forget", ([sha], "b"))
    assert worker.heard() == [("forget", [sha])]
    desk.register({sha: sent})
    assert worker.heard() == [("register", {sha: sent})]


def test_what_the_worker_does_not_take_is_not_entered(worker: Worker) -> None:
    def refuse(name: str, *args: Any) -> None:
        raise ValueError("vector does not hold what its address says")

    desk = Desk(facts(), refuse)
    with pytest.raises(ValueError, match="address"):
        desk.register(dict([ONE]))
    assert ONE[0] not in desk.vectors


def test_other_calls_are_the_workers(desk: Desk) -> None:
    for method in ("mia_fetch", "mia_enter", "mia_undo", "mia_admit", "mia_answer", "mia__forget", "beat", "mia_", "mia_call"):
        assert desk.answer(method, ("x", ["y"])) is None


def test_an_error_may_be_asked_for_as_a_value(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert desk.answer("mia_call", ("publish", ["digest"])) == [("", 1)]

    def refuse(digest: str) -> None:
        raise MiaError("not now")

    monkeypatch.setattr(desk, "publish", refuse)
    assert desk.answer("mia_call", ("publish", ["digest"])) == [("MiaError", "not now")]
    assert desk.answer("mia_call", ("fetch", ["digest"])) is None


def test_requests_and_calls_from_two_threads(worker: Worker) -> None:
    """A request is let in with all its vectors or not at all, while their owner registers and forgets them."""
    desk, errors, done = Desk(facts(), worker), [], threading.Event()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not done.is_set():
                    work()
            except Exception as error:
                errors.append(error)
        return run

    turned_away = []

    def come() -> None:
        try:
            desk.enter(request(RIGHT["one of everything"]))
        except EditError as error:
            turned_away.append(str(error))
            return
        if not all(sha in desk.vectors for sha in (ONE[0], THREE[0], MATRIX[0])):
            raise AssertionError("a request runs without its vectors")
        desk.leave("r")

    def call() -> None:
        desk.answer("mia_register", (VECTORS, "client"))
        desk.answer("mia_forget", (list(VECTORS), "client"))

    threads = [threading.Thread(target=guarded(work)) for work in (come, call)]
    for thread in threads:
        thread.start()
    done.wait(1.0)
    done.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {"is not registered" in text for text in turned_away} <= {True}
    assert is_empty(desk)


def test_an_engine_core_of_an_unknown_kind_is_left_alone() -> None:
    class Core:
        """One that lets requests in by another way."""

    before = dict(vars(Core))
    hook(Core)
    assert dict(vars(Core)) == before


def test_the_worker_is_let_be_while_nothing_runs(desk: Desk, worker: Worker) -> None:
    def asks(beats: int) -> int:
        found = [desk.beat("p", "") for _ in range(beats)]
        assert all(one["rows"] == 5 and one["gates"] == [1, 2] for one in found)
        return worker.heard().count(("counts",))

    assert asks(5) == 2
    desk.enter(request(Spec((), (Take("resid_post", 0, EVERY),)), "r1"))
    assert asks(3) == 3
    desk.leave("r1")
    assert asks(5) == 2
