"""Runs coroutines on the caller's thread, so that debuggers can step into them.

`LoopThread` has the same methods, and runs coroutines on another thread.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import ray_fed.errors as errors
from ray_fed.executors.loops import closed_under_a_call

_T = TypeVar("_T")


def run_alone(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]
) -> _T:
    """Run a coroutine on an event loop that no other code runs, and return its result.

    Tasks that the coroutine has started and that still run are cancelled, because the
    loop does not run between calls. An interrupt (Ctrl-C) cancels the coroutine.
    """
    try:
        return loop.run_until_complete(coroutine)
    finally:
        # This is not a task itself, because an interrupt could leave that task behind.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


class CallingThread:
    """Runs coroutines on the caller's thread, one after another.

    A debugger that stops in a coroutine then shows the caller's frames. A thread may
    call this while its own event loop runs, which then waits until the call returns.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()
        self._is_closed = False
        self._running: asyncio.Task[Any] | None = None

    def wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine, and return its result. An interrupt cancels the coroutine.

        Raises ContextStateError inside another call, or if `close` cancelled this call.
        """
        with self._lock:
            if self._loop.is_running():
                coroutine.close()
                raise errors.ContextStateError(
                    "Expected one call at a time with `debug`, found a call inside the"
                    " work of another call: use another context there."
                )
            if self._is_closed:
                coroutine.close()
                raise closed_under_a_call()
            try:
                with _outer_loop_aside():
                    return run_alone(self._loop, self._noted(coroutine))
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
            if self._is_closed:  # `close` found no task to cancel
                coroutine.close()
                raise closed_under_a_call()
            return await coroutine
        finally:
            self._running = None

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Run a coroutine to its end, and return a done future with result or error."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        try:
            future.set_result(self.wait_for(coroutine))
        except Exception as error:  # noqa: BLE001 (the future raises it)
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Cancel a running call, and close the event loop.

        This waits for a call of another thread. If this thread itself is in a call, the
        loop is closed when that call ends.
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
    # Lets another loop run inside a callback or task of this thread's running loop.
    # asyncio documents these hooks for other implementations of loops and tasks.
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
