"""How the costs of a round grow with clients, with workers and with nodes.

    python -m benchmarks.growth --part nodes --subrounds 4

Each row is a process with a `ray.cluster_utils.Cluster` of its own: a head that runs no
client work, and nodes on this machine. Clients of a Parquet table train a softmax layer
on 4 rows each, by federated averaging. Prints a line of JSON for each row to standard
error, and a table in Markdown.

`first_s` is the time from `ray_fed.init` to the first result, and `all_s` to the round
in which the last worker takes part. The others are of the ten rounds that follow.
`round_s` is a median. `driver_s`, `gcs_s` and `raylet_s` are means of the CPU time of
the driver, of Ray's head service and of the driver's raylet. Bytes are from the report.
Memory is in MB: RSS, and PSS, which counts a page that n processes share as one nth.
The largest worker and coordinator count. `driver_files` includes sockets.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import ray
from ray.cluster_utils import Cluster

import ray_fed
from benchmarks import tables
from benchmarks.frozen import measure
from benchmarks.papers.trials import draw_table
from ray_fed import learning
from ray_fed.data import ClientData

_ROWS, _LABELS, _ROUNDS, _START_S = 4, 5, 10, 900.0
# By default Ray ends idle coordinators within seconds. cluster.yaml sets this, too.
_SYSTEM = {"idle_worker_killing_time_threshold_ms": 600_000}


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of one measurement: clients of the table and of a round, and workers."""

    clients: int = 10_000
    cohort: int = 2_000
    nodes: int = 1
    workers: int = 2
    subrounds: int = 0  # of a round: 0 makes one for each worker


_PARTS: Mapping[str, Sequence[Size]] = {
    "clients": [
        Size(clients=clients, cohort=cohort)
        for clients in (10_000, 100_000, 1_000_000)
        for cohort in (100, 1_000, 10_000)
    ],
    "workers": [Size(workers=count) for count in (1, 2, 4, 8)],
    "nodes": [Size(nodes=count, workers=count) for count in (2, 4, 8, 16)],
}


def build_process() -> Any:
    """Return federated averaging of a softmax layer."""
    keras.utils.set_random_seed(0)
    model = learning.Model.from_keras(
        keras.Sequential([keras.Input((tables.WIDTH,)), keras.layers.Dense(_LABELS)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return learning.build_fed_avg(model, "sgd")


def read_cpu_s(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    ticks = map(int, stat.rpartition(")")[2].split()[11:13])
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


class Clock:
    """A callback that reads the clocks of a context's driver and of head processes."""

    def __init__(self, context: Any, head: Sequence[int]) -> None:
        self._context, self._head = context, head
        self.workers, self.coordinators = set[int](), set[int]()
        self.read: list[list[float]] = []

    def on_round(self, record: Any) -> None:
        """Read the wall clock and CPU times."""
        del record
        for each in self._context.last_report.subrounds:
            self.workers.add(each.worker_pid)
            self.coordinators.add(each.coordinator_pid)
        head = map(read_cpu_s, self._head)
        self.read.append([time.perf_counter(), time.process_time(), *head])


def run_rounds(path: pathlib.Path, size: Size) -> dict[str, Any]:
    """Start a cluster, run rounds there and return what they cost."""
    options = {"num_cpus": 0, "include_dashboard": False, "_system_config": _SYSTEM}
    cluster: Any = Cluster(initialize_head=True, head_node_args=options)
    for _ in range(size.nodes):
        cluster.add_node(num_cpus=size.workers // size.nodes)
    started = map(cluster.head_node.all_processes.get, ("gcs_server", "raylet"))
    head = [process.process.pid for process, *_ in started]
    config = ray_fed.Config(
        workers=size.workers, subrounds=size.subrounds or size.workers, progress="off"
    )
    begun = time.perf_counter()
    with ray_fed.init(cluster.address, config=config) as context:
        clock = Clock(context, head)
        columns: Any = {"client": "who", "x": "x", "y": "y"}
        data = ClientData.from_parquet(path, batch_size=_ROWS, **columns)
        process = build_process()
        run = functools.partial(learning.run, process, data, cohort_size=size.cohort)
        run(num_rounds=1)
        first_s = time.perf_counter() - begun
        while len(clock.workers) < size.workers:
            if time.perf_counter() > begun + _START_S:
                raise TimeoutError(f"Not all workers took part within {_START_S} s.")
            run(num_rounds=1, callbacks=[clock])
        all_s = time.perf_counter() - begun
        clock.coordinators.clear()
        clock.read.clear()
        run(num_rounds=1 + _ROUNDS, callbacks=[clock])
        spent = np.diff(np.array(clock.read), axis=0)
        report: Any = context.last_report
        coordinators = clock.coordinators - {os.getpid()}  # the driver drives a finish
        names = "first_s", "all_s", "round_s", "driver_s", "gcs_s", "raylet_s"
        times = first_s, all_s, np.median(spent[:, 0]), *spent.mean(axis=0)[1:]
        result = {
            **dataclasses.asdict(size),
            "subrounds": sum(each.num_clients > 0 for each in report.subrounds),
            **dict(zip(names, (round(float(s), 4) for s in times), strict=True)),
            "broadcast": report.bytes_broadcast,
            "sliced": report.bytes_sliced,
            "returned": report.bytes_returned,
            "driver_files": len([*pathlib.Path("/proc/self/fd").iterdir()]),
            "coordinators": len(coordinators),
            **read_memory("driver", [os.getpid()]),
            **read_memory("worker", clock.workers),
            **read_memory("coordinator", coordinators),
            **read_memory("gcs", head[:1]),
        }
    ray.shutdown()  # a cluster does not shut down under a driver
    cluster.shutdown()
    return result


def read_memory(name: str, pids: Collection[int]) -> dict[str, int]:
    """Return RSS and PSS of the largest of some processes that still run."""
    read = [measure(pid) for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
    return {f"{name}_{kind}": max(r[kind] for r in read) for kind in ("rss", "pss")}


def measure_part(sizes: Sequence[Size], folder: pathlib.Path) -> list[dict[str, Any]]:
    """Write the tables of clients, and return a row for each size."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        path = folder / f"{size.clients}.parquet"
        if not path.exists():
            about = _ROWS * tables.ROW_BYTES * size.clients, size.clients, 0, 0, 50_000
            tables.write_table(path, tables.Shape(*about, is_sorted=True, spread=1.0))
        print(f"begun: {size}", file=sys.stderr, flush=True)
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as host:
            rows.append(host.submit(run_rounds, path, size).result())
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure one part, or all, and print a table of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=[*_PARTS])
    parser.add_argument("--quick", action="store_true", help="one small row")
    parser.add_argument("--subrounds", type=int, default=0)
    given = parser.parse_args()
    for part in [given.part] if given.part else _PARTS:
        sizes = _PARTS[part][: 1 if given.quick else None]
        few = {"clients": 200, "cohort": 50} if given.quick else {}
        about = {"subrounds": given.subrounds, **few}
        sizes = [dataclasses.replace(size, **about) for size in sizes]
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_part(sizes, pathlib.Path(folder))
        print(draw_table([{k: f"{v:,}" for k, v in row.items()} for row in rows]))


if __name__ == "__main__":
    main()
