"""The lease of a worker that is done is kept for a moment, or given back at once."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest

from ray_fed.cluster.driver import kept_leases
from ray_fed.cluster.driver.kept_leases import KeptLeases, Lent
from ray_fed.cluster.pool.actions import UseBegan, UseEnded
from ray_fed.cluster.task.driving import Driven
from ray_fed.cluster.task.leases import Terms
from ray_fed.plan import outcomes


def driven(worker: str, scope: str, attempts: int = 1) -> Driven:
    outcome = outcomes.Outcome((), attempts, worker, 7, 8, "10.0.0.1")
    return Driven(outcome, scope, seconds=0.1)


class _Verb:
    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self._name, self._calls = name, calls

    def remote(self, *args: Any) -> None:
        self._calls.append((self._name, *args))


class _Told:
    """Answers once somebody waits for a worker, and then when nobody does."""

    def __init__(self) -> None:
        self._states = {True: asyncio.Event(), False: asyncio.Event()}
        self.num_pending = 0

    def tell(self, *, is_awaited: bool) -> None:
        self._states[is_awaited].set()
        self._states[not is_awaited].clear()

    async def _answer(self, known: bool, timeout_s: float) -> bool:
        self.num_pending += 1
        try:
            await asyncio.wait_for(self._states[not known].wait(), timeout_s)
        except TimeoutError:
            return known
        finally:
            self.num_pending -= 1
        return not known

    def remote(self, *, known: bool, timeout_s: float) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self._answer(known, timeout_s))


class FakePool:
    """Notes what a pool is told."""

    def __init__(self) -> None:
        self.when_awaited = _Told()
        self.calls: list[tuple[Any, ...]] = []
        self.release = _Verb("release", self.calls)
        self.end = _Verb("end", self.calls)
        self.note_uses = _Verb("note_uses", self.calls)

    @property
    def uses(self) -> list[UseBegan | UseEnded]:
        """What it was told that leases were used for."""
        told = [args[0] for call, *args in self.calls if call == "note_uses"]
        return [use for uses in told for use in uses]


@dataclasses.dataclass
class Played:
    """What became of a plan's lease."""

    calls: list[tuple[Any, ...]]
    lent: Lent | None


def play(
    terms: Terms,
    *,
    begun_ago_s: float = 0.0,
    pause_s: float = 0.0,
    scope: str = "first",
    attempts: int = 1,
) -> Played:
    """End a plan; after a pause ask for a worker for the next one."""
    pool = FakePool()

    async def run() -> Lent | None:
        kept = KeptLeases(pool, num_workers=1)
        begun_s = time.monotonic() - begun_ago_s
        came_to = driven("worker 0", scope, attempts)
        kept.keep("first", terms, begun_s, came_to)
        await asyncio.sleep(pause_s)
        return kept.take(terms)

    return Played(pool.calls, asyncio.run(run()))


def test_next_plan_has_the_lease_and_the_pool_is_not_asked() -> None:
    found = play(Terms(60.0, siblings="round 1", spare_after_s=10.0))

    assert found.lent is not None
    assert (found.lent.name, found.lent.given.attempt.worker) == ("first", "worker 0")
    assert found.calls == []


def test_lease_goes_back_when_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_leases, "_KEPT_S", 0.05)

    found = play(Terms(), pause_s=0.2)

    (_, [ended]), released = found.calls
    assert isinstance(ended, UseEnded)
    assert 0.05 <= ended.ago_s < 0.2
    assert (released, found.lent) == (("release", "first", "first"), None)


@pytest.mark.parametrize(
    ("ended", "scope"),
    [
        pytest.param(
            {"terms": Terms(30.0), "begun_ago_s": 29.3}, "first", id="nearly hung"
        ),
        pytest.param({"terms": Terms(), "attempts": 2}, "first", id="it lost another"),
        pytest.param(
            {"terms": Terms(siblings="round 1", spare_after_s=0.05)},
            "first",
            id="it may have a copy",
        ),
        pytest.param(
            {
                "terms": Terms(siblings="round 1", spare_after_s=0.05),
                "scope": "first copy",
            },
            "first copy",
            id="a copy won",
        ),
    ],
)
def test_lease_goes_back_at_once(ended: dict[str, Any], scope: str) -> None:
    assert play(**ended) == Played([("release", "first", scope)], None)


def test_pool_hears_nothing_once_its_leases_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_leases, "_KEPT_S", 0.05)
    pool = FakePool()

    async def run() -> None:
        kept = KeptLeases(pool, num_workers=2)
        for name in ("first", "second"):
            kept.keep(name, Terms(), time.monotonic(), driven("worker 0", name))
        kept.end("second")
        before.extend(pool.calls)
        kept.close()
        kept.end("third")
        await asyncio.sleep(0.2)

    before: list[Any] = []
    asyncio.run(run())

    assert before
    assert pool.calls == before
    assert pool.when_awaited.num_pending == 0


