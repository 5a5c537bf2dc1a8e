"""Runs a subround as one Ray task, which divides its clients among workers.

    driver --task--> run_subround (num_cpus=0, no TensorFlow) --one call each--> workers
       ^                 |                                           |
       |                 +<---- another worker that answers ---------+ lost
       +--- result ------+

A subround is a range of a round's clients. If a worker is lost, its part of the
subround runs again on the first worker that answers. The results of the other parts
stay valid. The task counts these losses against the budgets of its subround. If the
process of the task dies, Ray runs the task again. Then only the number of earlier runs
is known, and all clients of the subround run again.

The driver runs the finish of a round, the server's work, by the same code without a
task.
"""

import asyncio
import dataclasses
import functools
import gc
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import federated_language as fl
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.cluster import failures, joining, object_store, worker_actor
from ray_fed.cluster.joining import Job
from ray_fed.cluster.ray_strategy import (
    LostWorkerError,
    RayFederatingStrategy,
    RemoteExecutor,
    Worker,
    WorkerConnection,
)
from ray_fed.executors.calling_thread import run_alone
from ray_fed.language import blocks, type_checks
from ray_fed.plan import diagnostics, merge_tree, outcomes
from ray_fed.plan.fingerprint import Fingerprint, WorkerDescription
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored
from ray_fed.values.lru_cache import LruCache
from ray_fed.worker import evaluation
from ray_fed.worker.stacks import federated_stack

_LOOK_S = 0.2
"""Seconds until all workers are asked again if no worker answered."""

_ANSWER_S = 10.0
"""Seconds that a worker may take to answer. A stopped process never answers."""

