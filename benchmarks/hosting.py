"""What is measured, each in a process of its own that does one thing when told.

So they can take turns, and a busy machine hurts all alike; and the memory of one is not
that of another.
"""

import contextlib
import multiprocessing
import os
import pathlib
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

_SPAWN = multiprocessing.get_context("spawn")
_SAMPLE_S = 0.05
_CLOSE_S = 30.0


def _serve(connection: Connection, build: Callable[..., Any], args: Any) -> None:
    """Build an object and call its methods, one after another, until told to end."""
    try:
        served = build(*args)
        connection.send((True, None))
        while True:
            method, arguments = connection.recv()
            if method is None:
                getattr(served, "close", lambda: None)()
                return
            connection.send((True, getattr(served, method)(**arguments)))
    except EOFError:
        return
    except BaseException:  # noqa: BLE001 (said by the process that asked)
        connection.send((False, traceback.format_exc()))


class Hosted:
    """An object in a process of its own.

    Args:
        build: makes it there.
        *args: for `build`.
    """

    def __init__(self, build: Callable[..., Any], *args: Any) -> None:
        self._connection, other = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(other, build, args))
        self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid or 0

    def send(self, method: str, **arguments: Any) -> None:
        """Begin a call."""
        self._connection.send((method, arguments))

    def receive(self) -> Any:
        """Return the result of the oldest call; the first is that of building.

        Raises:
            RuntimeError: it raised, or the process died.
        """
        try:
            succeeded, result = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"Process {self.pid} died.") from None
        if not succeeded:
            raise RuntimeError(result)
        return result

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method and return its result."""
        self.send(method, **arguments)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # it may be gone
            self._connection.send((None, {}))
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.kill()


def read_status(pid: int, field: str) -> float:
    """Return a size of a process that the kernel tells, in MB; 0 where it is gone."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    told = dict(line.split(":", 1) for line in lines)
    return round(int(told.get(field, "0 kB").split()[0]) / 1024, 1)


class MemoryWatch:
    """Samples the memory of one process while it is open.

    Args:
        pid: of the process.
        name: of the kind of memory, see `read_status`; by default what no other shares.

    Attributes:
        before: when it was opened, in MB.
        peak: since then, in MB.
    """

    def __init__(self, pid: int, name: str = "RssAnon") -> None:
        self._pid, self._name = pid, name
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before = self.peak = read_status(pid, name)

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak = max(self.peak, read_status(self._pid, self._name))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def keep_to_cpu() -> None:
    """Hide cards and most of TensorFlow's chatter, here and in processes to come."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
