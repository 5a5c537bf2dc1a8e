"""The light actor that hosts the pool: what subrounds ask it for, and tell it."""

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import Collection, Sequence
from typing import Any

import ray.exceptions
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.cluster.actors.pool_cluster import Cluster, ClusterThread
from ray_fed.cluster.actors.pool_loop import CANCELLED, Lease, PoolLoop
from ray_fed.cluster.actors.worker_actors import WorkerActors
from ray_fed.cluster.pool import actions
from ray_fed.cluster.pool.actions import Failure
from ray_fed.cluster.pool.decisions import COPY, FURTHER, Pool
from ray_fed.cluster.pool.shortage import LOOK_S
from ray_fed.cluster.pool.stragglers import Stragglers
from ray_fed.config import Config
from ray_fed.plan import outcomes
from ray_fed.plan.fingerprint import Versions

_ABANDONED_S = 30.0
"""How long work that nobody waits for may keep its worker before it is ended."""

_ENDED = 1024
"""How many subrounds are remembered that have ended, for whoever still drives one."""


class PoolHost:
    """Hosts a `Pool`: starts workers, hands them out, replaces those that die.

    Args:
        config: of the pool.
        size: of the pool.
        driver: what workers have to agree with.
        cluster: that workers are started on.
        label: what Ray's lists and logs call this pool and its calls.
    """

    def __init__(
        self,
        config: Config,
        size: actions.Size,
        driver: Versions,
        cluster: Cluster,
        label: str = "ray_fed pool",
    ) -> None:
        self._label = label
        self._reports = False
        found, workers = config.stragglers, config.workers
        stragglers = Stragglers(found.factor, found.min_s)
        budgets = dict(config.retry)
        self._pool = Pool(size, budgets, workers.start_timeout_s, stragglers)
        self._workers = WorkerActors(cluster, driver, allow_mixed=workers.allow_mixed)
        self._loop = PoolLoop(self._pool, self._workers, ClusterThread(cluster))
        self._leased = self._loop.leased
        self._log = self._loop.log
        self._ended: collections.deque[str] = collections.deque(maxlen=_ENDED)

    @override
    def __repr__(self) -> str:
        return self._label

    async def begin_round(self) -> tuple[int, float]:
        """Look at the cluster, follow what changed, and return how many workers it has.

        Returns:
            (num_workers, valid_s): workers that are ready or start, at least 1; seconds
            for which that holds.
        """
        if not self._reports:
            self._reports = True
            self._loop.spawn(self._loop.report())
        if not self._loop.fresh_s():
            await self._loop.look()
        return max(1, self._pool.num_workers), self._loop.fresh_s()

    async def await_ready(self, seen: outcomes.Progress | None) -> outcomes.Progress:
        """Return how far the workers are, once that is not what was seen before.

        The same again where nothing changes for a while: nobody need cancel this.

        Args:
            seen: what was returned before; None for an answer at once.
        """
        if await self._loop.read_progress() == seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._loop.change()
        return await self._loop.read_progress()

    async def lease(
        self,
        subround: str,
        timeout_s: float | None = None,
        siblings: str = "",
        known: Collection[str] = (),
        prefers: str = "",
    ) -> Lease:
        """Return a worker of the caller's own, once one is free.

        A subround that asks again, because its coordinator died, loses what it had;
        that is a crash of its own.

        Args:
            subround: its name.
            timeout_s: seconds from the lease until the worker counts as hung and is
                ended; None: never.
            siblings: names subrounds that take about as long; empty: there are none.
            known: workers whose handles the caller has.
            prefers: the worker to have, where that is idle.

        Raises:
            RetryBudgetError, ResourceError, DeadlineError: see `PoolLoop.wait_for`.
        """
        if subround in self._ended:
            raise errors.RetryBudgetError(CANCELLED, "fatal")
        if self._loop.withdraw(subround) or subround in self._leased:
            detail = "the process that drove it is gone"
            self._pool.failed(subround, "crash", detail)
            self._abandon(subround, Failure("crash", detail))
        self._loop.withdraw(subround + COPY)
        for scope in (subround + COPY, *self._further(subround)):
            self._abandon(scope, None)
        self._log.asked(subround, time.monotonic())
        ticket = self._pool.ask(subround, timeout_s or math.inf, siblings, prefers)
        begun, handle, lost = await self._loop.wait_for(subround, ticket)
        return begun, None if begun.worker in known else handle, lost

    async def lease_spare(
        self, subround: str, timeout_s: float | None = None
    ) -> Lease | None:
        """Return a second worker, once the subround straggles and one is idle.

        None where it ends before.
        """
        if subround not in self._leased:
            return None
        ticket = self._pool.ask_spare(subround, timeout_s or math.inf)
        with contextlib.suppress(errors.RetryBudgetError):
            return await self._loop.wait_for(subround + COPY, ticket)
        return None

    async def lease_further(
        self,
        subround: str,
        count: int,
        timeout_s: float | None = None,
        known: Collection[str] = (),
    ) -> list[tuple[str, outcomes.Attempt, Any]]:
        """Return workers beside the one that a subround has: those that are idle now.

        Args:
            subround: its name.
            count: at most so many; there may be none.
            timeout_s: see `lease`.
            known: workers whose handles the caller has.

        Returns:
            For each: name of its lease, attempt that begins, handle (see `Lease`).
        """
        if subround not in self._leased:
            return []
        now_s = time.monotonic()
        deadline_s = now_s + (timeout_s or math.inf)
        found: list[tuple[str, outcomes.Attempt, Any]] = []
        for worker in self._pool.lease_idle(subround, count, deadline_s):
            scope = f"{subround}{FURTHER}{len(found) + 2}"
            self._leased[scope] = worker
            attempt = self._workers.begin_attempt(worker, 1)
            begun = self._log.granted(subround, attempt, now_s)
            handle = None if worker in known else self._workers.handle_of(worker)
            found.append((scope, begun, handle))
        self._loop.act()
        return found

    async def release_further(self, subround: str) -> None:
        """Take back the further workers of a subround, which have done their work."""
        for scope in self._further(subround):
            self._give_back(scope)
        self._loop.act()

    async def lost(
        self, scope: str, failure: Failure, used_ago_s: float = math.inf, use: int = 0
    ) -> None:
        """Take note that a worker of a subround died, or is to be replaced.

        What its other workers have done is lost with it: they are taken back.

        Args:
            scope: name of the lease.
            failure: of the worker.
            used_ago_s: how long ago a kept lease came to be used again: a loss before
                that is not the subround's.
            use: how many plans had the lease before.
        """
        subround = scope.partition(FURTHER)[0]
        worker = self._leased.pop(scope, None)
        used_s = time.monotonic() - used_ago_s
        if scope == subround and self._log.lost_at_s(subround) < used_s:
            self._pool.forget(subround)
            self._log.forget(subround)
        elif worker is not None:
            await self._loop.lose(worker, failure)
        self._log.count_loss_from(subround, used_s, use)
        others = [] if scope.endswith(COPY) else [subround, *self._further(subround)]
        for other in others:
            self._abandon(other, None)

    async def release(self, subround: str, scope: str) -> None:
        """Take back the worker that brought the result of a subround, and forget that.

        Args:
            subround: that is done; the scopes of its worker are free.
            scope: the name under which that worker was leased; if there is another
                one, it is taken back once it has ended what it does.
        """
        self._pool.finish(subround, time.monotonic())
        self._give_back(scope)
        await self.end(subround)

    async def note_uses(
        self, uses: Sequence[actions.UseBegan | actions.UseEnded]
    ) -> None:
        """Take note of what leases that are kept were used for, in order."""
        now_s = time.monotonic()
        for use in uses:
            worker, at_s = self._leased.get(use.subround), now_s - use.ago_s
            if worker is None or worker not in self._workers:
                continue
            if isinstance(use, actions.UseEnded):
                self._pool.end_use(worker, at_s)
                continue
            timeout_s = use.timeout_s or math.inf
            self._pool.begin_use(worker, at_s, timeout_s, use.siblings)
            self._log.begin_use(worker, at_s)
        self._loop.act()

    async def when_awaited(self, *, known: bool, timeout_s: float) -> bool:
        """Return whether somebody waits for a worker, once that is not `known`.

        Args:
            known: what was returned before.
            timeout_s: seconds after which it is returned, changed or not.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._pool.is_awaited == known and not self._loop.is_closed:
                    await self._loop.change()
        return self._pool.is_awaited

    async def handle_of(self, worker: str) -> Any:
        """Return the handle of a worker; None where it is gone."""
        return self._workers.handle_of(worker)

    async def forgive(self, subround: str) -> None:
        """Forget the failures of a subround that goes on; it keeps its worker."""
        self._pool.forget(subround)

    async def end(self, subround: str) -> None:
        """Take back what a subround still has, for good, and forget it."""
        self._ended.append(subround)
        for name in (subround, subround + COPY, *self._further(subround)):
            self._loop.withdraw(name)
            self._abandon(name, None, for_good=True)
        self._pool.forget(subround)
        self._log.forget(subround)
        self._loop.act()

    def _further(self, subround: str) -> list[str]:
        """Return the names of a subround's further leases."""
        return [scope for scope in self._leased if scope.startswith(subround + FURTHER)]

    def _give_back(self, scope: str) -> None:
        """Take back a worker that has done its work."""
        worker = self._leased.pop(scope, None)
        if worker is not None and worker in self._workers:
            self._log.done(worker)
            self._pool.give_back(worker)

    def _abandon(
        self, subround: str, failure: Failure | None, *, for_good: bool = False
    ) -> None:
        """Take back a worker that may still be at work: once it has ended that.

        Args:
            subround: that has it, if it has one.
            failure: why, for its log; None where it is no failure.
            for_good: whether nobody will have the name again.
        """
        worker = self._leased.pop(subround, None)
        if worker is None or worker not in self._workers:
            return
        if failure is None:
            self._log.done(worker)
        else:
            self._log.lost(worker, failure, time.monotonic())
        self._pool.abandon(worker, time.monotonic() + _ABANDONED_S)
        self._loop.spawn(self._settle(worker, subround, for_good=for_good))

    async def _settle(self, worker: str, subround: str, *, for_good: bool) -> None:
        handle = self._workers.handle_of(worker)
        with contextlib.suppress(ray.exceptions.RayError):  # `_start` sees it, too
            # Before anyone has that name again.
            await handle.free.remote(subround, for_good=for_good)
            await handle.settle.remote()
            self._pool.give_back(worker)
            self._loop.act()

    async def forget_clients(self, tokens: list[str]) -> None:
        """Have workers drop what they keep of clients whose sources are gone."""
        self._workers.forget_clients(tokens)

    async def close(self) -> None:
        """End all workers, and ask for no nodes any more."""
        await self._loop.close()
