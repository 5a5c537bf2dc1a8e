"""Rounds on a cluster whose workers are killed, hang, straggle and raise."""

# pyright: reportPrivateUsage=false

import pathlib
import time
from typing import Any

import federated_language as fl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData
from tests.data import tables
from tests.waiting_work import GO, mark_and_wait

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]


def pids(context: Any) -> list[int]:
    """Return the processes that ran the last round's clients."""
    return sorted(
        {s.worker_pid for s in context.last_report.subrounds if s.num_clients}
    )


def warm_up(context: Any, work: Any, meanwhile: Any) -> list[int]:
    """Run a round on two workers, forget it, and return their processes."""
    meanwhile(work.let_go_once_all_run)
    work.run(context)
    work.reset()
    return pids(context)


def test_worker_killed_under_a_subround_costs_that_subround_only(
    contexts: Any, client_work: Any, meanwhile: Any, kill: Any
) -> None:
    work = client_work(waiting=(3, 11))
    expected = work.expected(2)
    context = contexts(workers=2, subrounds=2)
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
    assert report.kernel_leaves == 8


def test_worker_killed_between_rounds_costs_neither_bits_nor_budget(
    contexts_with_sessions: Any, client_work: Any, kill: Any
) -> None:
    work = client_work(waiting=())
    expected = work.expected(3)
    context, session = contexts_with_sessions(workers=2, subrounds=2)
    work.let_go()
    bits = [work.run(context), work.run(context)]

    work.wait_until(lambda: session._pool.num_ready == 2)
    for member in session._pool.members:
        kill(member.described.pid)
    work.wait_until(lambda: session._pool.num_ready == 0)
    bits.append(work.run(context))

    assert bits == expected
    assert context.last_report.retries == {}


def test_every_worker_in_turn_is_killed_over_twenty_rounds(
    contexts: Any, client_work: Any, meanwhile: Any, kill: Any
) -> None:
    work = client_work(waiting=(0, 4, 8, 12))
    expected = work.expected(20)
    # A copy of a straggler, on a busy machine, would run clients twice.
    context = contexts(workers=2, subrounds=4, stragglers={"enabled": False})
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


def test_killed_coordinators_cost_their_subrounds_only(
    contexts: Any, client_work: Any, meanwhile: Any, kill: Any
) -> None:
    work = client_work(waiting=(3, 11))
    expected = work.expected(2)
    context = contexts(workers=2, subrounds=2)
    warm_up(context, work, meanwhile)
    subrounds = [s for s in context.last_report.subrounds if s.num_clients]
    doomed = {subround.coordinator_pid for subround in subrounds}

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


def sum_then_wait(folder: pathlib.Path) -> Any:
    """Return a round whose after-merge work leaves a file and waits for another."""

    @rtf.computation(np.int32)
    def wait(total: Any) -> Any:
        return mark_and_wait(total, folder, "finish") * 10

    @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
    def run(members: Any) -> Any:
        return fl.federated_map(wait, fl.federated_sum(members))

    return run


def test_worker_killed_under_the_finish_costs_the_finish_only(
    contexts: Any, client_work: Any, meanwhile: Any, kill: Any, tmp_path: pathlib.Path
) -> None:
    context = contexts(workers=1, subrounds=2)
    work = client_work()
    work.run_undisturbed(context)
    (doomed,) = pids(context)

    def act() -> None:
        work.wait_until(lambda: [*tmp_path.glob("finish-*")])
        kill(doomed)
        (tmp_path / GO).touch()

    meanwhile(act)
    found = context.invoke(sum_then_wait(tmp_path), list(range(16)))

    assert found == sum(range(16)) * 10
    assert len([*tmp_path.glob("finish-*")]) == 2
    *subrounds, finish = context.last_report.subrounds
    assert [s.attempts for s in subrounds] == [1, 1]
    ((attempt,), ended) = finish.lost, finish.attempts
    assert (attempt.worker_pid, attempt.ended, ended) == (doomed, "crash", 2)


@rtf.computation(tables.BATCHES)
def add_up(batches: Any) -> Any:
    def add(total: Any, batch: Any) -> Any:
        return total / 3.0 + tf.reduce_sum(batch["x"], axis=0)

    return batches.reduce(tf.zeros([2]), add)


@fl.federated_computation(fl.FederatedType(tables.BATCHES, fl.CLIENTS))
def total_of_rows(clients: Any) -> Any:
    return fl.federated_sum(fl.federated_map(add_up, clients))


def test_rows_are_sorted_anew_where_their_worker_is_killed(
    contexts: Any, kill: Any, tmp_path: pathlib.Path
) -> None:
    table = tables.make_table(24)
    rows = pa.table(tables.shuffled(table))
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=9)
    data = ClientData.from_parquet(
        tmp_path / "t.parquet", client="who", x=["a", "b"], y="y", batch_size=3
    )
    cohorts = [data[start : start + 8] for start in (0, 8, 16)]
    with ray_fed.create_context(
        ray_fed.Config(backend="local", clients_per_leaf=2)
    ) as local:
        expected = [local.invoke(total_of_rows, cohort).tobytes() for cohort in cohorts]
    context = contexts(workers=2, subrounds=2)

    found: list[bytes] = []
    for cohort in cohorts:
        found.append(context.invoke(total_of_rows, cohort).tobytes())
        for pid in {s.worker_pid for s in context.last_report.subrounds}:
            kill(pid)

    assert found == expected


TIMEOUT_S = 20.0
"""Of a subround; what hangs would go on for ever."""

WAIT_S = 120.0

NO_COPIES = {"enabled": False}
"""For what hangs: by then it is a straggler, too, or its next attempt is one,
on a busy machine; a copy of either is one more attempt."""


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total_of_indices(clients: Any) -> Any:
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
    context.invoke(total_of_indices, list(range(16)))
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
    assert context.invoke(total_of_indices, list(range(16))) == 120
    assert {s.worker_pid for s in context.last_report.subrounds} == {worker}
