"""The pool of worker actors that the driver uses for its rounds.

Ray starts the actors, places them, and restarts them when their processes die. The pool
knows which workers are ready, and gives each worker to one subround (the part of a
round that one Ray task runs) at a time. If a round waits for workers, the pool logs
the missing workers. The pool also decides which subrounds are stragglers, and how
workers end.

    starting --loaded--> ready --taken--> busy --given back--> ready
        ^                  |                |
        +----- the worker's process ends, and Ray starts another

If `workers.count` is one number, the workers are in a placement group, so Ray places
all of them or none. If it is (min, max), the pool starts max actors. Actors for which
there is no room wait in Ray's queue, where Ray's autoscaler sees them.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import statistics
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray_fed.errors as errors
from ray_fed.cluster import failures, inventory, metrics, worker_actor
from ray_fed.cluster.joining import Job
from ray_fed.cluster.ray_strategy import LostWorkerError, Worker
from ray_fed.config import Config
from ray_fed.executors.loops import LoopThread
from ray_fed.language import trees
from ray_fed.plan import outcomes
from ray_fed.plan.fingerprint import (
    Fingerprint,
    Versions,
    WorkerDescription,
    describe_difference,
)
from ray_fed.values.client_references import ClientRun
from ray_fed.values.lru_cache import LruCache

_logger = logging.getLogger(__name__)

_RETRY_S = 0.2
"""Seconds between attempts to reach an actor that Ray restarts."""

_LOOK_S = 1.0
"""Seconds between queries to the cluster, such as for draining nodes."""

_PLACED_WITHIN_S = 30.0
"""Seconds for which a starting worker of a pool of fixed size counts as available."""

_TELL_AFTER_S = 5.0
"""Seconds that a caller waits for workers before the pool logs it."""

_TELL_AGAIN_S = 60.0
"""Seconds until the pool logs the wait again."""

_REPORT_S = 5.0
"""Seconds between updates of the metric of ready workers. Ray drops a metric that is
not set for about 20 seconds."""

_LEAVE_S = 5.0
"""Seconds that `close` waits for tasks, and then for workers, before it kills them."""

MAX_FAILED_STARTS = 3
"""Number of failed starts in a row after which all waiting callers get an error."""

_START_PAUSE_S = 30.0
"""Seconds before the next start after `MAX_FAILED_STARTS` failures."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The number of workers of a pool, and the resources of one worker.

    Attributes:
        least: Minimum number of workers. In a pool of (min, max), a round waits until
            this number of workers is ready.
        most: Number of actors that the pool starts.
        is_fixed: Whether the pool has one number of workers, and not (min, max).
        each: Description of the resources that one worker asks Ray for, for errors.
        wait_timeout_s: Seconds that a round waits until a node has room for a worker.
    """

    least: int
    most: int
    is_fixed: bool
    each: str
    wait_timeout_s: float


@dataclasses.dataclass(eq=False)
class Member:
    """A worker of the pool.

    Attributes:
        name: Name such as "worker 0", which outlives the worker's processes.
        handle: Ray's handle of the actor.
        since_s: Time at which the worker began to start, or was lost.
        described: Description that the worker sent, or None if it is not ready.
        is_placed: Whether the worker has a process that answers.
        is_busy: Whether a subround uses the worker.
        refusal: Reason for which the worker must not be used, or "".
    """

    name: str
    handle: Any
    since_s: float
    described: WorkerDescription | None = None
    is_placed: bool = False
    is_busy: bool = False
    refusal: str = ""

    @property
    def node(self) -> str:
        """Ray's id of the node, or "" until the worker is ready."""
        return "" if self.described is None else self.described.node

    @property
    def is_idle(self) -> bool:
        """Whether a subround can have the worker."""
        return self.described is not None and not self.is_busy


@dataclasses.dataclass(eq=False)
class _Waiter:
    """A coroutine that waits for workers of the pool.

    Attributes:
        num_ready: Number of workers that must be ready.
        member: The only worker that the waiter can use, or None for any worker.
        max_team: Maximum number of idle workers that the waiter takes. With 0 it takes
            none, and only waits until `num_ready` workers, or `member`, are ready.
        prefers: Digest of clients, see `Pool.take`.
        team: Workers that the waiter has taken. The pool sets this under its lock.
        answer: Future that is done once the wait is over. It has the error if the wait
            was in vain.
    """

    num_ready: int = 1
    member: Member | None = None
    max_team: int = 0
    prefers: bytes = b""
    begun_s: float = dataclasses.field(default_factory=time.monotonic)
    team: list[Member] = dataclasses.field(default_factory=list[Member])
    answer: "concurrent.futures.Future[None]" = dataclasses.field(
        default_factory=concurrent.futures.Future[None]
    )

    def __post_init__(self) -> None:
        # A running future cannot be cancelled, so the pool can set it at any time.
        self.answer.set_running_or_notify_cancel()


