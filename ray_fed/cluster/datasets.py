"""Reads clients from a Ray dataset, and runs Ray Data only while a CPU is free.

A ray_fed worker is an actor that holds its CPUs until its pool ends. If workers hold
all CPUs, a task of Ray Data would wait forever in most programs. So this module checks
for a free CPU before and while Ray Data runs.
"""

import asyncio
import concurrent.futures
import ctypes
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.client import ray as ray_client
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.cluster import joining
from ray_fed.cluster.joining import Job
from ray_fed.cluster.object_store import fetch
from ray_fed.cluster.worker_actor import LeafWorker
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import check_columns
from ray_fed.files.table_rows import IdColumn, TableRows, take_rows
from ray_fed.imports import pyarrow

_T = TypeVar("_T")

_GROW_S = 300.0
"""Seconds to wait for a free CPU in a cluster that this process joined. Meanwhile a
node may join the cluster, or another program may end its pool."""

_POLL_S = 0.5

_ANSWER_S = 20.0
"""Seconds that Ray may take to return its table of actors. Ray itself ends a process
that waits a minute, for example because another thread called `ray.shutdown`."""

_LEAVE_S = 10.0
"""Seconds to wait for the end of a thread that was stopped."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TaskCpus:
    """The CPUs of a cluster's live nodes, and how many ray_fed workers leave free.

    Attributes:
        total: Number of CPUs of the live nodes.
        num_workers: Number of workers of all pools, also workers that wait for CPUs.
        num_left: Number of one-CPU tasks that fit once all workers have started.
        may_grow: Whether nodes may join the cluster.
    """

    total: float
    num_workers: int
    num_left: int
    may_grow: bool

    def check(self, label: str, since_s: float | None) -> float | None:
        """Return the time since which tasks have had no CPU, or None if one is free.

        `label` names the waiting work in messages. `since_s` is the result of the last
        check, or None. Raises ResourceError if no CPU was free for `_GROW_S` seconds,
        or if no CPU is free and no node may join the cluster.
        """
        if self.num_left >= 1 or not self.num_workers:
            return None
        now_s = time.monotonic()
        if since_s is None and self.may_grow:
            _logger.warning(
                "%s waits for a CPU: workers hold all %g of the cluster",
                *(label, self.total),
            )
        since_s = now_s if since_s is None else since_s
        if not self.may_grow or now_s - since_s >= _GROW_S:
            raise errors.ResourceError(
                f"Expected a CPU for {label}, found that {self.num_workers}"
                f" workers hold all {self.total:g} of the cluster: call"
                " ClientData.from_ray before ray_fed.init (after ray.init), or set"
                " `workers` to fewer than there are CPUs."
            )
        return since_s


def read() -> TaskCpus:
    """Read the CPUs of the cluster that this process is connected to."""
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    totals = {
        node["NodeID"]: node["Resources"].get("CPU", 0.0)
        for node in nodes
        if node["Alive"]
    }
    free, waiting, num_workers = dict(totals), 0.0, 0
    for node, num_cpus in _read_workers():
        num_workers += 1
        if node in free:
            free[node] -= num_cpus
        else:
            waiting += num_cpus
    left = sum(math.floor(amount + 1e-9) for amount in free.values()) - waiting
    return TaskCpus(
        sum(totals.values()),
        num_workers,
        math.floor(left + 1e-9),
        not joining.started_here(),
    )


def _read_workers() -> list[tuple[str, float]]:
    """Return each worker's node id and CPUs. An unplaced worker has the id ""."""
    # `asyncio.run` needs a thread without an event loop, and notebooks run one.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        actors = thread.submit(asyncio.run, _read_actors()).result()
    return [
        (actor.node_id.hex(), _count_cpus(actor.required_resources))
        for actor in actors.values()
        if actor.class_name == LeafWorker.__name__ and actor.state != actor.DEAD
    ]


async def _read_actors() -> Mapping[Any, Any]:
    client = joining.connected_worker().gcs_client
    return await client.async_get_all_actor_info(timeout=_ANSWER_S)


def _count_cpus(resources: Mapping[str, float]) -> float:
    names = [name for name in resources if name == "CPU" or "CPU_group_" in name]
    # Ray lists the CPUs of one bundle of a group under two names.
    return max((resources[name] for name in names), default=0.0)


