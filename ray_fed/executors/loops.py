"""Event loops: one on a thread of its own, and one that runs for a single coroutine.

    LoopThread       a thread that runs coroutines which others hand over
    CallingThread    the same for debuggers, on the thread of the caller

Run many coroutines; results by index, and nothing left behind.

An event loop that runs on the thread of each caller, while the call lasts.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, TypeVar

import ray_fed.errors as errors
from ray_fed.values.read_limits import Work

_T = TypeVar("_T")


async def gather_by_index(
    coroutines: Iterable[Coroutine[Any, Any, _T]], first: Sequence[int] = ()
) -> list[_T]:
    """Return the results in the order given; the first failure cancels the rest.

    Args:
        coroutines: what to run.
        first: indices of the coroutines to begin before the others, in this order.

    Raises:
        Exception: what the first coroutine to fail raised, after all others ended.
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
        # What is raised refers to this frame, which is to hold nobody's result.
        begun.clear()
        tasks.clear()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_in_order(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in the order given, where each begins as its former ended."""
    return [await coroutine for coroutine in coroutines]


_JOIN_TIMEOUT_S = 10.0
_LOOK_S = 1.0

_CANCELLED_BEFORE = asyncio.InvalidStateError, concurrent.futures.InvalidStateError
"""What futures raise that end twice: whoever waited has cancelled it."""


_running: "weakref.WeakSet[LoopThread]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads: Python kills what is left, and aborts where that is in C++."""
    until = time.monotonic() + _JOIN_TIMEOUT_S
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(until - time.monotonic())


class LoopThread:
    """An event loop on a daemon thread: started here, stopped by `close`.

    Args:
        name: of the thread.
        scope: that the thread enters before all else, and leaves at its end.
    """

    def __init__(
        self,
        name: str,
        scope: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._scope = scope or contextlib.nullcontext()
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._is_silent = False  # at Python's end: whoever waits for work waits on
        # Nothing is handed over after `_cancel_all`, which ends what was before. It may
        # be entered again: by a signal's handler that closes.
        self._lock = threading.RLock()
        self._works: weakref.WeakSet[Work] = weakref.WeakSet()  # those that run
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are as many as the system allows
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
        """Start a coroutine on the thread and return its future.

        Where the thread is closed before the coroutine ends, the future has a
        ContextStateError. A future that is cancelled cancels the coroutine.

        Raises:
            ContextStateError: the thread was closed.
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
        """Run a coroutine on the thread and return its result, to another event loop.

        Quicker than `submit` with a wrapped future, which takes two futures. Where the
        caller is cancelled, the coroutine is cancelled on the thread.

        Raises:
            ContextStateError: the thread was closed, now or before the end.
            Exception: what the coroutine raised.
        """
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
            del answer, end  # what is raised refers to this frame, and these to that

    def wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread and wait; an interrupt here cancels it there.

        Raises:
            KeyboardInterrupt: once the coroutine has ended, or ten seconds after.
            ContextStateError: the thread was closed, now or before the end.
            Exception: what the coroutine raised.
        """
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        work = Work()
        end = functools.partial(self._end, answer, work)
        try:
            self._hand_over(coroutine, end, work)
            # A signal that comes just before a wait does not end it: wait again.
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
            del answer, end  # what is raised refers to this frame, and these to that

    def _hand_over(
        self,
        coroutine: Coroutine[Any, Any, _T],
        end: Callable[[asyncio.Task[_T]], object],
        work: Work,
    ) -> None:
        """Start a coroutine as the task of a work; it goes to `end` as it ends."""
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
        work.enter()  # the context of this callback, of which the task has a copy
        work.task = task = self._loop.create_task(coroutine)
        task.add_done_callback(end)

    def _end(
        self,
        answer: "asyncio.Future[_T] | concurrent.futures.Future[_T]",
        work: Work,
        task: asyncio.Task[_T],
    ) -> None:
        """Let a future end as a task did; what `close` cancelled has an error."""
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
        """Call a function on the thread; return whether that runs on."""
        with self._lock:
            if self._is_open:  # or all is cancelled anyway
                self._loop.call_soon_threadsafe(call)
            return self._is_open

    def close(self) -> None:
        """Cancel what still runs, stop the loop and join the thread.

        What was cancelled so ends with a ContextStateError. A call from the thread
        itself does not wait for its end.
        """
        with self._lock:
            self._cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)

    def stop(self) -> None:
        """Cancel what still runs and stop the loop; nobody is told, or waited for."""
        with self._lock:
            self._is_silent = True
            # Says nothing of tasks that are left.
            self._loop.set_exception_handler(lambda _loop, _said: None)
            self._cancel()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread ended, for so long at most."""
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
    """End a coroutine that nobody waits for; it may be no task yet."""
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
    """Call a function with a task that ended, on another loop."""
    if not task.cancelled():
        task.exception()  # seen, also where nobody waits for it any more
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
        loop.call_soon_threadsafe(end, task)


async def _cancel_all() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop.call_soon(loop.stop)  # after what tells of tasks that have just ended


def run_alone(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]
) -> _T:
    """Return the result of a coroutine, on a loop that runs only for it.

    Tasks that it leaves are cancelled, as is the coroutine by an interrupt: the
    loop does not run between calls, so a task that stays would never end.
    """
    try:
        return loop.run_until_complete(coroutine)
    finally:
        # Named here, not in a task: an interrupt may leave that to the next coroutine.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


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

    def wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
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
            future.set_result(self.wait_for(coroutine))
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
