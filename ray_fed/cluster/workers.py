"""Everything that runs elsewhere: the actors, and the tasks that drive them.

    driver --task--> run_plan (num_cpus=0, no TensorFlow)
       |                |  lease / give back              | verbs, chunks
       |                v                                 v
       +-- finish -> PoolHost (num_cpus=0)  --starts-->  LeafWorker (TensorFlow, pinned)

A worker is never restarted by Ray: its death has a class, the pool replaces it. A task
whose worker dies reports that and raises `WorkerLost`, which Ray retries.
"""

import asyncio
import dataclasses
import functools
import gc
import os
import pickle
import time
from typing import Any, cast

import ray
from ray._private import worker as ray_worker  # no public name
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_fed.errors as errors
from ray_fed.cluster import garbage
from ray_fed.cluster.actors.leaf_worker import LeafWorker
from ray_fed.cluster.actors.pool_host import PoolHost
from ray_fed.cluster.store import object_store
from ray_fed.cluster.task import leases
from ray_fed.cluster.task.connection import LostWorkerError, Worker, WorkerConnection
from ray_fed.cluster.task.race import race
from ray_fed.cluster.task.ray_strategy import RayFederatingStrategy
from ray_fed.cluster.task.remote_executor import RemoteExecutor
from ray_fed.config import Config
from ray_fed.executors import loops
from ray_fed.plan import diagnostics, outcomes, plans
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored
from ray_fed.worker import evaluation
from ray_fed.worker.stacks import FederatedStack

_CONTROL_THREADS = 3

_YOUNG = 1
"""The generation of what one short task makes; collecting it takes no time."""

RemoteWorker: Any = cast("Any", ray.remote)(
    concurrency_groups={"control": _CONTROL_THREADS}, max_restarts=0, max_task_retries=0
)(LeafWorker)


def start_worker(config: Config, node: str | None) -> Any:
    """Start the actor of one worker with the resources of the configuration.

    Args:
        config: what it asks for.
        node: Ray's id of its node; None: any that has room.
    """
    wanted = config.workers
    actor = RemoteWorker.options(
        num_cpus=wanted.num_cpus,
        num_gpus=wanted.num_gpus,
        resources=dict(wanted.resources),
        scheduling_strategy=(
            "DEFAULT"
            if node is None
            else NodeAffinitySchedulingStrategy(node, soft=False)
        ),
    )
    num_threads = max(1, int(wanted.num_cpus))
    limits = config.worker_limits
    return actor.remote(num_threads, wanted.num_gpus, wanted.client_bytes, limits)


RemotePoolHost: Any = cast("Any", ray.remote)(num_cpus=0, max_concurrency=1000)(
    PoolHost
)


