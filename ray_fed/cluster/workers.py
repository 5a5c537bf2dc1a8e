"""Everything that runs elsewhere: the actors, and the tasks that drive them.

    driver --task--> run_plan (num_cpus=0, no TensorFlow)
       |                |  lease / give back              | verbs, chunks
       |                v                                 v
       +-- finish -> PoolHost (num_cpus=0)  --starts-->  LeafWorker (TensorFlow, pinned)

A worker is never restarted by Ray: its death has a class, the pool replaces it. A task
whose worker dies reports that and raises `WorkerLost`, which Ray retries.
"""

import asyncio
import dataclasses
import functools
import gc
import pickle
from typing import Any, cast

import ray
from ray._private import worker as ray_worker  # no public name
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import ray_fed.executors.loops as loops
from ray_fed.cluster import garbage
from ray_fed.cluster.actors.leaf_worker import LeafWorker
from ray_fed.cluster.actors.pool_host import PoolHost
from ray_fed.cluster.task import driving, leases
from ray_fed.cluster.task.work import Work
from ray_fed.config import Config

_CONTROL_THREADS = 3

_YOUNG = 1
"""The generation of what one short task makes; collecting it takes no time."""

RemoteWorker: Any = cast("Any", ray.remote)(
    concurrency_groups={"control": _CONTROL_THREADS}, max_restarts=0, max_task_retries=0
)(LeafWorker)


def start_worker(
    config: Config,
    label: str,
    node: str | None,
    group: PlacementGroup | None = None,
) -> Any:
    """Start the actor of one worker with the resources of the configuration.

    Args:
        config: what it asks for.
        label: what Ray's lists and logs are to call it.
        node: Ray's id of its node; None: any that has room.
        group: in whose bundles it lives, on any of their nodes.
    """
    wanted = config.workers
    strategy: Any = "DEFAULT"
    if group is not None:
        strategy = PlacementGroupSchedulingStrategy(group)
    elif node is not None:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = RemoteWorker.options(
        num_cpus=wanted.num_cpus,
        num_gpus=wanted.num_gpus,
        resources=dict(wanted.resources),
        scheduling_strategy=strategy,
    )
    num_threads = max(1, int(wanted.num_cpus))
    limits = config.worker_limits
    settings = num_threads, wanted.num_gpus, wanted.client_bytes, limits
    return actor.remote(*settings, label)


RemotePoolHost: Any = cast("Any", ray.remote)(num_cpus=0, max_concurrency=1000)(
    PoolHost
)


@ray.remote(num_cpus=0)
def run_plan(pool: Any, *arguments: Any) -> Any:
    """Run a subround or a finish on leased workers: see `driving.drive_plan`.

    Args:
        pool: handle of the `PoolHost`.
        arguments: see `Work.as_arguments`.

    Returns:
        `Driven`, pickled by pickle itself, which takes a fraction of the time of Ray's
        own pickler; then each value, encoded.
    """
    _handles().keep(pool, "", pool)
    work = Work.from_arguments(*arguments)
    if _is_repeated():  # what it was given is gone, or another process had it
        work = dataclasses.replace(work, given=None)
    try:
        driven, *found = loops.run_alone(
            _event_loop(), driving.drive_plan(pool, work, _handles())
        )
        return pickle.dumps(driven), *found
    except BaseException:
        garbage.collect_soon()
        raise
    finally:
        # Loops and tasks refer to each other, and to arrays that the object store may
        # not free before: an idle process would hold them.
        gc.collect(_YOUNG)


@functools.cache
def _handles() -> leases.Handles:
    """Return those of the workers that this process drove.

    No variable of the module: Ray pickles those with the task that uses them.
    """
    return leases.Handles()


def _is_repeated() -> bool:
    """Return whether Ray runs this task once more."""
    worker: Any = ray_worker.global_worker
    return worker.core_worker.get_current_task_attempt_number() > 0


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which Ray interrupts to cancel a task.

    Not that of `asyncio.run`, whose handling of interrupts writes out what a task
    returned, arrays and all, and takes longer than all else that drives a small round.
    """
    return asyncio.new_event_loop()


@ray.remote(num_cpus=0)
def pick_column(block: Any, column: str) -> Any:
    """Return one column of a block of a dataset, as a table of arrow."""
    return block.select([column])


@ray.remote(num_cpus=0)
def count_rows(block: Any) -> tuple[int, Any]:
    """Return how many rows a block of a dataset has, and its schema."""
    return block.num_rows, block.schema
