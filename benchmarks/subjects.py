"""Those who run a round: plain TensorFlow in W processes, and ray_fed's backends.

Modules that load TensorFlow are imported in the process that is to have it.
"""

import itertools
import time
from typing import Any

from benchmarks.hosting import Hosted, read_status

_START_S = 300.0
"""Seconds within which all workers take part in a round."""


def _build_share(name: str, clients: range, num_distinct: int) -> Any:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from benchmarks.plain_tf import PlainShare
    from benchmarks.workloads import WORKLOADS

    return PlainShare(WORKLOADS[name], clients, num_distinct)


class PlainTensorFlow:
    """Plain TensorFlow over a cohort, a share of it in each of some processes.

    Args:
        name: of the workload.
        num_clients: of the cohort.
        num_workers: processes, of one thread each.
        num_distinct: client i has the data of i mod this.
    """

    def __init__(
        self, name: str, num_clients: int, num_workers: int, num_distinct: int
    ) -> None:
        ends = [num_clients * i // num_workers for i in range(num_workers + 1)]
        shares = [range(*pair) for pair in itertools.pairwise(ends)]
        self._hosts = [
            Hosted(_build_share, name, share, num_distinct) for share in shares if share
        ]
        for host in self._hosts:
            host.receive()

    def run(self, **arguments: Any) -> tuple[float, list[Any]]:
        """Return the seconds of a round, and its weighted mean."""
        started = time.perf_counter()
        for host in self._hosts:
            host.send("run", **arguments)
        sums = [host.receive() for host in self._hosts]
        total = sum(weight for _, weight in sums)
        columns = zip(*(held for held, _ in sums), strict=True)
        mean = [sum(column) / total for column in columns]
        return time.perf_counter() - started, mean

    def peak_mb(self) -> list[float]:
        """Return the most memory that each process had."""
        return [read_status(host.pid, "VmHWM") for host in self._hosts]

    def close(self) -> None:
        """End the processes."""
        for host in self._hosts:
            host.close()


class Backend:
    """A context of ray_fed in this process, with computations and data at hand.

    Args:
        backend: "ray" or "local".
        num_workers: of the context, and subrounds of a round.
        jit: see `ray_fed.Config.kernels`.
    """

    def __init__(self, backend: str, num_workers: int, jit: str = "auto") -> None:
        import ray_fed

        kernels: Any = {"jit": jit}
        config = ray_fed.Config(backend=backend, workers=num_workers, kernels=kernels)
        address = "local" if backend == "ray" else None
        self._context = ray_fed.create_context(config, address=address)
        self._rounds: dict[str, Any] = {}
        self._fallbacks: set[str] = set()
        self._interpreted = 0
        self._worker_pids: set[int] = set()
        self._num_processes = num_workers if backend == "ray" else 1
        self._decisions: dict[str, list[bool]] = {}

    def prepare(
        self, label: str, of: tuple[str, int], num_distinct: int, data: str
    ) -> None:
        """Trace a round of a workload, and run it until each worker has taken part.

        Args:
            label: names the round.
            of: the workload's name, and how many clients.
            num_distinct: client i has the data of i mod this.
            data: how clients have them, see `workloads.make_datasets`.
        """
        from benchmarks import workloads

        name, num_clients = of
        workload = workloads.WORKLOADS[name]
        clients = workloads.make_datasets(workload, num_clients, num_distinct, data)
        computation = workloads.build_round(workload)
        self._rounds[label] = (computation, (workload.initial(), clients))
        ends_s = time.monotonic() + _START_S
        while len(self._worker_pids) < self._num_processes:  # one may start late
            if time.monotonic() > ends_s:
                raise TimeoutError(f"Not all workers took part within {_START_S} s.")
            self._run(label)

    def run(self, label: str, num_rounds: int) -> tuple[list[float], list[Any]]:
        """Return the seconds of rounds that follow one another, and the last's mean."""
        taken: list[float] = []
        mean: list[Any] = []
        for _ in range(num_rounds):
            seconds, mean = self._run(label)
            taken.append(seconds)
        return taken, mean

    def _run(self, label: str) -> tuple[float, list[Any]]:
        computation, arguments = self._rounds[label]
        started = time.perf_counter()
        mean = self._context.invoke(computation, arguments)
        seconds = time.perf_counter() - started
        report: Any = self._context.last_report
        self._interpreted += report.num_leaves - report.kernel_leaves
        self._fallbacks.update(report.no_kernel)
        self._decisions[label] = [found.jit for found in report.jit_decisions]
        self._worker_pids.update(subround.worker_pid for subround in report.subrounds)
        return seconds, list(mean)

    def facts(self) -> dict[str, Any]:
        """Return how many leaves no kernel ran, why, and the workers' memory."""
        return {
            "interpreted_leaves": self._interpreted,
            "reasons": sorted(self._fallbacks),
            "xla": self._decisions,
            "worker_peak_mb": [
                read_status(pid, "VmHWM") for pid in sorted(self._worker_pids)
            ],
        }

    def close(self) -> None:
        """Close the context."""
        self._context.close()
