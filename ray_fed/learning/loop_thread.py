"""A thread with an event loop, and one for work that blocks: both end with the process.

The threads are daemons: a program that is told to leave at once does not wait for what
they do.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import ray_fed.errors as errors

_T = TypeVar("_T")
_JOIN_S = 2.0


class IoThread:
    """Runs coroutines; a context manager, whose end cancels those that still run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ray_fed run, I/O", daemon=True
        )
        self._thread.start()

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Start a coroutine.

        Raises:
            ContextStateError: the run has ended.
        """
        if self._is_closed:
            coroutine.close()
            raise errors.ContextStateError(
                "Expected a run that goes on, found it ended: what was to follow its"
                " last round came too late."
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine."""
        return self.submit(coroutine).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(_end_loop(), self._loop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _end_loop() -> None:
    """Cancel all other tasks, then stop this thread's loop."""
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop.call_soon(loop.stop)


class WorkThread:
    """Does one thing after another, in order; a context manager.

    Args:
        prepare: done first, on the thread.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._prepare = prepare
        threading.Thread(target=self._run, name="ray_fed run", daemon=True).start()

    def _run(self) -> None:
        self._prepare()
        while (task := self._tasks.get()) is not None:
            task()

    def submit(self, work: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        """Have something done after all before it."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (told by the future)
                future.set_exception(error)

        self._tasks.put(do)
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tasks.put(None)
