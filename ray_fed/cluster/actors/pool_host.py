"""The light actor that hosts the pool: performs what the pool decides."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

import ray
import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster import failures
from ray_fed.cluster.pool import actions
from ray_fed.cluster.pool.actions import Failure
from ray_fed.cluster.pool.attempts import AttemptLog
from ray_fed.cluster.pool.decisions import COPY, FURTHER, Pool
from ray_fed.cluster.pool.placement import Node
from ray_fed.cluster.pool.shortage import LOOK_S
from ray_fed.cluster.pool.stragglers import Stragglers
from ray_fed.config import Config
from ray_fed.plan import outcomes
from ray_fed.plan.fingerprint import (
    Fingerprint,
    Versions,
    WorkerDescription,
    describe_difference,
)

_logger = logging.getLogger(__name__)

_Lease: TypeAlias = tuple[outcomes.Attempt, Any, tuple[outcomes.Attempt, ...]]
"""The attempt that begins, the handle of its worker, and those that were lost.

None stands for a handle that the caller has."""

_ABANDONED_S = 30.0
"""How long work that nobody waits for may keep its worker before it is ended."""

_ENDED = 1024
"""How many subrounds are remembered that have ended, for whoever still drives one."""

_CANCELLED = "The subround was cancelled."


class Cluster(Protocol):
    """What a pool needs of a cluster; may block, but not for long."""

    def read_nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        ...

    def start_worker(self, node: str | None) -> Any:
        """Start the actor of one worker, without waiting for it.

        Args:
            node: Ray's id of its node; None: any that has room.
        """
        ...

    def request(self, count: int) -> None:
        """Ask for a cluster that holds so many workers; 0: ask for none any more."""
        ...


class PoolHost:
    """Hosts a `Pool`: starts workers, hands them out, replaces those that die.

    Args:
        config: of the pool.
        size: of the pool.
        driver: what workers have to agree with.
        cluster: that workers are started on.
    """

    def __init__(
        self, config: Config, size: actions.Size, driver: Versions, cluster: Cluster
    ) -> None:
        self._cluster = cluster
        self._driver = driver
        retry = config.retry
        budgets: dict[actions.FailureClass, int] = {
            "crash": retry.crash,
            "preemption": retry.preemption,
            "memory": retry.memory,
            "hang": retry.hang,
        }
        self._allow_mixed = config.workers.allow_mixed
        found = config.stragglers
        self._pool = Pool(
            size,
            budgets,
            config.workers.start_timeout_s,
            Stragglers(found.factor, found.min_s),
        )
        self._handles: dict[str, Any] = {}
        self._described: dict[str, WorkerDescription] = {}
        self._fingerprint: Fingerprint | None = None
        self._waiting: dict[int, tuple[str, asyncio.Future[_Lease]]] = {}
        self._leased: dict[str, str] = {}  # the worker of each subround that runs
        self._ended: collections.deque[str] = collections.deque(maxlen=_ENDED)
        self._log = AttemptLog()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = -math.inf
        self._last_told = (0, 0, False)  # as of the latest `_act`
        self._changed = asyncio.Event()
        # One thread, so that what is asked of the cluster stays in order.
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    async def begin_round(self) -> tuple[int, float]:
        """Look at the cluster, follow what changed, and return how many workers it has.

        Those that start are counted; at least one. And for how many seconds that holds:
        a pool that has all its workers hears of a loss by itself, and looks for nodes
        that go once in a while.
        """
        if not self._holds_s():
            await self._look()
        return max(1, self._pool.num_workers), self._holds_s()

    async def await_ready(self, seen: tuple[int, int] | None) -> tuple[int, int]:
        """Return how many workers are ready, once that is not what was seen before.

        Args:
            seen: what was returned before; None for an answer at once.

        Returns:
            (num_ready, num_workers): workers that are ready; those and the ones that
            are starting.
        """
        while self._count_ready() == seen:
            await self._changed.wait()
        return self._count_ready()

    def _count_ready(self) -> tuple[int, int]:
        return self._pool.num_ready, self._pool.num_workers

    def _holds_s(self) -> float:
        looked_again_at = self._looked_at + LOOK_S if self._pool.is_full else -math.inf
        return max(0.0, looked_again_at - time.monotonic())

    async def lease(
        self,
        subround: str,
        timeout_s: float | None = None,
        siblings: str = "",
        known: Collection[str] = (),
        prefers: str = "",
    ) -> _Lease:
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
            RetryBudgetError: the subround failed too often, or was ended; or no worker
                starts.
            ResourceError: the cluster has no room for the least number of workers.
            DeadlineError: it hung too often.
        """
        if subround in self._ended:
            raise errors.RetryBudgetError(_CANCELLED, "fatal")
        if self._withdraw(subround) or subround in self._leased:
            detail = "the process that drove it is gone"
            self._pool.failed(subround, "crash", detail)
            self._abandon(subround, Failure("crash", detail))
        self._withdraw(subround + COPY)
        for scope in (subround + COPY, *self._further(subround)):
            self._abandon(scope, None)
        self._log.asked(subround, time.monotonic())
        ticket = self._pool.ask(subround, timeout_s or math.inf, siblings, prefers)
        begun, handle, lost = await self._wait(subround, ticket)
        return begun, None if begun.worker in known else handle, lost

    async def lease_spare(
        self, subround: str, timeout_s: float | None = None
    ) -> _Lease:
        """Return a second worker, once the subround straggles and one is idle.

        Raises:
            RetryBudgetError: the subround ended before.
        """
        if subround not in self._leased:
            raise errors.RetryBudgetError("The subround has ended.", "fatal")
        ticket = self._pool.ask_spare(subround, timeout_s or math.inf)
        return await self._wait(subround + COPY, ticket)

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
            For each, the name of its lease, the attempt that begins on it, and its
            handle; None for one that the caller has.
        """
        if subround not in self._leased:
            return []
        now_s = time.monotonic()
        deadline_s = now_s + (timeout_s or math.inf)
        found: list[tuple[str, outcomes.Attempt, Any]] = []
        for worker in self._pool.lease_idle(subround, count, deadline_s):
            scope = f"{subround}{FURTHER}{len(found) + 2}"
            self._leased[scope] = worker
            attempt = self._attempt(worker, 1)
            begun = self._log.granted(subround, attempt, now_s)
            handle = None if worker in known else self._handles[worker]
            found.append((scope, begun, handle))
        self._act()
        return found

    async def release_further(self, subround: str) -> None:
        """Take back the further workers of a subround, which have done their work."""
        for scope in self._further(subround):
            worker = self._leased.pop(scope)
            if worker in self._handles:
                self._log.done(worker)
                self._pool.give_back(worker)
        self._act()

    def _further(self, subround: str) -> list[str]:
        """Return the names of a subround's further leases."""
        return [scope for scope in self._leased if scope.startswith(subround + FURTHER)]

    async def _wait(self, subround: str, ticket: int) -> _Lease:
        future: asyncio.Future[_Lease] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = (subround, future)
        self._act()
        try:
            return await future
        finally:
            self._waiting.pop(ticket, None)
            self._pool.withdraw(ticket)

    async def lost(
        self, scope: str, failure: Failure, used_ago_s: float = math.inf
    ) -> None:
        """Take note that a worker of a subround died, or is to be replaced.

        What its other workers have done is lost with it: they are taken back.

        Args:
            scope: name of the lease.
            failure: of the worker.
            used_ago_s: how long ago a lease that was kept came to be used again: the
                subround is not to blame where its worker was lost before.
        """
        subround = scope.partition(FURTHER)[0]
        worker = self._leased.pop(scope, None)
        if scope == subround and (
            self._log.lost_at_s(subround) < time.monotonic() - used_ago_s
        ):
            self._pool.forget(subround)
            self._log.forget(subround)
        elif worker is not None:
            await self._lose(worker, failure)
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
        worker = self._leased.pop(scope, None)
        if worker in self._handles:
            self._log.done(worker)
            self._pool.give_back(worker)
        await self.end(subround)

    async def note_uses(
        self, uses: Sequence[actions.UseBegan | actions.UseEnded]
    ) -> None:
        """Take note of what leases that are kept were used for, in order."""
        now_s = time.monotonic()
        for use in uses:
            worker, at_s = self._leased.get(use.subround), now_s - use.ago_s
            if worker not in self._handles:
                continue
            if isinstance(use, actions.UseEnded):
                self._pool.end_use(worker, at_s)
                continue
            timeout_s = use.timeout_s or math.inf
            self._pool.begin_use(worker, at_s, timeout_s, use.siblings)
            self._log.begin_use(worker, at_s)
        self._act()

    async def when_awaited(self, *, known: bool, timeout_s: float) -> bool:
        """Return whether somebody waits for a worker, once that is not `known`.

        Args:
            known: what was returned before.
            timeout_s: seconds after which it is returned, changed or not.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._pool.is_awaited == known:
                    await self._changed.wait()
        return self._pool.is_awaited

    async def handle_of(self, worker: str) -> Any:
        """Return the handle of a worker; None where it is gone."""
        return self._handles.get(worker)

    async def forgive(self, subround: str) -> None:
        """Forget the failures of a subround that goes on; it keeps its worker."""
        self._pool.forget(subround)

    async def end(self, subround: str) -> None:
        """Take back what a subround still has, for good, and forget it."""
        self._ended.append(subround)
        for name in (subround, subround + COPY, *self._further(subround)):
            self._withdraw(name)
            self._abandon(name, None, for_good=True)
        self._pool.forget(subround)
        self._log.forget(subround)
        self._act()

    def _withdraw(self, subround: str) -> bool:
        """Refuse what a subround waits for; return whether it did wait."""
        found = [t for t, (name, _) in self._waiting.items() if name == subround]
        for ticket in found:
            self._pool.withdraw(ticket)
            _, future = self._waiting.pop(ticket)
            if not future.done():
                future.set_exception(errors.RetryBudgetError(_CANCELLED, "fatal"))
        return bool(found)

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
        if worker not in self._handles:
            return
        if failure is None:
            self._log.done(worker)
        else:
            self._log.lost(worker, failure, time.monotonic())
        self._pool.abandon(worker, time.monotonic() + _ABANDONED_S)
        self._spawn(self._settle(worker, subround, for_good=for_good))

    async def _settle(self, worker: str, subround: str, *, for_good: bool) -> None:
        handle = self._handles[worker]
        with contextlib.suppress(ray.exceptions.RayError):  # `_start` sees it, too
            # Before anyone has that name again.
            await handle.free.remote(subround, for_good=for_good)
            await handle.settle.remote()
            self._pool.give_back(worker)
            self._act()

    async def _lose(self, worker: str, failure: Failure) -> None:
        # Its node may be gone, or going: that decides the class, and where to go on.
        await self._survey()
        counted = self._pool.lost(worker, failure.failure_class, failure.detail)
        failure = dataclasses.replace(failure, failure_class=counted)
        self._log.lost(worker, failure, time.monotonic())
        self._drop(worker)
        self._act()

    async def forget_clients(self, tokens: list[str]) -> None:
        """Have workers drop what they keep of clients whose sources are gone."""
        for handle in self._handles.values():
            handle.forget_clients.remote(tokens)

    async def close(self) -> None:
        """End all workers, and ask for no nodes any more."""
        if self._timer is not None:
            self._timer.cancel()
        for worker in list(self._handles):
            self._drop(worker)
        await self._on_thread(self._cluster.request, 0)
        self._thread.shutdown(wait=False)

    async def _look(self) -> None:
        await self._survey()
        self._act()

    async def _survey(self) -> None:
        self._looked_at = time.monotonic()
        nodes = await self._on_thread(self._cluster.read_nodes)
        if nodes is not None:
            self._pool.survey(nodes)

    async def _on_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of the cluster returns; None if Ray refuses."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, function, *args)
        except (ray.exceptions.RayError, RuntimeError):
            _logger.warning("%s failed.", function.__name__, exc_info=True)
            return None

    def _act(self) -> None:
        for action in self._pool.decide(time.monotonic()):
            self._perform(action)
        self._set_timer()
        self._tell()

    def _tell(self) -> None:
        now = (*self._count_ready(), self._pool.is_awaited)
        if now != self._last_told:
            self._last_told = now
            self._changed.set()  # wakes those that wait now
            self._changed.clear()

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.Start():
                self._spawn(self._start(action))
            case actions.Stop():
                hang = Failure("hang", action.detail)
                self._log.lost(action.worker, hang, time.monotonic())
                self._drop(action.worker)
            case actions.Grant():
                self._grant(action)
            case actions.Refuse():
                self._refuse(action)
            case actions.Look():
                self._spawn(self._look())
            case actions.Request():
                self._spawn(self._on_thread(self._cluster.request, action.count))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _grant(self, action: actions.Grant) -> None:
        subround, future = self._waiting.get(action.ticket, ("", None))
        if future is None or future.done():
            self._pool.give_back(action.worker)
            return
        # Noted here, so that whoever ends the subround finds what it was given.
        self._leased[subround] = worker = action.worker
        name = subround.removesuffix(COPY)
        attempt = self._attempt(worker, action.attempt)
        begun = self._log.granted(name, attempt, time.monotonic())
        future.set_result((begun, self._handles[worker], self._log.lost_of(name)))

    def _attempt(self, worker: str, attempt: int) -> outcomes.Attempt:
        """Return the attempt of that number on a worker, which has not begun."""
        found = self._described[worker]
        return outcomes.Attempt(
            attempt, worker, found.pid, found.address, fingerprint=found.fingerprint
        )

    def _refuse(self, action: actions.Refuse) -> None:
        subround, future = self._waiting.get(action.ticket, ("", None))
        if future is None or future.done():
            return
        message, failure_class = action.message, action.failure_class
        if failure_class == actions.SHORTAGE:  # of the cluster, whoever asks
            error: Exception = errors.ResourceError(message)
        else:
            error = self._log.final_error(subround, message, failure_class)
        future.set_exception(error)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._pool.next_deadline_s()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay, self._act)

    async def _start(self, action: actions.Start) -> None:
        worker = action.worker
        handle = self._cluster.start_worker(action.node)
        self._handles[worker] = handle
        try:
            described: WorkerDescription = await handle.ping.remote()
            if not self._admit(worker, described):
                return
            await handle.hold.remote()  # returns never: fails when the worker is gone
        except ray.exceptions.RayError as error:
            if worker in self._handles:
                found = self._described.get(worker)
                node = "unknown" if found is None else found.address
                detail = f"`{worker}` on node {node}: {failures.describe(error)}"
                failure = Failure(failures.classify(error), detail)
                if worker not in self._leased.values():  # nobody is to be given it
                    self._pool.lost(worker, failure.failure_class, detail)
                await self._lose(worker, failure)

    def _admit(self, worker: str, described: WorkerDescription) -> bool:
        """Take a worker into the pool; refuse one that is not as it should be."""
        if worker not in self._handles:  # ended while it answered
            return False
        why = self._refusal(described)
        if not why:
            self._fingerprint = self._fingerprint or described.fingerprint
            self._described[worker] = described
            self._pool.ready(worker, described.node)
        else:
            told = f"`{worker}` on node {described.address} was refused: {why}."
            self._pool.bar(worker, described.node, told)
            self._drop(worker)
        self._act()
        return worker in self._described

    def _refusal(self, described: WorkerDescription) -> str:
        """Return why a worker must not be used; empty where it may."""
        difference = describe_difference(described, self._driver, self._fingerprint)
        if described.missing or difference is None or self._allow_mixed:
            return described.missing
        return f"{difference}. Make them the same, or set `workers.allow_mixed`"

    def _drop(self, worker: str) -> None:
        self._described.pop(worker, None)
        handle = self._handles.pop(worker, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)
