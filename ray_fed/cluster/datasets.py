"""Clients of a Ray dataset, and CPUs for the tasks of Ray Data beside workers.

Rows are sorted by client once. The sorted blocks stay in the object store.

A worker holds its CPUs for as long as its pool lives. If workers hold all CPUs, a task
of Ray Data waits until a pool ends or a node joins, which never happens in most
programs. So this module checks that a CPU is free before such a task begins.
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
"""Seconds to wait for a free CPU in a cluster that this process joined. A node may join
it, or the program of another pool may end. No node joins a Ray started here."""

_POLL_S = 0.5

_ANSWER_S = 20.0
"""Seconds that Ray may take to return its table of actors."""

_LEAVE_S = 10.0
"""Seconds that stopped work may take to end."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TaskCpus:
    """The CPUs of the live nodes of a cluster.

    Attributes:
        num_workers: Number of workers of all pools, including workers that wait for
            CPUs.
        num_left: Number of one-CPU tasks that fit once all workers have started.
        may_grow: Whether nodes may join the cluster.
    """

    total: float
    num_workers: int
    num_left: int
    may_grow: bool

    def check(self, label: str, since_s: float | None, grow_s: float) -> float | None:
        """Return since when no CPU is left for tasks, or None if one is left.

        `since_s` is the previous result, None at first. Raises ResourceError after
        `grow_s` seconds, or at once if no node may join the cluster.
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
        if not self.may_grow or now_s - since_s >= grow_s:
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
    """Return each worker's node and CPUs. An unplaced worker has the node ""."""
    # `asyncio.run` needs a thread without an event loop, and notebooks run one.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        actors = thread.submit(asyncio.run, _read_actors()).result()
    return [
        (actor.node_id.hex(), _count_cpus(actor.required_resources))
        for actor in actors.values()
        if actor.class_name == LeafWorker.__name__ and actor.state != actor.DEAD
    ]


async def _read_actors() -> Mapping[Any, Any]:
    """Return Ray's table of actors.

    Ray ends a process that waits a minute for this table, for example because another
    thread called `ray.shutdown`. So the timeout is shorter.
    """
    client = joining.connected_worker().gcs_client
    return await client.async_get_all_actor_info(timeout=_ANSWER_S)


def _count_cpus(resources: Mapping[str, float]) -> float:
    """Return the CPUs that an actor asks for, inside or outside a placement group."""
    names = [name for name in resources if name == "CPU" or "CPU_group_" in name]
    # Ray lists the CPUs of one bundle of a group under two names.
    return max((resources[name] for name in names), default=0.0)


def run_tasks(
    work: Callable[[], _T],
    label: str,
    read_cpus: Callable[[], TaskCpus] = read,
    grow_s: float = _GROW_S,
) -> _T:
    """Run work that waits for Ray tasks of one CPU each, and return its result.

    The work runs on a thread of its own. It does not begin while workers leave no CPU
    for tasks. If workers take the last CPU later, `SystemExit` is raised on its thread.
    Both cases raise ResourceError for the caller.
    """
    since_s = None
    while (since_s := read_cpus().check(label, since_s, grow_s)) is not None:
        time.sleep(_POLL_S)
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_run, args=(work, done), name=f"ray_fed {label}", daemon=True
    )
    with joining.auto_connect.disabled():
        try:
            thread.start()
            while not concurrent.futures.wait([done], timeout=_POLL_S).done:
                since_s = read_cpus().check(label, since_s, grow_s)
        except BaseException:
            _stop(thread)
            raise
    return done.result()


def _stop(thread: threading.Thread) -> None:
    """Raise `SystemExit` on a thread at its next step, and wait a while for its end.

    Ray Data waits in short steps, so it soon sees the error and cancels its tasks.
    """
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
    """Return an Arrow table with one column of a block of a dataset."""
    return block.select([column])


@ray.remote(num_cpus=0)
def count_rows(block: Any) -> tuple[int, Any]:
    """Return the number of rows of a block of a dataset, and its schema."""
    return block.num_rows, block.schema


class DatasetBlocks(TableRows):
    """The rows of a dataset, grouped by client.

    The dataset is read and sorted at once. Its blocks stay in the object store for as
    long as this object lives.
    """

    label = "the dataset"

    def __init__(self, dataset: Any, ids: IdColumn, columns: Sequence[str]) -> None:
        if not hasattr(dataset, "to_arrow_refs"):
            raise errors.ValueMismatchError(
                f"Expected a ray.data.Dataset, found {errors.describe(dataset)}."
            )
        if ray_client.is_connected():
            raise errors.UnsupportedError(
                "Expected a process of the cluster for a dataset of Ray Data, found one"
                " that joined it by Ray's client (`ray://`): run the program by `ray"
                " job submit`, or read files, as by ClientData.from_parquet."
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
        """Return the ids of all rows, in order, as Arrow arrays.

        Only the first call returns them: it then forgets the columns of ids.
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
