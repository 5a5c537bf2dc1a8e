"""CPUs for tasks of Ray's own, such as those of Ray Data, beside workers' CPUs.

A worker holds its CPUs for as long as its pool lives. Where workers hold all, a task
that needs one waits until a pool ends, or a node comes: without end, for most programs.
"""

import concurrent.futures
import ctypes
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import ray
from ray import _raylet
from ray._private import state as ray_state  # no public name for what actors hold
from ray.core.generated import gcs_pb2

import ray_fed.errors as errors
from ray_fed.cluster.actors.leaf_worker import LeafWorker
from ray_fed.cluster.driver import joining

_T = TypeVar("_T")

_GROW_S = 300.0
"""How long a cluster that this process joined may take to have a free CPU: a node may
come, or the program of another pool may end. No node comes to a Ray started here."""

_POLL_S = 0.5

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

    @property
    def is_spent(self) -> bool:
        """Whether workers leave no CPU to any task."""
        return self.num_workers > 0 and self.num_left < 1


def read() -> TaskCpus:
    """Read what the cluster that this process is of has."""
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    totals = {
        node["NodeID"]: node["Resources"].get("CPU", 0.0)
        for node in nodes
        if node["Alive"]
    }
    free, waiting, num_workers = dict(totals), 0.0, 0
    for node, held in _read_workers():
        num_workers += 1
        if node in free:
            free[node] -= held
        else:
            waiting += held
    left = sum(math.floor(amount + 1e-9) for amount in free.values()) - waiting
    return TaskCpus(
        sum(totals.values()),
        num_workers,
        math.floor(left + 1e-9),
        not joining.started_here(),
    )


def _read_workers() -> list[tuple[str, float]]:
    """Return the node, empty before there is one, and the CPUs of each worker."""
    options = cast("Any", ray_state.state).gcs_options
    accessor: Any = cast("Any", _raylet).GlobalStateAccessor(options)
    accessor.connect()
    table = cast("Any", gcs_pb2).ActorTableData
    actors = [table.FromString(row) for row in accessor.get_actor_table(None, None)]
    return [
        (actor.node_id.hex(), actor.required_resources.get("CPU", 0.0))
        for actor in actors
        if actor.class_name == LeafWorker.__name__ and actor.state != table.DEAD
    ]


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
    watch = _Watch(label, read_cpus, grow_s)
    while watch.finds_none():
        time.sleep(_POLL_S)
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_run, args=(work, done), name=f"ray_fed {label}", daemon=True
    )
    thread.start()
    try:
        while not concurrent.futures.wait([done], timeout=_POLL_S).done:
            watch.finds_none()
    except BaseException:
        _stop(thread)
        raise
    return done.result()


def _stop(thread: threading.Thread) -> None:
    """Have a thread raise `SystemExit` at its next step.

    Ray Data waits in short steps, and takes back its tasks when it is left so. A thread
    that went on would start a Ray of its own, once this one is shut down.
    """
    number = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))


def _run(work: Callable[[], _T], done: concurrent.futures.Future[_T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 (the thread that waits raises it)
        done.set_exception(error)


class _Watch:
    """Sees for how long tasks have had no CPU.

    Args:
        label: what the tasks are of.
        read_cpus: reads what there is.
        grow_s: how long there may be none, where more may come.
    """

    def __init__(
        self, label: str, read_cpus: Callable[[], TaskCpus], grow_s: float
    ) -> None:
        self._label, self._read, self._grow_s = label, read_cpus, grow_s
        self._since_s: float | None = None

    def finds_none(self) -> bool:
        """Return whether there is no CPU for tasks now.

        Raises:
            ResourceError: there has been none for too long.
        """
        found = self._read()
        if not found.is_spent:
            self._since_s = None
            return False
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
            if found.may_grow:
                _logger.warning(
                    "%s waits for a CPU: workers hold all %g of the cluster",
                    self._label,
                    found.total,
                )
        if not found.may_grow or now_s - self._since_s >= self._grow_s:
            raise errors.ResourceError(
                f"Expected a CPU for {self._label}, found that {found.num_workers}"
                f" workers hold all {found.total:g} of the cluster: call"
                " ClientData.from_ray before ray_fed.init (after ray.init), or set"
                " `workers` to fewer than there are CPUs."
            )
        return True
