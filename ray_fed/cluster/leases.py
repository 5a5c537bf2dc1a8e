"""Ask the pool for a worker, and tell it of a loss."""

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
import uuid
from collections.abc import Generator, Mapping
from typing import Any

import ray.exceptions

import ray_fed.errors as errors
import ray_fed.plan as plan
from ray_fed.cluster import failures
from ray_fed.cluster.connection import LostWorkerError, Worker
from ray_fed.cluster.pool import COPY

_KEPT_S = 0.5
"""How long a worker is kept from its pool for what follows."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """A worker of one's own.

    Attributes:
        worker: to call.
        attempt: that begins with the lease; its end is not known.
        lost: the attempts before, under the same name.
    """

    worker: Worker
    attempt: plan.Attempt
    lost: tuple[plan.Attempt, ...]


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a subround asks for a worker with.

    Attributes:
        timeout_s: seconds from the lease after which the worker counts as hung; None:
            never.
        siblings: names subrounds that take about as long; empty: there are none.
        spare_after_s: seconds before a second worker is thought of; None: never.
        prefers: name of the worker to have, where that is free; empty: any will do.
    """

    timeout_s: float | None = None
    siblings: str = ""
    spare_after_s: float | None = None
    prefers: str = ""


class Handles:
    """Handles of workers, kept by a process that leases the same ones again.

    Without one, Ray forgets an actor, and takes milliseconds to find it again; and it
    tells the pool's process of each handle that travels.

    Args:
        limit: the least recently leased are dropped beyond.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._kept: collections.OrderedDict[tuple[Any, str], Any]
        self._kept = collections.OrderedDict()

    def of(self, pool: Any) -> dict[str, Any]:
        """Return those of the workers of a pool, by name."""
        pool_id = pool._actor_id  # noqa: SLF001 (what Ray knows it by)
        return {name: kept for (p, name), kept in self._kept.items() if p == pool_id}

    def keep(self, pool: Any, name: str, handle: Any) -> None:
        """Keep the handle of a worker of a pool, or of the pool itself, unnamed."""
        key = (pool._actor_id, name)  # noqa: SLF001
        self._kept[key] = handle
        self._kept.move_to_end(key)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)


@dataclasses.dataclass(frozen=True)
class _Kept:
    name: str
    scope: str
    outcome: plan.Outcome
    until_s: float


class Passing:
    """Workers that are kept a moment for what follows, which asks no pool for them.

    Args:
        pool: handle of the `PoolHost`; not owned.
        num_workers: of the pool. While more plans run, some may wait for a worker.
    """

    def __init__(self, pool: Any, num_workers: int) -> None:
        self._pool = pool
        self._num_workers = num_workers
        self._num_running = 0
        self._kept: collections.deque[_Kept] = collections.deque()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Have a plan run inside."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def keep(
        self, name: str, terms: Terms, begun_s: float, scope: str, outcome: plan.Outcome
    ) -> None:
        """Keep the worker of a plan that is done, or give it back.

        The pool takes the plan for one that runs, until it is told: a worker is not
        kept where that would make it count as hung, or others as fast.

        Args:
            name: of the plan.
            terms: of the plan.
            begun_s: when that was, or before, by the monotonic clock.
            scope: under which the worker was leased that had its result.
            outcome: of the plan.
        """
        until_s = time.monotonic() + _KEPT_S
        hangs_at_s = begun_s + (terms.timeout_s or math.inf)
        is_wanted = self._num_running + len(self._kept) >= self._num_workers
        if is_wanted or terms.siblings or until_s + _KEPT_S >= hangs_at_s:
            self._pool.release.remote(name, scope)
            return
        self._kept.append(_Kept(name, scope, outcome, until_s))
        loop = asyncio.get_running_loop()
        loop.call_later(_KEPT_S, lambda: self.give_back(time.monotonic()))

    def give_back(self, now_s: float = math.inf) -> None:
        """Give those back whose moment has passed; all of them, without an argument."""
        while self._kept and self._kept[0].until_s <= now_s:
            kept = self._kept.popleft()
            self._pool.release.remote(kept.name, kept.scope)

    def take(self, name: str, terms: Terms) -> plan.Attempt | None:
        """Return the first attempt of a plan that runs, on a kept worker; or None.

        The pool is told, and not waited for. It is to be asked, too, where the plan
        prefers a worker that may be idle there.
        """
        self.give_back(time.monotonic())
        preferred = [k for k in self._kept if k.outcome.worker == terms.prefers]
        is_idle_there = self._num_running + len(self._kept) <= self._num_workers
        if not self._kept or (terms.prefers and is_idle_there and not preferred):
            return None
        kept = (preferred or self._kept)[0]
        self._kept.remove(kept)
        self._pool.pass_on.remote(
            kept.name, kept.scope, name, terms.timeout_s, terms.siblings
        )
        found = kept.outcome
        return plan.Attempt(
            1,
            found.worker,
            found.worker_pid,
            found.node,
            fingerprint=found.fingerprint,
        )


async def passed(
    pool: Any, name: str, attempt: plan.Attempt | None, handles: Handles
) -> Lease | None:
    """Return the lease of what `Passing.take` returned; None where it is to be asked.

    Args:
        pool: handle of the `PoolHost`.
        name: of the plan.
        attempt: its first one, or None.
        handles: of workers that were leased before, and of that one.

    Raises:
        ClusterError: the pool is gone.
    """
    if attempt is None:
        return None
    handle = handles.of(pool).get(attempt.worker)
    if handle is None:
        handle = await _answer(pool.handle_of.remote(attempt.worker))
    if handle is None:
        return None
    handles.keep(pool, attempt.worker, handle)
    return Lease(Worker(handle, name, attempt.worker, attempt.node), attempt, ())


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
    attempt, handle, lost = await _answer(reply)
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


async def report(pool: Any, name: str, loss: LostWorkerError) -> None:
    """Tell the pool of the loss of a worker that is leased under a name."""
    failure = failures.Failure(failures.classify(loss.error), loss.detail)
    await pool.lost.remote(name, failure)


async def report_memory(
    pool: Any, lease: Lease, error: errors.WorkerMemoryError
) -> str:
    """Tell the pool to replace a worker whose work found no memory; return why.

    What fills its memory may well be its own, so the next attempt gets a fresh one.
    """
    attempt = lease.attempt
    detail = f"`{attempt.worker}` on node {attempt.node}: {error.message}"
    failure = failures.Failure(
        "memory", detail, error.location.client_index, error.cause_text
    )
    await pool.lost.remote(lease.worker.scope, failure)
    return detail


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
