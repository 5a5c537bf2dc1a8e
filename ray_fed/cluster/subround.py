"""A subround on Ray: one task, which calls workers, and which Ray repeats.

    driver --task--> run_subround (num_cpus=0, no TensorFlow) --one call each--> workers
       ^                 |
       +--- result ------+--- WorkerLost ---> Ray runs the task again

The task has the handles of its pool's workers, its own first. An attempt begins on its
own ones, else on the first that answers, and waits for one only where none does. What
an attempt cannot tell the next one by itself, it notes in Ray's key-value store: only
where it fails, so that a round in which nothing fails notes nothing.
"""

import asyncio
import dataclasses
import functools
import gc
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import federated_language as fl
import ray
import ray.exceptions
from ray._private import worker as ray_worker  # no public name for a task's attempt
from ray.experimental import internal_kv  # no public name for what outlives a process
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_fed.errors as errors
import ray_fed.executors.loops as loops
import ray_fed.plan.plans as plans
from ray_fed.cluster import failures, object_store, worker_actor
from ray_fed.cluster.failures import Failure
from ray_fed.cluster.joining import Job
from ray_fed.cluster.object_store import StoredKernel, fetch
from ray_fed.cluster.ray_strategy import (
    LostWorkerError,
    RayFederatingStrategy,
    RemoteExecutor,
    Worker,
    WorkerConnection,
)
from ray_fed.cluster.worker_actor import NotLoadedError
from ray_fed.executors.loops import gather_by_index
from ray_fed.language import blocks, type_checks
from ray_fed.plan import diagnostics, merge_tree, outcomes
from ray_fed.plan.fingerprint import Fingerprint, WorkerDescription
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored
from ray_fed.values.lru_cache import LruCache
from ray_fed.worker import evaluation
from ray_fed.worker.stacks import federated_stack

_LOOK_S = 0.2
"""How often an attempt for which no worker answers asks all of them again."""

_ANSWER_S = 10.0
"""How long a worker may take to say what it does: one that is stopped never does."""

_LATE_S = 1.0
"""A call may be as long on its way to a worker."""

_KNOWN_HANDLES = 64
"""Handles of workers that one process keeps between subrounds."""


@dataclasses.dataclass(frozen=True)
class KnownWorker:
    """A worker as the driver knows it when it submits a subround.

    Attributes:
        name: of it.
        described: what it said of itself; None where it is not ready.
    """

    name: str
    described: WorkerDescription | None


@dataclasses.dataclass(frozen=True)
class Terms:
    """On what terms a subround runs.

    Attributes:
        workers: those of the pool, in the order of their handles: its own first.
        num_own: how many of them it may use together, >= 1.
        budgets: failures of each class that it may have.
        timeout_s: seconds after which a worker counts as hung; None: never.
        wait_s: seconds within which a worker must answer.
        fingerprint: of all workers; None: any will do.
        each: what a worker asks for, in words.
        submitted: when the subround was, in seconds of time.
    """

    workers: tuple[KnownWorker, ...]
    num_own: int
    budgets: Mapping[str, int]
    timeout_s: float | None
    wait_s: float
    fingerprint: Fingerprint | None
    each: str
    submitted: float