@dataclasses.dataclass(frozen=True)
class Census:
    """The number of a pool's workers in each state.

    Attributes:
        num_usable: Number of all workers that were not refused. The pool refuses
            workers that differ from the other workers or from the driver.
        num_ready: Number of workers that have loaded TensorFlow, idle or busy.
        num_busy: Number of workers that run work.
        num_loading: Number of workers whose process answers and loads TensorFlow.
        num_unplaced: Number of workers without a process that answers.
        num_pending: Number of actors in Ray's queue for which no node has room. Some
            may belong to other pools.
    """

    num_usable: int
    num_ready: int
    num_busy: int
    num_loading: int
    num_unplaced: int
    num_pending: int

    @property
    def num_roomless(self) -> int:
        """Number of workers for which no node has room."""
        return min(self.num_pending, self.num_unplaced)

    @property
    def num_starting(self) -> int:
        """Number of workers that have room and are not ready yet."""
        return self.num_loading + self.num_unplaced - self.num_roomless

    def count_missing(self, num_ready: int) -> int:
        """Return how many more workers must become ready, so that `num_ready` are."""
        return max(0, num_ready - self.num_ready)

    def count_without_room(self, num_ready: int) -> int:
        """Return how many of these missing workers wait for room on a node."""
        return max(0, self.count_missing(num_ready) - self.num_starting)

    def find_limit_s(
        self, num_ready: int, wait_timeout_s: float, start_timeout_s: float
    ) -> float:
        """Return for how many seconds a call may wait for workers without progress.

        A wait for room on a node has the limit `wait_timeout_s`. A wait for a worker's
        process has the larger of both limits. All other waits have no limit here: the
        pool itself ends a process that loads for `start_timeout_s`, and
        `subrounds.timeout_s` ends busy workers.
        """
        if self.num_busy or not self.count_missing(num_ready):
            return math.inf
        if self.count_without_room(num_ready):
            return wait_timeout_s
        return math.inf if self.num_loading else max(wait_timeout_s, start_timeout_s)

    def describe(self, num_ready: int, needed: str) -> str:
        """Describe what a call that needs `num_ready` workers waits for.

        `needed` describes missing room on nodes, or is "". The result is "" if all
        workers are ready.
        """
        expected = max(num_ready, self.num_ready + self.num_starting)
        counted = "1 worker" if expected == 1 else f"{expected} workers"
        ready = f"{self.num_ready} of {counted} ready"
        if needed:
            waiting = f"waiting for {needed}"
            return f"{ready}, {waiting}" if self.num_ready else waiting
        if self.num_ready >= expected:
            return ""
        return ready if self.num_ready else f"starting {counted}: TensorFlow"


