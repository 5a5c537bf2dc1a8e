"""Rounds on a cluster of three nodes whose workers and coordinators are killed."""

import asyncio
import pathlib
from typing import Any

import federated_language as fl
import numpy as np
import pytest

from ray_fed import tensorflow as rtf
from ray_fed.cluster.session import Session
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


async def none_is_ready(session: Session) -> None:
    """Return once the pool knows that none of its workers is ready."""
    found = await session.await_ready(None)
    while found[0]:
        found = await session.await_ready(found)


def test_worker_killed_between_rounds_costs_neither_bits_nor_budget(
    contexts_with_sessions: Any, client_work: Any, kill: Any
) -> None:
    work = client_work(waiting=())
    expected = work.expected(3)
    context, session = contexts_with_sessions(workers=2, subrounds=2)
    work.let_go()
    bits = [work.run(context), work.run(context)]

    for pid in pids(context):
        kill(pid)
    asyncio.run(asyncio.wait_for(none_is_ready(session), 120))
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
