"""An event loop on a thread of its own, which runs coroutines for other threads."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import ray_fed.errors as errors
from ray_fed.values.read_limits import Work

_T = TypeVar("_T")

_JOIN_TIMEOUT_S = 10.0
_LOOK_S = 1.0

_CANCELLED_BEFORE = asyncio.InvalidStateError, concurrent.futures.InvalidStateError
"""Errors that a future raises if it gets a result after its waiter cancelled it."""

_running: "weakref.WeakSet[LoopThread]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # At its end, Python kills daemon threads. Inside of C++ code, this aborts.
    until = time.monotonic() + _JOIN_TIMEOUT_S
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(until - time.monotonic())


class LoopThread:
    """An event loop on a daemon thread that starts at once and ends with `close`.

    The thread enters the context manager `scope` when it starts, and leaves it at its
    end. `name` is the thread's name.
    """

    def __init__(
        self,
        name: str,
        scope: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._scope = scope or contextlib.nullcontext()
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._is_silent = False  # at the end of Python, futures get no results
        # No work is submitted after `_cancel_all`, which ends all earlier work.
        # The lock is reentrant because the handler of a signal may close the thread.
        self._lock = threading.RLock()
        self._works: weakref.WeakSet[Work] = weakref.WeakSet()  # the running ones
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no more threads
            self._loop.close()
            raise
        _running.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with self._scope:
            while True:
                try:
                    self._loop.run_forever()
                    break
                except (KeyboardInterrupt, SystemExit):  # of a task, which has it
                    continue
        self._loop.close()

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Start a coroutine on the thread, and return a future of its result.

        If the future is cancelled, so is the coroutine. If the thread is closed before
        the coroutine ends, the future gets a ContextStateError. If the thread is closed
        already, this method raises the error.
        """
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        work = Work()
        self._hand_over(coroutine, functools.partial(self._end, future, work), work)

        def pass_on(ended: concurrent.futures.Future[_T]) -> None:
            if ended.cancelled():
                work.end_call()
                self._call_soon(work.cancel)

        future.add_done_callback(pass_on)
        return future

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread, and await its result in another event loop.

        If the caller is cancelled, so is the coroutine. Raises ContextStateError if the
        thread is closed before the coroutine ends.
        """
        # One future is enough here. `wrap_future` of `submit` would need two.
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        work = Work()
        end = functools.partial(self._end, answer, work)
        self._hand_over(coroutine, functools.partial(_call_on, loop, end), work)
        try:
            return await answer
        except asyncio.CancelledError:
            work.end_call()
            self._call_soon(work.cancel)
            raise
        finally:
            del answer, end  # errors refer to this frame, and these to the error

    def wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread, and block until its result is there.

        An interrupt (Ctrl-C) cancels the coroutine, and is raised when the coroutine
        has ended, or after ten seconds. Raises ContextStateError if the thread is
        closed before the coroutine ends.
        """
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        work = Work()
        end = functools.partial(self._end, answer, work)
        try:
            self._hand_over(coroutine, end, work)
            # Wait in short steps, because a signal just before a wait does not end it.
            while not answer.done():
                with contextlib.suppress(TimeoutError):
                    return answer.result(_LOOK_S)
            return answer.result()
        except BaseException:
            work.end_call()
            if not answer.done() and self._call_soon(
                functools.partial(_abandon, coroutine, answer, work)
            ):
                with contextlib.suppress(
                    TimeoutError, concurrent.futures.CancelledError
                ):
                    answer.exception(_JOIN_TIMEOUT_S)
            raise
        finally:
            del answer, end  # errors refer to this frame, and these to the error

    def _hand_over(
        self,
        coroutine: Coroutine[Any, Any, _T],
        end: Callable[[asyncio.Task[_T]], object],
        work: Work,
    ) -> None:
        with self._lock:
            if self._is_open:
                self._works.add(work)
                self._loop.call_soon_threadsafe(self._start, coroutine, end, work)
                return
        coroutine.close()
        raise errors.ContextStateError(
            f"Expected the thread `{self._thread.name}` to run, found it closed."
        )

    def _start(
        self,
        coroutine: Coroutine[Any, Any, _T],
        end: Callable[[asyncio.Task[_T]], object],
        work: Work,
    ) -> None:
        work.enter()  # the task copies the context of this callback
        work.task = task = self._loop.create_task(coroutine)
        task.add_done_callback(end)

    def _end(
        self,
        answer: "asyncio.Future[_T] | concurrent.futures.Future[_T]",
        work: Work,
        task: asyncio.Task[_T],
    ) -> None:
        work.task = None
        if self._is_silent:
            return
        with contextlib.suppress(*_CANCELLED_BEFORE):
            if not task.cancelled():
                error = task.exception()
            elif self._is_closed:
                error = closed_under_a_call()
            else:
                answer.cancel()
                return
            if error is None:
                answer.set_result(task.result())
            else:
                answer.set_exception(error)

    @property
    def _is_open(self) -> bool:
        return not self._is_closed and self._thread.is_alive()  # not after a fork

    def _call_soon(self, call: Callable[[], object]) -> bool:
        # The result is whether the thread is open.
        with self._lock:
            if self._is_open:  # otherwise all calls are cancelled already
                self._loop.call_soon_threadsafe(call)
            return self._is_open

    def close(self) -> None:
        """Cancel all coroutines, stop the event loop, and wait for the thread's end.

        Callers of cancelled coroutines get a ContextStateError. A call on the thread
        itself does not wait.
        """
        with self._lock:
            self._cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)

    def stop(self) -> None:
        """Cancel all coroutines and stop the loop, without errors and without waiting.

        This is for the end of the process. Futures get no results.
        """
        with self._lock:
            self._is_silent = True
            # Do not log tasks that are still pending.
            self._loop.set_exception_handler(lambda _loop, _said: None)
            self._cancel()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, for at most `timeout_s` seconds."""
        self._thread.join(max(0.0, timeout_s))

    def _cancel(self) -> None:
        if self._is_open:
            self._is_closed = True
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
            for work in list(self._works):
                work.end_call()


def closed_under_a_call() -> errors.ContextStateError:
    """Return the error of a call that was cancelled because its context is closed."""
    return errors.ContextStateError(
        "Expected calls to end before `close` or `shutdown`, found one that still ran:"
        " it was cancelled."
    )


def _abandon(
    coroutine: Coroutine[Any, Any, _T],
    answer: "concurrent.futures.Future[_T]",
    work: Work,
) -> None:
    # The coroutine may not have started yet. It then has no task.
    if work.task is not None:
        work.cancel()
    elif not answer.done():
        coroutine.close()
        answer.cancel()


def _call_on(
    loop: asyncio.AbstractEventLoop,
    end: "Callable[[asyncio.Task[_T]], object]",
    task: "asyncio.Task[_T]",
) -> None:
    if not task.cancelled():
        task.exception()  # otherwise asyncio warns of an error that is never read
    with contextlib.suppress(RuntimeError):  # a closed loop has no waiters
        loop.call_soon_threadsafe(end, task)


async def _cancel_all() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop.call_soon(loop.stop)  # after the callbacks of the ended tasks
