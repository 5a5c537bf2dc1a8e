"""Rounds over a table that is larger than its workers' memory: what they read and hold.

    python -m benchmarks.tables --gigabytes 2 --clients 100000 [--unsorted]

Writes a parquet table of clients with log-normal sizes, the largest 10,000 times the
smallest; runs rounds of new cohorts on Ray; runs some again while a worker is killed;
deletes the table; prints one line of JSON.
"""

import argparse
import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

from benchmarks.hosting import read_status

WIDTH = 24
ROW_BYTES = 4 * WIDTH + 4  # f32[24] and i32[]
_BATCHES = fl.SequenceType(
    fl.StructWithPythonType(
        [
            ("x", fl.TensorType(np.float32, [None, WIDTH])),
            ("y", fl.TensorType(np.int32, [None])),
        ],
        dict,
    )
)
_WORKER_BYTES = 64 * 2**20  # clients that a worker keeps between rounds
_CHUNK_ROWS = 100_000
_KILL_AFTER_S = 0.02
_NUM_KILLED = 3  # rounds that run again while a worker is killed


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is run.

    Attributes:
        num_bytes: of the table's inputs and labels.
        num_clients: in it.
        num_rounds: of new cohorts.
        cohort: clients of a round.
        group_rows: rows of a row group.
        is_sorted: whether rows are in the order of clients.
        spread: The size of the largest client divided by the smallest one's.
    """

    num_bytes: int
    num_clients: int
    num_rounds: int
    cohort: int
    group_rows: int
    is_sorted: bool
    spread: float = 1e4


def draw_sizes(shape: Shape) -> NDArray[np.int64]:
    """Return the rows of each client, at least one."""
    normal = np.random.default_rng(0).normal(size=shape.num_clients)
    scale = math.log(shape.spread) / (normal.max() - normal.min())
    sizes = np.exp(scale * normal)
    rows = sizes * shape.num_bytes / ROW_BYTES / sizes.sum()
    return np.maximum(1, np.round(rows)).astype(np.int64)


def write_table(path: pathlib.Path, shape: Shape) -> None:
    """Write the table, some rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    who = np.repeat(np.arange(shape.num_clients, dtype=np.int32), draw_sizes(shape))
    if not shape.is_sorted:
        rng.shuffle(who)
    writer = None
    for start in range(0, len(who), _CHUNK_ROWS):
        ids = who[start : start + _CHUNK_ROWS]
        values = rng.random(len(ids) * WIDTH, np.float32)
        columns = {
            "who": ids,
            "x": pa.FixedSizeListArray.from_arrays(pa.array(values), WIDTH),
            "y": rng.integers(0, 5, len(ids), np.int32),
        }
        rows = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, rows.schema)
        writer.write_table(rows, row_group_size=shape.group_rows)
    if writer is not None:
        writer.close()


def count_read(pid: int) -> int:
    """Return the bytes that a process has asked the system to read, cached or not."""
    lines = pathlib.Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar:"))


def build_work(type_spec: fl.Type) -> Any:
    """Return one epoch of linear regression at each client, averaged."""
    import tensorflow as tf

    from ray_fed import tensorflow as rtf

    @rtf.computation(type_spec)
    def train(batches: Any) -> Any:
        def step(weights: Any, batch: Any) -> Any:
            error = tf.linalg.matvec(batch["x"], weights) - tf.cast(
                batch["y"], tf.float32
            )
            gradient = tf.linalg.matvec(batch["x"], error, transpose_a=True)
            return weights - 0.001 * gradient

        return batches.reduce(tf.zeros([WIDTH]), step)

    @fl.federated_computation(fl.FederatedType(type_spec, fl.CLIENTS))
    def work(clients: Any) -> Any:
        return fl.federated_mean(fl.federated_map(train, clients))

    return work


