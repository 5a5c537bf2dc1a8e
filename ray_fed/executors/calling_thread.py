"""An event loop that runs on whichever thread calls, for as long as the call."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import ray_fed.errors as errors
from ray_fed.executors import loops

_T = TypeVar("_T")


class CallingThread:
    """Runs coroutines on the thread that hands them over, one after another.

    So breakpoints in what they call stop that thread, with its caller on the stack. A
    thread whose own event loop runs may call too: that loop stands still meanwhile.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine; an interrupt cancels what it started.

        Raises:
            ContextStateError: the call comes from inside of another one.
            Exception: what the coroutine raised.
        """
        with self._lock:
            if self._loop.is_running():
                coroutine.close()
                raise errors.ContextStateError(
                    "Expected one call at a time with `debug`, found a call from inside"
                    " of the work of another one: call another context there."
                )
            with _outer_loop_aside():
                return loops.run_alone(self._loop, coroutine)

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
        """Close the loop."""
        with self._lock:
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
