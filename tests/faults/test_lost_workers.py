"""Rounds on a cluster of three nodes whose workers are killed, hang and fail."""

import time
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors

import tensorflow as tf  # isort: skip

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total(clients: Any) -> Any:
    return fl.federated_sum(clients)


def pids(context: Any) -> list[int]:
    """Return the processes that ran the last round's clients."""
    return sorted(
        {s.worker_pid for s in context.last_report.subrounds if s.num_clients}
    )


def warm_up(context: Any, work: Any, meanwhile: Any) -> list[int]:
    """Run a round on two workers, forget it, and return their processes."""

    def act() -> None:
        work.wait_until(lambda: sum(work.runs()[:8]) and sum(work.runs()[8:]))
        work.let_go()

    meanwhile(act)
    work.run(context)
    work.reset()
    return pids(context)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "interpreter"])
def test_worker_killed_under_a_subround_costs_that_subround_only(
    contexts: Any, client_work: Any, meanwhile: Any, kill: Any, kernels: bool
) -> None:
    work = client_work(waiting=(3, 11))
    expected = work.expected(2)
    context = contexts(workers=2, subrounds=2, kernels={"enabled": kernels})
    doomed, _ = warm_up(context, work, meanwhile)

    def act() -> None:
        work.wait_for(3, 11)
        kill(doomed)
        work.let_go()

    meanwhile(act)
    bits = work.run(context)

    assert bits == expected[1]
    report = context.last_report
    lost = {s.subround_index: s.lost for s in report.subrounds if s.lost}
    ((index, (attempt,)),) = lost.items()
    assert (attempt.worker_pid, attempt.ended) == (doomed, "crash")
    assert attempt.attempt == 1
    assert attempt.seconds > 0
    once, twice = [1] * 8, [2] * 4 + [1] * 4
    assert work.runs() == (twice + once if index == 0 else once + twice)
    assert report.retries == {"crash": 1}
    assert report.kernel_leaves == (8 if kernels else 0)


def test_every_worker_in_turn_is_killed_over_twenty_rounds(
    contexts: Any, client_work: Any, meanwhile: Any, kill: Any
) -> None:
    work = client_work(waiting=(0, 4, 8, 12))
    expected = work.expected(20)
    context = contexts(workers=2, subrounds=4)
    killed: list[int] = []
    retries = 0
    bits: list[bytes] = []
    for round_index in range(20):
        work.reset()
        if round_index in (3, 10) and pids(context):
            doomed = next(pid for pid in pids(context) if pid not in killed)
            killed.append(doomed)

            def act(doomed: int = doomed) -> None:
                work.wait_until(lambda: sum(work.runs()) >= 2)
                kill(doomed)
                work.let_go()

            meanwhile(act)
        else:
            work.let_go()
        bits.append(work.run(context))
        retries += context.last_report.num_retries
        assert sum(work.runs()) - 16 <= context.last_report.num_retries

    assert bits == expected
    assert retries == len(killed) == 2


def run_undisturbed(context: Any, work: Any) -> None:
    """Run a round with nothing in its way, and forget its runs."""
    work.let_go()
    work.run(context)
    work.reset()


def test_hung_worker_is_ended_and_its_subround_runs_elsewhere(
    contexts: Any, client_work: Any, meanwhile: Any
) -> None:
    work = client_work(waiting=(3,))
    expected = work.expected(2)
    context = contexts(workers=2, subrounds={"count": 2, "timeout_s": 10})
    run_undisturbed(context, work)

    def act() -> None:
        work.wait_until(lambda: work.runs()[3] == 2)
        work.let_go()

    meanwhile(act)
    bits = work.run(context)

    assert bits == expected[1]
    report = context.last_report
    assert report.retries == {"hang": 1}
    (attempt,) = report.subrounds[0].lost
    assert 10 <= attempt.seconds < 20
    assert "`subrounds.timeout_s`" in attempt.detail
    assert report.subrounds[0].worker_pid != attempt.worker_pid
    assert work.runs() == [2] * 4 + [1] * 12


def test_subround_that_always_hangs_is_a_clear_error(
    contexts: Any, client_work: Any
) -> None:
    work = client_work(waiting=(3,))
    context = contexts(
        workers=2, subrounds={"count": 2, "timeout_s": 10}, retry={"hang": 0}
    )
    run_undisturbed(context, work)
    started = time.monotonic()

    with pytest.raises(errors.DeadlineError, match="most 0 failures of hang") as caught:
        work.run(context)

    assert 10 <= time.monotonic() - started < 30
    location = caught.value.location
    assert (location.round_index, location.subround_index) == (1, 0)
    assert location.attempt == 1
    assert location.node is not None
    run_undisturbed(context, work)
    assert context.last_report.round_index == 2


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
    before = pids(context)

    with pytest.raises(errors.ComputationError, match="bad batch") as caught:
        work.run(context)

    location = caught.value.location
    assert (location.round_index, location.subround_index) == (1, 2)
    assert (location.client_index, location.attempt) == (9, 1)
    assert location.node is not None
    assert "InvalidArgumentError" in caught.value.cause_text
    assert isinstance(caught.value.__cause__, errors.WorkerTraceback)
    assert work.runs()[9] == 2  # in its kernel; then interpreted, to be named
    assert context.invoke(total, list(range(16))) == 120
    assert pids(context) == before


def test_killed_coordinators_cost_their_subrounds_only(
    contexts: Any, client_work: Any, meanwhile: Any, kill: Any
) -> None:
    work = client_work(waiting=(3, 11))
    expected = work.expected(2)
    context = contexts(workers=2, subrounds=2)
    warm_up(context, work, meanwhile)
    doomed = {s.coordinator_pid for s in context.last_report.subrounds}

    def act() -> None:
        work.wait_for(3, 11)
        for pid in doomed:
            kill(pid)
        work.let_go()

    meanwhile(act)
    bits = work.run(context)

    assert bits == expected[1]
    assert context.last_report.retries == {"crash": 2}
    told = [lost.detail for s in context.last_report.subrounds for lost in s.lost]
    assert told == ["the process that drove it is gone"] * 2
    # What a worker had begun goes on until it hears that nobody waits for it.
    assert set(work.runs()) <= {1, 2}
    assert (work.runs()[3], work.runs()[11]) == (2, 2)


def test_straggler_runs_on_an_idle_worker_too_and_the_first_result_counts(
    contexts: Any, client_work: Any, meanwhile: Any
) -> None:
    work = client_work(waiting=(3,))
    expected = work.expected(3)
    context = contexts(workers=2, subrounds=4, stragglers={"min_s": 2})
    run_undisturbed(context, work)

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
