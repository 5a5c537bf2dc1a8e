"""The driver's list of workers: who has which, who waits, and what it is told.

Also which subrounds are called stragglers, on a clock that the test turns, what names
clients in an argument, and how many workers there are to be.
"""

# pyright: reportPrivateUsage=false

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import ray.exceptions

import ray_fed
import ray_fed.errors as errors
from ray_fed.cluster import metrics, pool, worker_actor
from ray_fed.cluster.pool import Census, Pool, Size, Stragglers, name_clients
from ray_fed.plan.fingerprint import Fingerprint, Versions, WorkerDescription
from ray_fed.values.client_references import ClientRun

WAIT_S = 60.0
PRINT = Fingerprint("2", "CPU", "avx", onednn=True, threads=1)
DESCRIBED = WorkerDescription(7, "10.0.0.1", "node", Versions.read(), PRINT)


class FakeActor:
    """The handle of a worker's actor; the test says what it answers."""

    has_place = True
    names: tuple[str, str] = ("", "")

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Be a new process."""
        self.loaded: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.asked: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def die(self) -> None:
        """End the process; the next one loads."""
        ended = self.ended
        self.renew()
        ended.set_exception(ray.exceptions.ActorUnavailableError("gone", None))

    def __getattr__(self, name: str) -> Any:
        return FakeMethod(self, name)


@dataclasses.dataclass
class FakeMethod:
    actor: FakeActor
    name: str

    def remote(self, *args: Any) -> Any:
        del args
        if self.name == "leave":
            if not self.actor.ended.done():
                self.actor.ended.set_result(None)
            return types.SimpleNamespace(future=lambda: self.actor.ended)
        futures = {"load": self.actor.loaded, "hold": self.actor.ended}
        futures["describe"] = self.actor.asked
        if not self.actor.has_place:
            futures["ping"] = concurrent.futures.Future()
        return _answer(futures.get(self.name))


async def _answer(future: Any) -> Any:
    return None if future is None else await asyncio.wrap_future(future)


class FakeJob:
    is_current = True

    def check(self) -> None:
        pass

    async def answer(self, reference: Any) -> Any:
        return await reference

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[FakeActor]:
    """The actors that were started, in order."""
    started: list[FakeActor] = []

    def start(config: ray_fed.Config, label: str, name: str, _: Any) -> FakeActor:
        del config
        started.append(FakeActor())
        started[-1].names = label, name
        return started[-1]

    class Gauge:
        def __init__(self, run: str) -> None:
            assert run == "a test"

        def set(self, value: float) -> None:
            pass

    async def look_up(read: Any, *_: Any) -> Any:
        pending = sum(not actor.has_place for actor in started)
        answers = {
            pool.inventory.count_pending: pending,
            pool.inventory.describe_need: "room for some workers",
        }
        return answers.get(read, [])

    def kill(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(worker_actor, "start_worker", start)
    monkeypatch.setattr(metrics, "workers_ready", Gauge)
    monkeypatch.setattr(pool.inventory, "look_up", look_up)
    monkeypatch.setattr(ray, "kill", kill)
    return started


@pytest.fixture
def build(actors: list[FakeActor]) -> Iterator[Callable[..., Pool]]:
    """Builds pools, of two workers if not said otherwise, of which one is needed."""
    del actors
    built: list[Pool] = []

    def make(wait_s: float = WAIT_S, most: int = 2, least: int = 1) -> Pool:
        size = Size(least, most, is_fixed=False, each="1 CPU", wait_timeout_s=wait_s)
        config = ray_fed.Config(workers=(1, 2))
        built.append(Pool(config, size, None, "a test", cast("Any", FakeJob())))
        return built[-1]

    yield make
    for one in built:
        one.close()


def take(built: Pool, count: int = 1, prefers: bytes = b"") -> list[str]:
    """Return the names of the workers that are taken."""
    team = asyncio.run(asyncio.wait_for(built.take(prefers, count), WAIT_S))
    return [member.name for member in team]


def wait_until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def ready(built: Pool, actors: list[FakeActor]) -> Pool:
    """Return a pool once all of its workers are loaded."""
    for actor in actors:
        actor.loaded.set_result(DESCRIBED)
    wait_until(lambda: built.num_ready == len(actors))
    return built


def test_actors_of_all_pools_have_names_of_their_own(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    for _ in range(2):
        build()

    labels, names = zip(*(actor.names for actor in actors), strict=True)
    assert labels == tuple(f"ray_fed worker {index} of a test" for index in (0, 1)) * 2
    assert len(set(names)) == 4
    for label, name in zip(labels, names, strict=True):
        assert name.startswith(f"{label} (")


def test_workers_are_given_to_one_at_a_time(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build()
    actors[1].loaded.set_result(DESCRIBED)
    first = take(built)
    actors[0].loaded.set_result(DESCRIBED)
    second = take(built)

    assert (first, second) == (["worker 1"], ["worker 0"])
    assert built.take_now(b"", 1) == []
    built.give_back([built.members[1]])
    assert take(built) == ["worker 1"]


def test_several_idle_workers_are_taken_together(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = ready(build(), actors)

    assert take(built, count=3) == ["worker 0", "worker 1"]


def test_worker_that_ran_clients_last_comes_first(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = ready(build(), actors)
    built.note_holder(b"clients", "worker 1")
    built.note_holder(b"", "worker 0")

    assert take(built, prefers=b"clients") == ["worker 1"]
    assert take(built, prefers=b"clients") == ["worker 0"]


def test_worker_that_dies_is_taken_again_once_its_next_process_is_ready(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build()
    actors[0].loaded.set_result(DESCRIBED)
    wait_until(lambda: built.num_ready == 1)

    actors[0].die()
    wait_until(lambda: built.num_ready == 0)
    actors[0].loaded.set_result(dataclasses.replace(DESCRIBED, pid=8))

    assert take(built) == ["worker 0"]
    described = built.members[0].described
    assert described is not None
    assert described.pid == 8
    assert len(actors) == 2  # Ray restarted it, nobody else


def test_loss_counts_for_that_process_alone_and_until_it_answers(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build()
    actors[0].loaded.set_result(DESCRIBED)
    wait_until(lambda: built.num_ready == 1)

    built.lose("worker 0", 6)
    before = built.num_ready
    built.lose("worker 0", DESCRIBED.pid)

    assert (before, built.num_ready) == (1, 0)

    actors[0].asked.set_result(DESCRIBED)
    assert take(built) == ["worker 0"]


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (
            dataclasses.replace(
                DESCRIBED, versions=dataclasses.replace(DESCRIBED.versions, python="2")
            ),
            "python is 2 where the driver has",
        ),
        (dataclasses.replace(DESCRIBED, missing="Expected a GPU"), "Expected a GPU"),
    ],
    ids=["version", "device"],
)
def test_worker_that_must_not_be_used_is_an_error_that_says_why(
    build: Callable[..., Pool],
    actors: list[FakeActor],
    described: WorkerDescription,
    why: str,
) -> None:
    built = build()
    for actor in actors:
        actor.loaded.set_result(described)

    for _ in range(2):  # it stays one
        with pytest.raises(errors.ResourceError, match=why) as raised:
            take(built)
        assert "`worker 0` on node 10.0.0.1 was refused" in str(raised.value)


CENSUS = Census(
    num_usable=4, num_ready=1, num_busy=0, num_loading=0, num_unplaced=3, num_pending=3
)


@pytest.mark.parametrize(
    ("change", "num_ready", "limit_s", "words"),
    [
        pytest.param({}, 1, math.inf, "", id="ready"),
        pytest.param({}, 2, 8.0, "1 of 2 workers ready, waiting for room", id="room"),
        pytest.param(
            {"num_ready": 0}, 2, 8.0, "waiting for room", id="room for all of them"
        ),
        pytest.param({"num_busy": 1}, 2, math.inf, "", id="a busy worker"),
        pytest.param(
            {"num_pending": 2}, 2, 60.0, "1 of 2 workers ready", id="start of a process"
        ),
        pytest.param(
            {"num_loading": 1, "num_unplaced": 2},
            2,
            math.inf,
            "1 of 2 workers ready",
            id="start of TensorFlow",
        ),
        pytest.param(
            {"num_loading": 1, "num_unplaced": 2}, 3, 8.0, "", id="start, then room"
        ),
        pytest.param(
            {"num_ready": 0, "num_loading": 1, "num_unplaced": 3, "num_pending": 7},
            1,
            math.inf,
            "starting 1 worker: TensorFlow",
            id="requests of other pools",
        ),
        pytest.param(
            {"num_ready": 0, "num_unplaced": 4, "num_pending": 0},
            2,
            60.0,
            "starting 4 workers: TensorFlow",
            id="start of all of them",
        ),
    ],
)
def test_room_a_start_and_a_busy_worker_are_waited_for_by_their_own_clocks(
    change: dict[str, int], num_ready: int, limit_s: float, words: str
) -> None:
    census = dataclasses.replace(CENSUS, **change)

    needed = "room" if census.count_without_room(num_ready) else ""

    assert census.find_limit_s(num_ready, 8.0, 60.0) == limit_s
    if words:
        assert census.describe(num_ready, needed) == words


@pytest.mark.parametrize("least", [1, 2])
def test_too_few_workers_with_room_are_an_error_in_time(
    build: Callable[..., Pool],
    actors: list[FakeActor],
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeActor, "has_place", False)
    built = build(wait_s=1.0, least=least)
    if least > 1:
        actors[0].has_place = True
        actors[0].loaded.set_result(DESCRIBED)
    begun_s = time.monotonic()

    with pytest.raises(errors.ResourceError, match=f"at least {least} workers") as e:
        asyncio.run(built.count_workers())

    assert "`workers.wait_timeout_s`" in str(e.value)
    assert time.monotonic() - begun_s >= 1.0


def test_worker_that_gets_room_starts_the_wait_for_the_others_anew(
    build: Callable[..., Pool],
    actors: list[FakeActor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeActor, "has_place", False)
    built = build(least=2)
    judge, judged = built._judge, list[float]()

    async def give_room_at_the_limit() -> None:
        if len(judged) == 1:
            actors[0].has_place = True
            built._pending = -math.inf, 0
            built._waiting[0].begun_s -= 2 * WAIT_S
            built._progress_s -= 2 * WAIT_S
        await judge()
        judged.append(time.monotonic())

    built._judge = give_room_at_the_limit

    async def run() -> None:
        counting = asyncio.ensure_future(built.count_workers())
        await until(lambda: len(judged) > 3 or counting.done())
        assert not counting.done()
        counting.cancel()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_round_waits_for_the_minimum_and_for_a_lost_worker_of_it(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build(most=3, least=2)

    async def run() -> None:
        counting = asyncio.ensure_future(built.count_workers())
        await until(lambda: bool(built._waiting))
        actors[0].loaded.set_result(DESCRIBED)
        await until(lambda: built.num_ready == 1)
        assert not counting.done()
        actors[1].loaded.set_result(DESCRIBED)
        assert await counting >= 2

        actors[0].die()
        await until(lambda: built.num_ready == 1)
        counting = asyncio.ensure_future(built.count_workers())
        await until(lambda: bool(built._waiting))
        assert await built.take(b"", 1) == [built.members[1]]  # of a round that runs
        actors[2].loaded.set_result(DESCRIBED)
        assert await counting >= 2

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_neither_a_busy_worker_nor_one_that_starts_fails_who_waits(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build(wait_s=0.1)
    judged = count_judgements(built)

    async def run() -> None:
        first = asyncio.ensure_future(built.take(b"", 1))
        await until(lambda: len(judged) > 3)  # both processes answer, and load
        actors[0].loaded.set_result(DESCRIBED)
        team = await first
        second = asyncio.ensure_future(built.take(b"", 1))
        begun = len(judged)
        await until(lambda: len(judged) > begun + 3)
        built.give_back(team)
        assert await second == team

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


async def until(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, holds)


def count_judgements(built: Pool) -> list[float]:
    """Return a list that grows each time that the pool looks at callers that wait."""
    judged: list[float] = []
    judge = built._judge

    async def counted() -> None:
        await judge()
        judged.append(time.monotonic())

    built._judge = counted
    return judged


def test_log_says_what_calls_wait_for_and_says_it_again(
    build: Callable[..., Pool],
    actors: list[FakeActor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_first = property(lambda actor: actor is actors[0])  # asked by a watcher, early
    monkeypatch.setattr(FakeActor, "has_place", is_first)
    monkeypatch.setattr(pool, "_TELL_AFTER_S", 0.1)
    monkeypatch.setattr(pool, "_TELL_AGAIN_S", 0.3)
    built = build(least=2)
    actors[0].loaded.set_result(DESCRIBED)

    told = "1 of 2 workers ready, waiting for room for some"

    async def run() -> None:
        counting = asyncio.ensure_future(built.count_workers())
        await until(lambda: caplog.text.count(told) > 2)
        counting.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(run(), WAIT_S))

    assert {record.levelname for record in caplog.records} == {"WARNING"}
    for record in caplog.records:
        assert record.message.startswith("A call has waited for ")


def test_log_says_what_a_call_waits_for_that_lost_all_its_workers(
    build: Callable[..., Pool],
    actors: list[FakeActor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pool, "_TELL_AFTER_S", 0.1)
    built = ready(build(), actors)
    assert len(take(built, count=2)) == 2

    monkeypatch.setattr(FakeActor, "has_place", False)
    for actor in actors:
        actor.die()
    wait_until(lambda: "waiting for room for some workers" in caplog.text)
    waits_for = asyncio.run(built.await_change(None))
    built.give_back(built.members)

    assert waits_for == "waiting for room for some workers"
    assert asyncio.run(built.await_change(waits_for)) == ""


def test_worker_handed_to_a_call_that_is_cancelled_goes_to_the_next(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build(most=1)

    async def run() -> None:
        first, second = (asyncio.ensure_future(built.take(b"", 1)) for _ in range(2))
        await until(lambda: len(built._waiting) == 2)
        delay_answer(built, cancel_and_wait(first))
        actors[0].loaded.set_result(DESCRIBED)
        assert await second == [built.members[0]]
        assert first.cancelled()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert not built._watches["worker 0"].done()


def delay_answer(built: Pool, meanwhile: Callable[[], None]) -> None:
    """Have something happen when the first caller that waits is about to be told."""
    answer = built._waiting[0].answer
    set_result = answer.set_result

    def delayed(result: None) -> None:
        meanwhile()
        set_result(result)

    answer.set_result = delayed


def cancel_and_wait(task: "asyncio.Future[Any]") -> Callable[[], None]:
    loop, is_cancelled = asyncio.get_running_loop(), threading.Event()
    task.add_done_callback(lambda _: is_cancelled.set())

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)
        is_cancelled.wait(WAIT_S)

    return cancel


def test_straggler_s_copy_takes_no_worker_that_was_handed_to_a_call(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build(most=1)
    copies: list[Any] = []

    async def run() -> None:
        taking = asyncio.ensure_future(built.take(b"", 1))
        await until(lambda: bool(built._waiting))
        delay_answer(built, lambda: copies.append(built.take_now(b"", 1)))
        actors[0].loaded.set_result(DESCRIBED)
        assert await taking == [built.members[0]]

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert copies == [[]]


def test_starts_that_fail_again_and_again_are_an_error(
    build: Callable[..., Pool],
    actors: list[FakeActor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(handle: FakeActor, *, no_restart: bool) -> None:
        del no_restart
        if handle.loaded.done():
            handle.renew()
            handle.loaded.set_exception(_failure())

    monkeypatch.setattr(ray, "kill", fail)
    built = build()
    for actor in actors:
        actor.loaded.set_exception(_failure())

    with pytest.raises(errors.RetryBudgetError, match="No module named") as raised:
        take(built)

    assert raised.value.failure_class == "fatal"
    assert "Expected workers to start, found" in str(raised.value)


def _failure() -> Exception:
    return ray.exceptions.RayTaskError(
        "load", "No module named `tensorflow`", ImportError("tensorflow")
    )


def straggle(
    *done: float, running: int = 1, begun_s: float = 0.0, min_s: float = 1.0
) -> float | None:
    """Return when one of some siblings is due, after the seconds of those done."""
    stragglers = Stragglers(3.0, min_s)
    names = [f"running {index}" for index in range(running)]
    for name in names:
        stragglers.begin("round 1", name, begun_s)
    for index, seconds in enumerate(done):
        stragglers.begin("round 1", f"done {index}", 0.0)
        stragglers.end("round 1", f"done {index}", seconds)
    return stragglers.due_s("round 1", names[0])


def test_limit_is_so_many_times_the_median_of_those_that_are_done() -> None:
    assert straggle(2.0, 4.0, 100.0, begun_s=10.0) == 10.0 + 3 * 4.0


def test_limit_is_no_less_than_the_least_seconds() -> None:
    assert straggle(2.0, min_s=60.0) == 60.0


@pytest.mark.parametrize(
    ("num_done", "num_running", "expected"),
    [
        pytest.param(0, 1, None, id="nothing to compare with"),
        pytest.param(1, 2, None, id="most still run"),
        pytest.param(2, 2, 30.0, id="half are done"),
    ],
)
def test_nothing_is_said_before_half_of_them_are_done(
    num_done: int, num_running: int, expected: float | None
) -> None:
    assert straggle(*[10.0] * num_done, running=num_running) == expected


def test_what_is_known_of_a_round_is_its_own_and_goes_with_its_last_subround() -> None:
    stragglers = Stragglers(3.0, 1.0)
    for siblings in ("round 1", "round 2"):
        stragglers.begin(siblings, "first", 0.0)
        stragglers.begin(siblings, "second", 0.0)
    stragglers.end("round 1", "first", 2.0)

    assert stragglers.due_s("round 1", "second") == 6.0
    assert stragglers.due_s("round 2", "second") is None

    stragglers.end("round 1", "second", 2.0)
    stragglers.begin("round 1", "third", 0.0)
    assert stragglers.due_s("round 1", "third") is None


def test_subround_is_given_workers_of_other_nodes_first(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = build(most=6)
    for index, actor in enumerate(actors):
        node = "node" if index < 4 else "another"
        actor.loaded.set_result(dataclasses.replace(DESCRIBED, node=node))
    wait_until(lambda: built.num_ready == 6)

    handles, known = built.in_order(built.members[:1])

    assert [name for name, _ in known[:3]] == ["worker 0", "worker 4", "worker 5"]
    assert handles[:3] == [actors[0], actors[4], actors[5]]
    assert len(built.in_order(built.members)[0]) == 6


def test_subround_is_given_the_workers_that_get_room_next(
    build: Callable[..., Pool], actors: list[FakeActor]
) -> None:
    built = ready(build(most=6), actors)
    for number in (1, 2, 3, 5, 4):  # Ray places the first of them first
        built.lose(f"worker {number}", DESCRIBED.pid)

    _, known = built.in_order(built.members[:1])

    names = [name for name, _ in known]
    assert names == ["worker 0", "worker 1", "worker 2", "worker 3"]

    built.members[1].since_s = time.monotonic()  # it had room again, and lost it
    _, known = built.in_order(built.members[:1])

    names = [name for name, _ in known]
    assert names == ["worker 0", "worker 2", "worker 3", "worker 5"]


class Source:
    """Stands for a source of clients, which nobody reads."""

    def __init__(self, token: str) -> None:
        self.token = token


def run_of(token: str, *positions: int) -> ClientRun:
    source: Any = Source(token)
    type_spec: Any = None
    return ClientRun(source, type_spec, np.array(positions, np.int64))


def test_equal_clients_have_one_name() -> None:
    first = (np.float32(1), (run_of("a", 3, 4), run_of("b", 0)))
    second = (np.float32(2), (run_of("a", 3, 4), run_of("b", 0)))

    assert name_clients(first) == name_clients(second) != b""


@pytest.mark.parametrize(
    "other",
    [
        (run_of("a", 3), run_of("b", 0, 4)),
        (run_of("a", 4, 3), run_of("b", 0)),
        (run_of("b", 3, 4), run_of("a", 0)),
        (run_of("a", 3, 4),),
        run_of("a", 3, 4, 0),
    ],
    ids=["cut", "order", "sources", "fewer", "joined"],
)
def test_other_clients_have_another_name(other: Any) -> None:
    assert name_clients(other) != name_clients((run_of("a", 3, 4), run_of("b", 0)))


@pytest.mark.parametrize("argument", [None, (), [1.0, 2.0], (np.float32(1), [2.0])])
def test_values_have_no_name(argument: Any) -> None:
    assert name_clients(argument) == b""


def size_of(
    workers: Any,
    bundles: Sequence[Mapping[str, float]],
    held: Mapping[str, float] | None = None,
) -> tuple[int, int]:
    """Return the least and the most workers in what bundles have left."""
    config = ray_fed.Config(workers=workers)
    size = pool.decide_size(config, bundles, may_grow=False, occupied=held)
    return size.least, size.most


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param({}, (1, 3), id="one a bundle"),
        pytest.param({"num_cpus": 2}, (1, 1), id="large ones"),
        pytest.param((1, 9), (1, 9), id="range"),
    ],
)
def test_workers_follow_the_bundles_beside_the_process(
    workers: Any, expected: tuple[int, int]
) -> None:
    bundles = [{"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 2.0}]

    assert size_of(workers, bundles, {"CPU": 1.0}) == expected


@pytest.mark.parametrize(
    ("workers", "advice"),
    [
        pytest.param({}, '2 bundles: [{"CPU": 1}] + [{"CPU": 1}] * 1', id="one"),
        pytest.param(3, '4 bundles: [{"CPU": 1}] + [{"CPU": 1}] * 3', id="three"),
        pytest.param(
            {"count": (2, 4), "num_cpus": 2, "num_gpus": 1},
            '3 bundles: [{"CPU": 1}] + [{"CPU": 2, "GPU": 1}] * 2',
            id="range with GPUs",
        ),
    ],
)
def test_too_few_bundles_are_an_error_that_says_which_to_ask_for(
    workers: Any, advice: str
) -> None:
    with pytest.raises(errors.ResourceError) as raised:
        size_of(workers, [{"CPU": 0.0}], {"CPU": 1.0})

    count, bundles = advice.split(": ", 1)
    assert "found room for 0 beside the process" in str(raised.value)
    assert f"ask for {count}, the first for the process" in str(raised.value)
    assert f"tune.PlacementGroupFactory({bundles})" in str(raised.value)
    assert 'backend="local"' in str(raised.value)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param({"CPU": 1.0}, [{"CPU": 0.0}, {"CPU": 2.0}], id="the first"),
        pytest.param({"CPU": 2.0}, [{"CPU": 1.0}, {"CPU": 0.0}], id="where it fits"),
        pytest.param({}, [{"CPU": 1.0}, {"CPU": 2.0}], id="nothing"),
    ],
)
def test_process_has_its_part_of_a_bundle(
    held: dict[str, float], expected: list[dict[str, float]]
) -> None:
    bundles = [{"CPU": 1.0}, {"CPU": 2.0}]

    assert pool.inventory.without(bundles, held) == expected
