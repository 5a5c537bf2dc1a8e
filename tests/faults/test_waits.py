"""Workers are killed at random moments: a round waits for no replacement."""

import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing  # no public name

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(590)]

NUM_KILLS = 4
CLIENT_S = 0.1
"""What each client's work takes, asleep: a busy machine does not change it."""

ROUND_S = 8 * CLIENT_S
"""What the clients of a round take on two workers, as do those of one subround."""

MOST_S = 2.0
"""Of all kills but one, for a busy machine; a new worker takes three times that."""


def sleep(value: Any) -> Any:
    """Return a value after a while: half of it for the element, half for the end."""
    pause = testing.sleep(round(CLIENT_S / 2 * 1e6))
    slow: Any = tf.data.Dataset.from_tensors(value).apply(cast("Any", pause))
    return slow.reduce(0, _second)


def _second(_: Any, element: Any) -> Any:
    return element


def unused_s(work: Any, begun: float, ended: float) -> float:
    """Return for how long of a stretch of time no client was at work."""
    found = sorted(float(path.name.split("-")[1]) for path in work.folder.glob("*-*"))
    free, at = 0.0, begun
    for start in (start for start in found if start + CLIENT_S > begun):
        free += max(0.0, start - at)
        at = max(at, start + CLIENT_S)
    return free + max(0.0, ended - at)


def run(work: Any, context: Any) -> tuple[bytes, float, float]:
    """Run the first round again; return its bits, its begin and its end."""
    context.resume_at(0)
    begun = time.time()
    return work.run(context), begun, time.time()


def run_on_two(work: Any, context: Any) -> tuple[list[int], float]:
    """Run rounds until two workers share one; return their pids, and its overhead."""
    while True:
        work.reset()
        _, begun, ended = run(work, context)
        subrounds = context.last_report.subrounds
        pids = {subround.worker_pid for subround in subrounds if subround.num_clients}
        if len(pids) == 2 and not context.last_report.retries:
            return sorted(pids), ended - begun - ROUND_S


def kill_at(
    kill: Callable[[int], None], pid: int, moment: float, killed: list[float]
) -> threading.Thread:
    def act() -> None:
        time.sleep(max(0.0, moment - time.time()))
        killed.append(time.time())
        kill(pid)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def _shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s (at most {max(seconds):.2f} s)"


def test_round_waits_for_no_replacement_while_a_worker_lives(
    contexts: Any, client_work: Any, kill: Any
) -> None:
    chosen = random.Random(20)
    work = client_work(body=sleep)
    (expected,) = work.expected()
    context = contexts(workers=2, stragglers={"enabled": False})
    bits: set[bytes] = set()
    waits: list[float] = []
    rounds: list[float] = []
    calm: list[float] = []
    for _ in range(NUM_KILLS):
        pids, overhead_s = run_on_two(work, context)
        killed: list[float] = []
        moment = time.time() + chosen.uniform(0.0, ROUND_S)
        killing = kill_at(kill, chosen.choice(pids), moment, killed)
        found, begun, ended = run(work, context)
        killing.join()
        bits.add(found)
        calm.append(overhead_s)
        waits.append(unused_s(work, max(begun, *killed), ended))
        rounds.append(ended - begun - 2 * ROUND_S)

    print(  # noqa: T201 (the figures are what it is for; -s shows them)
        f"\n{NUM_KILLS} kills: {_shown(rounds)} beyond twice the clients' time of a"
        f" round, {_shown(waits)} without a client at work; without a kill"
        f" {_shown(calm)} beyond the clients' time"
    )
    slow_s = max(0.0, *calm)  # what the machine takes for all but the clients
    assert bits == {expected}
    assert sorted(waits)[-2] <= slow_s + MOST_S, (waits, calm)
    assert sorted(rounds)[-2] <= slow_s + MOST_S, (rounds, calm)
