"""The light actor that hosts the pool: performs what the pool decides."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import ray
import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster import failures
from ray_fed.cluster import pool as pools
from ray_fed.config import Config

_Lease: TypeAlias = tuple[str, Any, int, int, str]
"""Name and handle of a worker, attempt (1 for the first), process, node."""


class PoolHost:
    """Hosts a `Pool`: starts workers, hands them out, replaces those that die.

    Args:
        config: of the pool.
        count: of workers.
        start_worker: starts the actor of one worker, without waiting for it.
    """

    def __init__(
        self, config: Config, count: int, start_worker: Callable[[Config], Any]
    ) -> None:
        self._start_worker = start_worker
        retry = config.retry
        budgets: dict[pools.FailureClass, int] = {
            "crash": retry.crash,
            "preemption": retry.preemption,
            "memory": retry.memory,
        }
        self._config = config
        self._pool = pools.Pool(count, budgets, config.workers.start_timeout_s)
        self._handles: dict[str, Any] = {}
        self._facts: dict[str, tuple[int, str]] = {}
        self._waiting: dict[int, tuple[str, asyncio.Future[_Lease]]] = {}
        self._leased: dict[str, str] = {}  # the worker of each subround that runs
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begin to start workers, without waiting for them."""
        self._act()

    async def lease(self, subround: str) -> _Lease:
        """Return a worker of the caller's own, once one is free.

        A subround that asks again, because its coordinator died, loses what it had.

        Raises:
            RetryBudgetError: the subround failed too often, or no worker starts.
        """
        self._release(subround)
        ticket = self._pool.ask(subround)
        future: asyncio.Future[_Lease] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = (subround, future)
        self._act()
        try:
            return await future
        finally:
            self._waiting.pop(ticket, None)
            self._pool.withdraw(ticket)

    async def lost(
        self, subround: str, failure_class: pools.FailureClass, detail: str
    ) -> None:
        """Take note that the worker of a subround died."""
        worker = self._leased.pop(subround, None)
        if worker is not None:
            self._lose(worker, failure_class, detail)

    async def release(self, subround: str) -> None:
        """Take back the worker of a subround that is done with it."""
        self._release(subround)
        self._act()

    async def forgive(self, subround: str) -> None:
        """Forget the failures of a subround that goes on; it keeps its worker."""
        self._pool.forget(subround)

    async def end(self, subround: str) -> None:
        """Take back what a subround has, whether it is done or is to be cancelled."""
        for ticket, (waiting, _) in list(self._waiting.items()):
            if waiting == subround:
                cancelled = "The subround was cancelled."
                self._refuse(pools.Refuse(ticket, cancelled, "fatal"))
        self._release(subround)
        self._pool.forget(subround)
        self._act()

    def _release(self, subround: str) -> None:
        worker = self._leased.pop(subround, None)
        if worker in self._handles:
            self._handles[worker].free.remote(subround)
            self._pool.give_back(worker)

    def _lose(
        self, worker: str, failure_class: pools.FailureClass, detail: str
    ) -> None:
        self._pool.lost(worker, failure_class, detail)
        self._drop(worker)
        self._act()

    async def close(self) -> None:
        """End all workers."""
        for worker in list(self._handles):
            self._drop(worker)

    def _act(self) -> None:
        for action in self._pool.decide(time.monotonic()):
            match action:
                case pools.Start():
                    task = asyncio.ensure_future(self._start(action.worker))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case pools.Stop():
                    self._drop(action.worker)
                case pools.Grant():
                    self._grant(action)
                case pools.Refuse():
                    self._refuse(action)
        self._set_timer()

    def _grant(self, action: pools.Grant) -> None:
        subround, future = self._waiting.get(action.ticket, ("", None))
        if future is None or future.done():
            self._pool.give_back(action.worker)
            return
        # Noted here, so that whoever ends the subround finds what it was given.
        self._leased[subround] = worker = action.worker
        facts = self._facts[worker]
        future.set_result((worker, self._handles[worker], action.attempt, *facts))

    def _refuse(self, action: pools.Refuse) -> None:
        _, future = self._waiting.get(action.ticket, ("", None))
        if future is not None and not future.done():
            future.set_exception(
                errors.RetryBudgetError(action.message, action.failure_class)
            )

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._pool.next_deadline_s()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay, self._act)

    async def _start(self, worker: str) -> None:
        handle = self._start_worker(self._config)
        self._handles[worker] = handle
        try:
            self._facts[worker] = await handle.ping.remote()
            self._pool.ready(worker)
            self._act()
            await handle.hold.remote()  # returns never: fails when the worker is gone
        except ray.exceptions.RayError as error:
            if worker in self._handles:
                node = self._facts.get(worker, (0, "unknown"))[1]
                detail = f"`{worker}` on node {node}: {failures.describe(error)}"
                self._lose(worker, failures.classify(error), detail)

    def _drop(self, worker: str) -> None:
        self._facts.pop(worker, None)
        handle = self._handles.pop(worker, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)
