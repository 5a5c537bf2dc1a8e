"""Limits on reading clients' data, so that data without end raises an error.

    limited, Meter         end the reading of data that is too long or not needed
    Work, interruptible    end a call, such as one of TensorFlow, that blocks a thread

Sequences are read in steps. After each step, a `Meter` checks that a caller still waits
for the value and that the sequence is within its limit. The code that starts the work
sets the limits and the check for a caller in context variables. Asyncio tasks and calls
to other threads inherit them.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import ray_fed.errors as errors

STEP_BYTES = 2**20
"""Bytes to read in one step, if the size of the elements is known."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the data that may be read.

    Attributes:
        num_bytes: Maximum bytes of the tensors of one sequence, > 0.
        advice: What a user who needs more can do. It is the error's last sentence.
        protocols: Protocols of URIs that are allowed, besides local files and "memory".
    """

    num_bytes: int = 2**30
    advice: str = "If the data should be so large, pass a list of its elements."
    protocols: tuple[str, ...] = ()


class AbandonedError(errors.ClusterError):
    """No caller waits any longer for the value that is being read."""


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
    """Limit the data that is read in the `with` block.

    `checking` is called before each client and after every step, and raises a
    `ClusterError` to end the reading. None keeps the current function.
    """
    token = _limits.set(limits)
    check_token = _check.set(_check.get() if checking is None else checking)
    try:
        yield
    finally:
        _limits.reset(token)
        _check.reset(check_token)


def limits() -> Limits:
    """Return the limits of the current work."""
    return _limits.get()


def check() -> None:
    """Raise an error if no caller waits any longer for the value that is read."""
    check_cancelled()
    _check.get()()


class Work:
    """Lets a caller stop a coroutine that another thread runs.

    `task` is set once the coroutine has started. `is_cancelled` says whether the caller
    no longer waits.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.is_cancelled = False
        self._interrupt: Callable[[], object] | None = None

    def enter(self) -> None:
        """Let `interruptible` and `check_cancelled` in this context use this work."""
        _work.set(self)

    def cancel(self) -> None:
        """Cancel the task. Call this on its thread, after `end_call` unblocked it."""
        if self.task is not None:
            self.task.cancel()

    def end_call(self) -> None:
        """Interrupt the call that blocks the thread, and later calls. Thread-safe."""
        self.is_cancelled = True
        interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    @contextlib.contextmanager
    def calling(self, interrupt: Callable[[], object]) -> Generator[None]:
        """Let `end_call` interrupt the `with` block by a call of `interrupt`."""
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
    """Raise `asyncio.CancelledError` if the caller of the work no longer waits."""
    work = _work.get()
    if work is not None and work.is_cancelled:
        raise asyncio.CancelledError


def interruptible(
    interrupt: Callable[[], object],
) -> contextlib.AbstractContextManager[object]:
    """Let a call in the `with` block end early when no caller waits for it.

    `interrupt` runs on another thread. It makes the call raise
    `asyncio.CancelledError`, or does nothing if the call has ended.
    """
    work = _work.get()
    return contextlib.nullcontext() if work is None else work.calling(interrupt)


class Meter:
    """Counts the bytes read of one sequence, which errors call `label`."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count the bytes of a step.

        Raises ValueMismatchError if the sequence exceeds its limit, and ClusterError if
        no caller waits any longer.
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
    """Return how many elements the next step reads: about `STEP_BYTES`.

    The last step read `count` elements of `num_bytes` together. The next step reads at
    most `2 * count` and at most `largest`. All arguments are > 0.
    """
    fitting = count * STEP_BYTES // max(1, num_bytes)
    return max(1, min(2 * count, fitting, largest))
