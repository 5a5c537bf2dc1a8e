"""Workers without Ray: the real actor class in this process, which can be killed."""

# pyright: reportPrivateUsage=false

import asyncio
import concurrent.futures
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.exceptions

from ray_fed.cluster.ray_strategy import LostWorkerError, Worker
from ray_fed.cluster.worker_actor import LeafWorker
from ray_fed.plan.fingerprint import Versions, WorkerDescription


class _Method:
    """One method of an actor, called as Ray's handles are."""

    def __init__(self, handle: "FakeHandle", name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *args: Any) -> Any:
        return self._handle.call(self._name, args)


class FakeHandle:
    """The actor class on a thread of this process; lost on the nth call of a method.

    Attributes:
        calls: names of the methods that ended, in order.
        dies_at: a method: the first call of it finds the actor gone.
        is_dead: every call finds it gone.
        raises: what work raises.
        hangs: whether work never ends.
    """

    def __init__(self, pid: int = 1) -> None:
        self._pid = pid
        self._actor = LeafWorker(1, 0.0, 2**20)
        self._actor._loading.result()
        self._actor._describe = functools.lru_cache(self._describe)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.calls: list[str] = []
        self.dies_at: str | None = None
        self.is_dead = False
        self.raises: Exception | None = None
        self.hangs = False

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        self.is_dead |= name == self.dies_at
        if self.is_dead:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(ray.exceptions.RayActorError())
            return future
        if self.hangs and name == "evaluate":
            self._actor._running = args[0], -math.inf
            return asyncio.get_running_loop().create_future()
        return asyncio.wrap_future(self._thread.submit(self._run, name, args))

    def _run(self, name: str, args: tuple[Any, ...]) -> Any:
        try:
            if self.raises is not None and name == "evaluate":
                raise self.raises  # noqa: TRY301 (as the work would)
            result = getattr(self._actor, name)(*args)
        except Exception as error:
            raise ray.exceptions.RayTaskError(name, "", error) from error
        self.calls.append(name)
        return result

    def _describe(self) -> WorkerDescription:
        prints = self._actor._fingerprint
        return WorkerDescription(self._pid, "10.0.0.1", "node", Versions.read(), prints)

    def close(self) -> None:
        self._thread.shutdown()
        self._actor._loop.close()


class FakeSource:
    """A source of such workers, up to a number of them.

    Attributes:
        handles: of all workers that were leased, in order.
        max_workers: it leases no more than so many.
        settled: how often work that met a loss ended well.
    """

    def __init__(self, name: str, max_workers: int) -> None:
        self._name = name
        self.max_workers = max_workers
        self.handles: list[FakeHandle] = []
        self.settled = 0

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        if loss is not None and len(self.handles) == self.max_workers:
            raise loss
        self.handles.append(FakeHandle())
        worker = Worker(self.handles[-1], f"{self._name}/1", self._name)
        await worker.call("begin")
        return worker

    async def settle(self) -> None:
        self.settled += 1


@pytest.fixture
def handles() -> Iterator[list[FakeHandle]]:
    """Three workers without Ray."""
    built = [FakeHandle(pid) for pid in (1, 2, 3)]
    yield built
    for handle in built:
        handle.close()


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has joined no Ray, as far as the package sees.

    What fails to connect must not shut down the Ray of the test session.
    """
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)


@pytest.fixture
def sources() -> Iterator[list[FakeSource]]:
    """Two sources of up to three workers each; their threads end with the test."""
    built = [FakeSource(f"worker {index}", 3) for index in range(2)]
    yield built
    for source in built:
        for handle in source.handles:
            handle.close()