@dataclasses.dataclass(frozen=True)
class Work:
    """A plan with its argument, under a name.

    Attributes:
        name: that its worker is leased under; one at a time has it.
        terms: to lease a worker with.
        packed: the plan and its argument.
        computation: of a subround to fold, which only the interpreter needs; it may be
            large, and is left out of the plan.
        clients_per_leaf: of the cohort.
        num_clients: of a subround; None: a finish, which a worker runs in one call.
        given: its first attempt, where the driver kept a lease of that name; None: the
            pool is asked for a worker.
    """

    name: str
    terms: leases.Terms
    packed: object_store.Packed
    computation: bytes | None
    clients_per_leaf: int
    num_clients: int | None
    given: outcomes.Attempt | None = None

    @classmethod
    def of(
        cls,
        name: str,
        terms: leases.Terms,
        comp: Any,
        arg: Any,
        given: outcomes.Attempt | None = None,
    ) -> "Work":
        """Pack a `plans.Subround` or a `plans.Finish`.

        Args:
            name: of the subround.
            terms: to lease a worker with.
            comp: the plan.
            arg: as `worker.evaluation` takes it, but for what is stored.
            given: see `Work`.
        """
        computation, num_clients = None, None
        if isinstance(comp, plans.Subround):
            num_clients = sum(map(len, comp.leaves))
            if isinstance(comp.kernel, plans.Kernel):
                computation = comp.computation
                comp = dataclasses.replace(comp, computation=b"")
        packed, size = object_store.pack(comp, arg), comp.clients_per_leaf
        return cls(name, terms, packed, computation, size, num_clients, given)

    def unpack(self) -> tuple[Any, Any]:
        """Return the plan, whole, and its argument."""
        comp, arg = object_store.unpack(self.packed)
        if self.computation is not None:
            comp = dataclasses.replace(comp, computation=self.computation)
        return comp, arg

    def as_arguments(self) -> list[Any]:
        """Return what `run_plan` takes for it, which Ray pickles at little cost."""
        packed = self.packed
        sources = object_store.short_lists(packed.sources)
        lists = [*sources, *object_store.short_lists(packed.values)]
        cut = self.clients_per_leaf, self.num_clients
        about = (self.name, self.terms, *cut, self.given, len(sources))
        head = pickle.dumps(about)
        return [head, packed.work, self.computation, *lists]

    @classmethod
    def from_arguments(
        cls, head: bytes, work: bytes, computation: bytes | None, *lists: list[Any]
    ) -> "Work":
        """Return what `as_arguments` took apart."""
        name, terms, size, num_clients, given, count = pickle.loads(head)
        sources, held = map(object_store.gathered, (lists[:count], lists[count:]))
        packed = object_store.Packed(work, held, sources)
        return cls(name, terms, packed, computation, size, num_clients, given)


@ray.remote(num_cpus=0)
def run_plan(pool: Any, *arguments: Any) -> Any:
    """Run a subround or a finish on a leased worker: see `drive_plan`.

    Args:
        pool: handle of the `PoolHost`.
        arguments: see `Work.as_arguments`.

    Returns:
        `Driven`, pickled by pickle itself, which takes a fraction of the time of Ray's
        own pickler; then each value, encoded.
    """
    _handles().keep(pool, "", pool)
    work = Work.from_arguments(*arguments)
    if _is_repeated():  # what it was given is gone, or another process had it
        work = dataclasses.replace(work, given=None)
    try:
        driven, *found = loops.run_alone(
            _event_loop(), drive_plan(pool, work, _handles())
        )
        return pickle.dumps(driven), *found
    except BaseException:
        garbage.collect_soon()
        raise
    finally:
        # Loops and tasks refer to each other, and to arrays that the object store may
        # not free before: an idle process would hold them.
        gc.collect(_YOUNG)


@functools.cache
def _handles() -> leases.Handles:
    """Return those of the workers that this process drove.

    No variable of the module: Ray pickles those with the task that uses them.
    """
    return leases.Handles()