class Pool:
    """The worker actors of a context. Each worker runs one subround at a time.

    The constructor starts the actors, and does not wait for them. A thread of the pool
    follows each actor. `close` ends the actors.

    Args:
        config: Settings of the workers.
        size: Number of workers.
        group: Placement group of this process, whose bundles the workers get, or None.
        program: Name of the run in Ray's lists, logs and metrics.
        job: Job of Ray that the workers belong to.

    Attributes:
        members: All workers.
        running: Futures of the tasks that run subrounds now.
        stragglers: Record of durations that finds slow subrounds.
    """

    def __init__(
        self,
        config: Config,
        size: Size,
        group: PlacementGroup | None,
        program: str,
        job: Job,
    ) -> None:
        self.size = size
        self.job = job
        self.running: set[concurrent.futures.Future[Any]] = set()
        self._token = uuid.uuid4().hex[:8]
        self._names = itertools.count()
        self._starts = itertools.count()
        self.stragglers = Stragglers(config.stragglers.factor, config.stragglers.min_s)
        self._config = config
        self._demand = inventory.Demand.of(config)
        self._group = group
        self._program = program
        self._driver = Versions.read()
        self._fingerprint: Fingerprint | None = None
        self._holders: LruCache[bytes, str] = LruCache(_HOLDERS)
        self._lock = threading.RLock()
        self._waiting: list[_Waiter] = []
        self._stranded: _Waiter | None = None  # calls whose workers were all lost
        self._failed_starts: list[str] = []
        self._progress_s = time.monotonic()
        self._told_s: float | None = None
        self._roomless = 0
        self._looked_s = 0.0
        self._pending = -math.inf, 0
        self._is_closed = False
        self._own_group: PlacementGroup | None = None
        if group is None and config.workers.count is not None and size.is_fixed:
            labels = [dict(self._demand.labels)] * size.most
            self._own_group = ray.util.placement_group(
                [dict(self._demand.resources)] * size.most,
                strategy="SPREAD",
                name=f"ray_fed workers of {program} ({self._token})",
                bundle_label_selector=cast(
                    "Any", labels if self._demand.labels else None
                ),
            )
        self.members = [self._start(index) for index in range(size.most)]
        self._thread = LoopThread("ray_fed pool")
        self._watches = {
            member.name: self._thread.submit(self._watch(member))
            for member in self.members
        }
        self._reporting = self._thread.submit(self._report())

    def _start(self, index: int) -> Member:
        name = f"worker {index}"
        return Member(name, self._new_actor(name), time.monotonic())

    def _new_actor(self, name: str) -> Any:
        strategy: Any = "SPREAD"
        group = self._group or self._own_group
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group)
        label = f"ray_fed {name} of {self._program}"
        # A worker that Ray no longer restarts may still hold its name.
        unique = f"{label} ({self._token}.{next(self._starts)})"
        return worker_actor.start_worker(self._config, label, unique, strategy)

    # The coroutines below run on the pool's own thread.

    async def _watch(self, member: Member) -> None:
        while not self._is_closed and self.job.is_current and not member.refusal:
            try:
                await self._follow(member)
            except Exception as error:  # noqa: BLE001 (nobody reads a watcher's error)
                if self._is_closed or not self.job.is_current:
                    return  # after a shutdown, another call would start a new Ray
                self._note_end(member, error)
                has_failed = len(self._failed_starts) >= MAX_FAILED_STARTS
                await asyncio.sleep(_START_PAUSE_S if has_failed else _RETRY_S)

    async def _follow(self, member: Member) -> None:
        await self.job.answer(member.handle.ping.remote())
        self._change(member, is_placed=True)
        described: WorkerDescription | None = await asyncio.wait_for(
            self.job.answer(member.handle.load.remote()),
            self._config.workers.start_timeout_s,
        )
        if described is None:  # `close` told the worker to leave
            return
        refusal = self._refuse(described)
        if refusal:
            self._change(member, refusal=f"`{member.name}` {refusal}", is_placed=False)
            ray.kill(member.handle, no_restart=True)
            return
        self._failed_starts.clear()
        self._change(member, described=described)
        # This call returns when the worker leaves, and raises if its process dies.
        await self.job.answer(member.handle.hold.remote())

    def _refuse(self, described: WorkerDescription) -> str:
        # The first worker sets the fingerprint that later workers must have.
        allow_mixed = self._config.workers.allow_mixed
        difference = describe_difference(described, self._driver, self._fingerprint)
        if not described.missing and (difference is None or allow_mixed):
            self._fingerprint = self._fingerprint or described.fingerprint
            return ""
        why = described.missing or (
            f"{difference}. Make them the same, or set `workers.allow_mixed`"
        )
        return f"on node {described.address} was refused: {why}."

    def _note_end(self, member: Member, error: BaseException) -> None:
        timeout_s = self._config.workers.start_timeout_s
        detail = f"`{member.name}`: {failures.describe(error)}"
        if isinstance(error, TimeoutError):
            detail = (
                f"`{member.name}` was not ready within {timeout_s:.0f} s"
                " (`workers.start_timeout_s`)"
            )
        # A process that answered `ping` but never sent its description failed to start.
        is_start = member.is_placed and member.described is None
        is_dead = isinstance(
            error, (ray.exceptions.ActorDiedError, *failures.FATAL_ERRORS)
        )
        if is_start or is_dead:
            self._failed_starts.append(detail)
        if is_dead:  # Ray does not restart it
            ray.kill(member.handle, no_restart=True)
            self._change(member, handle=self._new_actor(member.name))
        elif isinstance(error, TimeoutError | ray.exceptions.RayTaskError):
            ray.kill(member.handle, no_restart=False)
        since_s = time.monotonic() if member.is_placed else member.since_s
        self._change(member, is_placed=False, described=None, since_s=since_s)

    def _change(self, member: Member, **fields: Any) -> None:
        with self._lock:
            before = member.is_placed, member.described
            for name, value in fields.items():
                setattr(member, name, value)
            if before != (member.is_placed, member.described):
                self._progress_s = time.monotonic()
        self._serve()

    async def _report(self) -> None:
        gauge, reported_s = metrics.workers_ready(self._program), 0.0
        while not self._is_closed and self.job.is_current:
            if time.monotonic() >= reported_s + _REPORT_S:
                gauge.set(self.num_ready)
                reported_s = time.monotonic()
            waits = self._waits()
            if waits:
                try:
                    await self._judge()
                except Exception:
                    _logger.debug("The cluster did not say how it is.", exc_info=True)
            else:
                self._told_s = None
            await asyncio.sleep(_RETRY_S if waits else _LOOK_S)

    def _waits(self) -> list[_Waiter]:
        """Return the callers that wait for workers.

        A call whose workers were all lost in the middle of its work waits, too. Its
        subrounds look for other workers by themselves, and have their own limit.
        """
        with self._lock:
            is_busy = any(member.is_busy for member in self.members)
            if not is_busy or self.num_ready:
                self._stranded = None
                return list(self._waiting)
            self._stranded = self._stranded or _Waiter()
            return [*self._waiting, self._stranded]

    async def _judge(self) -> None:
        num_pending = await self._count_pending()
        roomless = self._count(None, num_pending).num_roomless
        # A worker that got room is progress, so all limits of waits start again.
        if roomless < self._roomless:
            self._progress_s = time.monotonic()
        self._roomless = roomless
        with self._lock:
            waiting = [(w, self._count(w.member, num_pending)) for w in self._waits()]
        missing = [(w, c) for w, c in waiting if c.count_missing(w.num_ready)]
        refusable = [waiter for waiter, _ in missing if waiter is not self._stranded]
        if refusable and len(self._failed_starts) >= MAX_FAILED_STARTS:
            error = errors.RetryBudgetError(
                f"Expected workers to start, found {len(self._failed_starts)} failures."
                f" The last: {self._failed_starts[-1]}",
                "fatal",
            )
            self._failed_starts.clear()
            self._refuse_waiters(refusable, error)
            return
        now_s, wanted = time.monotonic(), self._config.workers
        for waiter, census in missing:
            waited_s = now_s - max(waiter.begun_s, self._progress_s)
            limit_s = census.find_limit_s(
                waiter.num_ready, self.size.wait_timeout_s, wanted.start_timeout_s
            )
            needed = 1 if waiter.member else waiter.num_ready
            # With too few usable workers, waiting would be in vain.
            if waited_s >= limit_s or census.num_usable < needed:
                shortage = await self._describe_shortage(waited_s, census)
                self._refuse_waiters([waiter], errors.ResourceError(shortage))
        await self._tell(missing, now_s)

    async def _tell(self, missing: list[tuple[_Waiter, Census]], now_s: float) -> None:
        """Log what callers wait for, after `_TELL_AFTER_S` and each `_TELL_AGAIN_S`."""
        if not missing:
            self._told_s = None
            return
        waiter, census = missing[0]
        waited_s = now_s - waiter.begun_s
        pause_s = _TELL_AFTER_S - waited_s if self._told_s is None else _TELL_AGAIN_S
        if now_s < (self._told_s or now_s) + pause_s:
            return
        self._told_s = now_s
        # A start takes about ten seconds. Only a user can make room.
        is_usual = not census.count_without_room(waiter.num_ready)
        level = logging.WARNING
        if is_usual and waited_s < _TELL_AGAIN_S:
            level = logging.INFO
        needed = await self._name_need(census.count_without_room(waiter.num_ready))
        activity = census.describe(waiter.num_ready, needed)
        _logger.log(level, "A call has waited for %.0f s: %s.", waited_s, activity)

    def _count(self, member: Member | None, num_pending: int) -> Census:
        members = self.members if member is None else [member]
        members = [each for each in members if not each.refusal]
        ready = [each for each in members if each.described is not None]
        unplaced = sum(not each.is_placed for each in members)
        return Census(
            num_usable=len(members),
            num_ready=len(ready),
            num_busy=sum(each.is_busy for each in members),
            num_loading=len(members) - len(ready) - unplaced,
            num_unplaced=unplaced,
            num_pending=num_pending,
        )

    async def _count_pending(self) -> int:
        if self.num_ready == self.size.most:
            return 0
        looked_s, num_pending = self._pending
        if time.monotonic() < looked_s + _LOOK_S:
            return num_pending
        if self._own_group is None:
            about = inventory.count_pending, self._demand, self._group
            num_pending = await inventory.look_up(*about)
        else:  # Ray places all bundles of a group at once
            is_placed = await inventory.look_up(inventory.is_placed, self._own_group)
            num_pending = 0 if is_placed else self.size.most
        self._pending = time.monotonic(), num_pending
        return num_pending

    async def _name_need(self, num_workers: int) -> str:
        if not num_workers:
            return ""
        if self._own_group is not None:  # Ray places all bundles at once
            num_workers = self.size.most
        about = self._demand, self._group, num_workers
        return await inventory.look_up(inventory.describe_need, *about)

    async def _describe_shortage(self, waited_s: float, census: Census) -> str:
        about = inventory.read_nodes, self._demand, self._group
        nodes = await inventory.look_up(*about)
        draining = sum(node.is_draining for node in nodes)
        room = sum(node.free for node in nodes if not node.is_draining)
        starting = f", {census.num_starting} starting" if census.num_starting else ""
        refused = " ".join(m.refusal for m in self.members if m.refusal)
        refused = refused and f"; refused: {refused}"
        is_whole = self._own_group is not None and census.num_roomless
        expected = self.size.most if is_whole else self.size.least
        failed = self._failed_starts[-1:]
        last = f" The last start failed: {failed[0]}." if failed else ""
        return (
            f"Expected at least {expected} workers (`workers.count`), each with"
            f" {self.size.each}, found {self.num_ready} after {waited_s:.0f} s"
            f" (`workers.wait_timeout_s`){starting}, and {len(nodes)} nodes"
            f" ({draining} draining) with room for {room}{refused}.{last} Add nodes,"
            " lower the resources of `workers`, or wait longer."
        )

    def _refuse_waiters(self, waiters: Iterable[_Waiter], error: Exception) -> None:
        with self._lock:
            refused = [waiter for waiter in waiters if waiter in self._waiting]
            for waiter in refused:
                self._waiting.remove(waiter)
        for waiter in refused:
            waiter.answer.set_exception(error)

    # The methods below may run on any thread.

    @property
    def num_ready(self) -> int:
        """Number of workers that are ready or busy."""
        return sum(member.described is not None for member in self.members)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of all workers, or None if workers may differ (`allow_mixed`)."""
        return None if self._config.workers.allow_mixed else self._fingerprint

    async def count_workers(self) -> int:
        """Wait for the minimum of workers, and return the number for a round.

        This also ends idle workers on nodes that Ray will soon remove. If all workers
        are ready, the search for these nodes runs at most once in `_LOOK_S`, in the
        background. Raises ResourceError if nodes have no room for the minimum, and
        RetryBudgetError if workers do not start.
        """
        self.job.check()
        is_full = self.num_ready == self.size.most
        if time.monotonic() >= self._looked_s + _LOOK_S or not is_full:
            self._looked_s = time.monotonic()
            leaving = self._thread.submit(self._leave_nodes())
            if not is_full:
                await asyncio.wrap_future(leaving)
        if not self.size.is_fixed and self.num_ready < self.size.least:
            with self.job.watched():
                await self._wait(_Waiter(self.size.least))
        return max(1, self.num_workers)

    @property
    def num_workers(self) -> int:
        """Number of workers that are ready or will probably be ready soon."""
        since_s = time.monotonic() - _PLACED_WITHIN_S
        return sum(
            member.is_placed
            or (self.size.is_fixed and not member.refusal and member.since_s > since_s)
            for member in self.members
        )

    async def _leave_nodes(self) -> None:
        # Ray starts the workers that this ends on other nodes.
        draining = await inventory.look_up(inventory.read_draining)
        with self._lock:
            leaving = [
                member
                for member in self.members
                if member.is_idle and member.node in draining
            ]
            for member in leaving:
                member.described, member.is_placed = None, False
                member.since_s = self._progress_s = time.monotonic()
        for member in leaving:
            ray.kill(member.handle, no_restart=False)

    async def await_change(self, told: str | None) -> str:
        """Describe what calls wait for, as soon as the text differs from `told`.

        `told` is the last result. With None, the present text is returned at once. The
        text is "" if no call waits for workers to start.
        """
        while True:
            waits_for = await self._describe_waits()
            if waits_for != told:
                return waits_for
            self.job.check()
            await asyncio.sleep(_RETRY_S)

    async def _describe_waits(self) -> str:
        waiting = self._waits()
        if not waiting:
            return ""
        first = max(waiting, key=lambda waiter: waiter.num_ready)
        census = self._count(first.member, await self._count_pending())
        missing = census.count_without_room(first.num_ready)
        return census.describe(first.num_ready, await self._name_need(missing))

    async def take(self, prefers: bytes, count: int) -> list[Member]:
        """Wait until a worker is idle, and take up to `count` idle workers.

        The caller returns the workers by `give_back`. `prefers` is a digest of clients
        (see `name_clients`). If the worker that ran these clients last is idle, it is
        the first of the result, because it may have cached their data. Raises
        ResourceError or RetryBudgetError if no worker can become idle.
        """
        waiter = _Waiter(max_team=count, prefers=prefers)
        await self._wait(waiter)
        return waiter.team

    def take_now(self, prefers: bytes, count: int) -> list[Member]:
        """Take up to `count` workers that are idle now, possibly none; see `take`."""
        with self._lock:
            return self._pick(prefers, count)

    def _pick(self, prefers: bytes, count: int) -> list[Member]:
        name = self._holders.find(prefers) if prefers else None
        idle = [member for member in self.members if member.is_idle]
        idle.sort(key=lambda member: member.name != name)
        team = idle[:count]
        for member in team:
            member.is_busy = True
        return team

    async def ready(self, member: Member) -> WorkerDescription:
        """Wait until a worker is ready, and return its description.

        The worker may be busy. Raises the errors of `take`.
        """
        while (described := member.described) is None:
            await self._wait(_Waiter(member=member))
        return described

    async def _wait(self, waiter: _Waiter) -> None:
        with self._lock:
            self._waiting.append(waiter)
        try:
            self._serve()
            await asyncio.wrap_future(waiter.answer)
        except BaseException:  # a cancelled waiter may have taken workers already
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            self.give_back(waiter.team)
            raise

    def _serve(self) -> None:
        # The earliest waiter comes first. If several want a team, each gets one worker.
        served: list[_Waiter] = []
        with self._lock:
            teams = sum(waiter.max_team > 0 for waiter in self._waiting)
            for waiter in list(self._waiting):
                if waiter.max_team:
                    count = 1 if teams > 1 else waiter.max_team
                    waiter.team = self._pick(waiter.prefers, count)
                    is_served = bool(waiter.team)
                    teams -= is_served
                elif waiter.member is not None:
                    is_served = waiter.member.described is not None
                else:
                    is_served = self.num_ready >= waiter.num_ready
                if is_served:
                    self._waiting.remove(waiter)
                    served.append(waiter)
        # Outside the lock: setting a result calls the future's callbacks at once.
        for waiter in served:
            waiter.answer.set_result(None)

    def give_back(
        self, team: Iterable[Member], lost: Iterable[outcomes.Attempt] = ()
    ) -> None:
        """Make the workers of `take` idle after their work.

        `lost` has the failed attempts of the work, whose workers count as lost.
        """
        with self._lock:
            for attempt in lost:
                self.lose(attempt.worker, attempt.worker_pid)
            for member in team:
                member.is_busy = False
            self._progress_s = time.monotonic()
        self._serve()

    def lose(self, name: str, pid: int) -> None:
        """Record that the process `pid` of a worker seems dead, and check this later.

        If the worker has another process by now, nothing happens.
        """
        with self._lock:
            for member in self.members:
                described = member.described
                if member.name == name and described and described.pid == pid:
                    member.described, member.is_placed = None, False
                    member.since_s = self._progress_s = time.monotonic()
                    with contextlib.suppress(errors.ContextStateError):  # pool closed
                        self._thread.submit(self._see_again(member, pid))

    async def _see_again(self, member: Member, pid: int) -> None:
        # The process that reported the loss may have died itself.
        with contextlib.suppress(ray.exceptions.RayError):
            described = await self.job.answer(member.handle.describe.remote())
            if described is not None and described.pid == pid:
                self._change(member, described=described, is_placed=True)

    def note_holder(self, clients: bytes, worker: str) -> None:
        """Record the worker that ran some clients last, so that `take` prefers it.

        `clients` is a digest of `name_clients`.
        """
        if clients:
            self._holders.put(clients, worker)

    def in_order(
        self, team: Sequence[Member]
    ) -> tuple[list[Any], tuple[tuple[str, WorkerDescription | None], ...]]:
        """Return the handles for a subround, and the name and description of each.

        The workers of `team` come first. The others are replacements, which a subround
        uses if it loses a worker. Replacements that are ready, on other nodes than the
        team, and idle come first. Workers without room are in the order of Ray's queue.
        """
        with self._lock:
            others = [m for m in self.members if m not in team and not m.refusal]
            nodes = {member.node for member in team}  # a lost node loses them all
            others.sort(key=lambda m: m.since_s)
            others.sort(key=lambda m: (m.described is None, m.node in nodes, m.is_busy))
            ordered = [*team, *others][: max(len(team), _HANDLES)]
            known = tuple((m.name, m.described) for m in ordered)
            return [member.handle for member in ordered], known

    def new_name(self) -> str:
        """Return a name for a subround that is unique in the cluster."""
        return f"{self._token}-{next(self._names)}"

    def end(self, name: str) -> None:
        """End all attempts at a subround on all workers, also later attempts."""
        if not self.job.is_current:
            return
        for member in self.members:
            with contextlib.suppress(ray.exceptions.RayError):
                member.handle.end_before.remote(name, _FOR_GOOD)

    def forget_clients(self, tokens: list[str]) -> None:
        """Tell all workers to drop the cached data of the client sources `tokens`."""
        for member in self.members:
            member.handle.forget_clients.remote(tokens)

    def close(self, *, ray_ends: bool = False) -> None:
        """End all workers. Running work gets a few seconds to end by itself.

        With `ray_ends`, the caller shuts Ray down next, so workers are not killed here.
        Ray would log a killed worker, with its remaining retries.
        """
        self._is_closed = True
        cancelled = errors.RetryBudgetError("The subround was cancelled.", "fatal")
        self._refuse_waiters(list(self._waiting), cancelled)
        if self.job.is_current:
            # Cancelled work gets time to end before its worker is killed.
            concurrent.futures.wait(list(self.running), timeout=_LEAVE_S)
            ending: list[concurrent.futures.Future[Any]] = []
            for member in self.members:
                if member.described is None and not member.is_placed:
                    continue
                left = member.handle.leave.remote().future()
                if member.described is not None:  # a starting worker may take long
                    ending += [self._watches[member.name], left]
            concurrent.futures.wait(ending, timeout=_LEAVE_S)
            if not ray_ends:
                for member in self.members:
                    ray.kill(member.handle, no_restart=True)
                if self._own_group is not None:
                    ray.util.remove_placement_group(self._own_group)
            metrics.workers_ready(self._program).set(0)
        self._thread.close()


_HOLDERS = 1024
"""Number of groups of clients for which the pool remembers the last worker."""

_HANDLES = 4
"""Number of handles that travel with a subround of fewer workers. The others are
replacements."""

_FOR_GOOD = 10**9
"""A number that is larger than the turn (the number) of any attempt at a subround."""


class HeldWorker:
    """A `WorkerSource` that always gives the same worker of a pool.

    If the worker dies, its next process continues. Repeated work has the budgets of a
    subround. The next work starts with full budgets. This object does not own the pool.
    """

    def __init__(self, pool: Pool, member: Member, budgets: Mapping[str, int]) -> None:
        self._pool, self._member, self._budgets = pool, member, budgets
        self._lost: list[outcomes.Attempt] = []
        self._turn = 0

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        """Return the worker. After a loss, wait until Ray has restarted its process.

        Raises RetryBudgetError or DeadlineError if the work has lost the worker too
        often, and the errors of `Pool.take`.
        """
        pool, member = self._pool, self._member
        while True:
            if loss is not None:
                lost = cast("WorkerDescription", loss.worker.described)
                pool.lose(member.name, lost.pid)
                loss.count(self._lost, self._budgets, loss.worker.leased_s)
            with pool.job.watched():
                described = await pool.ready(member)
            self._turn += 1
            scope = f"held {member.name}/{self._turn}"
            worker = Worker(member.handle, scope, member.name, described, pool.job)
            try:
                await worker.call("begin")
            except LostWorkerError as error:
                loss = error
            else:
                return worker

    async def settle(self) -> None:
        """Forget the losses of the work that has succeeded."""
        self._lost.clear()


def name_clients(argument: Any) -> bytes:
    """Return a digest of the clients whose data an argument refers to.

    Equal clients have equal digests, so the pool can find the worker that has cached
    their data. The digest is b"" if the argument contains no `ClientRun`.
    """
    digest, is_empty = hashlib.sha256(), True
    for run in trees.flatten(argument):
        if not isinstance(run, ClientRun):
            continue
        token, positions = run.key
        digest.update(b"%d %b" % (len(positions), token.encode()))
        digest.update(positions)
        is_empty = False
    return b"" if is_empty else digest.digest()


@dataclasses.dataclass
class _Siblings:
    begun_s: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    seconds: list[float] = dataclasses.field(default_factory=list[float])


class Stragglers:
    """Finds stragglers: subrounds that run far longer than their siblings.

    Siblings are the subrounds of one stage of a call. A subround is a straggler once it
    has run for `factor` times the median duration of its finished siblings, and at
    least for `min_s`. A stage has no stragglers while more siblings run than are
    finished. All times are seconds of one monotonic clock.

    Args:
        factor: Multiple of the median duration, > 1.
        min_s: Minimum duration of a straggler in seconds, >= 0.
    """

    def __init__(self, factor: float, min_s: float) -> None:
        self._factor = factor
        self._min_s = min_s
        self._groups: dict[str, _Siblings] = {}

    def begin(self, siblings: str, subround: str, now_s: float) -> None:
        """Record that `subround` starts. `siblings` is the key of all its siblings."""
        self._groups.setdefault(siblings, _Siblings()).begun_s[subround] = now_s

    def end(self, siblings: str, subround: str, now_s: float) -> None:
        """Record that a subround ended. When none runs, all siblings are forgotten."""
        group = self._groups[siblings]
        group.seconds.append(now_s - group.begun_s.pop(subround))
        if not group.begun_s:
            del self._groups[siblings]

    def due_s(self, siblings: str, subround: str) -> float | None:
        """Return the time at which a running subround becomes a straggler, or None.

        It is None while more siblings run than are finished.
        """
        group = self._groups[siblings]
        if len(group.seconds) < max(1, len(group.begun_s)):
            return None
        limit_s = self._factor * statistics.median(group.seconds)
        return group.begun_s[subround] + max(self._min_s, limit_s)


def decide_size(
    config: Config,
    nodes: Sequence[Mapping[str, float]],
    *,
    may_grow: bool,
    occupied: Mapping[str, float] | None = None,
) -> Size:
    """Return the size of a pool from `config.workers` and the cluster's resources.

    `nodes` has the resources of each node on which workers may run. In a placement
    group, it has the resources of each bundle, and `occupied` has the resources of this
    process, which `nodes` lacks. If nodes may join, a pool of (min, max) can wait for
    room. Raises ResourceError if the nodes can never have room for the pool.
    """
    each = inventory.Demand.of(config)
    fitting = sum(map(each.count_fitting, nodes))
    match config.workers.count:
        case None:
            least, most, is_fixed = 1, max(1, fitting), True
        case int() as count:
            least, most, is_fixed = 1, count, True
        case (least, most):
            is_fixed = False
    needed = most if is_fixed else least
    if fitting < needed and (is_fixed or not may_grow):
        if occupied is not None:
            raise errors.ResourceError(
                _describe_bundles(each, occupied, needed, fitting)
            )
        raise errors.ResourceError(_describe_shortage(each, nodes, needed, fitting))
    return Size(least, most, is_fixed, str(each), config.workers.wait_timeout_s)


def _describe_shortage(
    each: inventory.Demand,
    nodes: Sequence[Mapping[str, float]],
    needed: int,
    fitting: int,
) -> str:
    advice = (
        "lower `workers.count` or the resources of each worker, or add nodes. With"
        " workers=(min, max) the pool follows the cluster."
    )
    where = each.on_nodes() or " in the cluster"
    for name, amount in each.resources.items():
        total = sum(node.get(name, 0.0) for node in nodes)
        if amount * needed > total + 1e-9:
            wanted = inventory.describe_amount(name, amount * needed)
            found = inventory.describe_amount(name, total) if total else "none"
            return (
                f"Expected {wanted} for {needed} `workers`, found {found}{where}:"
                f" {advice}"
            )
    return (
        f"Expected room for {needed} `workers`, each on one node, found room for"
        f" {fitting} on {len(nodes)} nodes{each.on_nodes()}: {advice}"
    )


def _describe_bundles(
    each: inventory.Demand, first: Mapping[str, float], needed: int, fitting: int
) -> str:
    return (
        f"Expected room for {needed} `workers` in the bundles of the placement group"
        f" that this process runs in{each.on_nodes()}, found room for {fitting} beside"
        f" the process itself: ask for {needed + 1} bundles, the first for the process,"
        f" as in tune.PlacementGroupFactory([{_show(first)}] +"
        f" [{_show(each.resources)}] * {needed})."
        ' Without bundles for workers, call ray_fed.init(config=Config(backend="local",'
        " workers=1)), whose workers are threads of the process."
    )


def _show(resources: Mapping[str, float]) -> str:
    pairs = (f'"{name}": {amount:.15g}' for name, amount in resources.items())
    return f"{{{', '.join(pairs)}}}"
