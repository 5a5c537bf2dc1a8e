"""SIGINT and SIGTERM as a wish that a run sees: save and leave. A second one kills."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