@dataclasses.dataclass(frozen=True)
class Work:
    """A plan with its argument, under a name.

    Attributes:
        name: of the subround; its attempts are the turns of that name on workers.
        terms: on which it runs.
        packed: the plan and its argument.
        computation: of a subround with a kernel, which only the interpreter needs, and
            so no part of the plan; serialised, or in a list the reference to a large
            one.
        clients_per_leaf: of the cohort.
        num_clients: of a subround; None: a finish, which a worker runs in one call.
        is_whole: whether it is a computation that is not cut, whose one leaf may hold
            clients of several workers.
        num_stored: how many values a finish leaves in the object store; 0: none, they
            are wanted here.
    """

    name: str
    terms: Terms
    packed: object_store.Packed
    computation: bytes | list[Any] | None
    clients_per_leaf: int
    num_clients: int | None
    is_whole: bool = False
    num_stored: int = 0

    @classmethod
    def of(
        cls, name: str, terms: Terms, comp: Any, arg: Any, num_stored: int = 0
    ) -> "Work":
        """Pack a `plans.Subround` or a `plans.Finish`.

        Args:
            name: of the subround.
            terms: on which it runs.
            comp: the plan.
            arg: as `worker.evaluation` takes it, but for what is stored.
            num_stored: see `Work`.
        """
        computation, num_clients, is_whole = None, None, False
        if isinstance(comp, plans.Subround):
            is_whole = not comp.chunks
            num_clients = sum(map(len, comp.leaves))
            if isinstance(comp.kernel, plans.Kernel | StoredKernel):
                computation, kernel = _stored_if_large(comp)
                comp = dataclasses.replace(comp, computation=b"", kernel=kernel)
        packed, size = object_store.pack(comp, arg), comp.clients_per_leaf
        about = (size, num_clients, is_whole, num_stored)
        return cls(name, terms, packed, computation, *about)

    def unpack(self) -> tuple[Any, Any]:
        """Return the plan, whole, and its argument."""
        comp, arg = object_store.unpack(self.packed)
        computation = self.computation
        if isinstance(computation, list):
            computation = cast("bytes", fetch(computation[0]))
        if computation is not None:
            comp = dataclasses.replace(comp, computation=computation)
        return comp, arg

    def deal(self, num_workers: int) -> tuple[list["Work"], int]:
        """Return the parts of a subround that workers run at once, in order.

        Args:
            num_workers: that there are; each part is of whole chunks.

        Returns:
            The parts, at most one for each worker, and the number of values that are
            kept for each client.
        """
        if num_workers == 1 or self.is_whole:
            return [self], 0
        subround, arg = self.unpack()
        chunks, parameter = subround.chunks, _parameter_of(subround.computation)
        first = subround.leaves[0].start
        parts: list[Work] = []
        for run in merge_tree.cut_runs(len(chunks), num_workers):
            leaves = range(chunks[run.start].start, chunks[run.stop - 1].stop)
            part = subround.of_leaves(leaves)
            inside = range(part.leaves[0].start - first, part.leaves[-1].stop - first)
            clients = stored.slice_clients(arg, parameter, inside)
            parts.append(Work.of(self.name, self.terms, part, clients))
        return parts, subround.num_kept

    def for_worker(self) -> list[Any]:
        """Return what `LeafWorker.evaluate` takes for it."""
        sources = object_store.short_lists(self.packed.sources)
        work = self.packed.work, self.computation, len(sources)
        return [*work, *sources, *self.packed.values]

    def as_arguments(self) -> list[Any]:
        """Return what `run_subround` takes for it, which Ray pickles at little cost."""
        packed = self.packed
        sources = object_store.short_lists(packed.sources)
        lists = [*sources, *object_store.short_lists(packed.values)]
        cut = self.clients_per_leaf, self.num_clients, self.is_whole
        about = (self.name, self.terms, *cut, len(sources))
        head = pickle.dumps(about)
        return [head, packed.work, self.computation, *lists]

    @classmethod
    def from_arguments(
        cls,
        head: bytes,
        work: bytes,
        computation: bytes | list[Any] | None,
        *lists: list[Any],
    ) -> "Work":
        """Return what `as_arguments` took apart."""
        name, terms, *about, count = pickle.loads(head)
        sources, values = map(object_store.gathered, (lists[:count], lists[count:]))
        packed = object_store.Packed(work, values, sources)
        return cls(name, terms, packed, computation, *about)


@functools.lru_cache(maxsize=16)
def _parameter_of(computation: bytes) -> fl.Type | None:
    """Return the type of what a serialised computation takes."""
    block = blocks.parse_block(computation)
    return type_checks.function_type(block.type_signature).parameter


