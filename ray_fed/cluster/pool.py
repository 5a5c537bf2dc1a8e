"""The workers of a context: the driver's own list of actor handles.

Ray starts the actors, places them, and restarts them when their processes die. The pool
knows which of them are ready, gives each to one subround at a time, and says what a
round that waits for them waits for:

    starting --loaded--> ready --taken--> busy --given back--> ready
        ^                  |                |
        +----- its process ends, and Ray starts another one

A pool of a fixed size is a placement group, so that Ray places all of it or none; one
of (min, max) is max actors, and those for which there is no room wait at Ray, whose
autoscaler sees them.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray_fed.errors as errors
from ray_fed.cluster import failures, inventory, metrics, worker_actor
from ray_fed.cluster.joining import Job
from ray_fed.cluster.ray_strategy import LostWorkerError, Worker
from ray_fed.cluster.subround import KnownWorker
from ray_fed.config import Config
from ray_fed.executors.loops import LoopThread
from ray_fed.plan import outcomes
from ray_fed.plan.fingerprint import (
    Fingerprint,
    Versions,
    WorkerDescription,
    describe_difference,
)
from ray_fed.plan.outcomes import Progress
from ray_fed.values.client_references import ClientRun
from ray_fed.values.lru_cache import LruCache

_logger = logging.getLogger(__name__)

_RETRY_S = 0.2
"""How often an actor that Ray restarts is asked whether it is back."""

_LOOK_S = 1.0
"""How often to look for nodes that go, and at what those wait for that wait."""

_PLACED_WITHIN_S = 30.0
"""Within so many seconds an actor for which there is room has a process there."""

_REPORT_S = 5.0
"""Ray drops a gauge that was not set for some twenty seconds."""

_LEAVE_S = 5.0
"""How long workers may take to end what waits for their end, before they are killed."""

MAX_FAILED_STARTS = 3
"""Starts that fail one after another before everyone who waits is refused."""

_START_PAUSE_S = 30.0
"""Seconds after so many failures until a start is tried again."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How many workers a pool is to have, of which kind.

    Attributes:
        least: with fewer that have a place, rounds wait.
        most: how many there are where there is room.
        is_fixed: whether it is a number that the user or the cluster gives, no range.
        each: what a worker asks for, in words.
        wait_timeout_s: seconds that rounds wait for room for `least` workers.
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
        name: for reports and errors.
        handle: of its actor.
        described: what it said of itself; None: it is not ready.
        since_s: when it began to start, or was ready.
        is_placed: whether it has a process.
        is_busy: whether a subround has it.
        refusal: why it must not be used; empty: it may.
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
        """Ray's id of its node; empty where it is not ready."""
        return "" if self.described is None else self.described.node

    @property
    def is_idle(self) -> bool:
        """Whether it can be given to a subround."""
        return self.described is not None and not self.is_busy


_Waiter = tuple[str, "concurrent.futures.Future[None]"]


