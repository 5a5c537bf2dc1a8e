"""The one coordinator: leases workers for a plan, runs it on them, tells of losses.

    drive_plan --lease--> first worker, and further ones that are idle
        |
        +-- one worker: all of the plan in one call
        +-- several: each has some chunks of the subround, in one call each
        +-- several, and a computation that is not cut: a strategy over all of them

It runs in a Ray task for a subround, and in the driver for a finish that is wanted
there.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.cluster.store import object_store
from ray_fed.cluster.task import leases
from ray_fed.cluster.task.connection import LostWorkerError, Worker, WorkerConnection
from ray_fed.cluster.task.race import race
from ray_fed.cluster.task.ray_strategy import RayFederatingStrategy
from ray_fed.cluster.task.remote_executor import RemoteExecutor
from ray_fed.cluster.task.work import Work
from ray_fed.executors.loops import gather_by_index
from ray_fed.language import blocks, type_checks
from ray_fed.plan import diagnostics, merge_tree, outcomes
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
    if len(team) > 1:
        comp, arg = work.unpack()
        if comp.chunks:
            return await _evaluate_chunks(team, work, comp, arg)
    executors = [RemoteExecutor(WorkerConnection(_OneWorker(w))) for w in team]

    def stack_for(num_clients: int) -> FederatedStack:
        return FederatedStack(
            lambda federating: RayFederatingStrategy(
                federating.unplaced, executors, num_clients, work.clients_per_leaf
            ),
            executors[0],
        )

    ran: Evaluated | plans.NoKernel | None = None
    if work.num_clients is None:
        ran = await executors[0].evaluate(work.packed)
    elif work.computation is not None:
        ran = await stack_for(work.num_clients).fold(work.packed)
    if isinstance(ran, Evaluated):
        return ran
    comp, arg = work.unpack()
    if ran is not None:
        comp = dataclasses.replace(comp, kernel=ran)
    await gather_by_index(worker.call("begin") for worker in team)
    found = await evaluation.evaluate_plan(
        comp, arg, evaluation.Executors(stack_for, executors[0])
    )
    # What comes next may have the same scopes.
    await gather_by_index(worker.call("end") for worker in team)
    encoded = list(map(object_store.encode, found.values))
    return dataclasses.replace(found, values=encoded)


async def _evaluate_chunks(
    team: Sequence[Worker], work: Work, subround: plans.Subround, arg: Any
) -> Evaluated:
    """Return what a subround came to, whose chunks are dealt out, in order."""
    chunks, parameter = subround.chunks, _parameter_of(subround.computation)
    dealt = [
        range(chunks[run.start].start, chunks[run.stop - 1].stop)
        for run in merge_tree.cut_runs(len(chunks), len(team))
    ]
    parts = [subround.of_leaves(leaves) for leaves in dealt]
    first = subround.leaves[0].start

    def pack(part: plans.Subround) -> Work:
        inside = range(part.leaves[0].start - first, part.leaves[-1].stop - first)
        given = stored.slice_clients(arg, parameter, inside)
        return Work.of(work.name, work.terms, part, given)

    ran = await gather_by_index(
        _evaluate([worker], pack(part))
        for worker, part in zip(team, parts, strict=False)
    )
    return _join(ran, subround.num_kept)


def _join(parts: Sequence[Evaluated], num_kept: int) -> Evaluated:
    """Return what a subround came to from what parts of it did, in order.

    Args:
        parts: values encoded: those of leaves or subtrees, then those that are kept.
        num_kept: how many of these there are, each with a value for each client.
    """
    others = [v for part in parts for v in part.values[: len(part.values) - num_kept]]
    kept = [
        [member for held in column for member in object_store.decode(held)]
        for column in zip(
            *(part.values[len(part.values) - num_kept :] for part in parts), strict=True
        )
    ]
    return Evaluated(
        [*others, *map(object_store.encode, kept)],
        sum(part.kernel_leaves for part in parts),
        next((part.no_kernel for part in parts if part.no_kernel is not None), None),
    )


@functools.lru_cache(maxsize=16)
def _parameter_of(computation: bytes) -> fl.Type | None:
    """Return the type of what a serialised computation takes."""
    block = blocks.parse_block(computation)
    return type_checks.function_type(block.type_signature).parameter


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