def _stored_if_large(comp: plans.Subround) -> tuple[bytes | list[Any], Any]:
    """Return the computation of a plan and its kernel: as they are, or references."""
    if not isinstance(comp.kernel, plans.Kernel):  # packed before, by the driver
        return comp.computation, comp.kernel
    if not object_store.is_large(comp.kernel, comp.computation):
        return comp.computation, comp.kernel
    kernel, computation = object_store.store_kernel(comp.kernel, comp.computation)
    return [computation], kernel


class AttemptNotes:
    """What became of the attempts at one subround, where later ones find it.

    Args:
        name: of the subround.
    """

    _NAMESPACE = b"ray_fed"

    def __init__(self, name: str) -> None:
        self._key = b"attempts/" + name.encode()

    def read(self) -> tuple[float, list[outcomes.Attempt]]:
        """Return when the first attempt began, in seconds of time, and all lost."""
        noted = self._call("get", self._key)
        if noted is None:
            return time.time(), []
        return pickle.loads(noted)

    def write(self, begun: float, lost: Sequence[outcomes.Attempt]) -> None:
        """Note the attempts that are lost."""
        noted = pickle.dumps((begun, list(lost)))
        self._call("put", self._key, noted, overwrite=True)

    def clear(self) -> None:
        """Forget them."""
        self._call("del", self._key)

    def _call(self, verb: str, *args: Any, **options: Any) -> Any:
        method = getattr(internal_kv, f"_internal_kv_{verb}")
        return method(*args, namespace=self._NAMESPACE, **options)


