"""The one coordinator: leases workers for a plan, runs it on them, tells of losses.

    drive_plan --lease--> first worker, and further ones that are idle
        |
        +-- a finish: one call of a worker
        +-- a subround: a strategy deals its chunks to the workers, one call each
        +-- a computation that is not cut, and several workers: verb by verb, its
            clients on all of them

It runs in a Ray task for a subround, and in the driver for a finish that is wanted
there.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.cluster.store import object_store
from ray_fed.cluster.task import leases
from ray_fed.cluster.task.connection import LostWorkerError, Worker, WorkerConnection
from ray_fed.cluster.task.race import race
from ray_fed.cluster.task.ray_strategy import RayFederatingStrategy
from ray_fed.cluster.task.remote_executor import RemoteExecutor
from ray_fed.cluster.task.work import Work
from ray_fed.executors.loops import gather_by_index
from ray_fed.language import type_checks
from ray_fed.plan import diagnostics, outcomes
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored
from ray_fed.worker import evaluation
from ray_fed.worker.stacks import FederatedStack


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
        found: leases.Lease,
    ) -> tuple[Evaluated, set[diagnostics.Note]]:
        return await _attempt(pool, team if found is first else [found], work)

    first = await leases.resumed(pool, name, work.given, handles)
    if first is None:
        first = await leases.lease(pool, name, terms, handles)
    team = [first, *await leases.lease_further(pool, name, terms, handles)]
    wants_spare = terms.siblings and terms.spare_after_s is not None
    spare = leases.lease_spare(pool, name, terms) if wants_spare else None
    won = await race(first, spare, attempt)
    ran, (evaluated, noted) = won.lease.attempt, won.result
    num_workers = len(team) if won.lease is first else 1
    if num_workers > 1:
        await pool.release_further.remote(name)
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
        num_workers,
    )
    seconds = time.monotonic() - begun_s
    return Driven(outcome, won.lease.worker.scope, seconds), *evaluated.values


async def _attempt(
    pool: Any, team: Sequence[leases.Lease], work: Work
) -> tuple[Evaluated, set[diagnostics.Note]]:
    """Run a plan on leased workers, and tell the pool what becomes of those.

    Raises:
        WorkerLost: one of them was lost, and with it what the others did.
        ComputationError: the user's computation raised.
    """
    first = team[0]
    try:
        with diagnostics.noting() as noted:
            return await _evaluate([lease.worker for lease in team], work), noted
    except LostWorkerError as loss:
        await leases.report(pool, loss, first)
        raise errors.WorkerLost(loss.detail) from None
    except errors.WorkerMemoryError as error:
        full = next((held for held in team if held.worker.found_no_memory), first)
        detail = await leases.report_memory(pool, full, error)
        raise errors.WorkerLost(detail) from None
    except errors.ComputationError as error:
        raise error.located(attempt=first.attempt.attempt) from error


async def _evaluate(team: Sequence[Worker], work: Work) -> Evaluated:
    """Return what a plan came to on some workers, its values encoded."""
    executors = [RemoteExecutor(WorkerConnection(_OneWorker(w))) for w in team]
    if work.num_clients is None:
        return await executors[0].evaluate(work)

    def stack_for(num_clients: int) -> FederatedStack:
        return FederatedStack(
            lambda federating: RayFederatingStrategy(
                federating.unplaced, executors, num_clients, work.clients_per_leaf
            ),
            executors[0],
        )

    if len(team) > 1 and work.is_whole:
        return await _evaluate_whole(team, work, stack_for, executors[0])
    evaluated = await stack_for(work.num_clients).fold(work)
    return type_checks.narrow(evaluated, Evaluated, "RayFederatingStrategy")


async def _evaluate_whole(
    team: Sequence[Worker],
    work: Work,
    stack_for: Callable[[int], FederatedStack],
    unplaced: RemoteExecutor,
) -> Evaluated:
    """Interpret a computation that no worker can evaluate alone, verb by verb.

    It is not cut, so that its leaf holds clients of several workers.
    """
    comp, arg = work.unpack()
    await gather_by_index(worker.call("begin") for worker in team)
    evaluated = await evaluation.evaluate_plan(
        comp, arg, evaluation.Executors(stack_for, unplaced)
    )
    # The next attempt may use the same scopes.
    await gather_by_index(worker.call("end") for worker in team)
    encoded = list(map(object_store.encode, evaluated.values))
    return dataclasses.replace(evaluated, values=encoded)


class _OneWorker:
    """A worker of a subround: with it the subround is lost, and run again."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        if loss is not None:
            raise loss
        return self._worker

    async def settle(self) -> None:
        raise AssertionError("work that lost its worker does not end well")
