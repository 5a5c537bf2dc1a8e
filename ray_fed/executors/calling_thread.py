"""An event loop that runs on the thread of each caller, while the call lasts."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import ray_fed.errors as errors
from ray_fed.executors import loops
from ray_fed.executors.loops import closed_under_a_call

_T = TypeVar("_T")


class CallingThread:
    """Runs coroutines on the thread that hands them over, one after another.

    So a breakpoint inside of a coroutine stops the thread of the caller, whose frames
    are on the stack. A thread may call while its own event loop runs: that event loop
    stands still until the call returns.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()
        self._is_closed = False
        self._running: asyncio.Task[Any] | None = None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine; an interrupt cancels what it started.

        Raises:
            ContextStateError: the call comes from inside of another one, or was
                cancelled by `close`.
            Exception: what the coroutine raised.
        """
        with self._lock:
            if self._loop.is_running():
                coroutine.close()
                raise errors.ContextStateError(
                    "Expected one call at a time with `debug`, found a call from inside"
                    " of the work of another one: call another context there."
                )
            if self._is_closed:
                coroutine.close()
                raise closed_under_a_call()
            try:
                with _outer_loop_aside():
                    return loops.run_alone(self._loop, self._noted(coroutine))
            except asyncio.CancelledError as error:
                if not self._is_closed:
                    raise
                raise closed_under_a_call() from error
            finally:
                if self._is_closed:
                    self._loop.close()

    async def _noted(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        self._running = asyncio.current_task()
        try:
            if self._is_closed:  # too early for `close` to find a task to cancel
                coroutine.close()
                raise closed_under_a_call()
            return await coroutine
        finally:
            self._running = None

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Run a coroutine to its end, and return a future of how it ended."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        try:
            future.set_result(self.run(coroutine))
        except Exception as error:  # noqa: BLE001 (told by the future)
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Cancel a call that runs, and close the loop.

        It waits for the end of a call of another thread. Inside of a call of its own
        it does not, and the loop is closed as that call ends.
        """
        self._is_closed = True
        running = self._running
        if running is not None:
            self._loop.call_soon_threadsafe(running.cancel)
        with self._lock:
            if not self._loop.is_running():
                self._loop.close()


@contextlib.contextmanager
def _outer_loop_aside() -> Generator[None]:
    """Let a loop run inside a callback or task of the one that runs on this thread.

    By the hooks that asyncio documents for other loops and tasks; the outer loop gets
    its place back before it goes on.
    """
    hooks: Any = asyncio
    outer = hooks._get_running_loop()  # noqa: SLF001
    task = None if outer is None else asyncio.current_task(outer)
    if task is not None:
        hooks._leave_task(outer, task)  # noqa: SLF001
    hooks._set_running_loop(None)  # noqa: SLF001
    try:
        yield
    finally:
        hooks._set_running_loop(outer)  # noqa: SLF001
        if task is not None:
            hooks._enter_task(outer, task)  # noqa: SLF001