class Pool:
    """Actors that Ray keeps alive, and who has which of them.

    Args:
        config: of the workers.
        size: of the pool.
        group: whose bundles the workers live in, where this process lives in it, too.
        program: that the pool is of, for Ray's lists and logs.
        job: that this process is of.

    Attributes:
        size: of the pool.
        members: all workers.
        stragglers: compares the subrounds of its rounds.
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
        self.stragglers = Stragglers(config.stragglers.factor, config.stragglers.min_s)
        self._config = config
        self._group = group
        self._program = program
        self._driver = Versions.read()
        self._fingerprint: Fingerprint | None = None
        self._holders: LruCache[bytes, str] = LruCache(_HOLDERS)
        self._lock = threading.RLock()
        self._waiting: collections.deque[_Waiter] = collections.deque()
        self._failed_starts: list[str] = []
        self._short_since_s: float | None = None
        self._looked_s = 0.0
        self._is_closed = False
        self._own_group: PlacementGroup | None = None
        if group is None and config.workers.count is not None and size.is_fixed:
            bundles = [dict(inventory.resources_of(config))] * size.most
            self._own_group = ray.util.placement_group(bundles, strategy="SPREAD")
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
        return worker_actor.start_worker(self._config, label, strategy)

    # What follows runs on the thread of the pool.

    async def _watch(self, member: Member) -> None:
        """Follow a worker for as long as the pool lives: starts, ends, starts again."""
        while not self._is_closed and self.job.is_current and not member.refusal:
            try:
                await self._follow(member)
            except (ray.exceptions.RayError, TimeoutError) as error:
                if self._is_closed or not self.job.is_current:
                    return  # Ray would start again for a call that comes after its end
                self._note_end(member, error)
                has_failed = len(self._failed_starts) >= MAX_FAILED_STARTS
                await asyncio.sleep(_START_PAUSE_S if has_failed else _RETRY_S)

    async def _follow(self, member: Member) -> None:
        """Wait for a worker to be ready, and then for as long as it lives."""
        await self.job.answer(member.handle.ping.remote())
        self._change(member, is_placed=True)
        described: WorkerDescription | None = await asyncio.wait_for(
            self.job.answer(member.handle.load.remote()),
            self._config.workers.start_timeout_s,
        )
        if described is None:  # it is to leave
            return
        refusal = self._refuse(described)
        if refusal:
            self._change(member, refusal=f"`{member.name}` {refusal}", is_placed=False)
            ray.kill(member.handle, no_restart=True)
            return
        self._failed_starts.clear()
        self._change(member, described=described)
        # Answers only as the worker leaves; raises where its process ends before.
        await self.job.answer(member.handle.hold.remote())

    def _refuse(self, described: WorkerDescription) -> str:
        """Return why a worker must not be used; the first one sets what others are."""
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
        """Take note that a worker is not, or no longer, there."""
        timeout_s = self._config.workers.start_timeout_s
        detail = f"`{member.name}`: {failures.describe(error)}"
        if isinstance(error, TimeoutError):
            detail = (
                f"`{member.name}` was not ready within {timeout_s:.0f} s"
                " (`workers.start_timeout_s`)"
            )
        is_start = member.is_placed and member.described is None
        is_dead = isinstance(
            error, (ray.exceptions.ActorDiedError, *failures.FATAL_ERRORS)
        )
        if is_start or is_dead:
            self._failed_starts.append(detail)
        if is_dead:  # Ray restarts it no more
            ray.kill(member.handle, no_restart=True)
            self._change(member, handle=self._new_actor(member.name))
        elif isinstance(error, TimeoutError | ray.exceptions.RayTaskError):
            ray.kill(member.handle, no_restart=False)
        since_s = time.monotonic() if member.is_placed else member.since_s
        self._change(member, is_placed=False, described=None, since_s=since_s)

    def _change(self, member: Member, **fields: Any) -> None:
        with self._lock:
            for name, value in fields.items():
                setattr(member, name, value)
        self._serve()

    async def _report(self) -> None:
        """Set Ray's metric of ready workers; refuse those that wait in vain."""
        gauge, reported_s = metrics.workers_ready(), 0.0
        while not self._is_closed and self.job.is_current:
            if time.monotonic() >= reported_s + _REPORT_S:
                gauge.set(self.num_ready)
                reported_s = time.monotonic()
            await self._judge()
            await asyncio.sleep(_RETRY_S if self._waiting else _LOOK_S)

    async def _judge(self) -> None:
        """Raise in those that wait, where they wait for what does not come."""
        # With enough workers placed, only failed starts can keep work waiting.
        placed = sum(member.is_placed for member in self.members)
        if not self._waiting or placed >= self.size.least:
            self._short_since_s = None
            if self._waiting and len(self._failed_starts) >= MAX_FAILED_STARTS:
                self._refuse_failed_starts()
            return
        usable = sum(not member.refusal for member in self.members)
        has_usable = usable >= self.size.least
        if has_usable and len(self._failed_starts) >= MAX_FAILED_STARTS:
            self._refuse_failed_starts()
            return
        now_s = time.monotonic()
        since_s = self._short_since_s = self._short_since_s or now_s
        waited_s = now_s - since_s
        if waited_s < self.size.wait_timeout_s and has_usable:
            return
        self._refuse_all(errors.ResourceError(await self._describe_shortage(waited_s)))
        self._short_since_s = None

    def _refuse_failed_starts(self) -> None:
        if self.num_ready:
            return
        message = (
            f"Expected workers to start, found {len(self._failed_starts)} failures. The"
            f" last: {self._failed_starts[-1]}"
        )
        self._failed_starts.clear()
        self._refuse_all(errors.RetryBudgetError(message, "fatal"))

    async def _describe_shortage(self, waited_s: float) -> str:
        each = inventory.resources_of(self._config)
        nodes = await inventory.look_up(inventory.read_nodes, each, self._group)
        draining = sum(node.is_draining for node in nodes)
        room = sum(node.free for node in nodes if not node.is_draining)
        refused = " ".join(m.refusal for m in self.members if m.refusal)
        last = self._failed_starts[-1] if self._failed_starts else ""
        return (
            f"Expected at least {self.size.least} workers (`workers.count`), each with"
            f" {self.size.each}, found {self.num_ready} after {waited_s:.0f} s"
            f" (`workers.wait_timeout_s`), and {len(nodes)} nodes ({draining} draining)"
            f" with room for {room}{refused and f'; refused: {refused}'}."
            f"{last and f' The last start failed: {last}.'} Add nodes, lower what"
            " `workers` asks for, or wait longer."
        )

    def _refuse_all(self, error: Exception) -> None:
        with self._lock:
            refused = [future for _, future in self._waiting]
            self._waiting.clear()
        for future in refused:
            if not future.done():
                future.set_exception(error)

    # What follows may run on any thread.

    @property
    def num_ready(self) -> int:
        """Workers that are ready, or at work."""
        return sum(member.described is not None for member in self.members)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What decides the bits of results on all workers; None where they differ."""
        return None if self._config.workers.allow_mixed else self._fingerprint

    async def count_workers(self) -> int:
        """Leave nodes that go; return how many workers a round is to be cut for.

        A pool that has all its workers looks once in a while, and waits for no answer.
        """
        self.job.check()
        is_full = self.num_ready == self.size.most
        if time.monotonic() >= self._looked_s + _LOOK_S or not is_full:
            self._looked_s = time.monotonic()
            leaving = self._thread.submit(self._leave_nodes())
            if not is_full:
                await asyncio.wrap_future(leaving)
        return max(1, self.num_workers)

    @property
    def num_workers(self) -> int:
        """Workers that are ready, or are about to be, as far as can be told."""
        since_s = time.monotonic() - _PLACED_WITHIN_S
        return sum(
            member.is_placed
            or (self.size.is_fixed and not member.refusal and member.since_s > since_s)
            for member in self.members
        )

    async def _leave_nodes(self) -> None:
        """End idle workers on nodes that drain: Ray starts them elsewhere."""
        draining = await inventory.look_up(inventory.read_draining)
        with self._lock:
            leaving = [
                member
                for member in self.members
                if member.is_idle and member.node in draining
            ]
            for member in leaving:
                member.described, member.is_placed = None, False
                member.since_s = time.monotonic()
        for member in leaving:
            ray.kill(member.handle, no_restart=False)

    async def await_ready(self, seen: Progress | None) -> Progress:
        """Return how far the workers are, once that is not what was seen before."""
        while True:
            unplaced = self._count_unplaced()
            needed = ""
            if unplaced:
                about = inventory.resources_of(self._config), self._group, unplaced
                needed = await inventory.look_up(inventory.describe_need, *about)
            progress = (self.num_ready, max(self.num_workers, self.size.least), needed)
            if progress != seen:
                return progress
            self.job.check()
            await asyncio.sleep(_RETRY_S)

    def _count_unplaced(self) -> int:
        """How many workers seem to find no room, of those that rounds wait for."""
        since_s = time.monotonic() - _PLACED_WITHIN_S
        waiting = sum(
            not (member.is_placed or member.refusal) and member.since_s < since_s
            for member in self.members
        )
        if self.size.is_fixed:
            return waiting
        placed = sum(member.is_placed for member in self.members)
        return min(waiting, max(0, self.size.least - placed))

    async def take(self, prefers: bytes, count: int) -> list[Member]:
        """Return idle workers, one at least; waits for it.

        Args:
            prefers: clients by reference, as `name_clients` names them: the worker that
                ran them last comes first, where it is idle.
            count: how many can be used together.

        Raises:
            ResourceError: the cluster has no room for the least number of workers.
            RetryBudgetError: no worker starts.
        """
        while True:
            team = self.take_now(prefers, count)
            if team:
                return team
            await self._wait("")

    def take_now(self, prefers: bytes, count: int) -> list[Member]:
        """Return workers that are idle now; there may be none."""
        name = self._holders.find(prefers) if prefers else None
        with self._lock:
            idle = [member for member in self.members if member.is_idle]
            idle.sort(key=lambda member: member.name != name)
            team = idle[: 1 if self._waiting else count]
            for member in team:
                member.is_busy = True
        return team

    async def ready(self, member: Member) -> WorkerDescription:
        """Return what a worker is, once it is ready.

        Raises:
            ResourceError: see `take`.
            RetryBudgetError: see `take`.
        """
        while True:
            described = member.described
            if described is not None:
                return described
            await self._wait(member.name)

    async def _wait(self, name: str) -> None:
        """Wait until some worker is idle, or one of a name is ready."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            self._waiting.append((name, future))
        self._serve()
        try:
            await asyncio.wrap_future(future)
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove((name, future))

    def _serve(self) -> None:
        """Wake those that wait for what is there now, the first who came first."""
        with self._lock:
            num_idle = sum(member.is_idle for member in self.members)
            ready = {m.name for m in self.members if m.described is not None}
            woken: list[_Waiter] = []
            for waiter in self._waiting:
                name, _ = waiter
                if name in ready or (not name and num_idle):
                    num_idle -= not name
                    woken.append(waiter)
            for waiter in woken:
                self._waiting.remove(waiter)
        # Outside of the lock, as a future calls at once whoever waits for it.
        for _, future in woken:
            if not future.done():
                future.set_result(None)

    def give_back(
        self, team: Iterable[Member], lost: Iterable[outcomes.Attempt] = ()
    ) -> None:
        """Take note that workers have done their work.

        Args:
            team: the workers.
            lost: attempts at the work that came to nothing.
        """
        with self._lock:
            for attempt in lost:
                self.lose(attempt.worker, attempt.worker_pid)
            for member in team:
                member.is_busy = False
        self._serve()

    def lose(self, name: str, pid: int) -> None:
        """Take note that the process of a worker seems gone; Ray starts another one."""
        with self._lock:
            for member in self.members:
                described = member.described
                if member.name == name and described and described.pid == pid:
                    member.described, member.is_placed = None, False
                    member.since_s = time.monotonic()
                    with contextlib.suppress(errors.ContextStateError):  # closed
                        self._thread.submit(self._see_again(member, pid))

    async def _see_again(self, member: Member, pid: int) -> None:
        """Take a worker back whose process lives: what called it lost may have died."""
        with contextlib.suppress(ray.exceptions.RayError):
            described = await self.job.answer(member.handle.describe.remote())
            if described is not None and described.pid == pid:
                self._change(member, described=described, is_placed=True)

    def note_holder(self, clients: bytes, worker: str) -> None:
        """Note which worker ran clients by reference last."""
        if clients:
            self._holders.put(clients, worker)

    def in_order(
        self, team: Sequence[Member]
    ) -> tuple[list[Any], tuple[KnownWorker, ...]]:
        """Return the handles for a subround, and what is known of each.

        Args:
            team: its own workers, which come first.
        """
        with self._lock:
            others = [m for m in self.members if m not in team and not m.refusal]
            nodes = {member.node for member in team}  # which may go as a whole
            others.sort(key=lambda m: (m.described is None, m.node in nodes, m.is_busy))
            ordered = [*team, *others][: max(len(team), _HANDLES)]
            known = tuple(KnownWorker(m.name, m.described) for m in ordered)
            return [member.handle for member in ordered], known

    def end(self, name: str) -> None:
        """End what workers still do of a subround, for good."""
        if not self.job.is_current:
            return
        for member in self.members:
            with contextlib.suppress(ray.exceptions.RayError):
                member.handle.end_before.remote(name, _FOR_GOOD)

    def forget_clients(self, tokens: list[str]) -> None:
        """Have workers drop what they keep of clients whose sources are gone."""
        for member in self.members:
            member.handle.forget_clients.remote(tokens)

    def close(self, *, ray_ends: bool = False) -> None:
        """End all workers.

        Args:
            ray_ends: whether Ray ends right after, with all processes that it has. A
                worker that is killed before under work is one of which Ray still says
                that it was lost, and how often the work will be tried again.
        """
        self._is_closed = True
        self._refuse_all(
            errors.RetryBudgetError("The subround was cancelled.", "fatal")
        )
        if self.job.is_current:
            ending: list[concurrent.futures.Future[Any]] = []
            for member in self.members:
                if member.described is None and not member.is_placed:
                    continue
                left = member.handle.leave.remote().future()
                if member.described is not None:  # another may still start
                    ending += [self._watches[member.name], left]
            concurrent.futures.wait(ending, timeout=_LEAVE_S)
            if not ray_ends:
                for member in self.members:
                    ray.kill(member.handle, no_restart=True)
                if self._own_group is not None:
                    ray.util.remove_placement_group(self._own_group)
            metrics.workers_ready().set(0)
        self._thread.close()