_KNOWN_HANDLES = 64
"""Number of handles of workers that one process keeps between subrounds."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """The workers that a plan may use, and its budgets and time limits.

    Attributes:
        workers: Name and description of each worker, in the order of the handles. The
            description is None if the worker is not ready.
        num_own: Number of workers at the front that the plan may use together, >= 1.
            The other workers are replacements.
        budgets: Number of failures that each class may have, by name of the class.
        timeout_s: Seconds after which a worker counts as hung, or None for no limit.
        wait_s: Seconds within which a replacement must answer.
        fingerprint: Fingerprint that workers must have, or None if they may differ.
        each: Description of the resources that one worker asks Ray for, for errors.
        submitted: Time at which the driver submitted the plan, by `time.time`.
    """

    workers: tuple[tuple[str, WorkerDescription | None], ...]
    num_own: int
    budgets: Mapping[str, int]
    timeout_s: float | None
    wait_s: float
    fingerprint: Fingerprint | None
    each: str
    submitted: float


@dataclasses.dataclass(frozen=True)
class Work:
    """A packed plan with its argument, its name and its terms.

    Attributes:
        name: Name of the plan. Workers know an attempt by this name and a turn, which
            is the attempt's number.
        terms: Workers and limits of the plan.
        packed: The pickled plan and argument.
        clients_per_leaf: Number of clients of a leaf.
        num_clients: Number of clients of a subround, or None for a finish.
        is_whole: Whether the computation could not be divided into stages. It is then
            interpreted as a whole, with its clients on all workers.
        num_stored: Number of values that a finish leaves in the object store. With 0,
            the worker returns all values to the caller.
    """

    name: str
    terms: Terms
    packed: object_store.Packed
    clients_per_leaf: int
    num_clients: int | None
    is_whole: bool = False
    num_stored: int = 0

    @classmethod
    def of(
        cls, name: str, terms: Terms, comp: Any, arg: Any, num_stored: int = 0
    ) -> "Work":
        """Pack a `plans.Subround` or a `plans.Finish` with its argument."""
        num_clients, is_whole = None, False
        if not comp.arrays:  # a part of a subround has them
            finish = getattr(comp, "finish", None)
            computations = comp.computation, finish and finish.computation
            arrays = object_store.store_arrays(*computations)
            comp = dataclasses.replace(comp, arrays=arrays)
        if isinstance(comp, plans.Subround):
            is_whole = not comp.chunks
            num_clients = sum(map(len, comp.leaves))
            comp = object_store.store_functions(comp)
        packed, size = object_store.pack(comp, arg), comp.clients_per_leaf
        about = (size, num_clients, is_whole, num_stored)
        return cls(name, terms, packed, *about)

    def unpack(self) -> tuple[Any, Any]:
        """Return the plan and its argument. Stored objects stay references."""
        return object_store.unpack(self.packed)

    def deal(self, num_workers: int) -> tuple[list["Work"], int]:
        """Divide a subround into at most `num_workers` parts that run at the same time.

        Each part has neighboring chunks of clients, and parts are in client order. The
        second result is the number of values that each client keeps for later stages.
        It is 0 if there is one part, because only several outcomes must be joined.
        """
        if num_workers == 1 or self.is_whole:
            return [self], 0
        subround, arg = self.unpack()
        parameter = _parameter_of(object_store.fetch_computation(subround))
        chunks = subround.chunks
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
        """Return the arguments of `LeafWorker.evaluate` that follow its scope."""
        sources = object_store.short_lists(self.packed.sources)
        return [self.packed.work, len(sources), *sources, *self.packed.values]

    def as_arguments(self) -> list[Any]:
        """Return the arguments of `run_subround` that follow the handles.

        They are bytes and short lists, because Ray's pickler is slow for objects.
        """
        packed = self.packed
        sources = object_store.short_lists(packed.sources)
        lists = [*sources, *object_store.short_lists(packed.values)]
        cut = self.clients_per_leaf, self.num_clients, self.is_whole
        about = (self.name, self.terms, *cut, len(sources))
        head = pickle.dumps(about)
        return [head, packed.work, *lists]

    @classmethod
    def from_arguments(cls, head: bytes, work: bytes, *lists: list[Any]) -> "Work":
        """Make the `Work` from the list that `as_arguments` returned."""
        name, terms, *about, count = pickle.loads(head)
        sources, values = map(object_store.gathered, (lists[:count], lists[count:]))
        packed = object_store.Packed(work, values, sources)
        return cls(name, terms, packed, *about)


@functools.lru_cache(maxsize=16)
def _parameter_of(computation: bytes) -> fl.Type | None:
    block = blocks.parse_block(computation)
    return type_checks.function_type(block.type_signature).parameter


class Attempts:
    """Runs one plan on workers, replaces lost workers, and counts the lost attempts.

    Args:
        handles: Handles of the workers, in the order of `work.terms.workers`.
        work: The plan.
        number: Number of earlier runs of this Ray task, whose process died each time.
        job: Job of the handles in a driver, or None in a task.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        work: Work,
        number: int = 0,
        job: Job | None = None,
    ) -> None:
        self._handles, self._work, self._job = handles, work, job
        self._terms = terms = work.terms
        self._number = number
        self._described = [described for _, described in terms.workers]
        # Times of attempts count from the submission, as Ray may start the task later.
        self._begun_s = time.monotonic() - max(0.0, time.time() - terms.submitted)
        self._turn = number * 1000  # a later run of the task has higher turns
        self._opens_scopes = False
        self._lost: list[outcomes.Attempt] = []
        self._gone: list[WorkerDescription] = []
        self._leased: dict[int, Worker] = {}

    async def run(self) -> tuple[outcomes.Outcome, Sequence[Any]]:
        """Run the plan. Return its outcome without values, and its encoded values.

        Raises:
            RetryBudgetError: The plan failed too often.
            DeadlineError: The plan hung too often.
            ResourceError: No worker answered in time.
            ComputationError: The user's computation raised an error.
        """
        if self._number:
            self._take_over()
        own = range(self._terms.num_own)
        # A starting worker would delay its part, so ready workers do the whole work.
        ready = [index for index in own if self._described[index] is not None]
        connections = [
            WorkerConnection(_Lease(self, index), self._terms.timeout_s)
            for index in ready or own
        ]
        try:
            with diagnostics.noting() as noted:
                evaluated = await self._evaluate(connections)
        except errors.ComputationError as error:
            raise error.located(attempt=len(self._lost) + 1) from error
        finally:
            for connection in connections:
                connection.close()
        first = self._leased[min(self._leased)]
        by = cast("WorkerDescription", first.described)
        outcome = outcomes.Outcome(
            values=(),
            attempts=len(self._lost) + 1,
            worker=first.name,
            worker_pid=by.pid,
            coordinator_pid=os.getpid(),
            node=by.address,
            notes=diagnostics.in_order(noted),
            kernel_leaves=evaluated.kernel_leaves,
            no_kernel=evaluated.no_kernel,
            lost=tuple(self._lost),
            value_bytes=tuple(stored.count_bytes(v) for v in evaluated.values),
            fingerprint=by.fingerprint,
            num_workers=len(self._leased),
            busy_s=evaluated.busy_s,
        )
        return outcome, evaluated.values

    def _take_over(self) -> None:
        """Count the task's earlier runs as lost, and end their work on workers."""
        name, described = self._terms.workers[0]
        failure = failures.find_cause_of_silence(self._terms.submitted)
        ended, detail = failure.failure_class, failure.detail
        self._lost = [
            outcomes.Attempt.on(
                *(name, described), attempt=number, ended=ended, detail=detail
            )
            for number in range(1, self._number + 1)
        ]
        failures.check_budgets(self._lost, self._terms.budgets, failure)
        self._described = [None] * len(self._handles)  # workers may have died, too
        for handle in self._handles:
            handle.end_before.remote(self._work.name, self._turn)

    async def _evaluate(self, connections: Sequence[WorkerConnection]) -> Evaluated:
        work = self._work
        if work.num_clients is None:
            return await connections[0].run(
                lambda worker: _evaluate_finish(worker, work)
            )
        is_interpreted_here = work.is_whole and len(connections) > 1
        arrays = work.unpack()[0].arrays if is_interpreted_here else ()
        executors = [RemoteExecutor(each, arrays) for each in connections]
        strategy = RayFederatingStrategy(
            executors[0], executors, work.num_clients, work.clients_per_leaf
        )
        if len(executors) == 1 or not work.is_whole:
            return await strategy.evaluate(work)
        self._opens_scopes = True
        evaluated = await _evaluate_whole(work, strategy, executors[0])
        for worker in self._leased.values():
            worker.handle.end.remote(worker.scope)
        # This plan has all its workers from its beginning to its end.
        busy_s = len(self._leased) * evaluated.busy_s
        return dataclasses.replace(evaluated, busy_s=busy_s)

    async def lease(self, index: int, loss: LostWorkerError | None) -> Worker:
        """Return a worker for one part of the plan: `handles[index]`, if it answers.

        `loss` is the loss of the part's former worker, or None. Raises RetryBudgetError
        or DeadlineError if a budget is spent, and ResourceError if no worker answers.
        """
        while True:
            if loss is not None:
                self._note(loss)
            taken, described = index, self._described[index]
            if described is None:
                others = [i for i in range(len(self._handles)) if i != index]
                ranks = [index], others  # the preferred worker may have cached data
                # A lost worker may answer only once Ray has started it again.
                ranks = ranks if loss is None else ranks[::-1]
                taken, described = await self._find(*ranks)
            self._turn += 1
            scope = f"{self._work.name}/{self._turn}"
            name, _ = self._terms.workers[taken]
            worker = Worker(self._handles[taken], scope, name, described, self._job)
            self._leased[index] = worker
            try:
                if self._opens_scopes:
                    await worker.call("begin")
            except LostWorkerError as error:
                loss = error
            else:
                return worker

    def _note(self, loss: LostWorkerError) -> None:
        worker = loss.worker
        if worker.described is not None:
            self._gone.append(worker.described)
        self._described[self._handles.index(worker.handle)] = None
        # The worker may be alive and only slow to answer, so its work is ended there.
        turn = int(worker.scope.rpartition("/")[2])
        worker.handle.end_before.remote(self._work.name, turn + 1)
        loss.count(self._lost, self._terms.budgets, self._begun_s)

    async def _find(self, *ranks: list[int]) -> tuple[int, WorkerDescription]:
        # Asks the workers of a rank only if no worker of the rank before it answers.
        waits_until_s = time.monotonic() + self._terms.wait_s
        while True:
            for indices in ranks:
                answered = await self._ask(indices)
                if answered is not None:
                    return answered
            if time.monotonic() > waits_until_s:
                raise errors.ResourceError(
                    f"Expected a worker with {self._terms.each} for a subround that"
                    f" lost its own, found none within {self._terms.wait_s:.0f} s: add"
                    " nodes, or call again once there is room."
                )
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, indices: list[int]) -> tuple[int, WorkerDescription] | None:
        async def ask(index: int) -> tuple[int, WorkerDescription] | None:
            described: WorkerDescription | None
            try:
                described = await self._handles[index].describe.remote()
            except ray.exceptions.RayError:
                return None  # the worker starts, or waits for room
            # A process that was just killed may still answer.
            if described is None or described in self._gone:
                return None
            expected = self._terms.fingerprint
            is_alike = expected is None or described.fingerprint == expected
            return (index, described) if is_alike else None

        asking = [asyncio.ensure_future(ask(index)) for index in indices]
        try:
            for answer in asyncio.as_completed(asking, timeout=_ANSWER_S):
                if (answered := await answer) is not None:
                    return answered
        except TimeoutError:
            pass  # the other workers do not answer
        finally:
            for each in asking:
                each.cancel()
        return None


