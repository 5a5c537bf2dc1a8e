"""Signals to a run on the main thread of this process."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from ray_fed.learning import LearningProcess, run
from ray_fed.learning.interrupts import Interrupts
from tests.learning.counting import CLIENTS, build_tally


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run_saved(tmp_path: Any, number: signal.Signals) -> None:
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
    rest = run(tally, CLIENTS, num_rounds=9, cohort_size=2, storage_path=tmp_path)
    whole = run(tally, CLIENTS, num_rounds=9, cohort_size=2)
    assert rest.state == whole.state


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
