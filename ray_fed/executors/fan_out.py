"""Runs many coroutines at once. After a failure, none of them still runs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from typing_extensions import override

_T = TypeVar("_T")


async def gather_by_index(
    coroutines: Iterable[Coroutine[Any, Any, _T]], first: Sequence[int] = ()
) -> list[_T]:
    """Run coroutines at the same time, and return their results in the given order.

    Coroutines at the indices `first` start first. If a coroutine fails, the others are
    cancelled, and its error is raised after they have ended.
    """
    work = list(coroutines)
    if len(work) == 1:
        return [await work[0]]
    order = dict.fromkeys([*first, *range(len(work))])
    begun = {index: asyncio.ensure_future(work[index]) for index in order}
    tasks = [begun[index] for index in range(len(work))]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await _end(tasks)
        raise
    finally:
        # An error refers to this frame, so the frame must not keep results alive.
        begun.clear()
        tasks.clear()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Once(Generic[_T]):
    """A coroutine that starts when its result is first needed, and runs only once.

    `begin` makes the coroutine. If a caller of `get` is cancelled, the coroutine
    continues for the other callers. If all callers are cancelled, so is the coroutine,
    and the next call of `get` starts a new one.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._begin = begin
        self._task: asyncio.Task[_T] | None = None
        self._waiters = set[asyncio.Future[None]]()

    async def get(self) -> _T:
        """Return the result, or raise the error of the coroutine."""
        task = self._task = self._task or asyncio.create_task(self._begin())
        if not task.done():
            waiter = _Waiter(lambda: self._leave(task, waiter))
            self._waiters.add(waiter)
            task.add_done_callback(waiter.end)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return task.result()

    def _leave(self, task: asyncio.Task[_T], waiter: asyncio.Future[None]) -> bool:
        # The result is whether this has cancelled the task for the last waiter.
        self._waiters.discard(waiter)
        if self._waiters:
            return False
        self._task = None
        return task.cancel()


class _Waiter(asyncio.Future[None]):
    """A future for one caller that waits for a task.

    A cancelled caller calls `leave`, which cancels the task if no other caller waits.
    The caller then waits for the task's end, and otherwise ends at once.
    """

    def __init__(self, leave: Callable[[], bool]) -> None:
        super().__init__()
        self._leave = leave

    def end(self, _: object) -> None:
        if not self.done():
            self.set_result(None)

    @override
    def cancel(self, msg: Any = None) -> bool:
        return self._leave() or super().cancel(msg)


async def run_in_order(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines one after another, and return their results in order."""
    return [await coroutine for coroutine in coroutines]
