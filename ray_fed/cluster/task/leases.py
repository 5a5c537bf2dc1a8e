"""Ask the pool for a worker, and tell it of a loss."""

import asyncio
import dataclasses
import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster import failures
from ray_fed.cluster.jobs import JobActor
from ray_fed.cluster.pool import actions
from ray_fed.cluster.pool.decisions import COPY
from ray_fed.cluster.task.connection import LostWorkerError, Worker
from ray_fed.plan import outcomes
from ray_fed.values.lru_cache import LruCache


@dataclasses.dataclass(frozen=True)
class Given:
    """A lease that the driver kept, and gives to a plan that begins.

    Attributes:
        attempt: the plan's first one.
        use: how many plans had the lease before, >= 1.
    """

    attempt: outcomes.Attempt
    use: int


@dataclasses.dataclass(frozen=True)
class Lease:
    """A worker of one's own.

    Attributes:
        worker: to call.
        attempt: that begins with the lease; its end is not known.
        lost: the attempts before, under the same name.
        used_s: since when, by the monotonic clock, where the lease was kept before.
        use: how many plans had it before.
    """

    worker: Worker
    attempt: outcomes.Attempt
    lost: tuple[outcomes.Attempt, ...] = ()
    used_s: float = -math.inf
    use: int = 0


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a subround asks for a worker with.

    Attributes:
        timeout_s: seconds from the lease after which the worker counts as hung; None:
            never.
        siblings: names subrounds that take about as long; empty: there are none.
        spare_after_s: seconds before a second worker is thought of; None: never.
        prefers: name of the worker to have, where that is free; empty: any will do.
        num_workers: how many it can use together, >= 1; it may get fewer.
    """

    timeout_s: float | None = None
    siblings: str = ""
    spare_after_s: float | None = None
    prefers: str = ""
    num_workers: int = 1


class Handles:
    """Handles of workers, kept by a process that leases the same ones again.

    Without one, Ray forgets an actor, and takes milliseconds to find it again; and it
    tells the pool's process of each handle that travels.

    Args:
        limit: the least recently leased are dropped beyond.
    """

    def __init__(self, limit: int = 64) -> None:
        self._kept: LruCache[tuple[Any, str], Any] = LruCache(limit)

    def of(self, pool: Any) -> dict[str, Any]:
        """Return those of the workers of a pool, by name."""
        pool_id = pool._actor_id  # noqa: SLF001 (what Ray knows it by)
        return {name: kept for (p, name), kept in self._kept.items() if p == pool_id}

    def keep(self, pool: Any, name: str, handle: Any) -> None:
        """Keep the handle of a worker of a pool, or of the pool itself, unnamed."""
        key = (pool._actor_id, name)  # noqa: SLF001
        self._kept.put(key, handle)


async def resumed(
    pool: Any, name: str, given: Given | None, handles: Handles
) -> Lease | None:
    """Return a lease that the driver kept; None where the pool is to be asked for one.

    Args:
        pool: handle of the `PoolHost`.
        name: that the worker was leased under.
        given: by the driver, or None.
        handles: of workers that were leased before, and of that one.

    Raises:
        ClusterError: the pool is gone.
    """
    if given is None:
        return None
    attempt = given.attempt
    handle = handles.of(pool).get(attempt.worker)
    if handle is None:
        handle = await _answer(pool.handle_of.remote(attempt.worker))
    if handle is None:  # its worker was lost before this use, which is not to blame
        gone = actions.Failure("crash", f"`{attempt.worker}` is gone.")
        await _answer(pool.lost.remote(name, gone, 0.0))
        return None
    handles.keep(pool, attempt.worker, handle)
    worker = Worker(handle, name, attempt.worker, attempt.node)
    return Lease(worker, attempt, used_s=time.monotonic(), use=given.use)


async def lease(
    pool: Any, name: str, terms: Terms | None = None, handles: Handles | None = None
) -> Lease:
    """Lease a worker under a name, which is the scope of values on it too.

    Args:
        pool: handle of the `PoolHost`.
        name: of a subround, or of another use; unique.
        terms: None: those of what has no time limit and no siblings.
        handles: of workers that were leased before; None keeps none.

    Raises:
        RetryBudgetError: workers were lost under the name too often, or none starts.
        ResourceError: the cluster has no room for the least number of workers.
        DeadlineError: they hung too often.
        ClusterError: the pool is gone.
    """
    terms, handles = terms or Terms(), handles or Handles()
    known = handles.of(pool)
    reply = pool.lease.remote(
        name, terms.timeout_s, terms.siblings, tuple(known), terms.prefers
    )
    found = await _asked(reply, name, known)
    handles.keep(pool, found.worker.name, found.worker.handle)
    return found


async def lease_further(
    pool: Any, name: str, terms: Terms, handles: Handles
) -> list[Lease]:
    """Lease workers beside the first of a subround: at once, those that are idle.

    Args:
        pool: handle of the `PoolHost`.
        name: under which the subround has its first one.
        terms: of the subround; with `num_workers` of one the pool is not asked.
        handles: of workers that were leased before.

    Raises:
        ClusterError: the pool is gone.
    """
    count = terms.num_workers - 1
    if not count:
        return []
    known = handles.of(pool)
    reply = pool.lease_further.remote(name, count, terms.timeout_s, tuple(known))
    further: list[Lease] = []
    for scope, attempt, handle in await _answer(reply):
        found = known[attempt.worker] if handle is None else handle
        handles.keep(pool, attempt.worker, found)
        worker = Worker(found, scope, attempt.worker, attempt.node)
        further.append(Lease(worker, attempt))
    return further


async def lease_spare(pool: Any, name: str, terms: Terms) -> Lease:
    """Lease a second worker for a subround, if ever it straggles.

    Args:
        pool: handle of the `PoolHost`.
        name: under which the subround has its first one.
        terms: `spare_after_s` is not None.

    Raises:
        ClusterError: the subround ended before, or the pool is gone.
    """
    await asyncio.sleep(terms.spare_after_s or 0.0)
    reply = pool.lease_spare.remote(name, terms.timeout_s)
    return await _asked(reply, name + COPY, {})


async def _asked(reply: Any, scope: str, known: Mapping[str, Any]) -> Lease:
    answer = await _answer(reply)
    if answer is None:
        raise errors.ClusterError(f"Expected a worker for `{scope}`, found it over.")
    attempt, handle, lost = answer
    handle = known[attempt.worker] if handle is None else handle
    return Lease(Worker(handle, scope, attempt.worker, attempt.node), attempt, lost)


async def _answer(reply: Any) -> Any:
    """Return what the pool answers.

    Raises:
        ClusterError: the pool is gone.
        Exception: what it raised.
    """
    try:
        return await reply
    except ray.exceptions.RayTaskError as error:
        raise failures.unwrap(error) from None
    except ray.exceptions.RayActorError as error:
        raise errors.ClusterError(
            "Expected a pool of workers, found it gone: close the context and make"
            f" another. {failures.describe(error)}"
        ) from error


async def report(pool: Any, loss: LostWorkerError, lease: Lease | None = None) -> None:
    """Tell the pool of the loss of a leased worker.

    Args:
        pool: handle of the `PoolHost`.
        loss: of the worker; its scope is the name of the lease.
        lease: of a subround; None, or another's scope: it was never kept.
    """
    failure = actions.Failure(failures.classify(loss.error), loss.detail)
    used = () if lease is None or lease.worker.scope != loss.scope else _used(lease)
    await pool.lost.remote(loss.scope, failure, *used)


def _used(lease: Lease) -> tuple[float, int]:
    """Return how long ago the use of a lease began, and how many were before."""
    return time.monotonic() - lease.used_s, lease.use


async def report_memory(
    pool: Any, lease: Lease, error: errors.WorkerMemoryError
) -> str:
    """Tell the pool to replace a worker whose work found no memory; return why.

    What fills its memory may well be its own, so the next attempt gets a fresh one.
    """
    attempt = lease.attempt
    detail = f"`{attempt.worker}` on node {attempt.node}: {error.message}"
    failure = actions.Failure(
        "memory", detail, error.location.client_index, error.cause_text
    )
    await pool.lost.remote(lease.worker.scope, failure, *_used(lease))
    return detail


class PooledWorker:
    """A worker for as long as the pool lives: one that is lost is replaced.

    What is run again after a loss has the budgets of a subround; what ended well
    starts the next with whole ones.

    Args:
        pool: the `PoolHost`; not owned.
    """

    def __init__(self, pool: JobActor) -> None:
        self._pool = pool
        self._name = f"held-{uuid.uuid4().hex[:8]}"

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        """Return a worker, after the loss of the one before; see `WorkerSource`."""
        job = self._pool.job
        while True:
            with job.watched():
                if loss is not None:
                    await report(self._pool, loss)
                found = (await lease(self._pool, self._name)).worker
            handle = JobActor(found.handle, job)
            worker = Worker(handle, found.scope, found.name, found.node, job)
            try:
                await worker.call("begin")
            except LostWorkerError as error:
                loss = error
            else:
                return worker

    async def settle(self) -> None:
        """Give the next work whole budgets."""
        with self._pool.job.watched():
            await self._pool.forgive.remote(self._name)
