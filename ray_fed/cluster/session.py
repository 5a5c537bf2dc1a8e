"""The home of Ray: connect or start, see what there is, leave it as it was found."""

import asyncio
import collections
import logging
import math
import weakref
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_fed.errors as errors
import ray_fed.values as values
from ray_fed.client_runs import ClientRun
from ray_fed.cluster import failures, object_store, workers
from ray_fed.cluster.inventory import expect_listener
from ray_fed.cluster.leases import PooledWorker
from ray_fed.cluster.runner import RayRunner
from ray_fed.config import Config

_logger = logging.getLogger(__name__)

_RUNNERS_PER_WORKER = 2
"""Subround tasks in flight a worker: one runs, one waits with its argument at hand."""

_IDLE_COORDINATOR_MS = 600_000
"""Ray ends idle task processes after seconds; the next round would start them anew."""

_CLOSE_TIMEOUT_S = 10.0


class Session:
    """A connection to Ray with a pool of workers on it; owns what it started.

    Args:
        address: "local" starts a Ray of its own, "auto" or an address joins one; None
            joins one that is running for this user, else starts one.
        config: of the pool.

    Raises:
        ClusterError: there is no cluster at the address.
        ResourceError: the cluster is smaller than what `workers` asks for.
    """

    def __init__(self, address: str | None, config: Config) -> None:
        self._config = config
        self._tokens: set[str] = set()  # of sources whose clients workers may keep
        self._gone: collections.deque[str] = collections.deque()
        self._owns_ray = _connect(address, config)
        try:
            self.num_workers = _count_workers(config)
            # On this node: the pool may die with its driver, and with nothing else.
            here = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            self._pool: Any = workers.RemotePoolHost.options(
                scheduling_strategy=here
            ).remote(config, self.num_workers, workers.start_worker)
            self._pool.start.remote()
        except BaseException:
            if self._owns_ray:
                ray.shutdown()
            raise

    def runners(self) -> list[RayRunner]:
        """Return what runs subrounds, more than there are workers."""
        return [
            RayRunner(self._pool, self._config)
            for _ in range(_RUNNERS_PER_WORKER * self.num_workers)
        ]

    def store(self, value: Any) -> tuple[Any, int]:
        """Put a large value into the object store once; see `object_store.store`.

        Sources of clients that are gone are forgotten on workers at the next call.
        """
        if isinstance(value, ClientRun) and value.source.token not in self._tokens:
            token = value.source.token
            self._tokens.add(token)
            weakref.finalize(value.source, self._gone.append, token).atexit = False
        self._forget_gone()
        return object_store.store(value)

    def _forget_gone(self) -> None:
        tokens: list[str] = []
        while self._gone:
            tokens.append(self._gone.popleft())
        if tokens:
            self._tokens.difference_update(tokens)
            self._pool.forget_clients.remote(tokens)

    def sources(self) -> list[PooledWorker]:
        """Return all workers of the pool, to be held for as long as it lives."""
        return [PooledWorker(self._pool) for _ in range(self.num_workers)]

    async def fetch(self, value: Any) -> Any:
        """Return a value that runners kept: read from the object store, if it is there.

        Raises:
            ClusterError: the object store has lost it.
            DeadlineError: it did not come within `subrounds.timeout_s`.
        """
        if not isinstance(value, values.Stored):
            return value
        try:
            reference = cast("Any", value.reference)
            return await asyncio.wait_for(reference, self._config.subrounds.timeout_s)
        except TimeoutError as error:
            raise errors.DeadlineError(
                "Expected a stored value within"
                f" {self._config.subrounds.timeout_s} s (`subrounds.timeout_s`), found"
                " it still on its way."
            ) from error
        except ray.exceptions.RayError as error:
            raise errors.ClusterError(
                "Expected a value in the object store, found it lost: go on from state"
                f" that was saved. {failures.describe(error)}"
            ) from error

    def close(self) -> None:
        """End the workers, then the Ray that was started here, if it was."""
        if not ray.is_initialized():
            return
        try:
            ray.wait([self._pool.close.remote()], timeout=_CLOSE_TIMEOUT_S)
            ray.kill(self._pool)
        except ray.exceptions.RayError:
            _logger.debug("The pool was gone before it was closed.", exc_info=True)
        if self._owns_ray:
            ray.shutdown()


def _connect(address: str | None, config: Config) -> bool:
    """Connect this process to Ray; return whether a Ray was started for it."""
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.runtime_env is not None:
        options["runtime_env"] = dict(config.runtime_env)
    if address != "local":
        expect_listener(address or "auto")
        try:
            ray.init(address=address or "auto", **options)
        except ConnectionError as error:
            if address is not None:
                raise errors.ClusterError(
                    f"Expected a Ray cluster at `{address}`, found none: start one with"
                    " `ray start --head`, or pass address=None."
                ) from error
        else:
            return False
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            _system_config={
                "idle_worker_killing_time_threshold_ms": _IDLE_COORDINATOR_MS
            },
            **options,
        )
    except Exception as error:  # Ray raises bare ones for a start that fails
        raise errors.ClusterError(
            f"Expected Ray to start on this machine, found: {error} Try again when the"
            ' machine is less busy, or run without Ray: Config(backend="local").'
        ) from error
    return True


def _count_workers(config: Config) -> int:
    """Return how many workers to keep, or raise where they can never be placed."""
    wanted = config.workers
    found = cast("dict[str, float]", ray.cluster_resources())
    each = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
    fitting = [
        math.floor(found.get(name, 0.0) / amount + 1e-9)
        for name, amount in each.items()
        if amount > 0
    ]
    count = wanted.count if wanted.count is not None else max(1, min(fitting))
    for name, amount in each.items():
        if amount * count > found.get(name, 0.0) + 1e-9:
            raise errors.ResourceError(
                f"Expected {amount * count:g} {name} for {count} `workers`, found"
                f" {found.get(name, 0.0):g} in the cluster: lower `workers.count` or"
                f" what each worker asks for, or add nodes."
            )
    return count
