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
from ray_fed.learning import History, LearningProcess, TrainingResult, run
from ray_fed.learning.rounds_in_flight import Interrupts
from tests.learning.counting import CLIENTS, build_tally


def send(number: int) -> None:
    os.kill(os.getpid(), number)


ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


class Sender:
    """Sends a signal once, at one place of a run; all its methods are user code."""

    def __init__(self, place: str, number: int) -> None:
        self._place = place
        self._number = number

    def _reach(self, place: str, *, if_it_is: bool = True) -> None:
        if place == self._place and if_it_is:
            self._place = ""
            send(self._number)

    def build_process(self) -> LearningProcess:
        tally = build_tally()

        def initialize() -> Any:
            self._reach("initialize")
            return tally.initialize()

        def advance(state: Any, data: Any) -> Any:
            self._reach("next", if_it_is=state.round_index == 2)
            return tally.next(state, data)

        return LearningProcess(initialize, advance)

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        del k
        self._reach("sampler", if_it_is=round_index == 2)
        return list(range(num_clients))

    @override
    def __repr__(self) -> str:
        return "Sender()"

    def evaluate(self, state: Any) -> dict[str, int]:
        self._reach("evaluate", if_it_is=state.round_index == 2)
        return {"n": state.round_index}

    def stop(self, history: History) -> bool:
        self._reach("stop", if_it_is=len(history) == 2)
        return False

    def on_start(self, history: History) -> None:
        del history
        self._reach("on_start")

    def on_round(self, record: Any) -> None:
        self._reach("on_round", if_it_is=record.round == 2)

    def on_end(self, history: History, reason: str) -> None:
        del history, reason
        self._reach("on_end")

    def run(self, storage_path: Any, **more: Any) -> TrainingResult:
        return run(
            self.build_process(), CLIENTS, num_rounds=9, sampler=self,
            evaluate=self.evaluate, stop=self.stop, callbacks=[self],
            storage_path=storage_path, **more,
        )  # fmt: skip


CALLED = ["initialize", "next", "sampler", "evaluate", "stop"]
PLACES = [*CALLED, "on_start", "on_round", "on_end"]


@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize("place", PLACES)
def test_signal_ends_the_program_and_its_run_is_saved(
    tmp_path: Any, place: str, number: signal.Signals
) -> None:
    former = signal.getsignal(number)
    sender = Sender(place, number)

    with pytest.raises(ENDS[number]) as raised:
        sender.run(tmp_path)

    if number == signal.SIGTERM:
        assert raised.value.args == (143,)
    assert signal.getsignal(number) is former
    rest = sender.run(tmp_path)
    whole = Sender("", number).run(None)
    assert rest.state == whole.state
    assert rest.history.values("n") == whole.history.values("n")


@pytest.mark.parametrize("place", [p for p in PLACES if p != "initialize"])
def test_signal_returns_the_rounds_so_far_where_that_is_wanted(place: str) -> None:
    result = Sender(place, signal.SIGTERM).run(None, on_signal="return")

    assert result.reason == "interrupted"
    assert result.state.round_index == len(result.history)
    assert len(result.history) == 9 if place == "on_end" else len(result.history) < 9


def test_signal_ends_a_program_that_goes_on_after_errors() -> None:
    def evaluate(_: Any) -> Any:
        send(signal.SIGINT)
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        run(build_tally(), CLIENTS, num_rounds=2, evaluate=evaluate)


def test_exit_in_a_callback_saves_the_run(tmp_path: Any) -> None:
    class Leave:
        def on_round(self, record: Any) -> None:
            if record.round == 3:
                raise SystemExit(5)

    with pytest.raises(SystemExit, match="5"):
        run(
            build_tally(), CLIENTS, num_rounds=9, storage_path=tmp_path,
            checkpoint_every=9, callbacks=[Leave()],
        )  # fmt: skip

    assert len(History.load(tmp_path)) == 3


def test_handler_of_the_program_is_called_once_the_run_is_saved(tmp_path: Any) -> None:
    seen: list[int] = []

    def handle(*_: Any) -> None:
        seen.append(len(History.load(tmp_path)))
        raise SystemExit(7)

    former = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(SystemExit, match="7"):
            Sender("on_round", signal.SIGTERM).run(tmp_path, checkpoint_every=9)
    finally:
        signal.signal(signal.SIGTERM, former)

    assert len(seen) == 1
    assert seen[0] >= 2


def test_signal_that_the_program_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = Sender("on_round", signal.SIGINT).run(None)
    finally:
        signal.signal(signal.SIGINT, former)

    assert result.reason == "finished"


@pytest.mark.parametrize("number", ENDS)
def test_round_that_runs_long_is_left(
    tmp_path: Any, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    tally = build_tally()

    def advance(state: Any, data: Any) -> Any:
        if state.round_index == 3:
            threading.Timer(0.1, send, [number]).start()
            time.sleep(20)
        return tally.next(state, data)

    process = LearningProcess(tally.initialize, advance)
    started = time.monotonic()
    with pytest.raises(ENDS[number]):
        run(
            process, CLIENTS, num_rounds=9, cohort_size=2, storage_path=tmp_path,
            checkpoint_every=9,
        )  # fmt: skip
    seconds = time.monotonic() - started

    assert seconds < 10
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
    result = run(
        build_tally(), CLIENTS, num_rounds=5, evaluate=evaluate, on_signal="return"
    )
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
        run(
            build_tally(), CLIENTS, num_rounds=2, storage_path=hanging,
            on_signal="return",
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint_every", "num_rounds"), [(None, 90), (1, 90), (None, 4)]
)
def test_storage_that_hangs_in_a_run_is_not_waited_for(
    hanging: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    checkpoint_every: int | None,
    num_rounds: int,
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
        checkpoint_every=checkpoint_every, on_signal="return",
    )  # fmt: skip

    assert result.reason == "interrupted"
    assert len(result.history) >= 4
    assert "was not saved in time" in caplog.text


def test_second_signal_goes_to_the_former_handler() -> None:
    seen: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with Interrupts(raises=False) as interrupts:
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
