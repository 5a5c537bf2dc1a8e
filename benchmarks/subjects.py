"""The subjects of a measurement: TensorFlow, a Keras loop, and ray_fed's backends.

Modules that load TensorFlow are imported in the process that is to have it.
"""

import functools
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


class KerasLoop:
    """The loop that a Keras user writes without a library, in one process.

    For each client it sets the server's weights, calls `train_on_batch`, and adds up
    the trained weights.

    Args:
        name: of the workload.
        num_clients: of the cohort.
        num_threads: of TensorFlow, for each op.
        num_distinct: client i has the data of i mod this.
    """

    def __init__(
        self, name: str, num_clients: int, num_threads: int, num_distinct: int
    ) -> None:
        import keras
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(num_threads)
        from benchmarks import workloads

        workload = workloads.WORKLOADS[name]
        self._clients = workloads.make_datasets(
            workload, num_clients, num_distinct, "lists"
        )
        self._model = workloads.build_keras(workload)
        self._model.compile(
            keras.optimizers.SGD(workloads.LEARNING_RATE),
            workloads.build_loss(),
            metrics=["accuracy"],
        )
        self._initial = workload.initial()

    def run(self) -> tuple[float, list[Any]]:
        """Return the seconds of a round, and its weighted mean."""
        started = time.perf_counter()
        sums, total = [0 * w for w in self._initial], 0
        for client in self._clients:
            self._model.set_weights(self._initial)
            for batch in client:
                self._model.train_on_batch(batch["x"], batch["y"])
            count = sum(len(batch["y"]) for batch in client)
            trained = self._model.get_weights()
            sums = [s + count * w for s, w in zip(sums, trained, strict=True)]
            total += count
        mean = [s / total for s in sums]
        return time.perf_counter() - started, mean


class _Clock:
    """A callback that notes when each round of a run ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round(self, record: Any) -> None:
        """Note the time."""
        del record
        self.ends.append(time.perf_counter())


class Backend:
    """A context of ray_fed in this process, installed, with programs and data at hand.

    Args:
        backend: "ray" or "local".
        num_workers: of the context, and subrounds of a round.
        jit: see `ray_fed.Config.kernels`.
    """

    def __init__(self, backend: str, num_workers: int, jit: str = "auto") -> None:
        import ray_fed

        kernels: Any = {"jit": jit}
        config = ray_fed.Config(
            backend=backend, workers=num_workers, kernels=kernels, progress="off"
        )
        address = "local" if backend == "ray" else None
        self._context = ray_fed.init(address, config=config)
        self._turns: dict[str, Any] = {}
        self._fallbacks: set[str] = set()
        self._interpreted = 0
        self._worker_pids: set[int] = set()
        self._num_processes = num_workers if backend == "ray" else 1
        self._decisions: dict[str, list[bool]] = {}

    def prepare(
        self, label: str, of: tuple[str, int], num_distinct: int, data: str
    ) -> float:
        """Trace a program, and run it until each worker has taken part.

        Args:
            label: names the program. If it ends in "by_hand", the program is
                `workloads.build_round`, else `workloads.build_learning`.
            of: the workload's name, and how many clients.
            num_distinct: client i has the data of i mod this.
            data: how clients have them, see `workloads.make_datasets`.

        Returns:
            The seconds until the first result, with tracing and compilation.
        """
        from benchmarks import workloads

        name, num_clients = of
        workload = workloads.WORKLOADS[name]
        clients = workloads.make_datasets(workload, num_clients, num_distinct, data)
        started = time.perf_counter()
        if label.endswith("by_hand"):
            computation = workloads.build_round(workload)
            arguments = workload.initial(), clients
            self._turns[label] = functools.partial(
                self._run_by_hand, computation, arguments
            )
        else:
            process = workloads.build_learning(workload)
            self._turns[label] = functools.partial(self._run_learning, process, clients)
        self.run(label, 1)
        first_s = time.perf_counter() - started
        ends_s = time.monotonic() + _START_S
        while len(self._worker_pids) < self._num_processes:  # one may start late
            if time.monotonic() > ends_s:
                raise TimeoutError(f"Not all workers took part within {_START_S} s.")
            self.run(label, 1)
        return first_s

    def run(self, label: str, num_rounds: int) -> tuple[list[float], list[Any]]:
        """Return the seconds of rounds that follow one another, and a round's weights.

        Every round by hand starts from the initial weights. A run of `learning` trains
        on, and its weights are those after its first round.
        """
        seconds, weights = self._turns[label](num_rounds)
        report: Any = self._context.last_report
        self._interpreted += report.num_leaves - report.kernel_leaves
        self._fallbacks.update(report.no_kernel)
        self._decisions[label] = [decision.jit for decision in report.jit_decisions]
        self._worker_pids.update(subround.worker_pid for subround in report.subrounds)
        return seconds, weights

    def _run_by_hand(
        self, computation: Any, arguments: Any, num_rounds: int
    ) -> tuple[list[float], list[Any]]:
        seconds: list[float] = []
        mean: list[Any] = []
        for _ in range(num_rounds):
            started = time.perf_counter()
            mean = list(self._context.invoke(computation, arguments))
            seconds.append(time.perf_counter() - started)
        return seconds, mean

    def _run_learning(
        self, process: Any, clients: Any, num_rounds: int
    ) -> tuple[list[float], list[Any]]:
        from ray_fed import learning

        clock = _Clock()
        started = time.perf_counter()
        learning.run(process, clients, num_rounds=num_rounds, callbacks=[clock])
        times = [started, *clock.ends]
        seconds = [after - before for before, after in itertools.pairwise(times)]
        first = learning.run(process, clients, num_rounds=1).state.weights
        return seconds, list(first.trainable)

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
        import ray_fed

        ray_fed.shutdown()