class _HungError(Exception):
    """A worker had not finished in time, and was ended.

    Attributes:
        worker: that one.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.name)
        self.worker = worker


class Attempt:
    """One attempt at a subround.

    Args:
        handles: of the workers.
        work: to be done.
        number: of attempts before.
        job: of the handles, in a driver; None: in a task.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        work: Work,
        number: int,
        job: Job | None = None,
    ) -> None:
        self._handles, self._work, self._number = handles, work, number
        self._job = job
        self._terms = work.terms
        self._notes = AttemptNotes(work.name)
        self._turn = number * 1000  # an attempt may try several workers that are new
        self._begun, self._lost = time.time(), list[outcomes.Attempt]()

    async def run(self) -> tuple[outcomes.Outcome, Sequence[Any]]:
        """Run the subround, on workers that answer.

        Returns:
            The outcome without values, and each value, encoded.

        Raises:
            WorkerLost: a worker died, hung or found no memory: to be run again.
            RetryBudgetError: that happened too often.
            DeadlineError: the last time, it hung.
            ResourceError: no worker answered in time.
            ComputationError: the user's computation raised.
        """
        if self._number:
            self._take_over()
        while True:
            team = await self._find_workers()
            begun_s, begun = time.monotonic(), time.time()
            try:
                with diagnostics.noting() as noted:
                    if self._terms.timeout_s is None:
                        evaluated = await _evaluate(team, self._work)
                    else:
                        evaluated = await self._in_time(team, self._terms.timeout_s)
            except NotLoadedError:
                self._forget(team)
                continue
            except (LostWorkerError, _HungError, errors.WorkerMemoryError) as error:
                seconds = time.monotonic() - begun_s
                self._fail(team, error, begun - self._begun, seconds)
            except errors.ComputationError as error:
                raise error.located(attempt=self._number + 1) from error
            if not all(map(self._is_alike, (worker.described for worker in team))):
                self._forget(team)  # a process that Ray put elsewhere; the pool ends it
                continue
            return self._outcome(team, evaluated, noted)

    def _is_alike(self, described: WorkerDescription | None) -> bool:
        expected = self._terms.fingerprint
        if expected is None or described is None:
            return True
        return described.fingerprint == expected

    def _outcome(
        self,
        team: Sequence[Worker],
        evaluated: Evaluated,
        noted: set[diagnostics.Note],
    ) -> tuple[outcomes.Outcome, Sequence[Any]]:
        by = cast("WorkerDescription", team[0].described)
        if self._lost:
            self._notes.clear()
        outcome = outcomes.Outcome(
            values=(),
            attempts=self._number + 1,
            worker=team[0].name,
            worker_pid=by.pid,
            coordinator_pid=os.getpid(),
            node=by.address,
            notes=diagnostics.in_order(noted),
            kernel_leaves=evaluated.kernel_leaves,
            no_kernel=evaluated.no_kernel,
            lost=tuple(self._lost),
            value_bytes=tuple(stored.count_bytes(v) for v in evaluated.values),
            fingerprint=by.fingerprint,
            num_workers=len(team),
            busy_s=evaluated.busy_s,
        )
        return outcome, evaluated.values

    def _take_over(self) -> None:
        """Begin where the attempts before ended; end what they left on workers."""
        self._begun, self._lost = self._notes.read()
        while len(self._lost) < self._number:  # its process died: it noted nothing
            first = self._terms.workers[0]
            failure = failures.find_cause_of_silence(self._terms.submitted)
            self._lost.append(
                outcomes.Attempt.on(
                    first.name,
                    first.described,
                    attempt=len(self._lost) + 1,
                    ended=failure.failure_class,
                    detail=failure.detail,
                )
            )
            self._check_budgets(failure)
        self._notes.write(self._begun, self._lost)
        for handle in self._handles:
            handle.end_before.remote(self._work.name, self._turn)

    def _check_budgets(self, last: Failure) -> None:
        try:
            failures.check_budgets(self._lost, self._terms.budgets, last)
        except errors.ClusterError:
            self._notes.clear()
            raise

    async def _find_workers(self) -> list[Worker]:
        """Return the workers of the attempt: its own, or the first that answers.

        After a loss others may be dead, too, whatever the driver knew of them.
        """
        self._turn += 1
        own = self._terms.workers[: self._terms.num_own]
        ready = [i for i, known in enumerate(own) if known.described is not None]
        if ready and not self._number:
            return [self._worker(i, own[i].described) for i in ready]
        waits_until_s = time.monotonic() + self._terms.wait_s
        while True:
            answered = await self._ask_all()
            if answered is not None:
                return [self._worker(*answered)]
            if time.monotonic() > waits_until_s:
                raise errors.ResourceError(
                    f"Expected a worker with {self._terms.each} for a subround that"
                    f" lost its own, found none within {self._terms.wait_s:.0f} s: add"
                    " nodes, or call again once there is room."
                )
            await asyncio.sleep(_LOOK_S)

    async def _ask_all(self) -> tuple[int, WorkerDescription] | None:
        """Return the first worker that answers, and what it says; None: none does."""
        # A process that an attempt lost may still answer: one that was just killed.
        lost = {
            (attempt.worker, attempt.worker_pid)
            for attempt in self._lost
            if not attempt.detail.startswith(failures.GONE)
        }

        async def ask(index: int) -> tuple[int, WorkerDescription] | None:
            described: WorkerDescription | None
            try:
                described = await self._handles[index].describe.remote()
            except ray.exceptions.RayError:
                return None  # it starts, or there is no room for it
            if described is None or not self._is_alike(described):
                return None
            process = self._terms.workers[index].name, described.pid
            return None if process in lost else (index, described)

        async def first_of(indices: range) -> tuple[int, WorkerDescription] | None:
            asking = [asyncio.ensure_future(ask(index)) for index in indices]
            try:
                for answer in asyncio.as_completed(asking, timeout=_ANSWER_S):
                    if (answered := await answer) is not None:
                        return answered
            except TimeoutError:
                pass  # the others are silent
            finally:
                for each in asking:
                    each.cancel()
            return None

        num_own = min(self._terms.num_own, len(self._handles))  # have data, perhaps
        answered = await first_of(range(num_own))
        return answered or await first_of(range(num_own, len(self._handles)))

    def _worker(self, index: int, described: WorkerDescription | None) -> Worker:
        scope = f"{self._work.name}/{self._turn}"
        name = self._terms.workers[index].name
        return Worker(self._handles[index], scope, name, described, self._job)

    def _forget(self, team: Sequence[Worker]) -> None:
        """Take note that the processes of workers are not those that were known."""
        for worker in team:
            worker.handle.end_before.remote(self._work.name, self._turn + 1)
        names = {worker.name for worker in team}
        workers = tuple(
            dataclasses.replace(known, described=None) if known.name in names else known
            for known in self._terms.workers
        )
        self._terms = dataclasses.replace(self._terms, workers=workers)

    def _fail(
        self,
        team: Sequence[Worker],
        error: LostWorkerError | _HungError | errors.WorkerMemoryError,
        started_s: float,
        seconds: float,
    ) -> NoReturn:
        """Note why the attempt came to nothing, and raise what Ray repeats it for."""
        match error:
            case LostWorkerError():
                worker, failure = error.worker, error.find_cause()
            case _HungError():
                worker = error.worker
                failure = Failure(
                    "hang",
                    f"`{worker.name}` had not finished within the time of its subround"
                    " (`subrounds.timeout_s`), and was ended.",
                )
            case _:
                # What fills its memory may well be its own: the next has a new process.
                worker = next((w for w in team if w.found_no_memory), team[0])
                ray.kill(worker.handle, no_restart=False)
                failure = Failure(
                    "memory",
                    f"`{worker.name}` on node {worker.node}: {error.message}",
                    error.location.client_index,
                    error.cause_text,
                )
        attempt = outcomes.Attempt.on(
            worker.name,
            worker.described,
            attempt=self._number + 1,
            started_s=started_s,
            seconds=seconds,
            ended=failure.failure_class,
            detail=failure.detail,
        )
        self._lost.append(attempt)
        # A spent budget raises here: Ray repeats a task only for what is raised below.
        self._check_budgets(failure)
        self._notes.write(self._begun, self._lost)
        raise errors.WorkerLost(failure.detail) from None

    async def _in_time(self, team: Sequence[Worker], timeout_s: float) -> Evaluated:
        """Run the subround; end a worker that is at it for longer than allowed."""
        running = asyncio.ensure_future(_evaluate(team, self._work))
        left_s = timeout_s
        try:
            while not (await asyncio.wait({running}, timeout=left_s))[0]:
                running_s = await gather_by_index(
                    _running_s(w, timeout_s) for w in team
                )
                longest_s, index = max((s, -i) for i, s in enumerate(running_s))
                if longest_s >= timeout_s:
                    worker = team[-index]
                    ray.kill(worker.handle, no_restart=False)
                    raise _HungError(worker)
                left_s = timeout_s - longest_s  # it waited while others' work ran
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})