def test_kept_lease_goes_back_once_somebody_waits_for_a_worker() -> None:
    pool = FakePool()

    async def run() -> list[str]:
        kept = KeptLeases(pool, num_workers=2)
        kept.keep("a", Terms(), time.monotonic(), driven("worker 0", "a"))
        pool.when_awaited.tell(is_awaited=True)
        await asyncio.sleep(0.01)
        kept.keep("b", Terms(), time.monotonic(), driven("worker 0", "b"))
        return [call for call, *_ in pool.calls]

    assert asyncio.run(run()) == ["note_uses", "release", "release"]


def test_leases_are_kept_again_once_nobody_waits() -> None:
    pool = FakePool()

    async def run() -> Lent | None:
        kept = KeptLeases(pool, num_workers=2)
        for name, is_awaited in (("a", True), ("b", False)):
            kept.keep(name, Terms(), time.monotonic(), driven("worker 0", name))
            pool.when_awaited.tell(is_awaited=is_awaited)
            await asyncio.sleep(0.01)
        kept.keep("b", Terms(), time.monotonic(), driven("worker 0", "b"))
        return kept.take(Terms())

    lent = asyncio.run(run())

    assert lent is not None
    assert lent.name == "b"


def test_pool_is_asked_only_while_leases_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_leases, "_KEPT_S", 0.05)
    pool = FakePool()

    async def run() -> list[int]:
        kept = KeptLeases(pool, num_workers=2)
        pending: list[int] = []
        for name in ("a", "b"):
            kept.keep(name, Terms(), time.monotonic(), driven("worker 0", name))
            await asyncio.sleep(0.01)
            pending.append(pool.when_awaited.num_pending)
            await asyncio.sleep(0.3)
            pending.append(pool.when_awaited.num_pending)
        return pending

    assert asyncio.run(run()) == [1, 0, 1, 0]


def tell(num_plans: int, pause_s: float) -> FakePool:
    """Run plans one after another on one lease, then wait."""
    pool = FakePool()

    async def run() -> None:
        kept = KeptLeases(pool, num_workers=1)
        kept.keep("a", Terms(), time.monotonic(), driven("worker 0", "a"))
        for number in range(num_plans):
            terms = Terms(60.0, siblings=f"round {number}")
            with kept.running():
                lent = kept.take(terms)
                assert lent is not None
            kept.keep("a", terms, time.monotonic(), driven("worker 0", "a"))
        await asyncio.sleep(pause_s)

    asyncio.run(run())
    return pool


def test_pool_is_told_of_many_uses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_leases, "_TELL_S", 0.05)

    begun_s = time.monotonic()
    pool = tell(num_plans=3, pause_s=0.2)

    assert [call for call, *_ in pool.calls] == ["note_uses"]
    told = [getattr(use, "siblings", None) for use in pool.uses]
    assert told == [None, "round 0", None, "round 1", None, "round 2", None]
    longest_s = time.monotonic() - begun_s
    assert all(0.05 <= use.ago_s < longest_s for use in pool.uses)


def test_pool_is_told_before_a_plan_ends_without_a_result() -> None:
    pool = FakePool()

    async def run() -> None:
        kept = KeptLeases(pool, num_workers=1)
        kept.keep("a", Terms(), time.monotonic(), driven("worker 0", "a"))
        assert kept.take(Terms()) is not None
        kept.end("a")

    asyncio.run(run())

    assert [call for call, *_ in pool.calls] == ["note_uses", "end"]
    assert len(pool.uses) == 2


@pytest.mark.parametrize(
    ("prefers", "expected"),
    [("worker 1", "worker 1"), ("worker 7", "worker 0"), ("", "worker 0")],
    ids=["kept", "gone", "none"],
)
def test_next_plan_has_the_worker_that_it_prefers(prefers: str, expected: str) -> None:
    assert take(("worker 0", "worker 1"), prefers, num_workers=2) == expected


def test_pool_is_asked_for_a_preferred_worker_that_it_may_have() -> None:
    assert take(("worker 0", "worker 1"), "worker 2", num_workers=3) is None


def take(workers: Sequence[str], prefers: str, num_workers: int) -> str | None:
    """Return the worker that a plan takes of those that are kept."""

    async def run() -> Lent | None:
        kept = KeptLeases(FakePool(), num_workers)
        for name in workers:
            kept.keep(name, Terms(), time.monotonic(), driven(name, name))
        with kept.running():
            return kept.take(Terms(prefers=prefers))

    lent = asyncio.run(run())
    return None if lent is None else lent.given.attempt.worker
