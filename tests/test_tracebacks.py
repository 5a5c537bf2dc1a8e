"""Errors have the frames of the user's code, and none of the libraries'."""

import asyncio
import concurrent.futures
import inspect
import json
import linecache
import logging
import traceback
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import learning
from ray_fed import tensorflow as rtf
from ray_fed.config import Config, Workers
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import aggregators, partition
from ray_fed.program import (
    ClientData,
    FileProgramStateManager,
    RayFederatedContext,
    UniformSampler,
    WeightedSampler,
)

WHOLE = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/ray_fed/worker/evaluation.py", line 9, in go
    return work()
  File "/home/me/train.py", line 3, in load
    return parse(name)
           ^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/our_data/parse.py", line 5, in parse
    return json.loads(name)
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
ValueError: no JSON
"""
SHORT = """\
  File "/home/me/train.py", line 3, in load
    return parse(name)
  File "/venv/lib/python3.11/site-packages/our_data/parse.py", line 5, in parse
    return json.loads(name)"""


def load(text: str) -> Any:
    return json.loads(text)


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@tracebacks.shorten
def call(function: Any) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, "{").result()


@tracebacks.shorten
async def wait(function: Any) -> Any:
    return await asyncio.to_thread(function, "{")


def test_the_text_of_a_traceback_is_cut_to_the_users_frames() -> None:
    shown = tracebacks.WorkerTraceback(WHOLE)

    assert str(shown) == f"on the worker:\n{SHORT}"
    assert shown.args == (WHOLE,)


def test_a_cell_is_shown_with_its_text_which_a_worker_does_not_know() -> None:
    file = "/tmp/ipykernel_7/123.py"
    linecache.cache[file] = (9, None, ["def load():\n", "    fail()\n"], file)
    whole = f'Traceback ...\n  File "{file}", line 2, in load\nValueError: x'

    shown = str(tracebacks.WorkerTraceback(whole))
    del linecache.cache[file]

    assert shown.splitlines()[1:] == ['  File "<cell>", line 2, in load', "    fail()"]


def test_a_text_without_frames_of_the_user_says_how_to_see_it() -> None:
    whole = 'Traceback ...\n  File "<frozen importlib>", line 3, in load\nValueError: x'

    assert "RAY_FED_TRACEBACKS=full" in str(tracebacks.WorkerTraceback(whole))
    assert str(tracebacks.WorkerTraceback("x: y")) == "on the worker:\nx: y"


@pytest.mark.parametrize("line", ["/home/me/train.py", "/venv/lib/python3.11/os.py"])
def test_a_worker_that_says_nothing_of_the_users_code_is_left_out(line: str) -> None:
    whole = f'Traceback ...\n  File "{line}", line 3, in load\n    go()\nValueError: x'

    def fail(_: str) -> None:
        raise errors.ConfigError("no") from tracebacks.WorkerTraceback(whole)

    with pytest.raises(errors.ConfigError) as caught:
        call(fail)

    assert (caught.value.__cause__ is None) == ("/venv/" in line)


def test_the_message_of_autograph_ends_with_the_frames() -> None:
    with pytest.raises(NameError) as caught:

        @rtf.computation(np.float32)
        def half(x: Any) -> Any:
            return x / divisor  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    said, file, source = str(caught.value).splitlines()
    assert said == "name 'divisor' is not defined"
    assert file.startswith('  File "')
    assert file.endswith("in half")
    assert source.strip().startswith("return x / divisor")


def test_a_message_has_no_escapes_of_terminals() -> None:
    def fail(_: str) -> None:
        raise ValueError("\x1b[1mno call\x1b[0m", 3)

    with pytest.raises(ValueError, match="no call") as caught:
        call(fail)

    assert caught.value.args == ("no call", 3)


def test_all_frames_are_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_FED_TRACEBACKS", "full")

    with pytest.raises(ValueError, match="Expecting") as caught:
        call(load)

    assert {"call", "result", "load", "decode"} <= set(names(caught.value))
    assert str(tracebacks.WorkerTraceback(WHOLE)) == f"on the worker:\n{WHOLE}"


def test_an_error_has_the_users_frames_alone() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        call(load)

    here = "test_an_error_has_the_users_frames_alone"
    assert names(caught.value) == [here, "call", "load"]


def test_an_error_of_a_coroutine_has_the_users_frames_alone() -> None:
    async def go() -> None:
        await wait(load)

    with pytest.raises(ValueError, match="Expecting") as caught:
        asyncio.run(go())

    assert names(caught.value)[-3:] == ["go", "wait", "load"]


def test_causes_are_kept_and_cut() -> None:
    def fail(text: str) -> None:
        try:
            load(text)
        except ValueError as error:
            raise errors.ConfigError("no settings") from error

    with pytest.raises(errors.ConfigError) as caught:
        call(fail)

    cause = caught.value.__cause__
    assert isinstance(cause, json.JSONDecodeError)
    assert names(cause) == ["fail", "load"]


def test_what_came_up_inside_of_a_library_is_not_shown() -> None:
    source = """
