"""Clients of a Ray dataset, and CPUs for the tasks of Ray Data beside workers.

Rows are sorted by client once, in blocks that stay in the object store.

A worker holds its CPUs for as long as its pool lives. Where workers hold all, a task
that needs one waits until a pool ends, or a node comes: without end, for most programs.
So enough CPUs are looked for before such a task begins.
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
from ray._private import auto_init_hook
from ray._private import worker as ray_worker  # no public name for what actors hold
from ray.core.generated import gcs_pb2
from ray.util.client import ray as ray_client
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.cluster import joining
from ray_fed.cluster.joining import Job
from ray_fed.cluster.object_store import fetch
from ray_fed.cluster.worker_actor import LeafWorker
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import check_columns
from ray_fed.files.parquet import take_rows
from ray_fed.files.table_rows import TableRows

_T = TypeVar("_T")

_GROW_S = 300.0
"""How long a cluster that this process joined may take to have a free CPU: a node may
come, or the program of another pool may end. No node comes to a Ray started here."""

_POLL_S = 0.5

_ANSWER_S = 20.0
"""How long Ray may take to say what its actors hold."""

_LEAVE_S = 10.0
"""How long work that is stopped may take to end."""

_hook: Any = auto_init_hook  # no public name for whether calls of Ray start one

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TaskCpus:
    """What the nodes that are alive have.

    Attributes:
        total: CPUs of all nodes.
        num_workers: that have CPUs, or wait for them; of all pools.
        num_left: how many tasks of one CPU there would be room for with all workers
            started.
        may_grow: whether more may come.
    """

    total: float
    num_workers: int
    num_left: int
    may_grow: bool

    def check(self, label: str, since_s: float | None, grow_s: float) -> float | None:
        """Return since when workers leave no CPU to any task; None: they leave one.

        Args:
            label: what the tasks are of.
            since_s: what was returned before; None at first.
            grow_s: how long there may be none, where more may come.

        Raises:
            ResourceError: there has been none for too long.
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
    """Read what the cluster that this process is of has."""
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
    """Return the node, empty before there is one, and the CPUs of each worker."""
    dead = cast("Any", gcs_pb2).ActorTableData.DEAD
    # On a thread of its own: a cell of a notebook is run by an event loop.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        actors = thread.submit(asyncio.run, _read_actors()).result()
    return [
        (actor.node_id.hex(), _count_cpus(actor.required_resources))
        for actor in actors.values()
        if actor.class_name == LeafWorker.__name__ and actor.state != dead
    ]


async def _read_actors() -> Mapping[Any, Any]:
    """Return Ray's table of actors.

    Ray ends a process that waits for this table for a minute, as it would where
    `ray.shutdown` is called meanwhile: so it waits for less.
    """
    client: Any = cast("Any", ray_worker).global_worker.gcs_client
    return await client.async_get_all_actor_info(timeout=_ANSWER_S)


def _count_cpus(resources: Mapping[str, float]) -> float:
    """Return the CPUs that an actor asks for, of a placement group too."""
    names = [name for name in resources if name == "CPU" or "CPU_group_" in name]
    # Of one bundle of a group, Ray asks under two names.
    return max((resources[name] for name in names), default=0.0)


def run_tasks(
    work: Callable[[], _T],
    label: str,
    read_cpus: Callable[[], TaskCpus] = read,
    grow_s: float = _GROW_S,
) -> _T:
    """Return what work that runs tasks of one CPU each returns.

    Where workers leave no CPU, it does not begin, or, where they start meanwhile, is
    stopped: `SystemExit` is raised in it, on its thread.

    Args:
        work: waits for tasks.
        label: what the work is, in an error.
        read_cpus: reads what there is.
        grow_s: how long there may be no CPU for tasks where more may come.

    Raises:
        ResourceError: workers hold all CPUs.
        Exception: what `work` raises.
    """
    since_s = None
    while (since_s := read_cpus().check(label, since_s, grow_s)) is not None:
        time.sleep(_POLL_S)
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_run, args=(work, done), name=f"ray_fed {label}", daemon=True
    )
    # Calls of Ray start one where there is none: threads of Ray Data would, as soon as
    # this one is shut down under them.
    starts_ray, _hook.enable_auto_connect = _hook.enable_auto_connect, False
    try:
        thread.start()
        while not concurrent.futures.wait([done], timeout=_POLL_S).done:
            since_s = read_cpus().check(label, since_s, grow_s)
    except BaseException:
        _stop(thread)
        raise
    finally:
        _hook.enable_auto_connect = starts_ray
    return done.result()


def _stop(thread: threading.Thread) -> None:
    """Have a thread raise `SystemExit` at its next step, and wait a while for its end.

    Ray Data waits in short steps, and takes back its tasks when it is left so.
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
    """Return one column of a block of a dataset, as a table of arrow."""
    return block.select([column])


@ray.remote(num_cpus=0)
def count_rows(block: Any) -> tuple[int, Any]:
    """Return how many rows a block of a dataset has, and its schema."""
    return block.num_rows, block.schema


class DatasetBlocks(TableRows):
    """The rows of a dataset, grouped by client.

    Args:
        dataset: a `ray.data.Dataset`; read, sorted and kept until this is gone.
        client: the column of its clients.
        columns: that must be there.

    Raises:
        ConfigError: a column is not there.
        ValueMismatchError: it is no dataset, or has no rows.
        UnsupportedError: this process is joined by Ray's client.
        ResourceError: workers leave no CPU to read and sort it.
        ContextStateError: `ray.shutdown` ended what holds it.
    """

    label = "the dataset"

    def __init__(self, dataset: Any, client: str, columns: Sequence[str]) -> None:
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
                lambda: self._group(dataset, client, names),
                "a dataset of Ray Data",
                self._read_cpus,
            )
            self._ids = [pick_column.remote(b, client) for b in self._blocks]
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
        if self._job is not None:  # a worker's copy has none
            self._job.check()

    def _fetch(self, reference: Any) -> Any:
        self._check()
        return fetch(reference)

    def _read_cpus(self) -> TaskCpus:
        self._check()
        return read()

    def _group(self, dataset: Any, client: str, names: list[str]) -> list[Any]:
        columns: list[str] = list(dataset.columns() or ())
        check_columns(names, columns, self.label)
        # Arrow sorts no dictionaries.
        plain = dataset.select_columns(names).map_batches(
            decoded_table, batch_format="pyarrow", batch_size=None
        )
        return plain.sort(client).materialize().to_arrow_refs()

    @override
    def __getstate__(self) -> dict[str, Any]:
        self._check()
        return self.__dict__ | {"_ids": [], "_job": None}

    def read_ids(self, column: str) -> list[Any]:
        """Return the ids of all rows, in order, as arrays of arrow; once."""
        references, self._ids = self._ids, []
        return [
            chunk
            for reference in references
            for chunk in self._fetch(reference).column(column).chunks
        ]

    @override
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        pyarrow: Any = opening.import_extra("pyarrow")
        indices = np.searchsorted(self._ends, rows, side="right")
        parts: list[Any] = []
        for index in np.unique(indices):
            block = self._fetch(self._blocks[index]).select(list(columns))
            inside = rows[indices == index] - self._ends[index] + block.num_rows
            parts.append(take_rows(block, inside))
        return pyarrow.concat_tables(parts) if parts else self.schema.empty_table()
