"""Tells what the first call of a computation waits for: workers, then compiling."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable

import ray_fed.errors as errors
from ray_fed.observability import events
from ray_fed.plan.outcomes import Progress
from ray_fed.rounds.computation_cache import Computation, ComputationCache

_PATIENCE_S = 0.5
"""A call that takes less is told of by its result alone."""

AwaitReady = Callable[[Progress | None], Awaitable[Progress]]
"""From a progress to the next one, once that differs; from None to the present one."""


@dataclasses.dataclass
class _Calls:
    comp: Computation
    has_returned: bool = False


class FirstCalls:
    """Sends `events.Waiting` while a computation has not returned once.

    Args:
        emit: takes the events.
        await_ready: see `Backend.await_ready`.
    """

    def __init__(
        self, emit: Callable[[events.Event], None], await_ready: AwaitReady | None
    ) -> None:
        self._emit = emit
        self._await_ready = await_ready
        self._calls = ComputationCache(_Calls)

    def has_returned(self, comp: Computation) -> bool:
        """Return whether a call of the computation has returned before."""
        return self._calls.get(comp).has_returned

    @contextlib.asynccontextmanager
    async def telling(self, comp: Computation) -> AsyncGenerator[None]:
        """Send events while the call of the computation in the `with` block runs."""
        task = asyncio.ensure_future(self._tell())
        try:
            yield
            self._calls.get(comp).has_returned = True
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _tell(self) -> None:
        """Send events until the task is cancelled; none if that happens soon."""
        await asyncio.sleep(_PATIENCE_S)
        try:
            if self._await_ready is not None:
                await self._tell_of_workers(self._await_ready)
            self._emit(events.Waiting("tracing and compiling"))
            await asyncio.Event().wait()
        except errors.ClusterError:
            pass  # the call itself raises it
        finally:
            self._emit(events.Waiting(""))

    async def _tell_of_workers(self, await_ready: AwaitReady) -> None:
        found = await await_ready(None)
        while found[0] < max(1, found[1]):
            self._emit(events.Waiting(_describe(*found)))
            found = await await_ready(found)


def _describe(num_ready: int, num_workers: int, needed: str) -> str:
    counted = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    if needed:
        ready = f"{num_ready} of {counted} ready, " if num_ready else ""
        return f"{ready}waiting for {needed}"
    if num_workers == 0:
        return "looking for room for workers"
    if num_ready == 0:
        return f"starting {counted}: TensorFlow"
    return f"{num_ready} of {counted} ready"
