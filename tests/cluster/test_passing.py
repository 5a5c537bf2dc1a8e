"""A worker that is done stays with the driver for a moment, or goes back at once."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest

import ray_fed.plan as plan
from ray_fed.cluster import leases
from ray_fed.cluster.leases import Passing, Terms


def outcome(worker: str) -> plan.Outcome:
    return plan.Outcome((), 1, worker, 7, 8, "10.0.0.1")


class _Verb:
    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self._name, self._calls = name, calls

    def remote(self, *args: Any) -> None:
        self._calls.append((self._name, *args))


class FakePool:
    """Notes what a pool is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.release = _Verb("release", self.calls)
        self.pass_on = _Verb("pass_on", self.calls)


@dataclasses.dataclass
class Played:
    """What became of a plan's worker."""

    calls: list[tuple[Any, ...]]
    taken: plan.Attempt | None


def play(
    terms: Terms,
    *,
    begun_ago_s: float = 0.0,
    pause_s: float = 0.0,
    num_running: int = 0,
) -> Played:
    """End a plan; after a pause ask for a worker for the next one."""
    pool = FakePool()

    async def run() -> plan.Attempt | None:
        passing = Passing(pool, num_workers=1)
        with contextlib.ExitStack() as others:
            for _ in range(num_running):
                others.enter_context(passing.running())
            begun_s = time.monotonic() - begun_ago_s
            passing.keep("first", terms, begun_s, "first", outcome("worker 0"))
        await asyncio.sleep(pause_s)
        return passing.take("second", terms)

    return Played(pool.calls, asyncio.run(run()))


def test_next_plan_has_the_worker_and_the_pool_is_told() -> None:
    found = play(Terms(60.0))

    assert found.taken is not None
    assert found.taken.worker == "worker 0"
    assert found.calls == [("pass_on", "first", "first", "second", 60.0, "")]


def test_worker_goes_back_when_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_KEPT_S", 0.05)

    found = play(Terms(), pause_s=0.2)

    assert found == Played([("release", "first", "first")], None)


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param({"terms": Terms(30.0), "begun_ago_s": 29.5}, id="nearly hung"),
        pytest.param({"terms": Terms(siblings="round 1")}, id="others are compared"),
        pytest.param({"terms": Terms(), "num_running": 1}, id="others wait"),
    ],
)
def test_worker_goes_back_at_once(ended: dict[str, Any]) -> None:
    assert play(**ended) == Played([("release", "first", "first")], None)


@pytest.mark.parametrize(
    ("prefers", "expected"),
    [("worker 1", "worker 1"), ("worker 7", "worker 0"), ("", "worker 0")],
    ids=["kept", "gone", "none"],
)
def test_next_plan_has_the_worker_that_it_prefers(prefers: str, expected: str) -> None:
    assert take(("worker 0", "worker 1"), prefers, num_workers=2) == expected


def test_pool_is_asked_for_a_preferred_worker_that_it_may_have() -> None:
    assert take(("worker 0", "worker 1"), "worker 2", num_workers=3) is None


def take(kept: Sequence[str], prefers: str, num_workers: int) -> str | None:
    """Return the worker that a plan takes of those that are kept."""

    async def run() -> plan.Attempt | None:
        passing = Passing(FakePool(), num_workers)
        for name in kept:
            passing.keep(name, Terms(), time.monotonic(), name, outcome(name))
        with passing.running():
            return passing.take("next", Terms(prefers=prefers))

    attempt = asyncio.run(run())
    return None if attempt is None else attempt.worker
