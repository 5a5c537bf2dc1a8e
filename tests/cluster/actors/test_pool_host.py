"""The pool's host over a cluster that is played: when it looks at it."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import ray.exceptions
from typing_extensions import override

import ray_fed
from ray_fed import errors
from ray_fed.cluster.actors import pool_loop, worker_actors
from ray_fed.cluster.actors.pool_host import PoolHost
from ray_fed.cluster.pool import shortage
from ray_fed.cluster.pool.actions import Failure, Size, UseBegan, UseEnded
from ray_fed.cluster.pool.placement import Node
from ray_fed.cluster.task import leases
from ray_fed.plan import outcomes
from ray_fed.plan.fingerprint import Fingerprint, Versions, WorkerDescription

DRIVER = Versions("3", "1", "2", "2", "1")


@dataclasses.dataclass
class Method:
    """Stands for a method of an actor."""

    answer: Callable[[], Any]

    def remote(self, *_: Any, **__: Any) -> Any:
        return asyncio.ensure_future(self.answer())


class Worker:
    """Stands for the handle of a worker that answers and lives until it is ended."""

    def __init__(
        self, node: str, threads: int | None = None, missing: str = ""
    ) -> None:
        self.ended = asyncio.Event()
        left = asyncio.Event()

        async def live() -> None:
            waits = [asyncio.ensure_future(e.wait()) for e in (self.ended, left)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.ended.is_set():
                raise ray.exceptions.ActorDiedError

        async def leave() -> None:
            left.set()

        async def describe() -> WorkerDescription:
            fingerprint: Any = Fingerprint
            fields = {field.name: None for field in dataclasses.fields(fingerprint)}
            found = fingerprint(**fields | {"threads": threads})
            return WorkerDescription(1, node, node, DRIVER, found, missing)

        async def nothing() -> None:
            pass

        self.ping = Method(nothing)
        self.load = Method(describe)
        self.leave = Method(leave)
        self.hold = Method(live)
        self.free = self.settle = Method(nothing)


class Played:
    """A cluster of one node with room for some workers."""

    def __init__(self, room: int) -> None:
        self.looks = 0
        self._free = self._room = room

    def read_nodes(self) -> list[Node]:
        self.looks += 1
        return [Node("a", "a", self._free, self._room)]

    def start_worker(self, worker: str, node: str | None) -> Worker:
        del worker
        self._free -= 1
        return Worker(node or "a")

    def request(self, count: int) -> None:
        del count

    def describe_need(self, count: int) -> str:
        return f"room for {count} of {self._room}"


async def count_looks(cluster: Played, size: Size, rounds: int) -> int:
    """Return how often a pool looks in some rounds, one right after the other."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, cluster)
    for _ in range(3):  # the first workers start, and answer
        await host.begin_round()
    before = cluster.looks
    for _ in range(rounds):
        await host.begin_round()
    return cluster.looks - before


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pool that is short of workers look at the cluster twenty times a second."""
    monkeypatch.setattr(shortage, "LOOK_S", 0.05)


@pytest.fixture
def size() -> Size:
    return Size(2, 2, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)


def test_full_pool_does_not_look_at_every_round(size: Size) -> None:
    assert asyncio.run(count_looks(Played(room=2), size, rounds=20)) == 0


def test_full_pool_looks_once_in_a_while(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_loop, "LOOK_S", 0.0)

    assert asyncio.run(count_looks(Played(room=2), size, rounds=20)) == 20


def test_pool_short_of_workers_looks_at_every_round(size: Size) -> None:
    assert asyncio.run(count_looks(Played(room=1), size, rounds=20)) == 20


async def count_workers(cluster: Played, size: Size) -> tuple[int, float]:
    host = PoolHost(ray_fed.Config(), size, DRIVER, cluster)
    return await host.begin_round()


def test_count_of_a_full_pool_holds_for_a_while(size: Size) -> None:
    count, seconds = asyncio.run(count_workers(Played(room=2), size))

    assert count == 2
    assert 0 < seconds <= pool_loop.LOOK_S


def test_count_of_a_pool_short_of_workers_holds_for_one_round(size: Size) -> None:
    assert asyncio.run(count_workers(Played(room=1), size)) == (1, 0.0)


async def watch_workers(size: Size) -> list[outcomes.Progress]:
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    found = [await host.await_ready(None)]
    started = asyncio.ensure_future(host.begin_round())
    while found[-1][0] < 2:
        found.append(await asyncio.wait_for(host.await_ready(found[-1]), 5))
    await started
    return found


def test_those_who_watch_hear_of_each_worker_that_becomes_ready(size: Size) -> None:
    found = asyncio.run(watch_workers(size))

    assert found[0] == (0, 0, "")
    assert found[-1] == (2, 2, "")
    assert [ready for ready, *_ in found] == sorted(ready for ready, *_ in found)
    assert len(set(found)) == len(found)


async def watch_a_full_cluster() -> outcomes.Progress:
    """Return what is told of two workers where there is room for one."""
    size = Size(2, 2, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)
    host = PoolHost(ray_fed.Config(), size, DRIVER, Crowded(room=1))
    await host.begin_round()
    found = await host.await_ready(None)
    while found[0] < 1:
        found = await asyncio.wait_for(host.await_ready(found), 5)
    return found


class Crowded(Played):
    """A cluster whose nodes would hold more workers than they have room for now."""

    @override
    def read_nodes(self) -> list[Node]:
        return [Node("a", "a", self._free, 2)]

    @override
    def start_worker(self, worker: str, node: str | None) -> Worker:
        started = super().start_worker(worker, node)
        if node is None:
            started.ping = started.hold  # it has no place
        return started


def test_those_who_watch_hear_of_a_worker_that_has_no_room() -> None:
    assert asyncio.run(watch_a_full_cluster()) == (1, 2, "room for 1 of 1")


async def end_a_pool() -> tuple[list[Any], bool]:
    """Return what calls that wait for a pool are told as it ends."""
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)
    cluster = Leaving(room=1)
    host = PoolHost(ray_fed.Config(), size, DRIVER, cluster)
    await host.begin_round()
    await host.lease("a")
    calls: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(host.when_awaited(known=False, timeout_s=90)),
        asyncio.ensure_future(host.await_ready(await host.await_ready(None))),
        asyncio.ensure_future(host.lease_spare("a")),
    ]
    await asyncio.sleep(0)
    await host.close()
    ended = await asyncio.wait_for(asyncio.gather(*calls), 5)
    return ended, cluster.has_left


class Leaving(Played):
    """A cluster that notes whether its worker left before it was ended."""

    has_left = False

    @override
    def start_worker(self, worker: str, node: str | None) -> Worker:
        started = super().start_worker(worker, node)
        hold = started.hold.answer

        async def live() -> None:
            await hold()
            self.has_left = True

        started.hold = Method(live)
        return started


@pytest.mark.usefixtures("_nobody_dies")
def test_calls_that_wait_end_well_before_the_pool_does() -> None:
    told, has_left = asyncio.run(end_a_pool())

    assert told == [False, (1, 1, ""), None]
    assert has_left


async def use_a_lease_again(size: Size) -> tuple[list[str], list[int]]:
    """Return the workers, and the attempts, of a lease and of who waited for it."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=1))
    await host.begin_round()
    first, _, _ = await host.lease("first")
    await host.note_uses([UseEnded("first", 0.2), UseBegan("first", 0.1, None, "")])
    waiting = asyncio.ensure_future(host.lease("second"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await host.release("first", "first")
    second, _, _ = await waiting
    return [first.worker, second.worker], [first.attempt, second.attempt]


def test_lease_that_is_kept_is_nobody_elses_before_it_is_released() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    names, attempts = asyncio.run(use_a_lease_again(size))

    assert len(set(names)) == 1
    assert attempts == [1, 1]


async def ask_after_the_end(size: Size) -> str:
    """Return who has the worker after a subround was ended that asks once more."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=1))
    await host.begin_round()
    await host.lease("ended")
    await host.end("ended")
    with pytest.raises(errors.RetryBudgetError, match="was cancelled"):
        await host.lease("ended")
    found, _, _ = await host.lease("next")
    return found.worker


def test_subround_that_was_ended_is_given_no_worker_any_more() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(ask_after_the_end(size)) == "worker 0"


async def lose_at_second_use(
    size: Size,
) -> tuple[str, outcomes.Attempt, outcomes.Attempt]:
    """Return the worker of a lease, how its second use ended, and what came then."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    first, _, _ = await host.lease("first")
    await asyncio.sleep(0.2)
    await host.note_uses([UseEnded("first", 0.1), UseBegan("first", 0.05, None, "")])
    await host.lost("first", Failure("crash", "it died"))
    again, _, (lost,) = await host.lease("first")
    return first.worker, lost, again


@pytest.fixture
def _nobody_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_actors.ray, "kill", lambda *_, **__: None)  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.usefixtures("_nobody_dies")
def test_loss_at_the_second_use_of_a_lease_counts_from_its_begin() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    worker, lost, again = asyncio.run(lose_at_second_use(size))

    assert (lost.worker, lost.ended, again.attempt) == (worker, "crash", 2)
    assert lost.started_s == 0.0
    assert 0.05 <= lost.seconds < 0.15


async def lose_a_kept_lease(
    size: Size, *, host_hears_first: bool, is_told_first: bool
) -> outcomes.Attempt:
    """Return how a use of a kept lease ended, 0.2 s long by those who tell of it."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    _, worker, _ = await host.lease("first")
    await asyncio.sleep(0.3)
    if host_hears_first:
        worker.ended.set()
        await asyncio.sleep(0.05)
    uses = UseEnded("first", 0.25), UseBegan("first", 0.2, None, "")
    if is_told_first:
        await host.note_uses(uses)
    await host.lost("first", Failure("crash", "it died"), 0.1, use=1)
    await host.note_uses(uses)
    _, _, (lost,) = await host.lease("first")
    return lost


@pytest.mark.usefixtures("_nobody_dies")
@pytest.mark.parametrize(
    ("host_hears_first", "is_told_first", "least_s"),
    [(False, False, 0.1), (True, False, 0.04), (False, True, 0.2)],
    ids=["driver", "host", "told before"],
)
def test_loss_counts_from_the_use_in_which_it_was(
    host_hears_first: bool, is_told_first: bool, least_s: float
) -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    lost = asyncio.run(
        lose_a_kept_lease(
            size, host_hears_first=host_hears_first, is_told_first=is_told_first
        )
    )

    assert lost.started_s == 0.0
    assert least_s <= lost.seconds < least_s + 0.09


async def end_what_hangs(size: Size, *uses: UseBegan | UseEnded) -> bool:
    """Return whether a leased worker counts as hung after some uses."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    leased, _, _ = await host.lease("first", timeout_s=0.1)
    await host.note_uses(uses)
    await asyncio.sleep(0.3)
    return await host.handle_of(leased.worker) is None


@pytest.mark.usefixtures("_nobody_dies")
@pytest.mark.parametrize(
    ("uses", "hangs"),
    [
        pytest.param([], True, id="not told"),
        pytest.param([UseEnded("first", 0.0)], False, id="kept"),
        pytest.param(
            [UseEnded("first", 0.0), UseBegan("first", 0.0, 60.0, "")], False, id="new"
        ),
        pytest.param(
            [UseEnded("first", 0.0), UseBegan("first", 0.0, 0.1, "")], True, id="hung"
        ),
    ],
)
def test_time_limit_is_that_of_the_latest_use(
    uses: list[UseBegan | UseEnded], hangs: bool
) -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(end_what_hangs(size, *uses)) == hangs


async def use_what_is_gone(size: Size) -> outcomes.Attempt:
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    await host.lease("first")
    await host.lost("first", Failure("crash", "it died"))
    await host.note_uses([UseEnded("first", 0.1), UseBegan("first", 0.1, None, "")])
    again, _, _ = await host.lease("first")
    return again


@pytest.mark.usefixtures("_nobody_dies")
def test_uses_of_a_lease_that_is_lost_change_nothing() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(use_what_is_gone(size)).attempt == 2


async def lose_in_between(size: Size, used_ago_s: float) -> tuple[int, int]:
    """Return the attempt after the loss of a kept worker, and how many were lost."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    await host.lease("first")
    await host.lost("first", Failure("crash", "it died"))  # as its host is told by Ray
    await asyncio.sleep(0.1)
    await host.lost("first", Failure("crash", "it is gone"), used_ago_s)
    again, _, lost = await host.lease("first")
    return again.attempt, len(lost)


@pytest.mark.usefixtures("_nobody_dies")
@pytest.mark.parametrize(
    ("used_ago_s", "expected"), [(0.01, (1, 0)), (1.0, (2, 1))], ids=["before", "while"]
)
def test_loss_of_a_kept_worker_counts_only_while_it_is_used(
    used_ago_s: float, expected: tuple[int, int]
) -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(lose_in_between(size, used_ago_s)) == expected


THREE = Size(3, 3, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)


async def started_host(num_workers: int) -> PoolHost:
    """Return the host of a pool whose workers are all ready."""
    host = PoolHost(ray_fed.Config(), THREE, DRIVER, Played(room=num_workers + 1))
    await host.begin_round()
    ready = await host.await_ready(None)
    while ready[0] < num_workers:
        ready = await host.await_ready(ready)
    return host


def test_further_workers_are_those_that_are_idle() -> None:
    async def run() -> tuple[list[str], list[str], list[str]]:
        host = await started_host(3)
        first, _, _ = await host.lease("a")
        all_idle = await host.lease_further("a", 5)
        nobody = await host.lease_further("a", 5)
        await host.release_further("a")
        one = await host.lease_further("a", 1)
        names = [first.worker, *(attempt.worker for _, attempt, _ in all_idle)]
        return sorted(names), [s for s, *_ in nobody], [s for s, *_ in one]

    workers, nobody, one = asyncio.run(run())

    assert workers == ["worker 0", "worker 1", "worker 2"]
    assert nobody == []
    assert one == ["a worker 2"]


def test_subround_without_a_worker_gets_no_further_ones() -> None:
    async def run() -> list[Any]:
        host = await started_host(3)
        return await host.lease_further("ended", 2)

    assert asyncio.run(run()) == []


@pytest.mark.usefixtures("_nobody_dies")
@pytest.mark.parametrize("lost", ["a", "a worker 3"], ids=["first", "further"])
def test_loss_of_one_worker_counts_once_and_gives_the_others_back(lost: str) -> None:
    async def run() -> tuple[int, int, int]:
        host = await started_host(3)
        await host.lease("a")
        await host.lease_further("a", 2)
        await host.lost(lost, Failure("crash", "it died"))
        again, _, attempts = await host.lease("a")
        others = [(await host.lease(name))[0].worker for name in ("b", "c")]
        return again.attempt, len(attempts), len({again.worker, *others})

    attempt, num_lost, num_workers = asyncio.run(run())

    assert (attempt, num_lost) == (2, 1)
    assert num_workers == 3


def test_end_takes_all_workers_back() -> None:
    async def run() -> int:
        host = await started_host(3)
        await host.lease("a")
        await host.lease_further("a", 2)
        await host.end("a")
        leased = [await host.lease(name) for name in ("b", "c", "d")]
        return len({attempt.worker for attempt, _, _ in leased})

    assert asyncio.run(run()) == 3


async def watch_who_waits(size: Size) -> list[bool]:
    """Return what a pool of one worker tells of three subrounds, one after another."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=1))
    await host.begin_round()
    first, _, _ = await host.lease("first")
    told: list[bool] = []
    watching = asyncio.ensure_future(host.when_awaited(known=False, timeout_s=9))
    await asyncio.sleep(0.01)
    told.append(watching.done())
    waiting = [asyncio.ensure_future(host.lease(name)) for name in ("second", "third")]
    told.append(await watching)
    await host.release("first", "first")
    await waiting[0]
    told.append(await host.when_awaited(known=False, timeout_s=9))
    await host.release("second", "second")
    await waiting[1]
    told.append(await host.when_awaited(known=True, timeout_s=9))
    told.append(await host.when_awaited(known=False, timeout_s=0.01))
    assert first.worker == "worker 0"
    return told


def test_pool_tells_whether_somebody_waits_for_a_worker() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(watch_who_waits(size)) == [False, True, True, False, False]


class _Remote:
    """Stands for the handle of a pool's host."""

    _actor_id = "pool"

    def __init__(self, host: PoolHost) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._host, name)
        return type("Remote", (), {"remote": staticmethod(method)})


