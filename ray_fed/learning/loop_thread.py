"""A thread with an event loop, and one for work that blocks: both end with the process.

The threads are daemons: a program that is told to leave at once does not wait for what
they do.
"""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from ray_fed.executors.loops import LoopThread

_T = TypeVar("_T")


class IoThread:
    """Runs coroutines; a context manager, whose end cancels those that still run."""

    def __init__(self) -> None:
        self._thread = LoopThread("ray_fed run, I/O")

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Start a coroutine."""
        return self._thread.submit(coroutine)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine."""
        return self.submit(coroutine).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.close()


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