@dataclasses.dataclass(frozen=True)
class _Lease:
    """The `WorkerSource` of one part of a subround."""

    attempts: Attempts
    index: int

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        return await self.attempts.lease(self.index, loss)

    async def settle(self) -> None:
        """Do nothing, because the budgets are for the whole subround."""


async def _evaluate_finish(worker: Worker, work: Work) -> Evaluated:
    evaluated = await worker.evaluate(work, work.num_stored)
    described = cast("WorkerDescription", worker.described)
    if not work.num_stored or described.node == _this_node():
        return evaluated  # Ray never repeats an actor's call to make its result again
    with worker.reached():
        values = await bring_home(evaluated.values, work.terms.timeout_s)
    return dataclasses.replace(evaluated, values=values)


async def _evaluate_whole(
    work: Work, strategy: RayFederatingStrategy, unplaced: RemoteExecutor
) -> Evaluated:
    # Interprets a computation that could not be divided into stages: each operation on
    # clients is a call to each worker.
    comp, arg = work.unpack()
    begun = time.monotonic()
    stack = federated_stack(lambda _: strategy, unplaced)
    executors = evaluation.Executors(lambda _: stack, unplaced)
    evaluated = await evaluation.evaluate_plan(comp, arg, executors)
    encoded = list(map(object_store.encode, evaluated.values))
    busy_s = time.monotonic() - begun
    return dataclasses.replace(evaluated, values=encoded, busy_s=busy_s)