def _is_repeated() -> bool:
    """Return whether Ray runs this task once more."""
    worker: Any = ray_worker.global_worker
    return worker.core_worker.get_current_task_attempt_number() > 0


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which Ray interrupts to cancel a task.

    Not that of `asyncio.run`, whose handling of interrupts writes out what a task
    returned, arrays and all, and takes longer than all else that drives a small round.
    """
    return asyncio.new_event_loop()


@dataclasses.dataclass(frozen=True)
class Driven:
    """What a plan came to, beside its values.

    Attributes:
        outcome: without values.
        scope: under which the worker was leased that had the result first.
        seconds: since it asked for a worker.
    """

    outcome: outcomes.Outcome
    scope: str
    seconds: float


async def drive_plan(pool: Any, work: Work, handles: leases.Handles) -> tuple[Any, ...]:
    """Run a plan on a leased worker.

    Args:
        pool: handle of the `PoolHost`.
        work: to be done.
        handles: of workers that were leased before, and of that one.

    Returns:
        `Driven`, then each value, encoded. The worker is still leased: whoever has
        these gives it back.

    Raises:
        WorkerLost: the worker died, hung or found no memory: to be run again.
        RetryBudgetError: that happened too often.
        ResourceError: the cluster has no room for the least number of workers.
        DeadlineError: the last time, it hung.
        ComputationError: the user's computation raised.
    """
    name, terms, begun_s = work.name, work.terms, time.monotonic()

    async def attempt(
        lease: leases.Lease,
    ) -> tuple[Evaluated, set[diagnostics.Note]]:
        return await _attempt(pool, lease, work)

    lease = await leases.resumed(pool, name, work.given, handles)
    if lease is None:
        lease = await leases.lease(pool, name, terms, handles)
    wants_spare = terms.siblings and terms.spare_after_s is not None
    spare = leases.lease_spare(pool, name, terms) if wants_spare else None
    won = await race(lease, spare, attempt)
    ran, (evaluated, noted) = won.lease.attempt, won.result
    outcome = outcomes.Outcome(
        (),
        ran.attempt,
        ran.worker,
        ran.worker_pid,
        os.getpid(),
        ran.node,
        diagnostics.in_order(noted),
        evaluated.kernel_leaves,
        evaluated.no_kernel,
        (*won.lease.lost, *won.slower),
        tuple(stored.count_bytes(value) for value in evaluated.values),
        won.lease.attempt.fingerprint,
    )
    seconds = time.monotonic() - begun_s
    return Driven(outcome, won.lease.worker.scope, seconds), *evaluated.values


async def _attempt(
    pool: Any, lease: leases.Lease, work: Work
) -> tuple[Evaluated, set[diagnostics.Note]]:
    worker = lease.worker
    try:
        with diagnostics.noting() as noted:
            return await _evaluate(worker, work), noted
    except LostWorkerError as loss:
        await leases.report(pool, worker.scope, loss, lease.used_s)
        raise errors.WorkerLost(loss.detail) from None
    except errors.WorkerMemoryError as error:
        detail = await leases.report_memory(pool, lease, error)
        raise errors.WorkerLost(detail) from None
    except errors.ComputationError as error:
        raise error.located(attempt=lease.attempt.attempt) from error


async def _evaluate(worker: Worker, work: Work) -> Evaluated:
    """Return what a plan came to on a worker, its values encoded."""
    executor = RemoteExecutor(WorkerConnection(_OneWorker(worker)))

    def stack_for(num_clients: int) -> FederatedStack:
        return FederatedStack(
            lambda federating: RayFederatingStrategy(
                federating.unplaced, [executor], num_clients, work.clients_per_leaf
            ),
            executor,
        )

    ran: Evaluated | plans.NoKernel | None = None
    if work.num_clients is None:
        ran = await executor.evaluate(work.packed)
    elif work.computation is not None:
        ran = await stack_for(work.num_clients).fold(work.packed)
    if isinstance(ran, Evaluated):
        return ran
    comp, arg = work.unpack()
    if ran is not None:
        comp = dataclasses.replace(comp, kernel=ran)
    await worker.call("begin")
    executors = evaluation.Executors(stack_for, executor)
    found = await evaluation.evaluate_plan(comp, arg, executors)
    await worker.call("end")  # what comes next may have the same scope
    encoded = list(map(object_store.encode, found.values))
    return dataclasses.replace(found, values=encoded)


class _OneWorker:
    """The one worker of a subround: with it the subround is lost, and run again."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        if loss is not None:
            raise loss
        return self._worker

    async def settle(self) -> None:
        raise AssertionError("work that lost its worker does not end well")


@ray.remote(num_cpus=0)
def pick_column(block: Any, column: str) -> Any:
    """Return one column of a block of a dataset, as a table of arrow."""
    return block.select([column])


@ray.remote(num_cpus=0)
def count_rows(block: Any) -> tuple[int, Any]:
    """Return how many rows a block of a dataset has, and its schema."""
    return block.num_rows, block.schema