class Proof:
    """Rounds over a table, and what they cost.

    Args:
        context: to run them.
        path: of the table.
        shape: of all of it.
    """

    def __init__(self, context: Any, path: pathlib.Path, shape: Shape) -> None:
        from ray_fed.program import ClientData

        self._context = context
        self._work = build_work(_BATCHES)
        self._warm_up(ClientData)
        self._first_held = {pid: read_status(pid, "VmRSS") for pid in self._pids()}
        self._start = read_status(os.getpid(), "VmRSS")
        started = time.perf_counter()
        self._data = ClientData.from_parquet(
            path, client="who", x="x", y="y", batch_size=32
        )
        self._named_s = time.perf_counter() - started
        rng = np.random.default_rng(2)
        self._cohorts = [
            sorted(rng.choice(shape.num_clients, shape.cohort, replace=False).tolist())
            for _ in range(shape.num_rounds)
        ]

    def _warm_up(self, data_class: Any) -> None:
        """Load all libraries: run a round without the table, on all workers."""
        importlib.import_module("pyarrow.dataset")
        batch = {"x": np.zeros([1, WIDTH], np.float32), "y": np.zeros(1, np.int32)}
        data = data_class.from_values([[batch]] * 64, _BATCHES)
        self._context.invoke(self._work, data)

    def run(self) -> dict[str, Any]:
        """Run all rounds and return what they cost."""
        weights = self._data.weights
        found: list[bytes] = []
        seconds: list[float] = []
        ratios: list[float] = []
        for cohort in self._cohorts:
            before = {pid: count_read(pid) for pid in self._pids()}
            started = time.perf_counter()
            found.append(self._run(cohort))
            seconds.append(time.perf_counter() - started)
            read = sum(count_read(pid) - before.get(pid, 0) for pid in self._pids())
            own = float(weights[cohort].sum()) * ROW_BYTES  # pyright: ignore[reportOptionalSubscript]
            ratios.append(read / own)
        grown = read_status(os.getpid(), "VmRSS") - self._start
        return {
            "named_s": round(self._named_s, 1),
            "first_round_s": round(seconds[0], 1),
            "round_s": round(statistics.median(seconds[2:]), 3),
            "read_over_own_first": round(ratios[0], 2),
            "read_over_own_worst_after": round(max(ratios[2:]), 3),
            "driver_grew_mb": round(grown),
            "workers_peak_mb": [round(read_status(p, "VmHWM")) for p in self._pids()],
            "workers_grew_mb": [round(grown) for grown in self._grown()],
            "equal_with_a_worker_killed": self._run_killed(found),
        }

    def _run(self, cohort: list[int]) -> bytes:
        return self._context.invoke(self._work, self._data.pick(cohort)).tobytes()

    def _pids(self) -> set[int]:
        report = self._context.last_report
        return {s.worker_pid for s in report.subrounds} if report else set()

    def _grown(self) -> list[float]:
        """Return by how many MB each worker grew at most."""
        return [
            read_status(pid, "VmHWM") - held for pid, held in self._first_held.items()
        ]

    def _run_killed(self, found: list[bytes]) -> bool:
        """Run rounds again, each while a worker is killed; compare the bits."""
        are_equal: list[bool] = []
        for cohort, wanted in zip(self._cohorts[:_NUM_KILLED], found, strict=False):
            # One that ended its part before it was killed is in the last report still.
            worker = next(
                p for p in self._pids() if pathlib.Path(f"/proc/{p}").exists()
            )
            killing = threading.Timer(_KILL_AFTER_S, os.kill, (worker, signal.SIGKILL))
            killing.start()
            are_equal.append(self._run(cohort) == wanted)
            killing.join()
        return all(are_equal)


def measure(path: pathlib.Path, shape: Shape) -> dict[str, Any]:
    """Run the rounds on a Ray of their own."""
    import ray_fed

    config = ray_fed.Config(
        backend="ray", workers={"count": 2, "client_bytes": _WORKER_BYTES}, subrounds=4
    )
    with ray_fed.init("local", config=config) as context:
        return Proof(context, path, shape).run()


def main() -> None:
    """Write, run, delete, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=200)
    parser.add_argument("--group-rows", type=int, default=50_000)
    parser.add_argument("--unsorted", action="store_true")
    given = parser.parse_args()
    shape = Shape(
        int(given.gigabytes * 1e9),
        given.clients,
        given.rounds,
        given.cohort,
        given.group_rows,
        is_sorted=not given.unsorted,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "table.parquet"
        spawned = multiprocessing.get_context("spawn").Process(
            target=write_table, args=(path, shape)
        )
        spawned.start()  # a process of its own: this one's memory is measured
        spawned.join()
        print(f"written: {path.stat().st_size / 1e9:.2f} GB", file=sys.stderr)
        result = dataclasses.asdict(shape) | measure(path, shape)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