async def _running_s(worker: Worker, timeout_s: float) -> float:
    """Return for how long a worker has run its part; infinite where it is silent."""
    try:
        scope, seconds = await asyncio.wait_for(
            worker.handle.running_s.remote(), _ANSWER_S
        )
    except TimeoutError:
        return timeout_s
    except ray.exceptions.RayError:
        return 0.0  # lost: the call of the work says so
    return seconds + _LATE_S if scope == worker.scope else 0.0


async def _evaluate(team: Sequence[Worker], work: Work) -> Evaluated:
    """Return what a plan came to on some workers, encoded."""
    if work.num_clients is None:
        return await _evaluate_finish(team[0], work)
    executors = [RemoteExecutor(WorkerConnection(worker)) for worker in team]
    strategy = RayFederatingStrategy(
        executors[0], executors, work.num_clients, work.clients_per_leaf
    )
    if len(team) > 1 and work.is_whole:
        return await _evaluate_whole(team, work, strategy, executors[0])
    return await strategy.evaluate(work)


async def _evaluate_finish(worker: Worker, work: Work) -> Evaluated:
    evaluated = await worker.evaluate(work, work.num_stored)
    described = cast("WorkerDescription", worker.described)
    if not work.num_stored or described.node == _this_node():
        return evaluated  # no call of a worker is made again for what it returned
    with worker.reached():
        values = await bring_home(evaluated.values, work.terms.timeout_s)
    return dataclasses.replace(evaluated, values=values)


