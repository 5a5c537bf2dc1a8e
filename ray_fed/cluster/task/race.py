"""The same work on one worker, and on a second one if that is offered."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

import ray_fed.errors as errors
from ray_fed.cluster.task.leases import Lease
from ray_fed.plan import outcomes

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Won(Generic[_T]):
    """What a race came to.

    Attributes:
        lease: whose result counts.
        result: of the work.
        slower: the attempt on the other worker, if there was one.
    """

    lease: Lease
    result: _T
    slower: tuple[outcomes.Attempt, ...] = ()


async def race(
    lease: Lease,
    spare: Coroutine[Any, Any, Lease] | None,
    work: Callable[[Lease], Coroutine[Any, Any, _T]],
) -> Won[_T]:
    """Run work on a worker, and on a second one once there is one; the first counts.

    The work has the same bits wherever it runs, so that it does not matter which one
    that is. Where one worker is lost the other is waited for.

    Args:
        lease: the first worker.
        spare: returns the second one; fails if there will be none. None: do not ask.
        work: raises `WorkerLost` when its worker is.

    Raises:
        WorkerLost: all workers were lost.
        Exception: what the work raised, on either worker.
    """
    begun = {asyncio.ensure_future(work(lease)): (lease, time.monotonic())}
    asking = None if spare is None else asyncio.ensure_future(spare)
    pending: set[asyncio.Future[Any]] = {*begun, *([] if asking is None else [asking])}
    try:
        while True:
            done, pending = await asyncio.wait(
                pending, return_when=asyncio.FIRST_COMPLETED
            )
            for task in [task for task in begun if task.done()]:
                if _is_lost(task) and len(begun) > 1:
                    del begun[task]
                    continue
                winner, _ = begun.pop(task)
                return Won(winner, task.result(), _slower(begun.values()))
            if asking in done and asking.exception() is None:
                copy = asyncio.ensure_future(work(asking.result()))
                begun[copy] = (asking.result(), time.monotonic())
                pending.add(copy)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _is_lost(task: asyncio.Future[Any]) -> bool:
    return isinstance(task.exception(), errors.WorkerLost)


def _slower(begun: Iterable[tuple[Lease, float]]) -> tuple[outcomes.Attempt, ...]:
    now_s = time.monotonic()
    return tuple(
        dataclasses.replace(
            lease.attempt,
            seconds=now_s - begun_s,
            ended="slower",
            detail="another worker had the result first",
        )
        for lease, begun_s in begun
    )