_HOLDERS = 1024
"""Runs of clients of which the worker that ran them last is remembered."""

_HANDLES = 4
"""Handles that travel with a subround: enough to find one that answers."""

_FOR_GOOD = 10**9
"""A turn that no attempt reaches."""


class HeldWorker:
    """A worker of the pool, held for as long as that lives; see `WorkerSource`.

    What is run again after a loss has the budgets of a subround; what ended well starts
    the next with whole ones.

    Args:
        pool: not owned.
        member: of it.
        budgets: failures of each class.
    """

    def __init__(self, pool: Pool, member: Member, budgets: Mapping[str, int]) -> None:
        self._pool, self._member, self._budgets = pool, member, budgets
        self._lost: list[outcomes.Attempt] = []
        self._turn = 0

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        """Return the worker, after a loss once Ray has restarted it."""
        pool, member = self._pool, self._member
        while True:
            if loss is not None:
                self._count(loss)
            with pool.job.watched():
                described = await pool.ready(member)
            self._turn += 1
            scope = f"held {member.name}/{self._turn}"
            worker = Worker(member.handle, scope, member.name, described, pool.job)
            try:
                await worker.call("begin")
            except LostWorkerError as error:
                loss = error
            except worker_actor.NotLoadedError:
                pool.lose(member.name, described.pid)
            else:
                return worker

    def _count(self, loss: LostWorkerError) -> None:
        worker, failure = loss.worker, loss.find_cause()
        self._lost.append(
            outcomes.Attempt.on(
                worker.name,
                worker.described,
                attempt=len(self._lost) + 1,
                ended=failure.failure_class,
                detail=failure.detail,
            )
        )
        self._pool.lose(worker.name, self._lost[-1].worker_pid)
        failures.check_budgets(self._lost, self._budgets, failure)

    async def settle(self) -> None:
        """Give the next work whole budgets."""
        self._lost.clear()


