"""One message with the cause, wherever it arose."""
from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pydantic
import pytest
import tiny

import mia_lab as mia
from mia_lab.errors import ClosedError, EngineError, PointError, UnsupportedError
from mia_lab.running import failures, logs

PREFIX = "(EngineCore pid=12) "
STAMP = "\x1b[0;36m(EngineCore pid=12)\x1b[0;0m ERROR 11-30 06:47:01 [core.py:1100] "
DEATH = "".join(f"{line}\n" for line in (
    f"{PREFIX}INFO 11-30 06:47:00 [core.py:1] starting",
    f"{STAMP}EngineCore failed to start.", f"{STAMP}Traceback (most recent call last):", f'{STAMP}  File "core.py", line 2, in run',
    f"{STAMP}    raise ValueError(", f"{STAMP}ValueError: there is no room,", f"{STAMP}not even for one", f"{STAMP}",
    f"{STAMP}During handling of the above exception, another exception occurred:", f"{STAMP}Traceback (most recent call last):",
    f'{STAMP}  File "core.py", line 3, in run', f"{STAMP}RuntimeError: which follows", f"{PREFIX}INFO 11-30 06:47:02 [core.py:9] ending"))


def say(text: str) -> None:
    with logs.path().open("a") as file:
        file.write(text)


def test_the_first_cause_is_read_out_of_a_log() -> None:
    assert failures.logged(DEATH) == "ValueError: there is no room,\nnot even for one"
    assert failures.logged("no trace of it") == ""


def test_a_cause_elsewhere_is_looked_for_in_the_log() -> None:
    def start() -> None:
        with failures.Lifted("vLLM could not load 'm'"):
            say(DEATH)
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(EngineError) as caught:
        start()
    cause = "ValueError: there is no room,\nnot even for one"
    assert str(caught.value) == f"vLLM could not load 'm': {cause}\nThe whole of it is in {logs.path()}"
    assert caught.value.__suppress_context__ and "Engine core initialization failed" in logs.path().read_text()


def test_a_mia_error_comes_through_as_it_is_also_from_a_worker() -> None:
    with pytest.raises(PointError, match="no such point"), failures.Lifted("loading"):
        raise PointError("no such point")
    start = logs.mark()
    say(f"{STAMP}Traceback (most recent call last):\n{STAMP}  File\n{STAMP}mia_lab.errors.UnsupportedError: blocks of two kinds\n")
    found = failures.explained(RuntimeError("see root cause above"), "loading", start)
    assert type(found) is UnsupportedError and str(found) == "blocks of two kinds"


def test_a_process_that_is_killed_says_nothing() -> None:
    assert "for want of memory" in str(failures.explained(RuntimeError("cancelled"), "it died", logs.mark(), elsewhere=True))


def test_interrupts_are_none_of_it() -> None:
    with pytest.raises(KeyboardInterrupt), failures.Lifted("loading"):
        raise KeyboardInterrupt


def test_a_refused_argument_is_named_with_what_is_taken() -> None:
    class Options(pydantic.BaseModel):
        dtype: int | bool
        size: int = 1

    with pytest.raises(pydantic.ValidationError) as caught:
        Options(dtype="bad", size="x")
    found = failures.described(caught.value)
    assert re.fullmatch(r"dtype: Input .* or Input .*; size: Input should be a valid integer.*", found)


@pytest.mark.parametrize(("error", "advice"), [
    (OSError("We couldn't connect to 'https://huggingface.co' to load"), "Unset HF_HUB_OFFLINE"),
    (RuntimeError("CUDA out of memory. Tried"), "smaller max_model_len=")])
def test_what_to_type_is_said(error: Exception, advice: str) -> None:
    assert advice in str(failures.explained(error, "loading", logs.mark()))


def test_an_unknown_option_is_told_from_those_there_are() -> None:
    known = ["gpu_memory_utilization", "max_model_len", "dtype"]
    failures.check_options({"dtype": 1}, known)
    for wrong, right in (("gpu_mem", "gpu_memory_utilization"), ("max_modellen", "max_model_len")):
        with pytest.raises(EngineError, match=f"has an option '{wrong}'; did you mean {right}"):
            failures.check_options({wrong: 1}, known)


def test_news_of_a_death_is_waited_for() -> None:
    assert not failures.died(SimpleNamespace()) and not failures.died(SimpleNamespace(resources=SimpleNamespace(engine_dead=False)), 0.05)
    assert failures.died(SimpleNamespace(resources=SimpleNamespace(engine_dead=True)))


def test_a_path_where_nothing_is() -> None:
    with pytest.raises(mia.MiaError, match=r"no model at /no/such.*Give a folder"):
        mia.Session("/no/such")


@pytest.mark.full
def test_bad_options_are_one_message(open_tiny: Callable[..., Any]) -> None:
    with pytest.raises(EngineError, match=r"dtype: Input should be 'auto'(.|\n)*\.log$"):
        open_tiny("llama", dtype="bad")
    with pytest.raises(EngineError, match="did you mean max_model_len"):
        open_tiny("llama", max_modellen=3)


@pytest.mark.full
def test_a_worker_process_that_cannot_start_or_dies_says_why(models: Any, capfd: pytest.CaptureFixture) -> None:
    options = dict(tokenizer=str(tiny.tokenizer(models)), dtype="float32", max_model_len=64, enforce_eager=True, in_process=False)
    path = str(tiny.build("llama", models))
    capfd.readouterr()  # building a model may print, too
    with pytest.raises(EngineError, match=r"ValueError: To serve at least one request(.|\n)*\.log$"):
        mia.Session(path, **options | dict(max_model_len=128, num_gpu_blocks_override=2, block_size=32))
    others = set(psutil.Process().children(recursive=True))
    with mia.Session(path, **options) as session:
        assert "Starting to load model" in session.log.read_text()
        for child in set(psutil.Process().children(recursive=True)) - others:
            if child.name().startswith("VLLM"):
                child.kill()
        assert failures.died(session._engine._llm.llm_engine.engine_core, 30)
        with pytest.raises(EngineError, match="the engine of this session died: "):
            session.generate("ab", max_tokens=4)
        with pytest.raises(ClosedError, match=r"its engine died\. Close it"):
            session.generate("ab", max_tokens=4)
    out, err = capfd.readouterr()
    assert out == "" and set(err.splitlines()) == {line for line in err.splitlines() if line.startswith("mia_lab: ")} != set()