def run_tasks(
    work: Callable[[], _T],
    label: str,
    read_cpus: Callable[[], TaskCpus] = read,
) -> _T:
    """Run a function that waits for one-CPU Ray tasks, and return its result.

    `work` starts on a thread of its own once a CPU is free. If workers take the last
    CPU while `work` runs, that thread is stopped by a `SystemExit`. In both cases, this
    function raises the ResourceError of `TaskCpus.check`. `label` names `work`.
    """
    since_s = None
    while (since_s := read_cpus().check(label, since_s)) is not None:
        time.sleep(_POLL_S)
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_run, args=(work, done), name=f"ray_fed {label}", daemon=True
    )
    with joining.auto_connect.disabled():
        try:
            thread.start()
            while not concurrent.futures.wait([done], timeout=_POLL_S).done:
                since_s = read_cpus().check(label, since_s)
        except BaseException:
            _stop(thread)
            raise
    return done.result()


def _stop(thread: threading.Thread) -> None:
    # Python raises this at the thread's next step. Ray Data waits in short steps, so it
    # soon sees the error and cancels its tasks.
    number = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
    thread.join(_LEAVE_S)


def _run(work: Callable[[], _T], done: concurrent.futures.Future[_T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 (the thread that waits raises it)
        done.set_exception(error)


@ray.remote(num_cpus=0)
def pick_column(block: Any, column: str) -> Any:
    """Return one column of a dataset's block, as an Arrow table. This is a Ray task."""
    return block.select([column])


@ray.remote(num_cpus=0)
def count_rows(block: Any) -> tuple[int, Any]:
    """Return a dataset block's number of rows and Arrow schema. This is a Ray task."""
    return block.num_rows, block.schema


class DatasetBlocks(TableRows):
    """The rows of a Ray dataset, grouped by client.

    The constructor reads and sorts the dataset. The sorted blocks stay in the object
    store for as long as this object lives.

    Args:
        dataset: A `ray.data.Dataset`.
        ids: Column of client ids by which rows are sorted.
        columns: Names of the columns to read.
    """

    label = "the dataset"

    def __init__(self, dataset: Any, ids: IdColumn, columns: Sequence[str]) -> None:
        if not hasattr(dataset, "to_arrow_refs"):
            raise errors.ValueMismatchError(
                f"Expected a ray.data.Dataset, found {errors.describe(dataset)}."
            )
        if ray_client.is_connected():
            raise errors.UnsupportedError(
                "Expected a process of the cluster for a dataset of Ray Data, found a"
                " process that uses Ray's client (`ray://`): run the program by `ray"
                " job submit`, or read files, for example by ClientData.from_parquet."
            )
        names = list(dict.fromkeys(columns))
        self._job: Job | None = Job.current()
        with self._job.explained():
            self._blocks: list[Any] = run_tasks(
                lambda: self._group(dataset, ids, names),
                "a dataset of Ray Data",
                self._read_cpus,
            )
            self._ids = [pick_column.remote(b, ids.name) for b in self._blocks]
            heads = [fetch(count_rows.remote(block)) for block in self._blocks]
        sizes, schemas = zip(*heads, strict=True) if self._blocks else ((), ())
        filled = [schema for size, schema in zip(sizes, schemas, strict=True) if size]
        if not filled:
            raise errors.ValueMismatchError(
                "Expected rows of clients in the dataset, found none."
            )
        self.schema = filled[0]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def _check(self) -> None:
        if self._job is not None:  # a copy on a worker has no job
            self._job.check()

    def _fetch(self, reference: Any) -> Any:
        self._check()
        return fetch(reference)

    def _read_cpus(self) -> TaskCpus:
        self._check()
        return read()

    def _group(self, dataset: Any, ids: IdColumn, names: list[str]) -> list[Any]:
        columns: list[str] = list(dataset.columns() or ())
        check_columns(names, columns, self.label)

        def prepare(table: Any) -> Any:  # Arrow cannot sort dictionary columns
            return ids.cast(decoded_table(table), DatasetBlocks.label)

        plain = dataset.select_columns(names).map_batches(
            prepare, batch_format="pyarrow", batch_size=None
        )
        return plain.sort(ids.name).materialize().to_arrow_refs()

    @override
    def __getstate__(self) -> dict[str, Any]:
        self._check()
        return self.__dict__ | {"_ids": [], "_job": None}

    def read_ids(self, column: str) -> list[Any]:
        """Return the client ids of all rows, in order, as Arrow arrays, only once.

        The call frees the ids, so a second call returns an empty list.
        """
        references, self._ids = self._ids, []
        return [
            chunk
            for reference in references
            for chunk in self._fetch(reference).column(column).chunks
        ]

    @override
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        indices = np.searchsorted(self._ends, rows, side="right")
        parts: list[Any] = []
        for index in np.unique(indices):
            block = self._fetch(self._blocks[index]).select(list(columns))
            inside = rows[indices == index] - self._ends[index] + block.num_rows
            parts.append(take_rows(block, inside))
        return pyarrow.concat_tables(parts) if parts else self.schema.empty_table()