def fail(text):
    try:
        int(text)
    except ValueError:
        raise KeyError(text)
"""
    found: dict[str, Any] = {}
    exec(compile(source, "/venv/site-packages/pandas/core.py", "exec"), found)

    with pytest.raises(KeyError) as caught:
        call(found["fail"])

    assert isinstance(caught.value.__context__, ValueError)
    assert "ValueError" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "refused",
    [
        lambda: Config(worker=3),
        lambda: Config(debug=True),
        lambda: Workers(count=-1),
        lambda: Config.load(worker=3),
        lambda: UniformSampler(-1),
        lambda: WeightedSampler([1.0]).sample(0, 2, 1),
        lambda: ClientData.from_values([], fl.SequenceType(np.int32)).batch(0),
    ],
    ids=["Config", "debug", "Workers", "load", "UniformSampler", "sample", "batch"],
)
def test_an_argument_that_is_refused_shows_the_call_alone(
    refused: Callable[[], Any],
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        refused()

    here = "test_an_argument_that_is_refused_shows_the_call_alone"
    assert names(caught.value) == [here, "<lambda>"]
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1


def test_frames_of_extensions_of_libraries_are_left_out() -> None:
    path = ["python/ray/_raylet.pyx", "pyarrow/error.pxi", "our_data/fast.pyx"]

    assert list(map(tracebacks.is_of_user, path)) == [False, False, True]


def test_code_of_a_user_that_has_no_file_is_shown() -> None:
    source = """
import dataclasses
@dataclasses.dataclass
class Mine:
    def __post_init__(self):
        int("x")
"""
    found: dict[str, Any] = {"__name__": __name__}
    exec(source, found)

    with pytest.raises(ValueError, match="'x'") as caught:
        call(lambda _text: found["Mine"]())  # pyright: ignore[reportUnknownLambdaType]

    assert names(caught.value)[-2:] == ["__init__", "__post_init__"]


def test_the_whole_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, "ray_fed.tracebacks"),
        pytest.raises(ValueError, match="Expecting"),
    ):
        call(load)

    assert "in decode" in caplog.text


def test_the_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_FED_TRACEBACKS", "full")

    assert Config.load() == Config()


MODULES = (ray_fed, learning, partition, aggregators)


@pytest.mark.parametrize(
    ("owner", "names_of"),
    [
        *((module, module.__all__) for module in MODULES),
        *((cls, vars(cls)) for cls in (ClientData, FileProgramStateManager)),
        (RayFederatedContext, ["invoke", "resume_at"]),
        (ExecutionContext, ["invoke", "resume_at"]),
        (learning.History, ["load", "plot", "values"]),
    ],
    ids=[
        "ray_fed",
        "learning",
        "partition",
        "aggregators",
        "ClientData",
        "FileProgramStateManager",
        "RayFederatedContext",
        "ExecutionContext",
        "History",
    ],
)
def test_public_functions_and_methods_leave_frames_of_libraries_out(
    owner: Any, names_of: Any
) -> None:
    found = [getattr(owner, name) for name in names_of if not name.startswith("_")]
    is_function = inspect.isfunction if inspect.ismodule(owner) else inspect.isroutine
    functions = [each for each in found if is_function(each)]

    assert functions
    assert [f for f in functions if not hasattr(f, "__wrapped__")] == []


def test_a_call_and_a_tracing_of_federated_language_have_no_frame_of_it() -> None:
    @rtf.computation(np.float32)
    def half(x: Any) -> Any:
        return x / 2

    with pytest.raises(TypeError) as called:
        half(1.0, 2.0)
    with pytest.raises(TypeError) as traced:

        @fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
        def halves(values: Any) -> Any:
            return fl.federated_map(half, half)

    here = "test_a_call_and_a_tracing_of_federated_language_have_no_frame_of_it"
    assert names(called.value) == [here]
    assert names(traced.value) == [here, "halves"]
