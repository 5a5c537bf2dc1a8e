"""Rounds on a cluster of three nodes whose clients hang, straggle and raise."""

import time
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors

import tensorflow as tf  # isort: skip

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]

TIMEOUT_S = 20.0
"""Of a subround; what hangs would go on for ever."""

WAIT_S = 120.0

NO_COPIES = {"enabled": False}
"""For what hangs: by then it is a straggler, too, or its next attempt is one,
on a busy machine; a copy of either is one more attempt."""


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total(clients: Any) -> Any:
    return fl.federated_sum(clients)


def test_hung_worker_is_ended_and_its_subround_runs_elsewhere(
    contexts: Any, client_work: Any, meanwhile: Any
) -> None:
    work = client_work(waiting=(3,))
    expected = work.expected(2)
    context = contexts(
        workers=2, subrounds={"count": 2, "timeout_s": TIMEOUT_S}, stragglers=NO_COPIES
    )
    work.run_undisturbed(context)

    def act() -> None:
        work.wait_until(lambda: work.runs()[3] == 2)
        work.let_go()

    meanwhile(act)
    bits = work.run(context)

    assert bits == expected[1]
    report = context.last_report
    assert report.retries == {"hang": 1}
    (attempt,) = report.subrounds[0].lost
    assert TIMEOUT_S <= attempt.seconds < WAIT_S
    assert "`subrounds.timeout_s`" in attempt.detail
    assert report.subrounds[0].worker_pid != attempt.worker_pid
    assert work.runs() == [2] * 4 + [1] * 12


def test_subround_that_always_hangs_is_a_clear_error(
    contexts: Any, client_work: Any
) -> None:
    work = client_work(waiting=(3,))
    context = contexts(
        workers=2,
        subrounds={"count": 2, "timeout_s": TIMEOUT_S},
        stragglers=NO_COPIES,
        retry={"hang": 0},
    )
    work.run_undisturbed(context)
    started = time.monotonic()

    with pytest.raises(errors.DeadlineError, match="most 0 failures of hang") as caught:
        work.run(context)

    assert TIMEOUT_S <= time.monotonic() - started < WAIT_S
    location = caught.value.location
    assert (location.round_index, location.subround_index) == (1, 0)
    assert location.attempt == 1
    assert location.node is not None
    work.run_undisturbed(context)
    assert context.last_report.round_index == 2


def test_straggler_runs_on_an_idle_worker_too_and_the_first_result_counts(
    contexts: Any, client_work: Any, meanwhile: Any
) -> None:
    work = client_work(waiting=(3,))
    expected = work.expected(3)
    context = contexts(workers=2, subrounds=4, stragglers={"min_s": 2})
    work.run_undisturbed(context)

    def act() -> None:
        work.wait_until(lambda: work.runs()[3] == 2)
        work.let_go()

    meanwhile(act)
    bits = [work.run(context)]

    report = context.last_report
    assert report.retries == {}
    ((index, (slower,)),) = [
        (s.subround_index, s.lost) for s in report.subrounds if s.lost
    ]
    assert (index, slower.ended) == (0, "slower")
    assert slower.worker_pid != report.subrounds[0].worker_pid
    assert work.runs() == [2] * 4 + [1] * 12
    bits.append(work.run(context))
    assert bits == expected[1:]


def test_client_that_raises_ends_the_round_at_once(
    contexts: Any, client_work: Any
) -> None:
    def fail_on_the_seventh_batch(client: Any) -> Any:
        def step(batch: Any) -> Any:
            bad = tf.logical_and(tf.equal(client, 9), tf.equal(batch, 6))
            check = tf.debugging.Assert(~bad, ["bad batch", batch])
            with tf.control_dependencies([check]):
                return [batch + 1]

        def goes_on(batch: Any) -> Any:
            return batch < 10

        return client + 0 * tf.while_loop(goes_on, step, [0])[0]

    work = client_work(body=fail_on_the_seventh_batch)
    context = contexts(workers=1, subrounds=4)
    context.invoke(total, list(range(16)))
    worker = context.last_report.subrounds[0].worker_pid

    with pytest.raises(errors.ComputationError, match="bad batch") as caught:
        work.run(context)

    location = caught.value.location
    assert (location.round_index, location.subround_index) == (1, 2)
    assert (location.client_index, location.attempt) == (9, 1)
    assert location.node is not None
    assert "InvalidArgumentError" in caught.value.cause_text
    assert caught.value.__cause__ is None  # no frame of a user's, which it would show
    # In its kernel; in a kernel of its leaf, to find that; interpreted, to be named.
    assert work.runs()[9] == 3
    assert context.invoke(total, list(range(16))) == 120
    assert {s.worker_pid for s in context.last_report.subrounds} == {worker}
