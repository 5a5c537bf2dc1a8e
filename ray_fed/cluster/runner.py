"""Runs each plan as a Ray task over the pool: retried by Ray, cancelled by its call."""

import asyncio
import itertools
import math
import threading
import time
import uuid
from typing import Any

import federated_language as fl
import ray
import ray.exceptions
from typing_extensions import override

import ray_fed.blocks as blocks
import ray_fed.errors as errors
import ray_fed.parts as parts
import ray_fed.plan as plan
from ray_fed.cluster import failures, workers
from ray_fed.config import Config
from ray_fed.values import Stored

_LOOK_UP_S = 1.0
"""How often a thread that waits in Ray looks whether its call was cancelled."""


class RayRunner(fl.framework.AsyncContext):
    """Runs one plan at a time as a Ray task.

    Ray repeats a task whose worker died (`WorkerLost`), and one whose own process or
    node died, within the budgets that the pool counts.

    Args:
        pool: handle of the `PoolHost`; not owned.
        config: budgets and time limits.
    """

    def __init__(self, pool: Any, config: Config) -> None:
        self._pool = pool
        self._config = config
        self._prefix = uuid.uuid4().hex[:8]
        self._names = itertools.count()

    @override
    async def invoke(self, comp: Any, arg: Any) -> plan.Outcome:
        name = f"{self._prefix}-{next(self._names)}"
        count = _num_values(comp)
        retry = self._config.retry
        task: Any = workers.run_plan.options(
            num_returns=1 + count,
            max_retries=retry.crash + retry.preemption + retry.memory,
            retry_exceptions=[errors.WorkerLost],
            name=f"ray_fed {type(comp).__name__.lower()}",
        )
        refs: list[Any] = task.remote(self._pool, name, comp, arg)
        try:
            outcome = await asyncio.wait_for(refs[0], self._config.subrounds.timeout_s)
        except BaseException as error:  # noqa: BLE001 (a cancelled call ends its task too)
            ray.cancel(refs[0], force=False)
            raise _translate(error, self._config) from None
        finally:
            self._pool.end.remote(name)
        results: list[Any] = refs[1:]
        if comp.parts_type is not None:
            await _bring_home(results, self._config.subrounds.timeout_s)
        if _stays_stored(comp):
            held: list[Any] = [Stored(ref) for ref in results]
        else:
            held = [await ref for ref in results]
        return plan.Outcome(
            tuple(held),
            outcome.attempts,
            outcome.worker,
            outcome.worker_pid,
            outcome.coordinator_pid,
            outcome.node,
            outcome.unkeyed,
        )


def _num_values(comp: plan.Subround | plan.Finish) -> int:
    if isinstance(comp, plan.Finish):
        count = 1
    else:
        count = len(comp.leaves) if comp.merge is None else len(comp.nodes)
    if comp.parts_type is None:
        return count
    return count * len(parts.part_types(blocks.parse_type(comp.parts_type)))


def _stays_stored(comp: plan.Subround | plan.Finish) -> bool:
    is_partial = isinstance(comp, plan.Subround) and comp.merge is not None
    return is_partial or comp.parts_type is not None


async def _bring_home(refs: list[Any], timeout_s: float | None) -> None:
    """Copy results to the store of this node: what only a worker's holds dies with it.

    Raises:
        DeadlineError: it took longer than `timeout_s`.
    """
    cancelled = threading.Event()

    def wait() -> list[Any]:
        missing, ends = refs, time.monotonic() + (timeout_s or math.inf)
        while missing and not cancelled.is_set() and time.monotonic() < ends:
            _, missing = ray.wait(
                missing, num_returns=len(missing), timeout=_LOOK_UP_S, fetch_local=True
            )
        return missing

    try:
        missing = await asyncio.to_thread(wait)
    except asyncio.CancelledError:
        cancelled.set()
        raise
    if missing:
        raise errors.DeadlineError(
            f"Expected a result on the driver's node within {timeout_s} s"
            f" (`subrounds.timeout_s`), found {len(missing)} of {len(refs)} parts"
            " missing."
        )


def _translate(error: BaseException, config: Config) -> BaseException:
    """Return what a caller sees for what awaiting a task raised."""
    match error:
        case TimeoutError():
            return errors.DeadlineError(
                f"Expected a subround within {config.subrounds.timeout_s} s"
                " (`subrounds.timeout_s`), found it still running: it was cancelled."
            )
        case ray.exceptions.RayTaskError():
            return failures.unwrap(error)
        case ray.exceptions.RayError():
            return errors.RetryBudgetError(
                "Expected a subround to finish, found its coordinating task lost:"
                f" {failures.describe(error)}",
                failures.classify(error),
            )
        case _:
            return error
