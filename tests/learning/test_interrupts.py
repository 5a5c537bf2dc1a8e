"""Signals to a run on the main thread of this process."""

import importlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.learning.run_loop as run_loop
from ray_fed.learning import LearningProcess, run
from ray_fed.learning.rounds_in_flight import Interrupts
from tests.learning.counting import CLIENTS, build_tally


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run_saved(
    tmp_path: Any, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    former = signal.getsignal(number)
    tally = build_tally()

    def advance(state: Any, data: Any) -> Any:
        if state.round_index == 3:
            threading.Timer(0.1, send, [number]).start()
            time.sleep(20)
        return tally.next(state, data)

    process = LearningProcess(tally.initialize, advance)
    started = time.monotonic()
    result = run(
        process, CLIENTS, num_rounds=9, cohort_size=2, storage_path=tmp_path,
        checkpoint_every=9,
    )  # fmt: skip
    seconds = time.monotonic() - started

    assert result.reason == "interrupted"
    assert result.state.round_index == len(result.history) == 3
    assert seconds < 10
    assert signal.getsignal(number) is former
    assert f"after round 3, saved in `{tmp_path}`: the same call" in caplog.text
    rest = run(tally, CLIENTS, num_rounds=9, cohort_size=2, storage_path=tmp_path)
    whole = run(tally, CLIENTS, num_rounds=9, cohort_size=2)
    assert rest.state == whole.state


@pytest.mark.slow
def test_evaluation_that_takes_too_long_is_left() -> None:
    begun = threading.Event()

    def evaluate(state: Any) -> Any:
        if state.round_index == 2:
            begun.set()
            time.sleep(30)
        return {"n": state.round_index}

    def interrupt() -> None:
        begun.wait()
        send(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    started = time.monotonic()
    result = run(build_tally(), CLIENTS, num_rounds=5, evaluate=evaluate)
    seconds = time.monotonic() - started

    assert result.reason == "interrupted"
    assert [record.evaluation for record in result.history] == [{"n": 1}]
    assert result.state.round_index == 1
    assert seconds < 10


class HangingFiles(MemoryFileSystem):
    """A file system in memory that does not answer while it hangs."""

    protocol = "hanging"
    answers = threading.Event()

    def _wait(self) -> None:
        self.answers.wait()

    @override
    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._wait()
        return super().ls(path, detail, **options)

    @override
    def put_file(self, lpath: str, rpath: str, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._wait()
        return super().put_file(lpath, rpath, **options)


@pytest.fixture
def hanging() -> Iterator[str]:
    """The URI of a folder of `HangingFiles`, which answer as yet."""
    fsspec.register_implementation("hanging", HangingFiles, clobber=True)
    HangingFiles.answers.set()
    yield f"hanging://runs/{uuid.uuid4().hex}"
    HangingFiles.answers.set()


def test_storage_that_hangs_as_a_run_begins_is_not_waited_for(
    hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("ray_fed.learning.run_loop")  # not the function
    monkeypatch.setattr(module, "_OPEN_S", 0.5)
    HangingFiles.answers.clear()
    threading.Timer(0.2, send, [signal.SIGTERM]).start()

    with pytest.raises(errors.StorageError, match=r"no answer in [.0-9]+ seconds"):
        run(build_tally(), CLIENTS, num_rounds=2, storage_path=hanging)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint_every", "num_rounds", "reason"),
    [(None, 90, "interrupted"), (1, 90, "interrupted"), (None, 4, "finished")],
)
def test_storage_that_hangs_in_a_run_is_not_waited_for(
    hanging: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    checkpoint_every: int | None,
    num_rounds: int,
    reason: str,
) -> None:
    monkeypatch.setattr(run_loop, "_LEAVE_S", 1.0)
    tally = build_tally()

    def advance(state: Any, data: Any) -> Any:
        if state.round_index == 3:
            HangingFiles.answers.clear()
            threading.Timer(0.5, send, [signal.SIGTERM]).start()
        time.sleep(0.05)
        return tally.next(state, data)

    process = LearningProcess(tally.initialize, advance)
    result = run(
        process, CLIENTS, num_rounds=num_rounds, storage_path=hanging,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip

    assert result.reason == reason
    assert len(result.history) >= 4
    assert "was not saved in time" in caplog.text


def test_second_signal_goes_to_the_former_handler() -> None:
    seen: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with Interrupts() as interrupts:
            send(signal.SIGTERM)
            assert interrupts.since is not None
            assert seen == []
            send(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_run_on_another_thread_leaves_handlers_alone() -> None:
    handlers: list[Any] = []
    results: list[Any] = []
    former = signal.getsignal(signal.SIGINT)

    def evaluate(_: Any) -> dict[str, int]:
        handlers.append(signal.getsignal(signal.SIGINT))
        return {}

    def work() -> None:
        results.append(run(build_tally(), CLIENTS, num_rounds=2, evaluate=evaluate))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert handlers == [former, former]
    assert results[0].reason == "finished"