async def _evaluate_whole(
    team: Sequence[Worker],
    work: Work,
    strategy: RayFederatingStrategy,
    unplaced: RemoteExecutor,
) -> Evaluated:
    """Interpret a computation that no worker can evaluate alone, verb by verb.

    It is not cut, so that its leaf holds clients of several workers.
    """
    comp, arg = work.unpack()
    await gather_by_index(worker.call("begin") for worker in team)
    begun = time.monotonic()
    stack = federated_stack(lambda _: strategy, unplaced)
    executors = evaluation.Executors(lambda _: stack, unplaced)
    evaluated = await evaluation.evaluate_plan(comp, arg, executors)
    await gather_by_index(worker.call("end") for worker in team)
    encoded = list(map(object_store.encode, evaluated.values))
    busy_s = len(team) * (time.monotonic() - begun)  # each is held for all of it
    return dataclasses.replace(evaluated, values=encoded, busy_s=busy_s)


@ray.remote(num_cpus=0)
def run_subround(handles: list[Any], *arguments: Any) -> Any:
    """Run a subround or a finish on workers: see `Attempt.run`.

    Args:
        handles: of the workers, in the order of `Terms.workers`.
        arguments: see `Work.as_arguments`.

    Returns:
        The outcome, pickled by pickle itself, which takes a fraction of the time of
        Ray's own pickler; then each value, encoded.
    """
    work, number = Work.from_arguments(*arguments), _attempt_number()
    for handle in handles:
        _known_handles().put(handle, handle)
    try:
        attempt = Attempt(handles, work, number)
        outcome, values = loops.run_alone(_event_loop(), attempt.run())
        return pickle.dumps(outcome), *values
    except BaseException as error:
        worker_actor.gc_later()
        if isinstance(error, errors.WorkerLost):  # Ray prints it, frames and all
            error.with_traceback(None)
        raise
    finally:
        # Loops and tasks refer to each other, and to arrays that the object store may
        # not free before: an idle process would hold them.
        gc.collect(worker_actor.YOUNG_GENERATION)


@functools.cache
def _known_handles() -> LruCache[Any, Any]:
    """Return handles that this process had: without one Ray forgets an actor.

    It takes milliseconds to find it again. No variable of the module: Ray pickles those
    with the task that uses them.
    """
    return LruCache(_KNOWN_HANDLES)


def _attempt_number() -> int:
    """Return how often Ray has run this task before."""
    worker: Any = ray_worker.global_worker
    return worker.core_worker.get_current_task_attempt_number()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which Ray interrupts to cancel a task.

    Not that of `asyncio.run`, whose handling of interrupts writes out what a task
    returned, arrays and all, and takes longer than all else that drives a small round.
    """
    return asyncio.new_event_loop()


async def bring_home(values: Sequence[Any], timeout_s: float | None) -> list[Any]:
    """Return values in this node's store, whose making Ray does not remember.

    Of what Ray can make again, it remembers how, back to the first of all calls where
    each takes the former's result; and what only a worker's node has dies with that.

    Args:
        values: `Stored`, by whichever node.
        timeout_s: None: no bound.

    Raises:
        DeadlineError: it took longer.
    """
    if all(value.num_bytes < object_store.INLINE_BYTES for value in values):
        return list(values)  # they came in the answer of a task, to this process
    task: Any = _keep.options(
        num_returns=1 + len(values),
        scheduling_strategy=NodeAffinitySchedulingStrategy(_this_node(), soft=True),
    )
    is_done, *kept = task.remote(*(value.reference for value in values))
    try:
        await asyncio.wait_for(is_done, timeout_s)
    except TimeoutError:
        raise errors.DeadlineError(
            f"Expected a result on the driver's node within {timeout_s} s"
            " (`subrounds.timeout_s`), found it still on its way."
        ) from None
    return [
        dataclasses.replace(value, reference=reference)
        for value, reference in zip(values, kept, strict=True)
    ]


def _this_node() -> str:
    return ray.get_runtime_context().get_node_id()


@ray.remote(num_cpus=0, max_retries=0)
def _keep(*values: Any) -> Any:
    """Return that it is done, and the values, as new objects."""
    return None, *values
