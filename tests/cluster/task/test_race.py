"""Work that runs on two workers: the first result counts, the other is named."""

import asyncio
from typing import Any

import pytest

import ray_fed.errors as errors
from ray_fed.cluster.task.connection import Worker
from ray_fed.cluster.task.leases import Lease
from ray_fed.cluster.task.race import Won, race
from ray_fed.plan import outcomes

LOST = errors.WorkerLost("gone")


def _lease(name: str) -> Lease:
    attempt = outcomes.Attempt(1, name, 17, "10.0.0.1")
    return Lease(Worker(None, name, name, "10.0.0.1"), attempt, ())


class _Work:
    """Ends on each worker when told, with what it is told.

    Attributes:
        cancelled: the workers on which it was cancelled.
    """

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Future[Any]] = {}
        self.cancelled: list[str] = []

    def _end(self, name: str) -> "asyncio.Future[Any]":
        return self._ends.setdefault(name, asyncio.get_running_loop().create_future())

    def end(self, name: str, result: Any) -> None:
        if isinstance(result, Exception):
            self._end(name).set_exception(result)
        else:
            self._end(name).set_result(result)

    async def __call__(self, lease: Lease) -> Any:
        try:
            return await asyncio.shield(self._end(lease.worker.name))
        except asyncio.CancelledError:
            self.cancelled.append(lease.worker.name)
            raise


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def _run(*ends: tuple[str, Any], has_spare: bool = True) -> tuple[Won[Any], _Work]:
    """Race on the workers `first` and `spare`, which end in the order given."""

    async def act() -> tuple[Won[Any], _Work]:
        work = _Work()

        async def spare() -> Lease:
            if not has_spare:
                raise errors.RetryBudgetError("There will be none.", "fatal")
            return _lease("spare")

        running = asyncio.ensure_future(race(_lease("first"), spare(), work))
        await _settled()
        for name, result in ends:
            work.end(name, result)
            await _settled()
        return await running, work

    return asyncio.run(act())


def test_second_worker_that_is_first_counts() -> None:
    won, work = _run(("spare", 5))

    assert (won.lease.worker.name, won.result) == ("spare", 5)
    assert [(a.worker, a.ended) for a in won.slower] == [("first", "slower")]
    assert work.cancelled == ["first"]


def test_first_worker_that_is_first_counts() -> None:
    won, work = _run(("first", 5))

    assert (won.lease.worker.name, won.result) == ("first", 5)
    assert [(a.worker, a.ended) for a in won.slower] == [("spare", "slower")]
    assert work.cancelled == ["spare"]


def test_without_a_second_worker_there_is_nothing_to_tell() -> None:
    won, work = _run(("first", 5), has_spare=False)

    assert (won.lease.worker.name, won.result, won.slower) == ("first", 5, ())
    assert work.cancelled == []


@pytest.mark.parametrize(
    ("lost", "other"),
    [
        pytest.param("first", "spare", id="first"),
        pytest.param("spare", "first", id="spare"),
    ],
)
def test_worker_that_is_lost_leaves_the_work_to_the_other(
    lost: str, other: str
) -> None:
    won, _ = _run((lost, LOST), (other, 5))

    assert (won.lease.worker.name, won.result, won.slower) == (other, 5, ())


def test_work_that_lost_both_workers_is_lost() -> None:
    with pytest.raises(errors.WorkerLost):
        _run(("first", LOST), ("spare", LOST))


def test_only_worker_that_is_lost_loses_the_work() -> None:
    with pytest.raises(errors.WorkerLost):
        _run(("first", LOST), has_spare=False)


def test_failure_of_the_work_on_one_worker_ends_it_on_both() -> None:
    with pytest.raises(errors.ComputationError, match="no fives"):
        _run(("spare", errors.ComputationError("no fives")))