async def resume_what_is_gone(size: Size) -> tuple[bool, int, int]:
    """Return whether a kept lease is found again, and what the next one counts."""
    host = PoolHost(ray_fed.Config(), size, DRIVER, Played(room=2))
    await host.begin_round()
    kept, worker, _ = await host.lease("first")
    worker.ended.set()
    await asyncio.sleep(0.05)
    given = leases.Given(kept, use=1)
    found = await leases.resumed(_Remote(host), "first", given, leases.Handles())
    again, _, lost = await host.lease("first")
    return found is not None, again.attempt, len(lost)


@pytest.mark.usefixtures("_nobody_dies")
def test_loss_of_a_kept_worker_that_its_next_user_never_had_counts_for_nobody() -> None:
    size = Size(1, 1, is_fixed=True, each="1 CPU", wait_timeout_s=5.0)

    assert asyncio.run(resume_what_is_gone(size)) == (False, 1, 0)


class Mixed(Played):
    """Its workers have one thread, two threads, and so on."""

    @override
    def start_worker(self, worker: str, node: str | None) -> Worker:
        del worker
        self._free -= 1
        return Worker(node or "a", self._room - self._free)


async def lease_two(size: Size, *, allow_mixed: bool) -> list[Any]:
    """Return what two that ask for a worker are given: its name, or an error."""
    config = ray_fed.Config(workers=ray_fed.Workers(allow_mixed=allow_mixed))
    host = PoolHost(config, size, DRIVER, Mixed(room=2))
    asking = asyncio.gather(*map(host.lease, ("one", "two")), return_exceptions=True)
    found = await asyncio.wait_for(asking, 30)
    return [
        lease if isinstance(lease, BaseException) else lease[0].worker
        for lease in found
    ]


