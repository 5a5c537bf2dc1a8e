"""A peer's process, told what to do line by line."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers.environments import last_line

_ROOT = pathlib.Path(__file__).parents[2]
_CLOSE_S = 60.0


class PeerFailure(Exception):  # noqa: N818 (a peer that does not run is no error)
    """A peer does not run, or not what it should; the message says why."""


class PeerProcess:
    """Serves rounds of a peer; stands still in between.

    Flower's server asks for messages ten times a second: the turns of others would pay.

    Args:
        command: runs it; see `turns` for what it reads and writes.
        settings: its own; those of threads go to OpenMP too.
        folder: for its log and its weights; another for each process.
        limit_s: for each answer.

    Attributes:
        limit_s: as given.
        version: of the peer that is installed.
    """

    def __init__(
        self,
        command: list[str],
        settings: Mapping[str, int],
        folder: pathlib.Path,
        limit_s: float,
    ) -> None:
        self.limit_s = limit_s
        self._timed_out = False
        folder.mkdir(parents=True)
        self._log, self._weights = folder / "log", folder / "weights.npz"
        kept = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
        threads = str(settings.get("threads", 1))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **kept,
                    "PYTHONPATH": str(_ROOT),
                    "OMP_NUM_THREADS": threads,
                    "TQDM_DISABLE": "1",
                    "RAY_USAGE_STATS_ENABLED": "0",
                },
                start_new_session=True,
            )
        self.version: str = self._receive()["version"]
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def turn(self, num_rounds: int) -> tuple[list[float], None]:
        """Return the seconds of some rounds, and no weights: see `weights`."""
        with self._going():
            rounds = [self._ask(do="round") for _ in range(num_rounds)]
        return [told["seconds"] for told in rounds], None

    def weights(self) -> list[Any]:
        """Return the weights after the last round."""
        with self._going():
            self._ask(do="weights", path=str(self._weights))
        with np.load(self._weights) as held:
            return [held[name] for name in held.files]

    def close(self) -> None:
        """End the process, and those that it started with itself."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._kill()  # TensorFlow Federated's worker outlives it
        self._stdout.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    @contextlib.contextmanager
    def _going(self) -> Generator[None]:
        """Let the process go on, and stop it after."""
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def _ask(self, **told: Any) -> dict[str, Any]:
        try:
            self._stdin.write(json.dumps(told) + "\n")
            self._stdin.flush()
        except OSError:
            raise PeerFailure(self._last_words()) from None
        return self._receive()

    def _signal(self, number: signal.Signals) -> None:
        """Stop the process, or let it go on; it is gone where it has failed."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _receive(self) -> dict[str, Any]:
        timer = threading.Timer(self.limit_s, self._give_up)
        timer.start()
        line = self._stdout.readline()
        timer.cancel()
        timer.join()  # so that what it ends has ended
        if not line:
            raise PeerFailure(self._last_words())
        return json.loads(line)

    def _give_up(self) -> None:
        self._timed_out = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        if self._timed_out:
            return f"it gave no answer within {self.limit_s:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)  # until all is in the log
        return last_line(self._log.read_text(errors="replace"))
