"""SIGINT and SIGTERM as a wish that a run sees: save and leave. A second one kills."""

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any, Self, TypeVar

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