def test_worker_of_another_fingerprint_is_ended(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []

    def kill(handle: Any, *, no_restart: bool) -> None:
        assert no_restart
        ended.append(handle)

    monkeypatch.setattr(worker_actors.ray, "kill", kill)

    name, error = asyncio.run(lease_two(size, allow_mixed=False))

    assert isinstance(name, str)
    assert isinstance(error, errors.ResourceError)
    assert "threads is 2 where other workers have 1" in str(error)
    assert "set `workers.allow_mixed`" in str(error)
    assert len(ended) == 1


def test_worker_of_another_fingerprint_is_leased_where_that_is_allowed(
    size: Size,
) -> None:
    first, second = asyncio.run(lease_two(size, allow_mixed=True))

    assert isinstance(first, str)
    assert isinstance(second, str)
    assert first != second


class WithoutGPUs(Played):
    """Its workers were given a GPU that they cannot use."""

    @override
    def start_worker(self, worker: str, node: str | None) -> Worker:
        del worker
        self._free -= 1
        return Worker(node or "a", missing="Expected a GPU")


@pytest.mark.parametrize("allow_mixed", [False, True], ids=["alike", "mixed"])
@pytest.mark.parametrize("room", [1, 2], ids=["one", "two"])
def test_worker_that_misses_its_gpu_is_never_leased(
    size: Size, monkeypatch: pytest.MonkeyPatch, room: int, allow_mixed: bool
) -> None:
    monkeypatch.setattr(worker_actors.ray, "kill", lambda *_, **__: None)  # pyright: ignore[reportUnknownLambdaType]
    config = ray_fed.Config(workers=ray_fed.Workers(allow_mixed=allow_mixed))

    async def lease_twice() -> list[Any]:
        host = PoolHost(config, size, DRIVER, WithoutGPUs(room))
        found: list[Any] = []
        for name in ("one", "two"):
            asking = asyncio.gather(host.lease(name), return_exceptions=True)
            found += await asyncio.wait_for(asking, 30)
        return found

    told = asyncio.run(lease_twice())

    assert [type(error) for error in told] == [errors.ResourceError] * 2
    assert all("on node a was refused: Expected a GPU" in str(e) for e in told)


class Mute(Played):
    """Its workers never say that they are ready."""

    @override
    def start_worker(self, worker: str, node: str | None) -> Worker:
        del worker
        mute = Worker(node or "a")
        mute.ping = mute.hold
        return mute


def test_worker_that_is_not_ready_in_time_is_ended(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []

    def kill(handle: Any, *, no_restart: bool) -> None:
        assert no_restart
        ended.append(handle)

    monkeypatch.setattr(worker_actors.ray, "kill", kill)
    config = ray_fed.Config(workers=ray_fed.Workers(start_timeout_s=0.1))

    async def lease() -> None:
        host = PoolHost(config, size, DRIVER, Mute(room=2))
        await asyncio.wait_for(host.lease("one"), 30)

    with pytest.raises(errors.ClusterError, match=r"`workers\.start_timeout_s`"):
        asyncio.run(lease())

    assert ended
