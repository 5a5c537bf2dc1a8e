"""Performs what the pool decides, and wakes those that wait for it."""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeAlias

import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster import failures, metrics
from ray_fed.cluster.actors.pool_cluster import ClusterThread
from ray_fed.cluster.actors.worker_actors import WorkerActors
from ray_fed.cluster.pool import actions
from ray_fed.cluster.pool.actions import Failure
from ray_fed.cluster.pool.attempts import AttemptLog
from ray_fed.cluster.pool.decisions import COPY, Pool
from ray_fed.cluster.pool.shortage import LOOK_S
from ray_fed.plan import outcomes
from ray_fed.plan.fingerprint import WorkerDescription

Lease: TypeAlias = tuple[outcomes.Attempt, Any, tuple[outcomes.Attempt, ...]]
"""The attempt that begins, the handle of its worker, and those that were lost.

None stands for a handle that the caller has."""

_REPORT_S = 5.0
"""Ray drops a gauge that was not set for some twenty seconds."""

_LEAVE_S = 5.0
"""How long a worker may take to end what waits for its end, before it is killed."""

CANCELLED = "The subround was cancelled."


class PoolLoop:
    """Starts workers, hands them out, ends them and asks for nodes, as a pool decides.

    Args:
        pool: that decides; owned.
        workers: the actors of its workers; owned.
        cluster: that is looked at; owned.

    Attributes:
        leased: the worker of each lease, by the name of the lease.
        log: what became of the attempts at each subround.
        is_closed: whether the pool has ended, or is about to.
    """

    def __init__(
        self, pool: Pool, workers: WorkerActors, cluster: ClusterThread
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._cluster = cluster
        self.leased: dict[str, str] = {}
        self.log = AttemptLog()
        self.is_closed = False
        self._waiting: dict[int, tuple[str, asyncio.Future[Lease]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = -math.inf
        self._placed: set[asyncio.Task[Any]] = set()  # those of workers that live
        self._last_told = (0, 0, 0, False)  # as of the latest `act`
        self._changed = asyncio.Event()

    def act(self) -> None:
        """Perform what the pool decides now, and set the time of its next decision."""
        for action in self._pool.decide(time.monotonic()):
            self._perform(action)
        self._set_timer()
        self._tell()

    async def look(self) -> None:
        """Look at the nodes of the cluster, and follow what changed."""
        await self._survey()
        self.act()

    def fresh_s(self) -> float:
        """Return for how many seconds the cluster need not be looked at.

        A pool that has all its workers hears of a loss by itself, and looks for nodes
        that go once in a while.
        """
        looked_again_at = self._looked_at + LOOK_S if self._pool.is_full else -math.inf
        return max(0.0, looked_again_at - time.monotonic())

    async def read_progress(self) -> outcomes.Progress:
        """Return how far the workers are; see `PoolHost.await_ready`."""
        missing = self._pool.num_unplaced(time.monotonic())
        needed = await self._cluster.describe_need(missing) if missing else ""
        return self._pool.num_ready, self._pool.num_workers, needed or ""

    async def change(self) -> None:
        """Wait until a number of workers, or whether somebody waits, is another.

        Where the pool ends, too.
        """
        if not self.is_closed:
            await self._changed.wait()

    async def wait_for(self, scope: str, ticket: int) -> Lease:
        """Return what a ticket of the pool is given, once it is.

        Args:
            scope: name of the lease.
            ticket: of the pool; withdrawn where the caller is cancelled.

        Raises:
            RetryBudgetError: the subround failed too often, or was ended; or no worker
                starts.
            ResourceError: the cluster has no room for the least number of workers.
            DeadlineError: it hung too often.
        """
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = (scope, future)
        self.act()
        try:
            return await future
        finally:
            self._waiting.pop(ticket, None)
            self._pool.withdraw(ticket)

    def withdraw(self, scope: str) -> bool:
        """Refuse what a lease waits for; return whether it did wait."""
        found = [t for t, (name, _) in self._waiting.items() if name == scope]
        for ticket in found:
            self._pool.withdraw(ticket)
            _, future = self._waiting.pop(ticket)
            if not future.done():
                future.set_exception(errors.RetryBudgetError(CANCELLED, "fatal"))
        return bool(found)

    async def lose(self, worker: str, failure: Failure) -> None:
        """Take note that a worker is gone or useless; it is ended and replaced."""
        # Its node may be gone, or going: that decides the class, and where to go on.
        await self._survey()
        counted = self._pool.lost(worker, failure.failure_class, failure.detail)
        failure = dataclasses.replace(failure, failure_class=counted)
        self.log.lost(worker, failure, time.monotonic())
        self._workers.end(worker)
        self.act()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine beside all else; the loop holds it until it ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def report(self) -> None:
        """Set Ray's metric of ready workers: now and then, as Ray forgets it soon."""
        gauge = metrics.workers_ready()
        while not self.is_closed:
            gauge.set(self._pool.num_ready)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await self.change()
        gauge.set(0)

    async def close(self) -> None:
        """End all workers, and ask for no nodes any more."""
        if self._timer is not None:
            self._timer.cancel()
        self.is_closed = True
        self._changed.set()
        for scope in [scope for scope, _ in self._waiting.values()]:
            self.withdraw(scope)
        self._workers.leave_all()
        if self._placed:
            await asyncio.wait(self._placed, timeout=_LEAVE_S)
        self._workers.end_all()
        await self._cluster.request(0)
        self._cluster.close()

    async def _survey(self) -> None:
        self._looked_at = time.monotonic()
        nodes = await self._cluster.read_nodes()
        if nodes is not None:
            self._pool.survey(nodes)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._pool.next_deadline_s()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self.act)

    def _tell(self) -> None:
        pool = self._pool
        waiting = pool.num_unplaced(time.monotonic())
        now = (pool.num_ready, pool.num_workers, waiting, pool.is_awaited)
        if now != self._last_told:
            self._last_told = now
            self._changed.set()  # wakes those that wait now
            self._changed.clear()

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.Start():
                self.spawn(self._start(action))
            case actions.Stop():
                hang = Failure("hang", action.detail)
                self.log.lost(action.worker, hang, time.monotonic())
                self._workers.end(action.worker)
            case actions.Grant():
                self._grant(action)
            case actions.Refuse():
                self._refuse(action)
            case actions.Look():
                self.spawn(self.look())
            case actions.Request():
                self.spawn(self._cluster.request(action.count))

    def _grant(self, action: actions.Grant) -> None:
        scope, future = self._waiting.get(action.ticket, ("", None))
        if future is None or future.done():
            self._pool.give_back(action.worker)
            return
        # Noted here, so that whoever ends the subround finds what it was given.
        self.leased[scope] = worker = action.worker
        name = scope.removesuffix(COPY)
        attempt = self._workers.begin_attempt(worker, action.attempt)
        begun = self.log.granted(name, attempt, time.monotonic())
        handle = self._workers.handle_of(worker)
        future.set_result((begun, handle, self.log.lost_of(name)))

    def _refuse(self, action: actions.Refuse) -> None:
        scope, future = self._waiting.get(action.ticket, ("", None))
        if future is None or future.done():
            return
        message, failure_class = action.message, action.failure_class
        if failure_class == actions.SHORTAGE:  # of the cluster, whoever asks
            error: Exception = errors.ResourceError(message)
        else:
            error = self.log.final_error(scope, message, failure_class)
        future.set_exception(error)

    async def _start(self, action: actions.Start) -> None:
        worker = action.worker
        handle = self._workers.start(worker, action.node)
        try:
            await handle.ping.remote()
            self._note_placed(worker)
            described: WorkerDescription | None = await handle.load.remote()
            if described is None or not self._admit(worker, described):
                return
            await handle.hold.remote()  # fails when the worker is gone
        except ray.exceptions.RayError as error:
            if worker in self._workers:
                node = self._workers.address_of(worker)
                detail = f"`{worker}` on node {node}: {failures.describe(error)}"
                failure = Failure(failures.classify(error), detail)
                if worker not in self.leased.values():  # nobody is to be given it
                    self._pool.lost(worker, failure.failure_class, detail)
                await self.lose(worker, failure)

    def _note_placed(self, worker: str) -> None:
        task = asyncio.current_task()
        if worker in self._workers and task is not None:
            self._pool.placed(worker)
            self._placed.add(task)
            task.add_done_callback(self._placed.discard)
            self._tell()

    def _admit(self, worker: str, described: WorkerDescription) -> bool:
        """Take a worker into the pool; refuse one that is not as it should be."""
        if worker not in self._workers:  # ended while it answered
            return False
        refusal = self._workers.admit(worker, described)
        if not refusal:
            self._pool.ready(worker, described.node)
        else:
            self._pool.bar(worker, described.node, refusal)
            self._workers.end(worker)
        self.act()
        return not refusal and worker in self._workers
