"""Runs a target executor on a thread of its own, so that its callers do not block."""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors

_T = TypeVar("_T")
_JOIN_TIMEOUT_S = 10.0


class LoopThread:
    """An event loop on a daemon thread: started here, stopped by `close`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        # Nothing is handed over after `_cancel_all`, which ends what was before. It may
        # be entered again: by a signal's handler that closes.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
                break
            except (KeyboardInterrupt, SystemExit):  # raised by a task, which has it
                continue
        self._loop.close()

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Start a coroutine on the thread and return its future.

        Raises:
            ContextStateError: the thread was closed.
        """
        with self._open_for(coroutine):
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread and return its result, to another event loop.

        Quicker than a future of `submit` that is wrapped, which is two futures. Who is
        cancelled here cancels it there.

        Raises:
            ContextStateError: the thread was closed.
            Exception: what the coroutine raised.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        tell = functools.partial(_tell, loop, answer)
        tasks: list[asyncio.Task[_T]] = []
        with self._open_for(coroutine):
            self._loop.call_soon_threadsafe(self._start, coroutine, tell, tasks)
        try:
            return await answer
        except asyncio.CancelledError:
            self._call_soon(lambda: [task.cancel() for task in tasks])
            raise
        except BaseException:
            tasks.clear()  # what is raised refers to this frame, and these to that
            raise
        finally:
            del answer, tell

    def _start(
        self,
        coroutine: Coroutine[Any, Any, _T],
        tell: "Callable[[asyncio.Task[_T]], object]",
        tasks: "list[asyncio.Task[_T]]",
    ) -> None:
        """Start a coroutine, on the thread; its task goes to a list."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(tell)
        tasks.append(task)

    @contextlib.contextmanager
    def _open_for(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[None]:
        """Let a coroutine be handed over: inside, the thread does not begin to end."""
        with self._lock:
            if self._is_open:
                yield
                return
        coroutine.close()
        raise errors.ContextStateError(
            f"Expected the thread `{self._thread.name}` to run, found it closed."
        )

    @property
    def _is_open(self) -> bool:
        return not self._is_closed and self._thread.is_alive()  # not after a fork

    def _call_soon(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._is_open:  # or all is cancelled anyway
                self._loop.call_soon_threadsafe(call)

    def cancel(self, task: "asyncio.Task[Any] | None") -> None:
        """Cancel a task of the thread's loop, without waiting for its end."""
        if task is not None:
            self._call_soon(task.cancel)

    def close(self) -> None:
        """Cancel what still runs, stop the loop and join the thread."""
        with self._lock:
            if self._is_open:
                asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
                self._is_closed = True
        self._thread.join(_JOIN_TIMEOUT_S)


def _tell(
    loop: asyncio.AbstractEventLoop,
    answer: "asyncio.Future[_T]",
    task: "asyncio.Task[_T]",
) -> None:
    """Let a loop's future end as a task of another loop did."""
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
        loop.call_soon_threadsafe(_end_as, answer, task)


def _end_as(answer: "asyncio.Future[_T]", task: "asyncio.Task[_T]") -> None:
    if task.cancelled():
        answer.cancel()
        return
    error = task.exception()
    if answer.cancelled():
        return
    if error is None:
        answer.set_result(task.result())
    else:
        answer.set_exception(error)


async def _cancel_all() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop.call_soon(loop.stop)  # after what tells of tasks that have just ended


def wait_for(thread: LoopThread, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a thread and wait; an interrupt here cancels it there.

    Raises:
        KeyboardInterrupt: once the coroutine has ended, or ten seconds after.
        Exception: what the coroutine raised.
    """
    ended, abandoned = threading.Event(), threading.Event()
    tasks: list[asyncio.Task[Any] | None] = []

    async def run() -> _T:
        tasks.append(asyncio.current_task())
        try:
            if abandoned.is_set():
                coroutine.close()
                raise asyncio.CancelledError
            return await coroutine
        finally:
            ended.set()

    try:
        return thread.submit(run()).result()
    except BaseException:
        # The interrupt may have come before there was a future to cancel.
        abandoned.set()
        if not tasks:
            coroutine.close()
        elif not ended.is_set():
            thread.cancel(tasks[0])
            ended.wait(_JOIN_TIMEOUT_S)
        raise
    finally:
        tasks.clear()  # what is raised refers to this frame, and a task to that


class ThreadDelegatingExecutor(fl.framework.Executor):
    """Delegates every verb to a target executor on one dedicated thread.

    Values are the target's own. Calls of one executor run one after another; those of
    several, at the same time.

    Args:
        target_executor: runs on the thread; owned: `close` closes it.
        name: of the thread.
    """

    def __init__(
        self, target_executor: fl.framework.Executor, name: str = "ray_fed executor"
    ) -> None:
        self._target = target_executor
        self._thread = LoopThread(name)

    @override
    def close(self) -> None:
        self._thread.close()
        self._target.close()

    async def _delegate(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return await self._thread.run(coroutine)

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        return await self._delegate(self._target.create_value(value, type_spec))

    @override
    async def create_call(
        self,
        comp: fl.framework.ExecutorValue,
        arg: fl.framework.ExecutorValue | None = None,
    ) -> Any:
        return await self._delegate(self._target.create_call(comp, arg))

    @override
    async def create_struct(self, elements: Any) -> Any:
        return await self._delegate(self._target.create_struct(elements))

    @override
    async def create_selection(self, source: Any, index: int) -> Any:
        return await self._delegate(self._target.create_selection(source, index))
