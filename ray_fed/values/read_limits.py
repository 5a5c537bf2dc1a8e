"""Bounds on reading clients' data, so that data without end become an error.

    limited, Meter         while data is read
    Work, interruptible    while a call, such as TensorFlow's, holds the thread

Sequences are read in steps. After each step a `Meter` checks that the caller still
waits for the value, and that the sequence is not larger than its limit. The function
that starts the work sets both in context variables, which follow asyncio tasks and
calls to other threads.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import ray_fed.errors as errors

STEP_BYTES = 2**20
"""The size of a step, where the size of the elements is known."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much may be read, and from which file systems.

    Attributes:
        num_bytes: of the tensors of one sequence, > 0.
        advice: what a user can do who needs more; ends the error.
        protocols: of URIs, beside those of local files and "memory".
    """

    num_bytes: int = 2**30
    advice: str = "Pass a list of its elements if it is to be as large."
    protocols: tuple[str, ...] = ()


class AbandonedError(errors.ClusterError):
    """The caller no longer waits for the value that is read."""


_NO_CONFIG = Limits()

_limits: contextvars.ContextVar[Limits] = contextvars.ContextVar(
    "ray_fed_read_limits", default=_NO_CONFIG
)
_check: contextvars.ContextVar[Callable[[], None]] = contextvars.ContextVar(
    "ray_fed_read_check", default=lambda: None
)


@contextlib.contextmanager
def limited(
    limits: Limits, checking: Callable[[], None] | None = None
) -> Generator[None]:
    """Hold what is read inside to limits.

    Args:
        limits: of what is read.
        checking: called before each client, and after every step; raises a
            `ClusterError` to end the reading. None: what is called already stays.
    """
    token = _limits.set(limits)
    check_token = _check.set(_check.get() if checking is None else checking)
    try:
        yield
    finally:
        _limits.reset(token)
        _check.reset(check_token)


def limits() -> Limits:
    """Return what may be read here."""
    return _limits.get()


def check() -> None:
    """Raise if the caller no longer waits for the value; see `limited`, `Work`."""
    check_cancelled()
    _check.get()()


class Work:
    """A coroutine that a thread runs for a caller.

    Attributes:
        task: of the coroutine, once it began.
        is_cancelled: whether nobody waits for it any more.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.is_cancelled = False
        self._interrupt: Callable[[], object] | None = None

    def enter(self) -> None:
        """Have `interruptible` find the work in this context, and in its copies."""
        _work.set(self)

    def cancel(self) -> None:
        """Cancel the task; called on its thread, which `end_call` gave back."""
        if self.task is not None:
            self.task.cancel()

    def end_call(self) -> None:
        """End the call that holds the thread, and any later one; from any thread."""
        self.is_cancelled = True
        interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    @contextlib.contextmanager
    def calling(self, interrupt: Callable[[], object]) -> Generator[None]:
        """Have `end_call` interrupt what runs inside; see `interruptible`."""
        self._interrupt = interrupt
        try:
            check_cancelled()
            yield
        except Exception as error:
            if self.is_cancelled:
                raise asyncio.CancelledError from error
            raise
        finally:
            self._interrupt = None


_work: contextvars.ContextVar[Work | None] = contextvars.ContextVar(
    "ray_fed_work", default=None
)


def check_cancelled() -> None:
    """Raise `asyncio.CancelledError` once nobody waits for the work; see `Work`."""
    work = _work.get()
    if work is not None and work.is_cancelled:
        raise asyncio.CancelledError


def interruptible(
    interrupt: Callable[[], object],
) -> contextlib.AbstractContextManager[object]:
    """Return what lets a call inside end early, once nobody waits for the work.

    Inside of it, a call that was interrupted raises `asyncio.CancelledError`.

    Args:
        interrupt: has the call raise, or does nothing once it ended; called on another
            thread.
    """
    work = _work.get()
    return contextlib.nullcontext() if work is None else work.calling(interrupt)


class Meter:
    """Counts what has been read of one sequence.

    Args:
        label: what the sequence is called in an error.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count the bytes of a step.

        Raises:
            ValueMismatchError: the sequence is larger than it may be.
            ClusterError: the caller no longer waits for the value.
        """
        check()
        limit = limits()
        self._num_bytes += num_bytes
        if self._num_bytes > limit.num_bytes:
            raise errors.ValueMismatchError(
                f"Expected {self._label} to end within {limit.num_bytes} bytes, found"
                " more. If it has no end, take as many elements as the client has."
                f" {limit.advice}"
            )


def next_step(count: int, num_bytes: int, largest: int) -> int:
    """Return how many elements the next step reads: at most twice as many as the last.

    Args:
        count: elements of the last step, > 0.
        num_bytes: of the last step.
        largest: the most elements of any step, > 0.
    """
    fitting = count * STEP_BYTES // max(1, num_bytes)
    return max(1, min(2 * count, fitting, largest))
