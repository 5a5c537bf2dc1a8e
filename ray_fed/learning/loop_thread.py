"""A thread with an event loop, and one for work that blocks: both end with the process.

The threads are daemons: a program that is told to leave at once does not wait for what
they do.

SIGINT and SIGTERM as a wish that a run sees: save and leave. A second one kills.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Self, TypeVar

import ray_fed.errors as errors

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_POLL_S = 0.1
"""How soon `wait_for` sees a signal."""


class StopNow(BaseException):
    """Ends a call on the main thread that nothing else could end."""


class Interrupts:
    """Notes the first signal; on the second, the former handlers take over.

    A context manager. On another thread than the main one it does nothing.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        """When the first signal came, by the monotonic clock; None: none came."""
        self._former: dict[int, Any] = {}
        self._breaks = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        former, self._former = self._former, {}
        for number, handler in former.items():
            # A handler that was not set from Python is None.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: object) -> None:
        if self.since is not None:
            self._restore()
            os.kill(os.getpid(), number)
            return
        self.since = time.monotonic()
        if self._breaks:
            raise StopNow

    def wait_for(self, future: concurrent.futures.Future[_T], grace_s: float) -> _T:
        """Return what a future returns; do not wait for it long once a signal came.

        Args:
            future: done on another thread.
            grace_s: seconds that it has after the first signal.

        Raises:
            StopNow: they are over.
            Exception: what the future raised.
        """
        while not concurrent.futures.wait([future], _POLL_S).done:
            left = self.find_time_left(grace_s)
            if left is not None and left <= 0:
                raise StopNow
        return future.result()

    def find_time_left(self, limit_s: float) -> float | None:
        """Return how much is left of a time that began with the first signal.

        Args:
            limit_s: that time.

        Returns:
            Seconds, below 0 once it is over; None where no signal came.
        """
        since = self.since
        return None if since is None else since + limit_s - time.monotonic()

    @contextlib.contextmanager
    def breaking(self) -> Generator[None]:
        """Raise `StopNow` out of what is done inside when the first signal comes.

        Raises:
            StopNow: it came.
        """
        if self.since is not None:
            raise StopNow
        self._breaks = True
        try:
            yield
        finally:
            self._breaks = False


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
