"""The desk: what the engine cannot run is turned away and leaves nothing behind; what clients hold and requests name stays."""
from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mia_lab.engine.core import hook
from mia_lab.engine.desk import Desk
from mia_lab.engine.wire import KEY, Gate, Reduce, Spec, Take, Term, address, encode
from mia_lab.errors import EditError, MiaError, RoomError

WIDTH = 4
SITES = [["resid_post", 0], ["resid_post", 1], ["q", 0], ["attention", 0]]
SHAPES = [["resid_post", 0, [WIDTH]], ["resid_post", 1, [WIDTH]], ["q", 0, [2, WIDTH]], ["attention", 0, [2, WIDTH]], ["embed", 0, [WIDTH]]]
KINDS = ("add", "ablate", "clamp", "scale", "replace", "affine", "clampfeature", "attentionbias")
SETTINGS = {"edits": KINDS, "max_requests": 2, "chunked": True, "max_len": 16}
EVERY = ((0, None),)


def bytes_of(*shape: int, fill: float = 1.0) -> tuple[str, tuple[int, bytes]]:
    rows = torch.full(shape, fill).numpy().tobytes()
    return address(shape[0], rows), (shape[0], rows)


ONE, THREE, NARROW, MATRIX = bytes_of(1, WIDTH), bytes_of(3, WIDTH), bytes_of(1, 3), bytes_of(2, WIDTH + 1)
VECTORS = dict([ONE, THREE, NARROW, MATRIX])


class Worker:
    """What the desk asked of the worker, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def __call__(self, name: str, *args: Any) -> Any:
        self.asked.append((name, *args))
        return {"rows": [["resid_post", 0]], "counts": {"rows": 5, "dropped": 0, "gates": [1, 2]}}.get(name)

    def heard(self) -> list[tuple]:
        """What was asked since the last call."""
        asked, self.asked = self.asked, []
        return asked


def facts(**other: Any) -> dict[str, Any]:
    found = {"shapes": SHAPES, "sites": SITES, "read_only": ["q"], "captured_tokens": 8, "bank_rows": 6, "programs": 4, "terms": 8,
             "plans": 2, "biased_tokens": 20}
    return found | {"settings": SETTINGS} | other


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def desk(worker: Worker) -> Desk:
    made = Desk(facts(), worker)
    made.register(VECTORS, "client")
    worker.heard()
    return made


def request(spec: Any, name: str = "r", uid: str = "t.uid", prompt: int | None = 4, max_tokens: int = 4) -> Any:
    text = encode(uid, spec) if isinstance(spec, Spec) else spec
    return SimpleNamespace(request_id=name, prompt_token_ids=None if prompt is None else list(range(prompt)), resumable=False,
                           sampling_params=SimpleNamespace(extra_args={KEY: text}, max_tokens=max_tokens))


def add(sha: str = ONE[0], layer: int = 0, spans: tuple = EVERY, **other: Any) -> Term:
    return Term("add", "resid_post", layer, spans, write=sha, **other)


def at(kind: str = "resid_post", layer: int = 0, before: bool = False) -> Take:
    return Take(kind, layer, EVERY, before)


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


def is_empty(desk: Desk) -> bool:
    """Whether nothing of any request is held: what the client lets go of is gone, and the tables have all their room."""
    desk.forget(list(VECTORS), "client")
    return not any(sha in desk.vectors for sha in VECTORS) and not desk._guests and not len(desk._in_flight)


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
    desk.admit("t.uid", b"", 1, 10, 10)
    with pytest.raises(EditError, match=says):
        desk.enter(request(spec))
    assert is_empty(desk)
    assert desk.collect("t.uid")["running"] is (spec == 7)


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


def test_a_capture_is_collected_by_name_while_it_is_held(desk: Desk, worker: Worker) -> None:
    call = lambda name, *args: desk.answer(f"mia_{name}", args)[0]  # noqa: E731
    assert call("collect", "t.uid") is None
    assert call("admit", "t.uid", b"note", 10, 60, 15) is True
    assert call("admit", "t.more", b"", 10, 60, 15) is False
    assert call("collect", "t.uid", 3) == {"note": b"note", "running": True, "rows": [["resid_post", 0]]}
    assert worker.heard() == [("rows", "t.uid", 3)]
    desk.enter(request(Spec(takes=(at(),))))
    assert call("collect", "t.uid")["running"]
    desk.leave("r")
    assert not call("collect", "t.uid")["running"]
    assert call("beat", "p", "")["held"] == [1, 10]
    worker.heard()
    call("drop", ["t.uid", "other"])
    assert worker.heard() == [("drop", ["t.uid", "other"])]
    assert call("collect", "t.uid") is None
    assert call("beat", "p", "") == {"wanted": "", "version": 0, "owners": {"p": ["", 0.0]}, "rows": 5, "dropped": 0, "gates": [1, 2],
                                     "held": [0, 0]} | {"owners": desk.beats.beat("p", "")["owners"]}


def test_rows_captured_after_their_capture_was_let_go_are_dropped_when_the_request_ends(desk: Desk, worker: Worker) -> None:
    desk.admit("t.uid", b"", 1, 60, 10)
    desk.enter(request(Spec(takes=(at(),))))
    desk.drop(["t.uid"])
    worker.heard()
    desk.leave("r")
    desk.answer("mia_publish", ("digest",))
    assert worker.heard() == [("drop", ["t.uid"])]


def test_a_capture_that_was_let_go_turns_its_request_away(desk: Desk) -> None:
    desk.admit("t.uid", b"", 1, 60, 10)
    desk.drop(["t.uid"])
    with pytest.raises(EditError, match="the time of this capture ended"):
        desk.enter(request(Spec(takes=(at(),))))


def test_what_is_over_goes_with_the_next_call(desk: Desk, worker: Worker) -> None:
    now = [0.0]
    desk.held._clock = lambda: now[0]
    desk.admit("t.uid", b"", 1, 5, 10)
    now[0] = 5.0
    assert desk.answer("mia_collect", ("t.uid",)) == [None]
    assert worker.heard() == [("drop", ["t.uid"])]


def test_rows_that_nobody_admitted_are_their_clients(desk: Desk, worker: Worker) -> None:
    desk.enter(request(Spec(takes=(at(),)), uid="session"))
    desk.leave("r")
    desk.answer("mia_beat", ("p", ""))
    assert worker.heard() == [("counts",)]


def test_other_calls_are_the_workers(desk: Desk) -> None:
    for method in ("mia_fetch", "mia_enter", "mia_answer", "mia__forget", "beat", "mia_", "mia_call"):
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
