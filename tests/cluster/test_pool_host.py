"""The pool's host over a cluster that is played: when it looks at it."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import ray_fed
import ray_fed.plan as plan
from ray_fed.cluster import pool_host
from ray_fed.cluster.actions import Size
from ray_fed.cluster.failures import Failure
from ray_fed.cluster.placement import Node
from ray_fed.cluster.pool_host import PoolHost
from ray_fed.fingerprint import Fingerprint, Versions, WorkerDescription

DRIVER = Versions("3", "1", "2", "2", "1")


@dataclasses.dataclass
class Method:
    """Stands for a method of an actor."""

    answer: Callable[[], Any]

    def remote(self, *_: Any) -> Any:
        return asyncio.ensure_future(self.answer())


class Worker:
    """Stands for the handle of a worker that answers and lives."""

    def __init__(self, node: str) -> None:
        async def describe() -> WorkerDescription:
            fingerprint: Any = Fingerprint
            fields = {field.name: None for field in dataclasses.fields(fingerprint)}
            return WorkerDescription(1, node, node, DRIVER, fingerprint(**fields))

        self.ping = Method(describe)
        self.hold = Method(asyncio.Event().wait)


class Played:
    """A cluster of one node with room for some workers."""

    def __init__(self, room: int) -> None:
        self.looks = 0
        self._free = self._room = room

    def read_nodes(self) -> list[Node]:
        self.looks += 1
        return [Node("a", "a", self._free, self._room)]

    def start_worker(self, node: str | None) -> Worker:
        self._free -= 1
        return Worker(node or "a")

    def request(self, count: int) -> None:
        del count


async def count_looks(cluster: Played, size: Size, rounds: int) -> int:
    """Return how often a pool looks in some rounds, one right after the other."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, cluster)
    for _ in range(3):  # the first workers start, and answer
        await host.begin_round()
    before = cluster.looks
    for _ in range(rounds):
        await host.begin_round()
    return cluster.looks - before


@pytest.fixture
def size() -> Size:
    return Size(2, 2, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)


def test_full_pool_does_not_look_at_every_round(size: Size) -> None:
    assert asyncio.run(count_looks(Played(room=2), size, rounds=20)) == 0


def test_full_pool_looks_once_in_a_while(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_host, "LOOK_S", 0.0)

    assert asyncio.run(count_looks(Played(room=2), size, rounds=20)) == 20


def test_pool_short_of_workers_looks_at_every_round(size: Size) -> None:
    assert asyncio.run(count_looks(Played(room=1), size, rounds=20)) == 20


async def count_workers(cluster: Played, size: Size) -> tuple[int, float]:
    host = PoolHost(ray_fed.Config(), size, DRIVER, cluster)
    return await host.begin_round()


def test_count_of_a_full_pool_holds_for_a_while(size: Size) -> None:
    count, seconds = asyncio.run(count_workers(Played(room=2), size))

    assert count == 2
    assert 0 < seconds <= pool_host.LOOK_S


def test_count_of_a_pool_short_of_workers_holds_for_one_round(size: Size) -> None:
    assert asyncio.run(count_workers(Played(room=1), size)) == (1, 0.0)


async def pass_a_worker_on(size: Size) -> tuple[list[str], list[int]]:
    """Return who had a worker, one after another, and the numbers of their attempts."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=1))
    await host.begin_round()
    first, _, _ = await host.lease("first")
    await host.pass_on("first", "first", "second")
    waiting = asyncio.ensure_future(host.lease("third"))
    await asyncio.sleep(0.01)
    assert not waiting.done()  # the second one has it
    await host.release("second", "second")
    third, _, _ = await waiting
    return [first.worker, third.worker], [first.attempt, third.attempt]


def test_worker_that_is_passed_on_is_nobody_elses_before_it_is_released() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    names, attempts = asyncio.run(pass_a_worker_on(size))

    assert len(set(names)) == 1
    assert attempts == [1, 1]


async def lose_what_was_passed_on(size: Size) -> plan.Attempt:
    """Return what a subround leases that lost the worker which it was passed."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    first, _, _ = await host.lease("first")
    await host.pass_on("first", "first", "second")
    await host.lost("second", Failure("crash", "it died"))
    again, _, lost = await host.lease("second")
    assert [(one.worker, one.ended) for one in lost] == [(first.worker, "crash")]
    return again


@pytest.fixture
def _nobody_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_host.ray, "kill", lambda *_, **__: None)  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.usefixtures("_nobody_dies")
def test_loss_of_a_worker_that_was_passed_on_counts_for_who_has_it() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(lose_what_was_passed_on(size)).attempt == 2


async def pass_on_what_is_gone(size: Size) -> plan.Attempt:
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    await host.lease("first")
    await host.lost("first", Failure("crash", "it died"))
    await host.pass_on("first", "first", "second")
    await host.lost("second", Failure("crash", "it is gone"))
    again, _, _ = await host.lease("second")
    return again


@pytest.mark.usefixtures("_nobody_dies")
def test_worker_that_is_gone_is_not_passed_on() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(pass_on_what_is_gone(size)).attempt == 1
