"""Ask the pool for a worker, and tell it of a loss."""

import dataclasses
import uuid
from typing import Any

import ray.exceptions

from ray_fed.cluster import failures
from ray_fed.cluster.connection import LostWorkerError, Worker


@dataclasses.dataclass(frozen=True)
class Lease:
    """A worker of one's own.

    Attributes:
        worker: to call.
        attempt: 1 for the first lease of a name.
        pid: the worker's process.
    """

    worker: Worker
    attempt: int
    pid: int


async def lease(pool: Any, name: str) -> Lease:
    """Lease a worker under a name, which is the scope of values on it too.

    Args:
        pool: handle of the `PoolHost`.
        name: of a subround, or of another use; unique.

    Raises:
        RetryBudgetError: workers were lost under the name too often, or none starts.
    """
    try:
        worker, handle, attempt, pid, node = await pool.lease.remote(name)
    except ray.exceptions.RayTaskError as error:
        raise failures.unwrap(error) from None
    return Lease(Worker(handle, name, worker, node), attempt, pid)


async def report(pool: Any, name: str, loss: LostWorkerError) -> None:
    """Tell the pool of the loss of a worker that is leased under a name."""
    await pool.lost.remote(name, failures.classify(loss.error), loss.detail)


class PooledWorker:
    """A worker for as long as the pool lives: one that is lost is replaced.

    What is run again after a loss has the budgets of a subround; what ended well
    starts the next with whole ones.

    Args:
        pool: handle of the `PoolHost`; not owned.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._name = f"held-{uuid.uuid4().hex[:8]}"

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        """Return a worker, after the loss of the one before; see `WorkerSource`."""
        while True:
            if loss is not None:
                await report(self._pool, self._name, loss)
            found = await lease(self._pool, self._name)
            try:
                await found.worker.call("begin")
            except LostWorkerError as error:
                loss = error
            else:
                return found.worker

    async def settle(self) -> None:
        """Give the next work whole budgets."""
        await self._pool.forgive.remote(self._name)