def name_clients(argument: Any) -> bytes:
    """Return what names the clients by reference in an argument; empty without any.

    Args:
        argument: plain, structures as tuples.
    """
    digest, is_empty = hashlib.sha256(), True
    for run in _runs(argument):
        token, positions = run.key
        digest.update(b"%d %b" % (len(positions), token.encode()))
        digest.update(positions)
        is_empty = False
    return b"" if is_empty else digest.digest()


def _runs(argument: Any) -> Iterator[ClientRun]:
    if isinstance(argument, ClientRun):
        yield argument
    elif isinstance(argument, tuple):
        for part in cast("tuple[Any, ...]", argument):
            yield from _runs(part)


@dataclasses.dataclass
class _Siblings:
    begun_s: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    seconds: list[float] = dataclasses.field(default_factory=list[float])


class Stragglers:
    """Compares subrounds that run with those of their siblings that are done.

    A subround straggles when it has run for `factor` times the median of its siblings'
    durations, and for `min_s` at least; nothing is said before half of those that were
    begun are done. All times are seconds of one clock, which only goes forward.

    Args:
        factor: > 1.
        min_s: >= 0.
    """

    def __init__(self, factor: float, min_s: float) -> None:
        self._factor = factor
        self._min_s = min_s
        self._groups: dict[str, _Siblings] = {}

    def begin(self, siblings: str, subround: str, now_s: float) -> None:
        """Note that a subround was given a worker.

        Args:
            siblings: names those to compare with.
            subround: its name.
            now_s: of the clock.
        """
        self._groups.setdefault(siblings, _Siblings()).begun_s[subround] = now_s

    def end(self, siblings: str, subround: str, now_s: float) -> None:
        """Note that one came to its end; what is known goes with the last that runs."""
        group = self._groups[siblings]
        group.seconds.append(now_s - group.begun_s.pop(subround))
        if not group.begun_s:
            del self._groups[siblings]

    def due_s(self, siblings: str, subround: str) -> float | None:
        """Return when a subround that runs is to be called a straggler.

        None: not as things stand.
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
    """Return how many workers to keep.

    Args:
        config: of the pool.
        nodes: what each has in all; or each bundle of a placement group, beside what
            this process holds.
        may_grow: whether nodes may come, so that a range can wait for its least.
        occupied: by this process, in the placement group; None: workers live in none.

    Raises:
        ResourceError: the nodes can never hold them.
    """
    each = inventory.resources_of(config)
    fitting = sum(inventory.count_fitting(node, each) for node in nodes)
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
    words = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
    return Size(least, most, is_fixed, words, config.workers.wait_timeout_s)


def _describe_shortage(
    each: Mapping[str, float],
    nodes: Sequence[Mapping[str, float]],
    needed: int,
    fitting: int,
) -> str:
    advice = (
        "lower `workers.count` or what each worker asks for, or add nodes. With"
        " workers=(min, max) the pool follows the cluster."
    )
    for name, amount in each.items():
        total = sum(node.get(name, 0.0) for node in nodes)
        if amount * needed > total + 1e-9:
            return (
                f"Expected {amount * needed:g} {name} for {needed} `workers`, found"
                f" {total:g} in the cluster: {advice}"
            )
    return (
        f"Expected room for {needed} `workers`, each on one node, found room for"
        f" {fitting} on {len(nodes)} nodes: {advice}"
    )


def _describe_bundles(
    each: Mapping[str, float], first: Mapping[str, float], needed: int, fitting: int
) -> str:
    return (
        f"Expected room for {needed} `workers` in the bundles of the placement group"
        f" that this process runs in, found room for {fitting} beside the process"
        f" itself: ask for {needed + 1} bundles, the first for the process, as in"
        f" tune.PlacementGroupFactory([{_show(first)}] + [{_show(each)}] * {needed})."
        ' Without bundles for workers, call ray_fed.init(config=Config(backend="local",'
        " workers=1)), whose workers are threads of the process."
    )


def _show(resources: Mapping[str, float]) -> str:
    pairs = (f'"{name}": {amount:g}' for name, amount in resources.items())
    return f"{{{', '.join(pairs)}}}"
