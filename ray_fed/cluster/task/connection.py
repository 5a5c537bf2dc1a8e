"""A use of the pool's workers: one worker at a time, another one after a loss.

    work --run--> WorkerConnection --lease--> WorkerSource
       ^                |
       +--- Worker -----+      the one of now; work that loses it is run again on the
                               next, where the source has one to give

Inside a subround the source has none: the subround is what is run again.
"""

import asyncio
import collections
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster import failures
from ray_fed.cluster.jobs import Job

_T = TypeVar("_T")

_DROPPED_TOGETHER = 64
"""Values that nobody refers to any more are dropped so many at once."""


class LostWorkerError(errors.ClusterError):
    """A worker is gone; whoever leased it reports it to the pool.

    Attributes:
        scope: of the use that lost it.
        error: what Ray said.
        detail: which worker on which node, and what Ray said, in words.
    """

    def __init__(self, worker: "Worker", error: BaseException) -> None:
        super().__init__(f"Expected `{worker.name}` to answer, found it gone.")
        self.scope = worker.scope
        self.error = error
        self.detail = (
            f"`{worker.name}` on node {worker.node}: {failures.describe(error)}"
        )


class Worker:
    """One process that serves a connection, until it is lost.

    Args:
        handle: of the actor.
        scope: names the values of this use on the actor; unique.
        name: for errors.
        node: for errors.
        job: that the handle is of, in a process that may leave it; None: in a task.

    Attributes:
        found_no_memory: whether work of this use did not find the memory that it needs.
    """

    def __init__(
        self, handle: Any, scope: str, name: str, node: str, job: Job | None = None
    ) -> None:
        self.handle = handle
        self._watched: Callable[[], contextlib.AbstractContextManager[None]]
        self._watched = contextlib.nullcontext if job is None else job.watched
        self.scope = scope
        self.name = name
        self.node = node
        self.found_no_memory = False

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor, in this scope, and return its result.

        Raises:
            LostWorkerError: the worker is gone.
            ContextStateError: this process has left the Ray that it is on.
            Exception: what the method raised.
        """
        try:
            with self._watched():
                return await getattr(self.handle, method).remote(self.scope, *args)
        except ray.exceptions.RayError as error:
            # The argument of a call may have been lost, not the worker.
            is_task = isinstance(error, ray.exceptions.RayTaskError)
            cause = failures.unwrap(error) if is_task else error
            if failures.is_loss(cause):
                raise LostWorkerError(self, cause) from error
            self.found_no_memory = isinstance(cause, errors.WorkerMemoryError)
            raise cause from None


class WorkerSource(Protocol):
    """Where a connection has its workers from."""

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        """Return a worker whose scope is open and empty.

        Args:
            loss: of the worker before; None for the first.

        Raises:
            ClusterError: there is none, or no more.
        """
        ...

    async def settle(self) -> None:
        """Take note that work which lost a worker has ended well on another."""
        ...


class WorkerConnection:
    """Runs work on one worker, and names the values that are made there.

    Args:
        source: of the worker; not owned.
    """

    def __init__(self, source: WorkerSource) -> None:
        self._source = source
        self._leased: asyncio.Task[Worker] | None = None
        self._keys = itertools.count()
        self._dropped: collections.deque[int] = collections.deque()

    def new_key(self) -> int:
        """Return a name for a value that no worker of this connection has yet."""
        return next(self._keys)

    def drop(self, key: int) -> None:
        """Let a value go, some time after all work that was begun before."""
        self._dropped.append(key)

    async def run(self, work: Callable[[Worker], Coroutine[Any, Any, _T]]) -> _T:
        """Run work on the worker; again, on the next one, if that one is lost.

        Raises:
            ClusterError: the source had no other worker to give.
            Exception: what the work raised.
        """
        if self._leased is None or has_failed(self._leased):
            self._leased = asyncio.ensure_future(self._source.lease(None))
        leased, is_first = self._leased, True
        while True:
            worker = await asyncio.shield(leased)
            try:
                self._send_dropped(worker)
                result = await work(worker)
            except LostWorkerError as loss:
                leased, is_first = self._replace(leased, loss), False
            else:
                if not is_first:
                    await self._source.settle()
                return result

    def _replace(
        self, lost: asyncio.Task[Worker], loss: LostWorkerError
    ) -> asyncio.Task[Worker]:
        """Return the lease after a lost one; all work that lost it shares the next."""
        if self._leased is lost:
            self._leased = asyncio.ensure_future(self._source.lease(loss))
        return self._leased or lost

    def _send_dropped(self, worker: Worker) -> None:
        if len(self._dropped) >= _DROPPED_TOGETHER:
            keys = [self._dropped.popleft() for _ in range(len(self._dropped))]
            worker.handle.drop.remote(worker.scope, keys)


def has_failed(task: asyncio.Task[Any]) -> bool:
    """Return whether a task ended without a result, so that it may be tried again."""
    return task.done() and (task.cancelled() or task.exception() is not None)