@ray.remote(num_cpus=0)
def run_subround(handles: list[Any], *arguments: Any) -> Any:
    """Run a subround on workers, and return the pickled outcome and encoded values.

    This is a Ray task. `handles` are in the order of `Terms.workers`, and `arguments`
    are the list of `Work.as_arguments`.
    """
    work = Work.from_arguments(*arguments)
    for handle in handles:
        _known_handles().put(handle, handle)
    try:
        attempts = Attempts(handles, work, _attempt_number())
        outcome, values = run_alone(_event_loop(), attempts.run())
        return pickle.dumps(outcome), *values
    except BaseException:
        worker_actor.gc_later()
        raise
    finally:
        # Event loops and tasks are reference cycles that refer to arrays in the object
        # store. Without a collection, an idle process would keep the arrays there.
        gc.collect(worker_actor.YOUNG_GENERATION)


@functools.cache
def _known_handles() -> LruCache[Any, Any]:
    # Without a handle, Ray forgets an actor, and takes milliseconds to find it again.
    # This is a function because Ray pickles a module's variables with a task that uses
    # them.
    return LruCache(_KNOWN_HANDLES)


def _attempt_number() -> int:
    core_worker = joining.connected_worker().core_worker
    return core_worker.get_current_task_attempt_number()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    # Not `asyncio.run`: to handle interrupts, it formats a task's result with all its
    # arrays, which takes longer than the rest of a small round.
    return asyncio.new_event_loop()


async def bring_home(values: Sequence[Any], timeout_s: float | None) -> list[Any]:
    """Copy `Stored` values to this node's object store, and return the copies.

    Ray's lineage of a task's result has all tasks that led to it. If each round takes
    the state of the round before, that is all rounds. The copies have no lineage, and
    stay available if a worker's node is lost. Raises DeadlineError after `timeout_s`.
    """
    if all(value.num_bytes < object_store.INLINE_BYTES for value in values):
        return list(values)  # Ray sends small results with the task's answer
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
            " (`subrounds.timeout_s`), found that it has not arrived."
        ) from None
    return [
        dataclasses.replace(value, reference=reference)
        for value, reference in zip(values, kept, strict=True)
    ]


def _this_node() -> str:
    return ray.get_runtime_context().get_node_id()


@ray.remote(num_cpus=0, max_retries=0)
def _keep(*values: Any) -> Any:
    # The caller awaits the None, so that it need not read a large value.
    return None, *values
